"""What every command shares: help, positional arguments, configurations by name, closed streams,
tab completion.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml
from helpers import run_command, slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

import jllama
from jllama.commands import cli
from jllama.commands.bench import BenchOptions
from jllama.commands.chat import ChatOptions
from jllama.commands.cli import parse, shipped_configs
from jllama.commands.doctor import DoctorOptions
from jllama.commands.eval import EvalOptions
from jllama.commands.sample import SampleOptions
from jllama.commands.verify import VerifyOptions
from jllama.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
BARE = ["train", "sample", "chat", "serve", "replay", "convert", "eval", "bench", "cache"]
"""Commands that do nothing without an argument but show how they are used."""
OPTIONS = {
    "train": (TrainConfig, ""),
    "sample": (SampleOptions, "--checkpoint x"),
    "chat": (ChatOptions, "--checkpoint x"),
    "verify": (VerifyOptions, ""),
    "eval": (EvalOptions, "--checkpoint x --data y"),
    "bench": (BenchOptions, "--what decode --checkpoint x"),
    "doctor": (DoctorOptions, ""),
}
"""The options of some commands, and what they cannot be without."""


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(line, **environment):
    """What a line of bash gives, where ``jllama`` is this one: exit code, stdout and stderr."""
    line = f'jllama() {{ {sys.executable} -m jllama "$@"; }}; {line}'
    words = ["bash", "-c", line]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, env=os.environ | environment)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# Help


def test_help_and_mistakes_do_not_import_jax():
    """Nor NumPy, Orbax, Grain: nobody who asks for help or mistypes an option waits for them."""
    calls = [
        [command, *rest]
        for command in cli.COMMANDS
        for rest in (["--help"], ["--help", "all"], ["--lr", "1"])
    ]
    calls += [[command] for command in BARE]
    calls += [["--version"], [], ["trian"], ["train", "quickstart", "--seed", "x"]]
    code = f"""
import contextlib, io, sys
from jllama.commands import cli
for call in {calls}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = cli.main(call)
    assert found == (0 if {{"--help", "--version"}} & set(call) else 2), (call, found)
    loaded = {{"jax", "numpy", "optax", "orbax", "grain", "flax"}} & set(sys.modules)
    assert not loaded, (call, loaded)
"""
    python(code)


@pytest.mark.parametrize("command", BARE)
def test_a_command_alone_shows_its_page_and_does_nothing(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(command, []) == 2
    out, err = capsys.readouterr()
    assert out == ""
    parent = f"{cli.VERBS[command][0]} " if command in cli.VERBS else ""
    assert err.startswith(f"usage: python -m jllama {parent}{command} ")
    assert f"\n\nexamples:\n  python -m jllama {parent}{command} " in err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def page():
    """The help page of a command, short or with all options."""

    @functools.cache
    def show(command, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert cli.run(command, ["--help", *words]) == 0
        return out.getvalue()

    return show


@pytest.mark.parametrize("command", [*cli.COMMANDS, *cli.VERBS])
def test_help_is_a_page_without_markup(command, page):
    short, everything = page(command), page(command, "all")
    assert len(short.splitlines()) <= 65
    assert len(short) <= len(everything) + 700  # the examples
    words = ["``", "Literal", "typing", "Optional", "customizes", "Path to a configuration", "%("]
    for word in words:
        assert word not in short + everything
    title = short.split("\n\n")[1]
    assert " ".join(everything.split()).count(" ".join(title.split())) == 1


@pytest.mark.parametrize("command", OPTIONS)
def test_help_explains_every_option(command, page):
    text = " ".join(page(command, "all").split())
    kind, required = OPTIONS[command]

    def check(values, prefix):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if dataclasses.is_dataclass(value):
                check(value, f"{prefix}{field.name}.")
                continue
            assert f"--{prefix}{field.name} " in text
            # Some fields are inherited.
            docs = "\n".join(parent.__doc__ for parent in type(values).__mro__)
            explanation = docs.partition(f"    {field.name}: ")[2].partition("\n")[0]
            assert explanation
            assert " ".join(explanation.replace("``", "").split()[:3]) in text

    check(parse(kind, required.split(), command), "")


@pytest.mark.parametrize("command", ["sample", "chat", "eval", "serve", "bench", "plan"])
def test_the_help_of_int8_says_where_it_saves_no_time(command, page):
    assert "no time" in " ".join(page(command, "all").split())


def test_help_of_train_lists_the_configurations_and_the_sizes(page):
    text = page("train")
    configs = shipped_configs()
    del configs["speedrun"]  # of several runs
    for name, path in configs.items():
        assert f"  {name:22} {path.read_text().splitlines()[0][2:]}\n" in text
    assert "  python -m jllama train quickstart\n" in text
    assert "--optimizer.learning_rate X" in text
    assert "--optimizer.beta1" not in text
    names = "preset model.num_layers model.embed_dim training.batch_size training.seq_len"
    for name in names.split():
        assert f"--{name} " in text


def test_help_of_train_ends_with_the_options_for_experts(page):
    before, _, after = page("train", "all").partition("\nfor experts:\n")
    group = after.partition("\n\nconfigurations:")[0]
    names = [line.split()[0] for line in group.splitlines() if line.startswith("  --")]
    assert sorted(names) == sorted(f"--{name}" for name in cli._EXPERT.split())
    assert "\n\n" not in group
    assert not [name for name in names if f"{name} " in before]
    assert "for experts" not in page("train")


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    version = f"jllama {jllama.__version__} (jax {importlib.metadata.version('jax')}"
    assert version in capsys.readouterr().out


@pytest.mark.parametrize("slow_s", [0, 0.3])
def test_ctrl_c_in_a_collection_of_garbage_is_not_lost(slow_s):
    """JAX has a callback there, and Python drops what is raised in one; also where the machine is
    busy meanwhile.
    """
    code = f"""
import gc, signal, sys, threading, time, types
from jllama.commands import cli
start = threading.Timer.start
threading.Timer.start = lambda timer: (start(timer), time.sleep({slow_s}))
pressed = []
def press_once(phase, info):
    if not pressed:
        pressed.append(True)
        signal.raise_signal(signal.SIGINT)
def work(argv, prog):
    gc.callbacks.append(press_once)
    gc.collect()
    gc.callbacks.clear()
    for _ in range(60_000):
        time.sleep(0.01)
    return 0
sys.modules["jllama.commands.data"] = types.SimpleNamespace(main=work)
print(cli.main(["data"]))
"""
    assert python(code) == "1\n"


def test_the_page_of_all_commands(capsys):
    assert cli.main([]) == 2
    text = capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert "usage: python -m jllama COMMAND" in text
    assert "tab completion: pip install 'jllama[completion]'" in text
    assert len(cli.COMMANDS) <= 13
    for name, purpose in cli.COMMANDS.items():
        assert f"{name:8} {purpose}" in text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_stands_behind_its_command_and_has_its_old_name(verb, capsys):
    parent, purpose = cli.VERBS[verb]
    assert cli.main([parent, verb, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: python -m jllama {parent} {verb}")
    assert cli.main([verb, "--help"]) == 0
    assert capsys.readouterr() == (page, f"jllama {verb} is now jllama {parent} {verb}\n")
    assert cli.main([parent, "--help"]) == 0
    assert f"  {verb:8} {purpose}" in capsys.readouterr().out


# Positional arguments and configurations


@pytest.mark.parametrize(
    "argv",
    [
        "--seed 3 model --json",
        "--json model --seed 3",
        "--json true model --seed=3",
        "--checkpoint=model --seed 3 --json=true",
    ],
)
def test_a_checkpoint_with_and_without_its_name(argv):
    options = parse(SampleOptions, argv.split(), "sample", ("checkpoint",))
    assert options == SampleOptions(checkpoint="model", seed=3, json=True)


@pytest.mark.parametrize(
    "command", ["eval --data x.txt", "chat", "sample", "serve", "doctor", "verify"]
)
def test_every_command_takes_a_checkpoint_both_ways(command, tmp_path):
    name, *options = command.split()
    (tmp_path / "x.txt").write_text("text")
    for path in (["nowhere"], ["--checkpoint", "nowhere"]):
        done = run_command(name, *path, *options, place=tmp_path)
        assert done.code == 1
        assert "error: there is no checkpoint at nowhere" in done.err


def test_a_shipped_configuration_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parse(TrainConfig, ["--config", str(ROOT / "configs" / "quickstart.yaml")], "train")
    for words in ("quickstart", "--config quickstart.yaml", "--config=configs/quickstart.yaml"):
        assert parse(TrainConfig, words.split(), "train", ("config",)) == expected
    changed = parse(TrainConfig, ["quickstart", "--seed", "5"], "train", ("config",))
    assert changed == dataclasses.replace(expected, seed=5)


def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("seed: 7\n")
    assert parse(TrainConfig, ["quickstart.yaml"], "train", ("config",)).seed == 7
    os.mkfifo(tmp_path / "pipe")  # as by <(...)
    code = "open('pipe', 'w').write('seed: 8')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path):
        assert parse(TrainConfig, ["pipe"], "train", ("config",)).seed == 8


def test_the_wheel_holds_the_configurations_and_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    paths = (ROOT / "jllama").rglob("__init__.py")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in paths}
    built = settings["tool"]["setuptools"]
    others = {"jllama.configs": "configs", "jllama.contestants": "benchmarks/contestants"}
    assert set(built["packages"]) == {*packages, *others}
    assert built["package-dir"] == others
    assert built["package-data"]["jllama.configs"] == ["*.yaml"]
    assert settings["project"]["scripts"] == {"jllama": "jllama.commands.cli:main"}
    assert {path.parent for path in shipped_configs().values()} == {ROOT / "configs"}


def test_a_printed_configuration_can_be_given_back(tmp_path, capsys):
    words = "--model.num_layers 3 --optimizer.learning_rate 1e-5 --training.remat"
    words += " --model.rope_scaling.type llama3 --model.rope_scaling.factor 8"
    argv = [*words.split(), "--training.sample_prompt", "a: 'b'"]
    assert cli.run("train", [*argv, "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["model"]["num_layers"] == 3
    (tmp_path / "printed.yaml").write_text(printed)
    again = parse(TrainConfig, ["--config", str(tmp_path / "printed.yaml")], "train")
    assert again == parse(TrainConfig, argv, "train")
    assert again.training.remat == "block"
    assert again.model.rope_scaling.factor == 8


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 3\ntraining: {steps: 7, batch_size: 4}\n")
    argv = ["--config", str(tmp_path / "a.yaml"), "--training.steps", "9"]
    config = parse(TrainConfig, argv, "train")
    options = config.training
    assert (config.seed, options.steps, options.batch_size, options.log_every) == (3, 9, 4, 10)


# Streams


def test_readers_that_have_gone_and_closed_streams():
    """Nothing of Python's own is said, and no message lands in another stream."""
    gone = 'jllama train --help all | true; echo "${PIPESTATUS[0]}"'
    code, out, err = shell(gone)
    assert (out in ("0\n", "1\n"), err) == (True, "")
    assert shell("jllama --version >&-") == (0, "", "")
    assert shell("jllama >&- 2>&- <&-") == (2, "", "")
    assert shell("jllama sample nowhere --seed x 2>&-") == (2, "", "")
    code, out, err = shell("jllama sample nowhere --seed é >&-", PYTHONIOENCODING="ascii")
    assert (code, out, err) == (2, "", "error: seed is '\\xe9'; it must be a whole number\n")


def test_a_full_disk_under_stdout():
    if not Path("/dev/full").is_char_device():
        pytest.skip("this system has no /dev/full")
    assert shell("jllama --version > /dev/full") == (1, "", "error: No space left on device\n")


def test_closed_files_are_not_reused_for_others(tmp_path):
    """A file that is opened after stderr was closed must not become stderr."""
    code = """
import os
os.close(2)
import sys
sys.stderr = None
from jllama.commands import cli
cli.main(["trian"])
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(2, b"noise")
print(file)
"""
    command = [sys.executable, "-c", code, tmp_path / "file"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert int(done.stdout) > 2
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.slow
def test_sampling_and_chatting_with_closed_streams(small_run):
    sample = f"jllama sample {small_run.folder} --max_new_tokens 2"
    code, out, err = shell(f"{sample} --prompt - <&-")
    assert (code, err) == (0, f"{small_run.folder}, step 20\n")
    assert shell(f"{sample} --prompt the >&-")[:2] == (0, "")
    code, out, err = shell(f"{sample} --prompt the 2>&-")
    assert (code, out.startswith("the"), err) == (0, True, "")
    code, out, _ = shell(f"{sample} --prompt é -n 2", PYTHONIOENCODING="ascii")
    assert (code, out.count("\\xe9")) == (0, 2)
    chat = f"jllama chat {small_run.folder} --chat_template chatml --max_new_tokens 2"
    assert shell(f"{chat} <&-")[:2] == (0, "")
    # The answer does not fit the context of 32, and that is said.
    code, out, err = shell(f"echo the | {chat} >&-")
    assert (code, out, "error: " in err, "Traceback" in err) == (1, "", True, False)


# Errors


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MemoryError("4 GiB"), "error: there is not enough memory: 4 GiB\n"),
        (RuntimeError("RESOURCE_EXHAUSTED: a\nb"), "error: the device's memory is full (RESOURCE_"),
        (KeyboardInterrupt(), "stopped\n"),
        (BrokenPipeError(), ""),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(problem, said, monkeypatch):
    monkeypatch.setattr("jllama.commands.doctor.main", mock.Mock(side_effect=problem))
    done = run_command("doctor")
    assert done.code == 1
    assert done.err.startswith(said)
    assert done.err.count("\n") == bool(said)


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("jllama.commands.doctor.main", lambda argv, prog: {}["missing"])
    with pytest.raises(KeyError):
        cli.run("doctor", [])


# Tab completion


@pytest.mark.parametrize(
    ("line", "expected"),
    slow_but(
        [("jllama s", ["sample", "serve"])],
        [
            ("jllama s", ["sample", "serve"]),
            ("jllama sample --te", ["--temperature"]),
            ("jllama train quickstart --optimizer.l", ["--optimizer.learning_rate"]),
            ("jllama convert --", ["--source", "--target", "--to"]),
        ],
    ),
)
def test_tab_completion(line, expected, tmp_path):
    pytest.importorskip("argcomplete")
    out = tmp_path / "out"
    variables = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    variables |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(out), "_ARGCOMPLETE_IFS": "\n"}
    assert shell("jllama", **variables, _ARGCOMPLETE="1")[0] == 0
    completed = [word.strip() for word in out.read_text().split("\n")]
    assert set(expected) <= set(completed)
    if len(expected) == 1:
        assert completed == expected


# Memory


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ("n", "at least 1 and at most 100,000"),
        ("batch_size", "at least 1 and at most 100,000"),
        ("speculate", "from 0 to below the model's context, 32"),
    ],
)
def test_a_batch_that_cannot_fit_is_refused_before_it_is_made(small_run, capsys, option, limit):
    assert cli.run("sample", [str(small_run.folder), f"--{option}", "100000000"]) == 2
    assert f"{option} is 100000000; it must be {limit}" in capsys.readouterr().err


def test_a_large_model_of_many_rows(monkeypatch):
    from jllama.generation.sampler import check_batch

    large = jllama.preset("llama3.1-8b")
    check_batch(large, 1)
    values = {"SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: values.get(name, 4 * 2**18))  # 4 GiB
    check_batch(large, 100)
    problem = r"^100,000 texts at once take at least 1,\d\d\d GiB of memory, and"
    with pytest.raises(jllama.UsageError, match=problem):
        check_batch(large, 100_000)


# The 64-bit mode


@pytest.mark.slow
def test_sampling_in_the_64_bit_mode_gives_the_same_text(small_run):
    import jax

    words = "--prompt the --max_new_tokens 8 --speculate 2 --json --top_k 9 --frequency_penalty 0.5"

    def text():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert cli.run("sample", [str(small_run.folder), *words.split()]) == 0
        return json.loads(out.getvalue())

    expected = text()
    with jax.enable_x64(True):
        assert text() == expected


# Anything at all

JUNK = [
    "",
    "nan",
    "1e999",
    "{",
    "[" * 5000,
    "\0",
    "\ud800",
    "é",
    "&a [*a]",
    "0001-99-99",
    "9" * 6000,
]
JUNK += ["--", "- 1", "{1: 2}", "[null]", "!!python/object/apply:os.getpid []", "a\nb"]
JUNK += ["{class_path: os.getpid}", "/dev/null", "."]
NAMES = {
    TrainConfig: "model model.num_layers model.rope_scaling model.rope_scaling.type training.remat "
    "data.path seed",
    SampleOptions: "checkpoint n stop stop_ids logit_bias banned_ids echo dtype top_p json",
}


@settings(max_examples=30)
@given(st.data())
def test_any_value_of_any_option_is_taken_or_answered_in_a_sentence(data):
    options = data.draw(st.sampled_from([*NAMES]))
    names = ["config", "print_config", "no_such", *NAMES[options].split()]
    name = data.draw(st.sampled_from(names))
    value = data.draw(st.sampled_from(JUNK) | st.text(max_size=20))
    argv = [f"--{name}={value}"] if data.draw(st.booleans()) else [f"--{name}", value]
    said, code = "", 0
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            parse(options, argv, "jllama")
    except jllama.UsageError as error:
        said = str(error).replace(value, "")
    except SystemExit as stop:  # --print_config
        code = stop.code
    assert code == 0
    for word in ("typing", "Literal", "<class", "Optional", "Parser key"):
        assert word not in said


def test_an_option_that_has_gone_is_read_where_it_changed_nothing(tmp_path):
    """Files of earlier runs have it."""
    file = tmp_path / "config.yaml"
    file.write_text("training:\n  grpo:\n    exact: false\n")
    assert parse(TrainConfig, ["--config", str(file)], "train") == parse(TrainConfig, [], "train")
    file.write_text("training:\n  grpo:\n    exact: true\n")
    with pytest.raises(jllama.UsageError, match=r"there is no option training\.grpo\.exact"):
        parse(TrainConfig, ["--config", str(file)], "train")
