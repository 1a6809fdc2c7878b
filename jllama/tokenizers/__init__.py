"""Tokenizers: one base class, the kinds of Llama's tokenizers, and their files."""
