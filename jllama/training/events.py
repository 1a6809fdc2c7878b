"""What callbacks get of a run, and how often its page is drawn."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

REPORT_EVERY_S = 60.0
"""The least time between two drawings of a run's page, which take up to half a second."""


class Event(NamedTuple):
    """The argument of a callback."""

    name: str  # ``log``, ``evaluation`` or ``save``
    step: int  # after how many steps
    figures: Mapping[str, Any]  # as in ``metrics.jsonl``; empty for ``save``
    model: Callable[[], Any]  # returns a copy of the current ``LanguageModel``


Callback = Callable[[Event], object]
