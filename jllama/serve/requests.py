"""The engine's events as a server delivers them, with its own errors."""

from collections.abc import Callable
from typing import NamedTuple

from jllama.generation.requests import Answer, Piece


class Failure(NamedTuple):
    """The end of an answer that the server could not finish."""

    message: str


Event = Piece | Answer | Failure
Deliver = Callable[[Event], None]
"""Receives the events of one request in order, in the engine's thread.

It must return at once, and not raise.
"""


class Busy(Exception):
    """The queue is full, or the server is starting or shutting down.

    ``retry_after_s`` is the value of the header ``Retry-After``, in seconds.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
