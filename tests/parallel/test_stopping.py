"""All processes ask for signals after the same steps, whoever gets one and however far the others
are. Here processes are threads, and the coordinator is a dictionary.
"""

import itertools
import random
import threading
import time
import types

import jax
import pytest

from jllama.parallel import stopping

NUM_STEPS = 60


class Coordinator:
    """What JAX's client does, for the processes of this test."""

    def __init__(self, count):
        self.values = {}
        self.changes = threading.Condition()
        self.barrier = threading.Barrier(count)

    def key_value_set(self, key, value):
        with self.changes:
            if key in self.values:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changes.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changes:
            self.changes.wait_for(lambda: key in self.values)
            return self.values[key]

    def wait_at_barrier(self, name, timeout_ms):
        self.barrier.wait()

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


class Process(threading.Thread):
    """Takes steps, each of which needs all processes, and may begin some before they are done."""

    def __init__(self, index, processes, patience, ahead, log_every):
        super().__init__(daemon=True)
        self.index = index
        self.processes = processes
        self.random = random.Random(f"{index} {patience}")
        self.ahead = ahead
        self.log_every = log_every
        self.signals = []
        self.signal_step = None
        self.begun = 0
        self.asked = []
        self.error = None

    def run(self):
        with stopping.agree_to_stop(self.signals, self.log_every) as agreement:
            for step in range(1, NUM_STEPS + 1):
                self.begun = step
                time.sleep(self.random.choice([0, 0, 0.001]))
                while min(process.begun for process in self.processes) < step - self.ahead:
                    time.sleep(0.0001)
                if step == self.signal_step:
                    self.signals.append(15)
                if agreement.may_ask(step):
                    self.asked.append(step)
                    if step % self.log_every or any(p.signals for p in self.processes):
                        break
            self.begun = NUM_STEPS


@pytest.fixture
def world(monkeypatch):
    """So many processes, whose threads are told apart by the process that has started them."""

    def make(count, seed, log_every=1000):
        indices = {}

        class Thread(threading.Thread):
            def __init__(self, **options):
                super().__init__(**options)
                indices[self] = threading.current_thread().index

        fake = types.SimpleNamespace(
            process_count=lambda: count,
            process_index=lambda: indices[threading.current_thread()],
            errors=jax.errors,
        )
        client = Coordinator(count)
        monkeypatch.setattr(stopping, "jax", fake)
        monkeypatch.setattr(stopping, "global_state", types.SimpleNamespace(client=client))
        monkeypatch.setattr(stopping, "_RUNS", itertools.repeat(0))
        kinds = types.SimpleNamespace(Thread=Thread, Lock=threading.Lock)
        monkeypatch.setattr(stopping, "threading", kinds)
        processes = []
        ahead = random.Random(seed).randrange(4)
        for index in range(count):
            processes.append(Process(index, processes, seed, ahead, log_every))
        return processes

    return make


def finish(processes):
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert not process.is_alive(), [process.asked for process in processes]


@pytest.mark.parametrize("seed", range(20))
def test_all_ask_after_the_same_step(world, seed):
    """One process or several have a signal, at the same time or not, and all stop."""
    choice = random.Random(seed)
    processes = world(choice.randrange(2, 6), seed)
    for process in choice.sample(processes, choice.randrange(1, len(processes))):
        process.signal_step = choice.randrange(20, 24)
    finish(processes)
    (asked,) = {tuple(process.asked) for process in processes}
    (stopped,) = asked
    first = min(process.signal_step for process in processes if process.signal_step)
    assert first < stopped <= first + processes[0].ahead + 2


def test_without_a_signal_nobody_asks(world):
    processes = world(3, 0)
    finish(processes)
    assert [process.asked for process in processes] == [[]] * 3


def test_a_signal_in_the_last_step_is_no_deadlock(world):
    """Some processes have left the loop, and nobody reaches the agreed step."""
    processes = world(3, 0)
    processes[1].signal_step = NUM_STEPS
    finish(processes)
    assert [process.asked for process in processes] == [[]] * 3


def test_one_process_asks_after_each_step():
    signals = []
    with stopping.agree_to_stop(signals, 1000) as agreement:
        assert [agreement.may_ask(step) for step in (1, 2, 3)] == [True] * 3
        assert not agreement.ask()
        signals += [2, 15]
        assert agreement.ask()
        assert agreement.signal == 2
        assert not agreement.thread.is_alive()
