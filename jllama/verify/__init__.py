"""Proof that this code computes Llamas rightly, on this machine: checks as data, and how wrong each would notice."""
