"""Faster forms of the core's functions, behind the same signatures."""
