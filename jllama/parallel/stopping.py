"""Processes that train together agree on the step after which all of them stop.

The main threads never wait for each other for this. In each process a thread waits at JAX's
coordinator until some process has a signal. Then all these threads meet, tell each other the last
steps of their main threads, and agree on the step after the largest one. Meanwhile a main thread
that has completed a step waits for its own thread, so it cannot pass the agreed step.

A main thread may wait in a step for the devices of a process that has not begun this step. This is
no deadlock: the threads do not need the main threads, and a process that is behind goes on.
"""

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax._src.distributed import global_state  # the coordinator has no public interface

from jllama.parallel.distributed import GONE, max_over_processes
from jllama.system.stop import exit_now

_FOREVER_MS = 2**40
_RUNS = itertools.count()  # all processes count the same, so each run has names of its own


class Agreement:
    """Whether a run stops: ``signal`` is the one that all processes know of, or 0."""

    def __init__(self, signals: Sequence[int], log_every: int) -> None:
        """Take the list of the signals that this process receives, and the interval of logs."""
        self.signal = 0
        self.thread = threading.Thread(target=self._agree, daemon=True)
        self._signals = signals
        self._log_every = log_every
        self._name = f"jllama/stop/{next(_RUNS)}"
        self._lock = threading.Lock()
        self._step = 0
        self._agreed_step = math.inf if jax.process_count() > 1 else 0

    def may_ask(self, step: int) -> bool:
        """Return whether all processes ``ask`` after a step, which this one has just completed.

        They do after logged steps and after the agreed one; one process alone after each step.
        """
        with self._lock:
            self._step = step
        if self._signals and self.thread.is_alive():
            self.announce("stop")
            self.thread.join()
        return step >= self._agreed_step or step % self._log_every == 0

    def ask(self) -> bool:
        """Return whether any process has a signal; all processes call this after the same steps."""
        own_signal = self._signals[0] if self._signals else 0
        self.signal = self.signal or max_over_processes(own_signal)
        return self.signal > 0

    def announce(self, reason: str) -> None:
        """Wake the threads of all processes, if no process has done so before."""
        client: Any = global_state.client
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{self._name}/reason", reason)

    def _agree(self) -> None:
        client: Any = global_state.client
        try:
            if client.blocking_key_value_get(f"{self._name}/reason", _FOREVER_MS) == "end":
                return
            with self._lock:
                client.key_value_set(f"{self._name}/steps/{jax.process_index()}", str(self._step))
                client.wait_at_barrier(self._name, _FOREVER_MS)
                steps = client.key_value_dir_get(f"{self._name}/steps")
                self._agreed_step = max(int(step) for _, step in steps) + 1
        except jax.errors.JaxRuntimeError:
            exit_now(GONE, 1)


@contextlib.contextmanager
def agree_to_stop(signals: Sequence[int], log_every: int) -> Iterator[Agreement]:
    """Yield this process's ``Agreement`` with the others, which ends with the block."""
    agreement = Agreement(signals, log_every)
    if jax.process_count() == 1:
        yield agreement
        return
    agreement.thread.start()
    try:
        yield agreement
    finally:
        agreement.announce("end")
        agreement.thread.join()
