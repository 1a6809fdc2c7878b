"""How well a model predicts: log-probabilities, perplexity, and lm-eval's tasks."""
