"""Hostile templates: one sentence comes back soon, and this process never holds what they make."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from helpers import slow_but

from jllama.core import JllamaError, UsageError
from jllama.templates import template as limits
from jllama.templates.messages import TEMPLATES
from jllama.templates.template import render

MESSAGES = [{"role": "user", "content": "hi there\n" * 99}]
END = "{% endfor %}"
LOOPS = "{% for a in r %}{% for b in r %}{% for c in r %}"
DOUBLED = (
    f"{{% set ns = namespace(s='ab') %}}{{% for i in range(60) %}}{{% set ns.s = STEP %}}{END}"
)
NESTED = DOUBLED.replace("STEP", "[ns.s, ns.s]")
TREE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
LIMIT = (
    r"it takes too much time or memory \(over 0.1 s or 128 MiB\); perhaps it loops without "
    r"end; give another t"
)
TEXT = "it makes a text of over 100,000 bytes"


@pytest.fixture(autouse=True, scope="module")
def _a_new_worker():
    limits._stop()
    yield
    limits._stop()


TOO_MUCH = [
    # time
    LOOPS + END * 3,
    LOOPS.replace(" %}", " if not a %}") + END * 3,
    "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}" + END,
    TREE + "{{ f(60) }}",
    "{% set a = [1] * 300000 %}{{ ('%(a)s' * 9000) % {'a': a} }}",
    "{{ 10 ** 999 ** 999 }}",
    # memory
    "{{ ('{a}' * 90000).format(a='a' * 90000) }}",
    "{% set ns = namespace(l=[]) %}{% for a in r %}{% set ns.l = [ns.l, 'a' * (a + 90000)] %}"
    + END,
    "{{ 'a' * 10 ** 10 }}",
    DOUBLED.replace("STEP", "ns.s ~ ns.s"),
    DOUBLED.replace("STEP", "[ns.s, ns.s] | join"),
    DOUBLED.replace("STEP", "ns.s.replace('a', ns.s)"),
    "{% set s = 'a' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    NESTED + "{{ ns.s }}",
    "{{ ('a' * 99999) | join('b' * 99999) }}",
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "{{ ('a\n' * 99999) | indent(99999) }}",
    "{{ ([1] * 99999) | tojson(indent=99999) }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ (1).to_bytes(10 ** 9) }}",
]
HOSTILE = [
    # length
    ("{% for a in range(999) %}{{ messages[0].content * 9 }}{% endfor %}", TEXT),
    ("{{ 'a' * 10 ** 7 }}", TEXT),
    ("é" * 50_000, TEXT),
    # depth
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself without end"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
    ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    # the sandbox
    ("{{ ''.__class__.__mro__ }}", "it reaches for '__class__' of a str"),
    ("{{ ''['__class__'] }}", "it reaches for '__class__' of a str"),
    ("{{ '' | attr('__class__') }}", "it reaches for '__class__' of a str"),
    ("{{ [''] | map(attribute='__class__') | list }}", "it reaches for '__class__' of a str"),
    ("{{ '{0.__class__}'.format('') }}", "it reaches for '__class__' of a str"),
    ("{{ raise_exception.__globals__ }}", "it reaches for '__globals__' of a function"),
    ("{{ dict.__class__ }}", "it reaches for '__class__' of a type"),
    ("{{ dict.mro() }}", "it reaches for 'mro' of a type"),
    ("{{ messages.append(1) }}", "it reaches for 'append' of a list"),
    # mistakes
    ("{% if %}", "is not Jinja: Expected an expression, got 'end of statement block' in line 1"),
    ("\n{{ 1 | nope }}", "is not Jinja: No filter named 'nope'. in line 2"),
    ("{% include 'other' %}", "failed: no loader"),
    ("{{ 1 / 0 }}", "failed: division by zero"),
    ("{{ messages[0].nope.more }}", "failed: 'dict object' has no attribute 'nope'"),
    ("{{ raise_exception('a\n \x1b[1mb') }}", r"refuses these messages: a \[1mb$"),
    ("{{ raise_exception('a' * 9999) }}", "a{250}"),
]


def assert_refused(template, message, **variables):
    tracemalloc.start()
    with pytest.raises(JllamaError, match=message) as caught:
        render(template, messages=MESSAGES, **variables)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 5_000_000
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.fixture(autouse=True)
def _low_limits(monkeypatch):
    monkeypatch.setattr(limits, "CLOCK_SECONDS", 600.0)
    monkeypatch.setattr(limits, "MEMORY_BYTES", 128 * 2**20)


@pytest.mark.parametrize("template", slow_but(TOO_MUCH[::5], TOO_MUCH), ids=lambda text: text[:50])
def test_templates_without_end_end_with_one_sentence(template, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    assert_refused(template, LIMIT, r=[*range(3000)])


@pytest.mark.parametrize(("template", "message"), HOSTILE, ids=lambda text: text[:50])
def test_hostile_templates_end_with_one_sentence(template, message, monkeypatch):
    """They end for their own reason, however slow the machine is."""
    monkeypatch.setattr(limits, "SECONDS", 600.0)
    monkeypatch.setattr(limits, "MAX_BYTES", 100_000)
    assert_refused(template, message)


POPEN = subprocess.Popen


def start_sleeper(argv, **options):
    """Start a process that never answers in place of a worker."""
    code = "import time; time.sleep(600)"
    return POPEN([sys.executable, "-I", "-S", "-c", code], **options)


def test_without_limits_of_the_process_the_clock_ends_it(monkeypatch):
    """As where the system has none: a worker that never answers."""
    monkeypatch.setattr(limits, "CLOCK_SECONDS", 0.05)
    limits._stop()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", start_sleeper)
        with pytest.raises(JllamaError, match="too much time or memory"):
            render("never")
    monkeypatch.undo()
    assert render("{{ x }} again", x=1) == "1 again"


def worker():
    return limits._workers[os.getpid()][-1]


def test_the_worker_is_kept_and_started_again_when_it_has_died():
    assert render("a") == "a"
    first = worker()
    assert render("b") == "b"
    assert worker() is first
    first.kill()
    first.wait()
    assert render("c") == "c"
    assert worker() is not first


def test_an_interrupted_call_does_not_leave_its_answer_to_the_next(monkeypatch):
    monkeypatch.setattr(limits.json, "loads", lambda text: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        render("first")
    monkeypatch.undo()
    assert render("second") == "second"


def test_many_threads_get_each_its_own_text():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda number: render("{{ x }}", x=number), range(200))
        assert [*texts] == [*map(str, range(200))]


def test_a_slow_template_does_not_hold_up_another(monkeypatch):
    """The first worker never answers; a second text is rendered while the first call waits."""
    started = []
    limits._stop()

    def start(argv, **options):
        started.append(start_sleeper(argv, **options))
        return started[-1]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(subprocess, "Popen", start)
        slow = pool.submit(render, "slow")
        while not started:
            time.sleep(0.01)
        monkeypatch.undo()
        assert render("quick") == "quick"
        assert not slow.done()
        started[0].kill()
        assert isinstance(slow.exception(), JllamaError)


def test_variables_that_json_cannot_hold():
    itself = []
    itself.append(itself)
    message = "takes text, numbers, lists and objects, as JSON does: "
    for value in ({1, 2}, object(), itself):
        with pytest.raises(UsageError, match=message):
            render("{{ x }}", x=value)
    assert render("{{ x }}", x="\ud83d \0 é") == "\ud83d \0 é"


def test_the_worker_imports_nothing_of_the_users_and_ends_with_its_parent(tmp_path):
    """A ``json.py`` in the user's folder or path is not run.

    Ctrl-C is for the parent, which leaves no worker when it is killed.
    """
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    (tmp_path / "jinja2.py").write_text("raise SystemExit('mine')")
    code = (
        "import os, sys; from jllama.templates import template\n"
        f"os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "print(template.render('{{ 1 + 1 }}'), 'jinja2' in sys.modules, 'jax' in sys.modules, "
        "flush=True)\n"
        "((worker,),) = template._workers.values(); os.kill(worker.pid, 2)\n"
        "print(template.render('alive'), worker.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=os.getcwd(), timeout=600
    )
    first, second = done.stdout.decode().splitlines()
    assert done.returncode == -signal.SIGKILL
    assert first == "2 False False"
    text, pid = second.split()
    assert text == "alive"
    deadline_s = time.monotonic() + 600
    while is_running(int(pid)):
        assert time.monotonic() < deadline_s, "the worker outlived its parent"
        time.sleep(0.01)


def is_running(pid):
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_long_conversation_is_not_hostile():
    """Of a hundred messages and over two megabytes."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "the user " * 2400} for i in range(101)
    ]
    for template in TEMPLATES.values():
        text = render(template, messages=messages, bos_token="<s>", eos_token="</s>")
        assert len(text) > 2_000_000
