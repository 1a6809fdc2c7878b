"""Chat templates: from messages to text and tokens, and which of those an answer is made of."""
