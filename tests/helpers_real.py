"""Where the tests marked ``real_weights`` find their files."""

from pathlib import Path

import pytest
from fetch_real_weights import real_weights_folder


def real_file(name: str) -> Path:
    """A file that ``fetch_real_weights.py`` fetches; the test is skipped where it has not been."""
    path = real_weights_folder() / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: python tests/fetch_real_weights.py fetches it")
    return path
