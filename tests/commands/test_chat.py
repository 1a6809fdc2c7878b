"""``python -m jllama chat`` on tiny models: what it answers, its commands, and what goes wrong."""

import contextlib
import io
import json
import os
import pty
import random
import re
import select
import signal
import string
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import jllama
from jllama.commands import cli, terminal
from jllama.commands.terminal import WordWrap
from jllama.core.config import LlamaConfig
from jllama.core.model import initial_params
from jllama.generation.conversation import chat_ids
from jllama.generation.generate import stream
from jllama.generation.sampling_params import SamplingParams
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece

pytestmark = pytest.mark.usefixtures("loads_once")
CONTEXT = 128
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
SHORT = ["--max_new_tokens", "6"]
OWN_TERMINAL = """
import fcntl, os, sys, termios
# So that its Ctrl-C is a signal, in one step with what the terminal forgets then.
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def config_of(vocab_size=259, max_seq_len=CONTEXT):
    sizes = {"num_layers": 1, "embed_dim": 32, "mlp_dim": 32, "num_heads": 2}
    return LlamaConfig(vocab_size=vocab_size, max_seq_len=max_seq_len, **sizes)


def save_model(folder, params, config):
    model = jllama.LanguageModel(config, params(config), BytesTokenizer(), TEMPLATE)
    jllama.save(model, folder, "hf")
    return folder


def zeros(config):
    shapes = jax.eval_shape(lambda key: initial_params(key, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def random_letters(config):
    """Random, but for a direction that every token has and that all small letters like."""
    rng = np.random.default_rng(0)
    shapes = zeros(config)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(leaf.dtype), shapes)
    params["embed"][:, 0] = 9
    params["lm_head"][0] = 0
    params["lm_head"][0, BytesTokenizer().encode(string.ascii_lowercase)] = 9
    params["final_norm"][0] = 1
    return jax.tree.map(jnp.asarray, params)


def always_a(config):
    """Whatever came before, the likeliest token by far is the letter a."""
    params = zeros(config)
    params["embed"] += 1
    params["final_norm"] += 1
    params["lm_head"][:, BytesTokenizer().encode("a")] = 9
    return jax.tree.map(jnp.asarray, params)


@pytest.fixture(scope="module", autouse=True)
def compile_sooner():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def babbler(tmp_path_factory):
    """A model whose answers depend on all that was said."""
    return save_model(tmp_path_factory.mktemp("models") / "babbler", random_letters, config_of())


@pytest.fixture(scope="module")
def monotone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "monotone"
    return save_model(folder, always_a, config_of(max_seq_len=4096))


@pytest.fixture
def chat(babbler, capfd, monkeypatch):
    """Say lines to the babbler; gives the exit code, the answers and the chatter."""

    def run(lines, *options):
        content = lines
        if not isinstance(lines, bytes):
            content = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        code = cli.run("chat", [str(babbler), *map(str, options)])
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        assert printed.err.startswith(f"{babbler}\n") or printed.out == ""
        return code, printed.out, printed.err.removeprefix(f"{babbler}\n")

    return run


def expected_answers(babbler, questions, system=None, **settings):
    """Each answer made alone, from the whole conversation so far, with the next seed."""
    model = jllama.load(babbler)
    settings = {"temperature": 0.7, "top_p": 0.95, "seed": 0} | settings
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for turn, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        sampling = SamplingParams(**settings | {"seed": settings["seed"] + turn})
        pieces = stream(model, chat_ids(model, messages), sampling, max_new_tokens=6)
        answers.append("".join(pieces))
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers, messages


def test_every_line_is_answered_with_all_that_was_said(chat, babbler):
    questions = ["hello", " /usr is a folder", "é 🙂"]
    answers, _ = expected_answers(babbler, questions)
    assert len(set(answers)) == 3
    notes = "(cut off after 6 tokens; /set max_new_tokens changes it)\n" * 3
    assert chat(questions, *SHORT) == (0, "".join(f"{answer}\n" for answer in answers), notes)
    lines = ["", questions[0], "   ", *questions[1:], "/quit", "not said"]
    assert chat(lines, *SHORT)[1] == "".join(f"{answer}\n" for answer in answers)


def test_every_option_changes_the_answer(chat, babbler, tmp_path):
    said = ["hello", "again"]
    plain = chat(said, *SHORT)
    assert chat(said, *SHORT) == plain
    (tmp_path / "other.jinja").write_text("{{ messages[-1].content }}")
    words = "--seed 9,--temperature 3,--top_k 1,--top_p 0.01,--min_p 1,--repetition_penalty 0.001"
    options = [option.split() for option in f"{words},--max_new_tokens 2".split(",")]
    options += [("--system", "be brief"), ("--chat_template", tmp_path / "other.jinja")]
    for option in options:
        code, out, _ = chat(said, *SHORT, *option)
        assert (code, out != plain[1]) == (0, True), option
    answers, _ = expected_answers(babbler, said, "be brief", seed=4, temperature=1.0)
    found = chat(said, *SHORT, "--system", "be brief", "--seed", 4, "--temperature", 1.0)[1]
    assert found == "".join(f"{answer}\n" for answer in answers)


def test_what_is_saved_is_the_conversation(chat, babbler, tmp_path):
    path = tmp_path / "said.jsonl"
    _, messages = expected_answers(babbler, ["one", "two\nlines"], "é")
    code, _, err = chat(["/system é", "one", "two\\", "lines", f"/save {path}"], *SHORT)
    assert (code, f"(saved {path})" in err) == (0, True)
    assert json.loads(path.read_text()) == {"messages": messages}
    assert path.read_text().count("\n") == 1
    before = path.read_bytes()
    code, _, err = chat(["one", f"/save {path}", "/save", f"/save {tmp_path}/no/such"], *SHORT)
    assert code == 1
    assert f"error: {path} exists: choose another name\n" in err
    assert "error: /save needs the name of a file\n" in err
    assert f"error: cannot write {tmp_path}/no/such: No such file or directory" in err
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_reset_keeps_the_system_prompt(chat, tmp_path):
    paths = [tmp_path / name for name in "abc"]
    said = ["/system x", "one", "/reset", f"/save {paths[0]}", "/system", f"/save {paths[1]}"]
    said += ["two", "/system y", f"/save {paths[2]}"]
    assert chat(said, *SHORT)[0] == 0
    found = [json.loads(path.read_text())["messages"] for path in paths]
    assert found[:2] == [[{"role": "system", "content": "x"}], []]
    assert [message["role"] for message in found[2]] == ["system", "user", "assistant"]
    assert [message["content"] for message in found[2][:2]] == ["y", "two"]
    again = chat(["one", "/reset", "one"], *SHORT, "--top_k", 1)[1].splitlines()
    assert again[: len(again) // 2] == again[len(again) // 2 :]


def test_help_and_commands_that_are_none(chat):
    code, out, err = chat(["/help", "/quit"])
    assert (code, out) == (0, "")
    words = "reset system save load set retry undo help quit"
    for word in words.split():
        assert f"\n/{word} " in f"\n{err}"
    code, out, err = chat(["/rest now", "hi"], *SHORT)
    assert (code, out != "") == (1, True)
    problem = "error: there is no command /rest; did you mean /reset? (/help explains them"
    assert err.startswith(problem)
    assert "error: there is no command /x; there are /retry, /undo" in chat(["/x"])[2]


def test_a_conversation_over_the_context(chat):
    """The question that does not fit is not said; after /reset all is well."""
    code, out, err = chat(["x" * 200, "hi", "/reset", "hi"], *SHORT, "--top_k", 1)
    first, second = out[: len(out) // 2], out[len(out) // 2 :]
    assert (code, first) == (1, second)
    problem = "the conversation now has 206 tokens and the model's context is 128"
    advice = (
        "begin a new one, or say less (/reset begins a new conversation, /undo takes back a turn)"
    )
    assert f"error: {problem}: {advice}\n" in err
    code, out, err = chat(["hi", "ho", "/reset", "hi"], "--temperature", 0)
    assert code == 1
    advice = "begin a new conversation with /reset"
    assert err.count(f"(cut off: the model's context of 128 tokens is full, {advice})") == 2
    assert err.count("error: the conversation now has ") == 1
    # Where the context ends is soon enough.
    assert chat(["hi"], "--max_new_tokens", 999)[2] == chat(["hi"])[2]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_input_that_is_not_utf_8(babbler, capfd, monkeypatch, errors):
    content = io.BytesIO(b"/reset\ncaf\xe9\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content, "utf-8", errors))
    assert cli.run("chat", [str(babbler), *SHORT]) == 1
    err = capfd.readouterr().err
    assert "of the input is not UTF-8 text: " in err
    assert "Traceback" not in err


def test_a_last_line_that_goes_nowhere(chat):
    assert chat(b"hello\\", *SHORT)[1] == chat(["hello\\", ""], *SHORT)[1]
    assert chat(b"", *SHORT) == (0, "", "")


MISTAKES = """
2 --temperature -1 -> temperature is -1.0; it must be 0
2 --max_new_tokens -1 -> max_new_tokens is -1; it must be 0 or more
2 --step -1 -> step is -1; it must be 0 or more
2 --step 3 -> is not a training run, so it has no step 3: leave out the step
2 --sytem a -> there is no option sytem; did you mean system?
1 --chat_template nowhere -> the template 'nowhere' cannot be read
1 --chat_template bad.jinja -> the chat template is not Jinja:
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_bad_options(chat, tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% if %}")
    words, problem = line.split(" -> ")
    code, *options = words.split()
    actual, out, err = chat([], *options)
    assert (actual, out, problem in err) == (int(code), "", True)
    assert err.count("\n") == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(chat, monkeypatch, tmp_path):
    """What was heard until then is the answer."""

    class Impatient(io.StringIO):
        def write(self, text):
            if text.strip():
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    before = signal.getsignal(signal.SIGINT)
    with contextlib.redirect_stdout(Impatient()) as heard:
        code, _, err = chat(["hi", f"/save {tmp_path}/said"])
    assert (code, err.startswith("(stopped)\n")) == (0, True)
    assert signal.getsignal(signal.SIGINT) is before
    answer = json.loads((tmp_path / "said").read_text())["messages"][-1]
    assert answer == {"role": "assistant", "content": heard.getvalue().removesuffix("\n")}
    assert 1 <= len(answer["content"]) < 20


def test_settings_and_turns_change_in_the_conversation(chat, tmp_path):
    """What /set says is what the option would have said; /retry answers anew, /undo and /load
    change what was said.
    """
    plain = chat(["one", "two"], *SHORT)[1].splitlines()
    options = ("--max_new_tokens", 3, "--temperature", 2, "--banned_ids", "[70, 71]")
    told = chat(["one", "two"], *options)[1]
    settings = ["/set max_new_tokens 3", "/set temperature=2", "/set --banned_ids [70, 71]"]
    code, out, err = chat([*settings, "one", "two", "/set"], *SHORT)
    assert (code, out) == (0, told)
    assert err.startswith("max_new_tokens 3\ntemperature 2.0\nbanned_ids (70, 71)\n")
    assert "\ntop_k 0\ntop_p 0.95\n" in err
    mistakes = {
        "/set temprature 1": "there is no setting temprature; did you mean temperature?",
        "/set temperature hot": "temperature is 'hot'; it must be a finite number",
        "/set temperature -1": "temperature is -1",
        "/set quantize int8": "there is no setting quantize",
        "/retry": "there is no question to take back",
        "/load": "/load needs the name of a file",
        f"/load {tmp_path}/none": f"{tmp_path}/none cannot be read: No such file",
    }
    code, out, err = chat([*mistakes, "one", "two"], *SHORT)
    assert (code, out.splitlines()) == (1, plain)
    for said in mistakes.values():
        assert f"error: {said}" in err

    (tmp_path / "bad.json").write_text('{"messages": ["hello"]}')
    kept, other = tmp_path / "kept.json", tmp_path / "other.json"
    lines = ["one", "two", f"/save {kept}", f"/load {tmp_path / 'bad.json'}", "/retry"]
    lines += ["/undo", "/undo", "one", f"/load {kept}", f"/save {other}"]
    code, out, err = chat(lines, *SHORT)
    assert "error: message 0 is of type str" in err
    assert (code, out.splitlines()[:2]) == (1, plain)
    again = out.splitlines()[2]
    assert again != plain[1]
    # The same conversation without its second question.
    first = tmp_path / "first.json"
    first.write_text(json.dumps({"messages": json.loads(kept.read_text())["messages"][:2]}))
    assert again == chat(["/set seed 2", "two"], *SHORT, "--load", first)[1].strip()
    assert "(taken back: two)\n(taken back: one)\n" in err
    assert "(loaded 4 messages)" in err
    assert other.read_text() == kept.read_text()


def test_a_model_without_a_template_is_said(tmp_path, capfd, monkeypatch):
    tokenizer = train_sentencepiece(["the quick brown fox jumps over the lazy dog\n" * 9], 300)
    config = config_of(vocab_size=300)
    jllama.save(jllama.LanguageModel(config, always_a(config), tokenizer), tmp_path / "base", "hf")
    note = f"{tmp_path}/base has no chat template: it may not have been trained to chat. "
    note += "This chat uses llama2; jllama sample continues"
    for template, is_noted in (("", True), ("chatml", False), ("llama2", False)):
        monkeypatch.setattr("sys.stdin", None)  # closed
        options = ["--chat_template", template] if template else []
        assert cli.run("chat", [str(tmp_path / "base"), *options]) == 0
        assert (note in capfd.readouterr().err) == is_noted


WORDS = st.text(st.sampled_from("abcdé-,.\u0301"), min_size=1, max_size=9) | st.sampled_from(
    [" ", "  ", "\n", "\t", "\n\n"]
)


@given(st.lists(WORDS, max_size=30).map("".join), st.integers(1, 12), st.integers(0, 2**32))
def test_words_wrap_whole(text, width, seed):
    """However the text comes in pieces; a word is broken only if no line could hold it."""
    whole = WordWrap(width).push(text, last=True)
    wrap, left, shown, draws = WordWrap(width), text, "", random.Random(seed)
    while left:
        size = draws.randint(1, 5)
        shown += wrap.push(left[:size])
        left = left[size:]
    assert shown + wrap.push("", last=True) == whole
    if max(map(len, text.split()), default=0) <= width:
        assert whole.split() == text.split()
    assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", text)
    assert whole.count("\n") >= text.count("\n")
    for line in whole.split("\n"):
        assert "\t" in line or cell_len(line) <= width


@given(st.text("世界🙂a ", max_size=40), st.integers(2, 12))
def test_wide_characters_wrap_one_by_one_and_are_not_held_back(text, width):
    wrap, shown = WordWrap(width), ""
    for char in text:
        shown += wrap.push(char)
        assert char in "a " or shown.endswith(char)
    shown += wrap.push("", last=True)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    assert all(cell_len(line) <= width for line in shown.split("\n"))


def test_an_answer_does_not_command_the_terminal():
    controls = {*map(chr, range(32)), *map(chr, range(127, 160))} - {"\n", "\t"}
    assert WordWrap(80).push("".join(controls) + "a\tb\n\x1b[2Jc", last=True) == "a\tb\n[2Jc"


def test_a_paste_is_one_turn_where_nothing_marks_it(monkeypatch, capfd):
    """Its lines come faster than anybody types."""
    ours, theirs = pty.openpty()
    monkeypatch.setitem(sys.modules, "readline", None)
    with os.fdopen(theirs) as stdin, os.fdopen(ours, "wb", buffering=0) as keys:
        monkeypatch.setattr("sys.stdin", stdin)
        said = terminal.lines(at_terminal=True)
        keys.write(b"one\ntwo\n\n  three\n")
        assert next(said) == "one\ntwo\n\n  three"
        keys.write(b"four\n")
        assert next(said) == "four"


def test_a_sample_that_ends_at_once_names_chat(monotone, capfd):
    (letter,) = BytesTokenizer().encode("a")
    assert cli.run("sample", [str(monotone), "--prompt", "hello", "--max_new_tokens", "2"]) == 0
    assert capfd.readouterr() == ("helloaa\n", f"{monotone}\n")
    options = ["--prompt", "hello", "-n", "2", "--stop_ids", f"[{letter}]"]
    assert cli.run("sample", [str(monotone), *options]) == 0
    note = "a text ended at once: the model was trained to answer messages, so chat with it"
    assert capfd.readouterr().err == f"{monotone}\n{note}: jllama chat {monotone}\n"


def test_at_a_terminal(monotone, tmp_path):
    """In a process of its own: Ctrl-C in an answer, a paste, earlier lines, Ctrl-D; what is waited
    for is said.
    """
    (tmp_path / "chat_history").write_text("earlier\n")
    environment = os.environ | {
        "JLLAMA_CACHE": str(tmp_path),
        "JLLAMA_CACHE_GIB": "",
        "TERM": "xterm-256color",
    }
    ours, theirs = pty.openpty()
    chat = [sys.executable, "-m", "jllama", "chat", monotone, "--max_new_tokens", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *chat],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""

    def until(wanted):
        nonlocal shown
        end = time.monotonic() + 600
        while wanted not in shown:
            assert select.select([ours], [], [], max(end - time.monotonic(), 0))[0], shown
            shown += os.read(ours, 4096)
        before, _, shown = shown.partition(wanted)
        return before

    def ask(keys):
        until(b"> ")
        os.write(ours, keys + b"\r")

    def stop_answer():
        until(b"aaaa")
        os.write(ours, b"typed meanwhile\x03")
        assert set(until(b"\x1b[2m")) <= set(b"a\r\n")  # and no ^C
        until(b"(stopped)")

    try:
        until(b"loading ")
        until(b"/help lists the commands")
        until(b"\x1b[?2004h")  # the terminal is to mark what is pasted
        until(b"\x1b[1;36m")
        ask(b"hello")
        until(b"compiling ...")
        stop_answer()
        ask(b"\x10\x10")  # Ctrl-P twice: the line before the last one
        until(b"earlier")
        stop_answer()
        ask(b"/set max_new_tokens 99")
        ask(b"\x1b[200~def f(x):\n    return 1\x1b[201~")
        until(b"aaaa")
        until(b"(cut off after 99 tokens; /set max_new_tokens changes it)")
        assert b" of 4,096 tokens, " in until(b" tokens/s]")
        ask(f"/save {tmp_path}/said".encode())
        until(b"(saved ")
        ask(b"\x04")
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert (tmp_path / "chat_history").read_text().split()[-2:] == ["/save", f"{tmp_path}/said"]
    messages = json.loads((tmp_path / "said").read_text())["messages"]
    questions = [message["content"] for message in messages if message["role"] == "user"]
    assert questions == ["hello", "earlier", "def f(x):\n    return 1"]
