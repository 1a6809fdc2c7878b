"""Where files are: at local paths. A URL never becomes a local folder of that name."""

import os
import re
from pathlib import Path

from jllama.core import UsageError


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return a local path.

    Raises:
        UsageError: it is a URL, also one that ``Path`` has shortened to ``gs:/bucket``. The message
            leaves out credentials and queries.

    Examples:
        >>> local_path("runs/mine").name
        'mine'
    """
    text = os.fspath(place)
    url = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/+(?:[^/@]*@)?([^?#]*)", text)
    if url is None:
        return Path(text)
    scheme, rest = url.groups()
    advice = "mount the bucket as a folder, or copy what you need"
    if scheme == "hf":
        advice = "give a model of the hub as owner/name"
    raise UsageError(f"{scheme}://{rest} is a URL; give a local path: {advice}")
