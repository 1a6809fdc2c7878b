"""The engine: a thread that owns the device and answers requests in the slots of one decoding program."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jllama.language_model import LanguageModel
from jllama.serve.config import EngineConfig
from jllama.serve.requests import Deliver, Request


class Engine:
    """Answers requests; ``start`` compiles everything first. Any thread may submit."""

    def __init__(self, models: Mapping[str, LanguageModel], config: EngineConfig) -> None:
        self.models, self.config, self.context = dict(models), config, config.context

    def start(self) -> None:
        """Reserve the memory, compile, and begin to serve in a thread of its own."""

    def check(self, request: Request) -> None:
        """Raise ``UsageError`` if the request can never be served: it exceeds the context."""

    def submit(self, request: Request, deliver: Deliver) -> Callable[[], None]:
        """Queue a request, whose events go to ``deliver``; returns what cancels it (no further event comes then).

        Raises ``UsageError`` as ``check`` does, and ``Busy`` if the queue is full or the engine is closing.
        """
        raise NotImplementedError

    def fingerprint(self, model: str) -> str:
        """Names all that an answer depends on besides its request: weights, programs, sizes, versions, device."""
        raise NotImplementedError

    def close(self, drain_s: float = 0.0) -> int:
        """Take no more requests, finish those under way within ``drain_s``; returns how many were broken off."""
        raise NotImplementedError
