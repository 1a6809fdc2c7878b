"""Checks of jllama, of other programs and of runs; plans for absent devices; ``speedrun``."""
