"""The two errors a user can cause; the command line prints them as one sentence and no traceback."""


class JllamaError(Exception):
    """Something went wrong with the user's files or data (exit code 1).

    The message is one sentence: what was found, what was expected, what to do.
    """


class UsageError(JllamaError):
    """The command line or the configuration is wrong (exit code 2)."""
