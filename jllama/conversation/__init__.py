"""Chat templates and conversations."""
