"""Where files are: at local paths, or at the URLs of buckets and hubs that fsspec knows.

Only this module tells them apart. A local path is a ``pathlib.Path``, and nothing of fsspec is
imported for it. A URL is a ``UPath``, which has the same methods. A URL never becomes a local
folder of that name, and never holds credentials, which the libraries find in the environment.
"""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jllama.core import UsageError

if TYPE_CHECKING:
    from upath import UPath

    Place = Path | UPath
else:
    Place = Any

PLACE = ".place"
"""A file in a working folder, which is a copy of a run in a bucket: the run's URL."""
# Of a secret with a slash, all is left out up to the last @; a number after a colon is a port.
_CREDENTIALS = r"(?:[^/@]*|[^/:]*:(?!\d+/)[^?#]*)@"
_URL = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]+):/+({_CREDENTIALS})?([^?#]*)(.*)", re.DOTALL)
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}


def is_url(place: str | os.PathLike[str]) -> bool:
    """Return whether this is a URL, also one that ``Path`` has shortened to ``gs:/bucket``."""
    return _URL.match(os.fspath(place)) is not None


def as_place(place: "str | os.PathLike[str] | UPath") -> Place:
    """Return a ``Path``, or the ``UPath`` of a URL, whose files can be read in the same way.

    Raises:
        UsageError: the URL's scheme is unknown or needs a package that is not installed; or the URL
            has credentials or a query, which the message leaves out.

    Examples:
        >>> as_place("runs/mine").name
        'mine'
    """
    text = str(place)
    url = _URL.match(text)
    if url is None:
        return Path(text)
    scheme, credentials, rest, query = url.groups()
    scheme = scheme.lower()
    has_query = re.match(r"\?[^/]*=", query) or (query and scheme in ("http", "https"))
    if credentials is not None or has_query:
        raise UsageError(
            f"{scheme}://{rest} has credentials or a query, which would be written to logs: leave "
            "them out; credentials are read from the environment"
        )
    shown = f"{scheme}://{rest}{query}"  # other ? and # are characters of names or patterns
    if scheme == "file":
        return Path("/" + rest)
    # Without this, gcsfs asks for the kind of each bucket first.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints a stack for each failure
    extra = _EXTRAS.get(scheme)
    advice = f"install the package of fsspec for {scheme}://"
    if extra:
        advice = f"pip install 'jllama[{extra}]'"
    try:
        from upath import UPath

        url_path = UPath(shown, use_listings_cache=False)
        _ = url_path.fs
    except (ImportError, ValueError) as error:
        raise UsageError(f"{shown} cannot be read or written here: {advice}") from error
    return url_path


def name_of(folder: str | os.PathLike[str]) -> str:
    """Return what people call a folder: its path, or the URL of which it is the working copy."""
    mark = Path(folder, PLACE)
    return mark.read_text(encoding="utf-8") if mark.is_file() else os.fspath(folder)


def local_path(place: str | os.PathLike[str]) -> Path:
    """Return a local path; raise ``UsageError`` for a URL."""
    local = as_place(place)
    if not isinstance(local, Path):
        raise UsageError(f"{local} is a URL; give a local path")
    return local
