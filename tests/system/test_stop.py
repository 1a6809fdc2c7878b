"""The first signal is answered at once and obeyed later, several at once are one, and a later one
ends the process.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

from jllama.system.stop import Stopped, stop_signals

BUSY = """
import itertools, sys, time, types
from jllama.system import stop as module
from jllama.system.stop import stop_signals
module.time = types.SimpleNamespace(monotonic=itertools.count(0, float(sys.argv[1])).__next__)
with stop_signals(lambda: "finishing step 3 and saving") as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.001)
    print(stop[0], flush=True)
    input()
print("saved", flush=True)
"""


@contextlib.contextmanager
def busy(clock_step_s):
    """A process whose clock goes on by so much each time that it is read, and not otherwise."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, str(clock_step_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_hail_of_signals_is_one():
    with busy(clock_step_s=0) as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.01)
        out, err = process.communicate("\n")
    assert out.splitlines()[1:] == ["saved"]
    assert err == "Ctrl-C: finishing step 3 and saving; again to quit now\n"
    assert process.returncode == 0


def test_a_second_signal_later_ends_the_process():
    with busy(clock_step_s=1.2) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "15\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert (out, process.returncode) == ("", 128 + signal.SIGTERM)
    assert err.splitlines() == [
        "SIGTERM: finishing step 3 and saving; again to quit now",
        "stopped at once; the last checkpoint stays as it was",
    ]


def test_the_answer_does_not_wait_for_python(capfd):
    """The main thread is in one long call that takes no notice of signals, as while compiling."""
    events = []
    asked, ask = os.pipe()

    def doing():
        events.append("asked")
        os.write(ask, b"!")
        return "finishing"

    with stop_signals(doing) as stop:
        threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGTERM]).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            select.select([asked], [], [], 600)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        events.append("returned")
        assert events == ["asked", "returned"]
    assert stop == [signal.SIGTERM]
    assert "SIGTERM: finishing; again to quit now\n" in capfd.readouterr().err


def test_all_is_as_before_afterwards_and_other_threads_are_left_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_signals(str):
        pass
    thread = threading.Thread(
        target=lambda: contextlib.ExitStack().enter_context(stop_signals(str))
    )
    thread.start()
    thread.join()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert Stopped("", signal.SIGINT).exit_code == 130


LAST = """
import os
from jllama.system.stop import exit_now
original = os._exit
def late(exit_code):
    os.write(2, b"what a thread of C++ has to say\\n")
    original(exit_code)
os._exit = late
exit_now("the end", 7)
"""


def test_a_last_line_is_the_last():
    """Another thread may write in the moment before the process ends."""
    done = subprocess.run([sys.executable, "-c", LAST], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("the end\n", 7)
