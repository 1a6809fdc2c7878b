"""A process that computes rewards: it may hang or die without the run.

It answers each line of its input, JSON of ``[number, prompt, answers, row]``, with a line: JSON of
``[number, result]``, where the result is the scores, or a message. Before, it writes such a line,
with number 0, when the reward is loaded. It ends with its parent.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jllama.rl.shipped import REWARDS, checked_scores


def import_file(path: str) -> Any:
    """Run a Python file once, with its folder on the search path, and return it as a module."""
    name = str(Path(path).resolve())
    if name not in sys.modules:
        sys.path.insert(0, str(Path(name).parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def load_function(spec: str) -> Any:
    """Return the function of ``file.py:name``.

    Other specifications are those of shipped rewards.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        name, _, argument = spec.partition(":")
        return REWARDS[name](argument)
    return getattr(import_file(path), name)


def describe_error(spec: str, error: BaseException) -> str:
    """Describe an error, with the last line of the reward's own file that it passed."""
    path = spec.rpartition(":")[0]
    lines = [
        f" ({path}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == os.path.abspath(path)
    ]
    return f"{type(error).__name__}: {error}{''.join(lines[-1:])}"


def main(spec: str) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reward prints is no reply
    process = os.getpid()
    function: Any = None
    result: Any = []
    try:
        function = load_function(spec)
    except BaseException as error:
        result = describe_error(spec, error)
    print(json.dumps([0, result]), file=replies, flush=True)
    for line in sys.stdin:
        number, *request = json.loads(line)
        try:
            result = checked_scores(function(*request))
        except Exception as error:
            result = describe_error(spec, error)
        if os.getpid() != process:  # a copy that the reward has made by a fork
            os._exit(0)
        print(json.dumps([number, result]), file=replies, flush=True)
