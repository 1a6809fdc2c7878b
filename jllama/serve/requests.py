"""What a server adds to the engine's events."""

from collections.abc import Callable
from typing import NamedTuple

from jllama.generation.requests import Answer, Piece


class Failure(NamedTuple):
    """The end of an answer that the server could not finish."""

    message: str


Event = Piece | Answer | Failure
Deliver = Callable[[Event], None]
"""Gets the events of one request in order, in the engine's thread: it must return at once, and not raise."""


class Busy(Exception):
    """The queue is full, or the server is shutting down; ``retry_after_s`` says when to come again."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
