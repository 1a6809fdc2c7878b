"""The server: OpenAI's protocol over an engine whose answers do not depend on what else it serves."""
