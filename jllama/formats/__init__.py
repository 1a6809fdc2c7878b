"""Reading and writing weights on disk."""
