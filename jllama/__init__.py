"""jllama: the Llama family in JAX and Flax."""
