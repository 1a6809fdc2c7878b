"""A process that computes rewards: it may hang or die without the run.

Its argument is the specification of a reward. It answers each line
of its input, JSON of ``[prompt, answers, row]``, with a line: JSON of the scores, or of a message.
Before, it writes a line when the reward is loaded.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from jllama.rewards.shipped import REWARDS


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


def main(spec: str) -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a reward prints is no reply
    function: Any = None
    reply: Any = []
    try:
        function = load_function(spec)
    except BaseException as error:
        reply = f"{type(error).__name__}: {error}"
    print(json.dumps(reply), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = [float(score) for score in function(*json.loads(line))]
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
