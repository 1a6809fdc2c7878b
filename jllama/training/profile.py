"""``training.profile``: which steps of a run are recorded."""

import re

from jllama.core import UsageError


def profiled_steps(text: str) -> tuple[int, int]:
    """Return the first and the last step of ``FIRST:LAST``; of an empty text 0 and 0.

    Raises:
        UsageError: these are not two steps, the smaller one first.
    """
    numbers = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, numbers.groups()) if numbers else (0, 0)
    if text and not 0 < first <= last:
        raise UsageError(
            f"training.profile is {text!r}; it must be FIRST:LAST, two steps such as 10:15"
        )
    return first, last
