"""How well a model predicts: log-probabilities and perplexity."""
