"""How a run is kept in a bucket: which of its files are there, and which are on the way."""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jllama.system.files import CHECKPOINTS, remove

COMPLETE = "complete.json"
"""The last file of a checkpoint in a bucket: without it the checkpoint does not exist."""
OWNERS = "owners"
COPIES = ".uploading"
"""The folder of a working folder with links to checkpoints that are not in the bucket yet."""
_linking = threading.Lock()
STEP_FILE = re.compile(rf"{CHECKPOINTS}/(\d+)/(.*)")
"""The name of a file of a checkpoint within its run: the step, and the name within it."""


def committed(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that are no part of an incomplete checkpoint.

    ``files`` are by their names within the run.
    """
    chosen = {}
    for name, facts in files.items():
        step = STEP_FILE.match(name)
        if step is None or f"{CHECKPOINTS}/{step[1]}/{COMPLETE}" in files:
            chosen[name] = facts
    return chosen


def without_state(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that its model needs."""
    unneeded = re.compile(rf"{CHECKPOINTS}/\d+/state/|{OWNERS}/")
    return {name: facts for name, facts in committed(files).items() if not unneeded.match(name)}


def without_checkpoints(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that people read."""
    names = [name for name in files if not name.startswith((CHECKPOINTS, OWNERS))]
    return {name: files[name] for name in names}


def link_checkpoints(folder: Path) -> None:
    """Link the checkpoints of a working folder that are not in the bucket yet.

    So they stay until they are copied, although they may no longer be needed here.
    """
    with _linking:
        for path in (folder / CHECKPOINTS).glob("*"):
            copy = folder / COPIES / path.name
            is_saved = path.name.isdecimal()
            if not is_saved or copy.exists() or (path / COMPLETE).exists():
                continue
            partial = copy.with_name(f"{path.name}.partial")
            remove(partial)
            # It may be deleted meanwhile, if it was linked before.
            with contextlib.suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(path, partial, copy_function=_link)
                partial.rename(copy)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
