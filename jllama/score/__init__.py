"""How well a model predicts: log-probabilities, perplexity and benchmarks."""
