"""The server: OpenAI's API, with answers that do not depend on what else is being served."""
