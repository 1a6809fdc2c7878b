"""From a trained model to text."""
