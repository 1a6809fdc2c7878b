"""A process that computes rewards: it may hang or die without the run.

It answers each line of its input, JSON of ``[number, prompt, answers, row]``, with a line: JSON of
``[number, result]``, where the result is the scores, or a message. Before, it writes such a line,
with number 0, when the reward is loaded. It ends with its parent.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from jllama.rewards.shipped import REWARDS, checked_scores


def load_function(spec: str) -> Any:
    """Return the function of ``file.py:name``, with the file's folder on the search path.

    Other specifications are those of shipped rewards.
    """
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        name, _, argument = spec.partition(":")
        return REWARDS[name](argument)
    sys.path.insert(0, str(Path(path).resolve().parent))
    module_spec = importlib.util.spec_from_file_location("rewards_of_the_user", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def describe_error(spec: str, error: BaseException) -> str:
    """Describe an error, with the last line of the reward's own file that it passed."""
    path = spec.rpartition(":")[0]
    lines = [
        f" ({path}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f"{type(error).__name__}: {error}{''.join(lines[-1:])}"


def end_with_parent(parent: int) -> None:
    """Kill this process and all of its group as soon as its parent is another one."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def main(spec: str, parent: int) -> None:
    """Answer requests until the input ends; ``parent`` is the process that starts this one."""
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
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


if __name__ == "__main__":
    main(sys.argv[3], int(sys.argv[4]))
