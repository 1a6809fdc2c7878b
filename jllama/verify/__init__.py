"""Checks, as data, that this machine computes Llamas correctly, and the error that each would see."""
