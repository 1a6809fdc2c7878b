"""What runs rewards: in this process, or in others that may hang or die."""

import functools
import json
import queue
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jllama import line_process
from jllama.errors import JllamaError, UsageError, unknown_name
from jllama.line_process import Process
from jllama.rewards.shipped import REWARDS, Reward

START_S = 300.0  # that a file of rewards may take to import what it needs
_Table = Float64[np.ndarray, "prompts answers"]


class RewardError(JllamaError):
    """A reward failed; the message names it and the row."""


class Scores(NamedTuple):
    """Rewards of the answers to some prompts."""

    total: _Table  # the weighted sum of the parts
    parts: dict[str, _Table]  # by the rewards' specifications


class Scorer:
    """Computes rewards of answers, each within a time limit.

    Functions of Python files run in processes of their own. One that hangs is killed, and the next
    request gets a new process. Shipped rewards run in this process, but for ``regex``, whose
    patterns may take forever.

    Examples:
        >>> scorer = Scorer({"exact": 1.0, "length:2": 0.5})
        >>> scores = scorer.score(["1+1="], [["2", "3", "two"]], [{"answer": "2"}], ["row 1"])
        >>> scores.total.tolist()
        [[1.0, 0.0, -0.25]]

    Args:
        rewards: weights by specification: ``file.py:function``, or a name of ``REWARDS``, which a
            colon and a text may follow.
        functions: rewards by further names, called in this process without a limit.
        limit_s: seconds for the answers to one prompt.
        num_processes: processes for each function of a file; they change no score.

    Raises:
        UsageError: a specification is unknown, or does not fit.
        JllamaError: a file cannot be imported.
    """

    def __init__(
        self,
        rewards: Mapping[str, float],
        *,
        functions: Mapping[str, Reward] | None = None,
        limit_s: float = 60.0,
        num_processes: int = 1,
    ) -> None:
        self.weights = {**rewards}
        self.rewards: dict[str, Reward] = {}
        self._pool = ThreadPoolExecutor(num_processes)
        for spec in rewards:
            path = spec.rpartition(":")[0]
            if functions and spec in functions:
                self.rewards[spec] = functions[spec]
            elif path.endswith(".py"):
                if not Path(path).is_file():
                    raise UsageError(f"reward is {spec}, and there is no file {path}")
                self.rewards[spec] = _Workers(spec, limit_s, num_processes)
            else:
                name, _, argument = spec.partition(":")
                if name not in REWARDS:
                    raise unknown_name("reward", name, REWARDS)
                self.rewards[spec] = REWARDS[name](argument)  # raises if the argument does not fit
                if name == "regex":
                    self.rewards[spec] = _Workers(spec, limit_s, num_processes)

    def score(
        self,
        prompts: Sequence[Any],
        answers: Sequence[Sequence[str]],
        rows: Sequence[Mapping[str, Any]],
        places: Sequence[str],
    ) -> Scores:
        """Return the rewards of each prompt's answers; all have the same number of answers.

        Raises:
            RewardError: a reward raised, took too long, or did not return a finite number for each
                answer; the message has the ``place`` of the prompt.
        """
        parts = {}
        for spec, reward in self.rewards.items():
            score = functools.partial(_scores, spec, reward)
            results = self._pool.map(score, prompts, answers, rows, places)
            parts[spec] = np.array([*results], np.float64)
        total = sum(self.weights[spec] * part for spec, part in parts.items())
        return Scores(np.asarray(total), parts)

    def close(self) -> None:
        """End the processes."""
        for reward in self.rewards.values():
            if isinstance(reward, _Workers):
                reward.close()
        self._pool.shutdown()


def _scores(
    spec: str, reward: Reward, prompt: Any, answers: Sequence[str], row: Any, place: str
) -> list[float]:
    """Return a reward's checked scores of the answers to one prompt."""
    try:
        scores = [float(score) for score in reward(prompt, answers, row)]
    except Exception as error:
        problem = (
            str(error) if isinstance(error, JllamaError) else f"{type(error).__name__}: {error}"
        )
        raise RewardError(f"the reward {spec} failed for {place}: {problem}") from error
    if len(scores) != len(answers):
        raise RewardError(
            f"the reward {spec} returned {len(scores)} scores for the {len(answers)} answers to "
            f"{place}"
        )
    if not np.isfinite(scores).all():
        raise RewardError(
            f"the reward {spec} returned a score that is no finite number for {place}"
        )
    return scores


class _Workers:
    """Processes that compute one reward of a file."""

    def __init__(self, spec: str, limit_s: float, num_processes: int) -> None:
        self.spec = spec
        self.limit_s = limit_s
        self.idle = queue.Queue[Any]()
        for _ in range(num_processes - 1):
            self.idle.put(None)
        self.idle.put(self._start())  # a file that cannot be imported is an error at once

    def __call__(self, prompt: Any, answers: Sequence[str], row: Any) -> list[float]:
        process = self.idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            request = json.dumps([prompt, [*answers], row]) + "\n"
            return self._ask(process, request, self.limit_s)
        finally:
            self.idle.put(process)

    def _start(self) -> Process:
        process = subprocess.Popen(
            [sys.executable, "-m", "jllama.rewards.worker", self.spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._ask(process, "", START_S)
        except JllamaError as error:
            line_process.end(process)
            raise JllamaError(f"the reward {self.spec} cannot be loaded: {error}") from error
        return process

    def _ask(self, process: Process, line: str, limit_s: float) -> list[float]:
        """Return the scores of a request, a line; of an empty line none."""
        start_s = time.monotonic()
        reply = line_process.ask(process, line.encode(), limit_s)
        if not reply.endswith(b"\n"):
            line_process.end(process)
            is_late = time.monotonic() - start_s >= limit_s
            raise JllamaError(f"it took over {limit_s:g} s" if is_late else "its process ended")
        scores = json.loads(reply)
        if isinstance(scores, str):
            raise JllamaError(scores)
        return scores

    def close(self) -> None:
        """End the processes."""
        while not self.idle.empty():
            process = self.idle.get()
            if process:
                line_process.end(process)
