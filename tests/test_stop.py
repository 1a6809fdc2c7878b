"""The first signal is answered at once and obeyed later, several at once are one, and a later one ends the process."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jllama.stop import Stopped, stop_signals

BUSY = """
import sys, time
from jllama.stop import stop_signals
with stop_signals(lambda: "finishing step 3 and saving") as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.001)
    print(stop[0], flush=True)
    input()
print("saved", flush=True)
"""


@pytest.fixture
def busy():
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.closing(process.stdin):
        assert process.stdout.readline() == "ready\n"
        yield process
    process.kill()
    process.wait()


def test_a_hail_of_signals_is_one(busy):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
        busy.send_signal(number)
        time.sleep(0.01)
    out, err = busy.communicate("\n")
    assert out.splitlines()[1:] == ["saved"]
    assert err == "Ctrl-C: finishing step 3 and saving; again to quit now\n"
    assert busy.returncode == 0


def test_a_second_signal_later_ends_the_process(busy):
    busy.send_signal(signal.SIGTERM)
    assert busy.stdout.readline() == "15\n"
    time.sleep(1.2)
    busy.send_signal(signal.SIGTERM)
    out, err = busy.communicate()
    assert (out, busy.returncode) == ("", 128 + signal.SIGTERM)
    assert err.splitlines() == [
        "SIGTERM: finishing step 3 and saving; again to quit now",
        "stopped at once; the last checkpoint stays as it was",
    ]


def test_the_answer_does_not_wait_for_python(capfd):
    """The main thread is in one long call that takes no notice of signals, as while compiling."""
    events = []

    def doing():
        events.append("asked")
        return "finishing"

    with stop_signals(doing) as stop:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)
        events.append("returned")
        assert events == ["asked", "returned"]
    assert stop == [signal.SIGTERM]
    assert "SIGTERM: finishing; again to quit now\n" in capfd.readouterr().err


def test_all_is_as_before_afterwards_and_other_threads_are_left_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_signals(str):
        pass
    thread = threading.Thread(target=lambda: contextlib.ExitStack().enter_context(stop_signals(str)))
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert Stopped("", signal.SIGINT).exit_code == 130
