"""Checks, as data, that this code computes Llamas correctly on this machine, and how large an error each would see."""
