"""What runs rewards: in this process, or in others that may hang or die."""

import functools
import itertools
import json
import math
import queue
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from jllama.core import JllamaError, UsageError
from jllama.rl.shipped import REWARDS, Reward, checked_scores
from jllama.system import line_process
from jllama.system.errors import unknown_name
from jllama.system.line_process import Process

START_S = 300.0  # that a file of rewards may take to import what it needs
_Table = Float64[np.ndarray, "prompts answers"]


class RewardError(JllamaError):
    """A reward failed; the message names it and the row."""


class Scores(NamedTuple):
    """Rewards of the answers to some prompts; NaN where there is none."""

    total: _Table  # the weighted sum of the parts
    parts: dict[str, _Table]  # by the rewards' specifications
    problems: list[str]  # why answers have no reward; a reward may also return None


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

        A reward fails if it raises, takes too long, or does not return a finite number or None for
        each answer. The answers to this prompt then have no reward.

        Raises:
            RewardError: no answer has a reward; the message has the ``place`` of a prompt.
        """
        parts = {}
        problems = []
        for spec, reward in self.rewards.items():
            score = functools.partial(_scores, spec, reward)
            try:
                results = [*self._pool.map(score, prompts, answers, rows, places)]
            except BaseException:  # Ctrl-C does not wait for rewards
                self.close()
                raise
            problems += [result for result in results if isinstance(result, str)]
            unscored = [None] * len(answers[0])
            table = [unscored if isinstance(result, str) else result for result in results]
            parts[spec] = np.array(table, np.float64)
        total = np.asarray(sum(self.weights[spec] * part for spec, part in parts.items()))
        if np.isnan(total).all():
            raise RewardError(next(iter(problems), "the rewards gave no answer a score"))
        return Scores(total, parts, problems)

    def close(self) -> None:
        """End the processes, busy ones too."""
        for reward in self.rewards.values():
            if isinstance(reward, _Workers):
                reward.close()
        self._pool.shutdown()


def _scores(
    spec: str, reward: Reward, prompt: Any, answers: Sequence[str], row: Any, place: str
) -> list[float | None] | str:
    """Return a reward's checked scores of the answers to one prompt, or why there are none."""
    try:
        scores = checked_scores(reward(prompt, answers, row))
    except Exception as error:
        problem = (
            str(error) if isinstance(error, JllamaError) else f"{type(error).__name__}: {error}"
        )
        return f"the reward {spec} failed for {place}: {problem}"
    if len(scores) != len(answers):
        return (
            f"the reward {spec} returned {len(scores)} scores for the {len(answers)} answers to "
            f"{place}"
        )
    if not all(score is None or math.isfinite(score) for score in scores):
        return f"the reward {spec} returned a score that is no finite number for {place}"
    return scores


class _Workers:
    """Processes that compute one reward of a file."""

    def __init__(self, spec: str, limit_s: float, num_processes: int) -> None:
        self.spec = spec
        self.limit_s = limit_s
        self.idle = queue.Queue[Any]()
        self.processes: set[Process] = set()
        self.numbers = itertools.count(1)
        for _ in range(num_processes - 1):
            self.idle.put(None)
        self.idle.put(self._start())  # a file that cannot be imported is an error at once

    def __call__(self, prompt: Any, answers: Sequence[str], row: Any) -> list[float | None]:
        process = self.idle.get()
        try:
            if process is None or process.poll() is not None:
                process = self._start()
            number = next(self.numbers)
            request = json.dumps([number, prompt, [*answers], row]) + "\n"
            return self._ask(process, request, number, self.limit_s)
        finally:
            self.idle.put(process)

    def _start(self) -> Process:
        process = line_process.start("jllama.rl.worker", self.spec)
        self.processes.add(process)
        try:
            self._ask(process, "", 0, START_S)
        except JllamaError as error:
            self._end(process)
            raise JllamaError(f"the reward {self.spec} cannot be loaded: {error}") from error
        return process

    def _ask(self, process: Process, line: str, number: int, limit_s: float) -> list[float | None]:
        """Return the scores of a request, a line; of an empty line none."""
        start_s = time.monotonic()
        reply = line_process.ask(process, line.encode(), limit_s)
        if not reply.endswith(b"\n"):
            self._end(process)
            is_late = time.monotonic() - start_s >= limit_s
            ending = f"its process ended (exit code {process.returncode})"
            raise JllamaError(f"it took over {limit_s:g} s" if is_late else ending)
        reply_number, scores = json.loads(reply)
        if reply_number != number:
            self._end(process)
            raise JllamaError("its process gave two answers: perhaps it has made a copy of itself")
        if isinstance(scores, str):
            raise JllamaError(scores)
        return scores

    def _end(self, process: Process) -> None:
        line_process.end(process)
        self.processes.discard(process)

    def close(self) -> None:
        """End the processes."""
        for process in [*self.processes]:
            self._end(process)
