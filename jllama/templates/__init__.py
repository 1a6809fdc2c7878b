"""Chat templates: from messages to text and token ids, and which of them an answer is made of."""
