"""How a run is kept in a bucket: which of its files are there, and which are on the way."""

import os
import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jllama.system.files import CHECKPOINTS, remove

# Names of files that a checkpoint of some format, or a run, has in its folder.
FILES_OF_CHECKPOINTS = (
    r".*\.safetensors(\.index\.json)?|.*\.(gguf|bin|pth)|tokenizer.*\.(json|model)|"
    r"(generation_|adapter_)?config\.json|merges\.txt|checklist\.chk|chat_template\.(jinja|json)|"
    r"(special_tokens_map|added_tokens|vocab|params|jllama|receipt)\.json|config\.yaml|checkpoints|"
    r"(metrics|samples|skipped|config\.history)\.jsonl|report\.html|reference\.npz|"
    r"tensorboard|wandb|autotuning|profile|flax_model.*\.msgpack(\.index\.json)?|in_use.*|place|uploading|\.gitattributes"
)
COMPLETE = "complete.json"
"""The last file of a checkpoint in a bucket: without it the checkpoint does not exist."""
OWNERS = "owners"
COPIES = ".uploading"
"""The folder of a working folder with links to checkpoints that are not in the bucket yet."""
_linking = threading.Lock()
STEP_FILE = re.compile(rf"{CHECKPOINTS}/(\d+)/(.*)")
"""The name of a file of a checkpoint within its run: the step, and the name within it."""


def known(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the files in a bucket that a checkpoint or a run has; others stay there."""
    is_known = re.compile(rf"({FILES_OF_CHECKPOINTS})?(/|$)").match
    return {name: facts for name, facts in files.items() if is_known(name)}


def committed(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that are no part of an incomplete checkpoint.

    ``files`` are by their names within the run.
    """
    chosen = {}
    for name, facts in known(files).items():
        step = STEP_FILE.match(name)
        if step is None or f"{CHECKPOINTS}/{step[1]}/{COMPLETE}" in files:
            chosen[name] = facts
    return chosen


def without_state(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that its model needs."""
    unneeded = re.compile(rf"{CHECKPOINTS}/\d+/state/")
    return {name: facts for name, facts in committed(files).items() if not unneeded.match(name)}


def without_checkpoints(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a run's files in a bucket that people read."""
    return {name: facts for name, facts in known(files).items() if not name.startswith(CHECKPOINTS)}


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
            try:
                shutil.copytree(path, partial, copy_function=_link)
                partial.rename(copy)
            except (FileNotFoundError, shutil.Error):
                if path.exists():  # else it was linked before, and is deleted meanwhile
                    raise


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where there are no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
