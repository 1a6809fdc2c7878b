"""Checks, as data, that this machine computes Llamas correctly, and what errors they would see."""
