"""What every command shares: help, positional arguments, configurations by name, closed streams,
tab completion.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jllama
from jllama.commands import cli
from jllama.commands.cli import parse, shipped_configs
from jllama.commands.sample import SampleOptions
from jllama.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
BARE = ["train", "sample", "chat", "serve", "replay", "convert", "eval", "bench", "cache"]
"""Commands that do nothing without an argument but show how they are used."""


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shell(line, **environment):
    """What a line of bash gives, where ``jllama`` is this one: exit code, stdout and stderr."""
    line = f'jllama() {{ {sys.executable} -m jllama "$@"; }}; {line}'
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, cwd=ROOT, env=os.environ | environment
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# Help


def test_help_and_mistakes_do_not_import_jax():
    """Nor NumPy, Orbax, Grain: nobody who asks for help or mistypes an option waits for them."""
    calls = [
        [command, *rest]
        for command in cli.COMMANDS
        for rest in (["--help"], ["--help", "all"], ["--lr", "1"])
    ]
    calls += [[command] for command in BARE] + [
        ["--version"],
        [],
        ["trian"],
        ["train", "quickstart", "--seed", "x"],
    ]
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
    assert err.startswith(f"usage: python -m jllama {command} ")
    assert f"\n\nexamples:\n  python -m jllama {command} " in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_is_a_page_without_markup(command, capsys):
    assert cli.run(command, ["--help"]) == 0
    short = capsys.readouterr().out
    assert cli.run(command, ["--help", "all"]) == 0
    everything = capsys.readouterr().out
    assert len(short.splitlines()) <= 65
    assert len(short) <= len(everything) + 700  # the examples
    for page in (short, everything):
        assert "``" not in page
        for word in (
            "Literal",
            "typing",
            "Optional",
            "customizes",
            "Path to a configuration file",
            "%(",
        ):
            assert word not in page
    title = short.split("\n\n")[1]
    assert " ".join(everything.split()).count(" ".join(title.split())) == 1


def test_help_of_train_lists_the_configurations(capsys):
    assert cli.run("train", ["--help"]) == 0
    page = capsys.readouterr().out
    for name, path in shipped_configs().items():
        assert f"  {name:22} {path.read_text().splitlines()[0][2:]}\n" in page
    assert "  python -m jllama train quickstart\n" in page
    assert "--optimizer.learning_rate X" in page
    assert "--optimizer.beta1" not in page


def test_the_version(capsys):
    assert cli.main(["--version"]) == 0
    assert (
        f"jllama {jllama.__version__} (jax {importlib.metadata.version('jax')}"
        in capsys.readouterr().out
    )


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
    page = capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == page
    assert "tab completion: pip install 'jllama[completion]'" in page


# Positional arguments and configurations


@pytest.mark.parametrize(
    "argv",
    [
        "model --json --seed 3",
        "--seed 3 model --json",
        "--json model --seed 3",
        "--json true model --seed=3",
        "--seed 3 --json --checkpoint model",
        "--checkpoint=model --seed 3 --json=true",
    ],
)
def test_a_checkpoint_with_and_without_its_name(argv):
    assert parse(SampleOptions, argv.split(), "sample", ("checkpoint",)) == SampleOptions(
        checkpoint="model", seed=3, json=True
    )


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("eval", "--data x.txt"),
        ("chat", ""),
        ("sample", ""),
        ("serve", "--port 0"),
        ("doctor", ""),
        ("verify", ""),
    ],
)
def test_every_command_takes_a_checkpoint_both_ways(
    command, options, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    for named in (["nowhere"], ["--checkpoint", "nowhere"]):
        assert cli.run(command, [*named, *options.split()]) == 1
        assert "error: there is no checkpoint at nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml"])
def test_a_shipped_configuration_is_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parse(TrainConfig, ["--config", str(ROOT / "configs" / "quickstart.yaml")], "train")
    for argv in ([name], ["--config", name], [f"--config={name}"]):
        assert parse(TrainConfig, argv, "train", ("config",)) == expected
    changed = parse(TrainConfig, [name, "--seed", "5"], "train", ("config",))
    assert (changed.seed, changed.model) == (5, expected.model)


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
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "jllama").rglob("__init__.py")
    }
    built = settings["tool"]["setuptools"]
    assert set(built["packages"]) == {*packages, "jllama.configs", "jllama.contestants"}
    assert built["package-dir"] == {
        "jllama.configs": "configs",
        "jllama.contestants": "benchmarks/contestants",
    }
    assert built["package-data"]["jllama.configs"] == ["*.yaml"]
    assert settings["project"]["scripts"] == {"jllama": "jllama.commands.cli:main"}
    assert {path.parent for path in shipped_configs().values()} == {ROOT / "configs"}


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
    code = (
        "import os; os.close(2); import sys; sys.stderr = None; from jllama.commands import cli; "
        "cli.main(['trian']); fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); "
        "os.write(2, b'noise'); print(fd)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "file"], capture_output=True, text=True, cwd=ROOT
    )
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
    code, out, err = shell(
        f"echo the | {chat} >&-"
    )  # the answer does not fit the context of 32, and that is said
    assert (code, out, "error: " in err, "Traceback" in err) == (1, "", True, False)


# Errors


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (MemoryError(), "error: there is not enough memory\n"),
        (
            MemoryError("Unable to allocate 16 GiB"),
            "error: there is not enough memory: Unable to allocate 16 GiB\n",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of\nmemory"),
            "error: the device's memory is full (RESOURCE_EXHAUSTED: ",
        ),
        (KeyboardInterrupt(), "stopped\n"),
        (BrokenPipeError(), ""),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(problem, said, monkeypatch, capsys):
    def fail(argv, prog):
        raise problem

    monkeypatch.setattr("jllama.commands.doctor.main", fail)
    assert cli.run("doctor", []) == 1
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == bool(said)


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("jllama.commands.doctor.main", lambda argv, prog: {}["missing"])
    with pytest.raises(KeyError):
        cli.run("doctor", [])


# Tab completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("jllama s", ["sample", "serve"]),
        ("jllama sample --te", ["--temperature"]),
        ("jllama sample --min", ["--min_p"]),
        ("jllama train quickstart --optimizer.l", ["--optimizer.learning_rate"]),
        ("jllama convert --", ["--source", "--target", "--to"]),
    ],
)
def test_tab_completion(line, expected, tmp_path):
    pytest.importorskip("argcomplete")
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE": "1"}
    out = tmp_path / "out"
    assert (
        shell("jllama", **asked, _ARGCOMPLETE_STDOUT_FILENAME=str(out), _ARGCOMPLETE_IFS="\n")[0]
        == 0
    )
    found = [word.strip() for word in out.read_text().split("\n")]
    assert set(expected) <= set(found)
    if len(expected) == 1:
        assert found == expected


# Memory


def test_a_batch_that_cannot_fit_is_refused_before_it_is_made(small_run, capsys):
    for option, said in (
        ("-n 100000000", "n is 100000000; it must be at least 1 and at most 100,000"),
        (
            "--batch_size 100000000",
            "batch_size is 100000000; it must be at least 1 and at most 100,000",
        ),
        (
            "--speculate 100000000",
            "speculate is 100000000; it must be from 0 to below the model's context, 32",
        ),
    ):
        assert cli.run("sample", [str(small_run.folder), *option.split()]) == 2
        assert said in capsys.readouterr().err


def test_a_large_model_of_many_rows(monkeypatch):
    from jllama.generation.decode_batch import check_batch

    large = jllama.preset("llama3.1-8b")
    check_batch(large, 1)
    monkeypatch.setattr(
        os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 4 * 2**18
    )  # 4 GiB
    check_batch(large, 100)
    with pytest.raises(
        jllama.UsageError, match=r"^100,000 texts at once take at least 1,\d\d\d GiB of memory, and"
    ):
        check_batch(large, 100_000)


# The 64-bit mode


@pytest.mark.slow
def test_sampling_in_the_64_bit_mode_gives_the_same_text(small_run):
    import jax

    def text():
        out = io.StringIO()
        given = [
            str(small_run.folder),
            "--prompt",
            "the ",
            "--max_new_tokens",
            "8",
            "--speculate",
            "2",
            "--json",
        ]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert cli.run("sample", [*given, "--top_k", "9", "--frequency_penalty", "0.5"]) == 0
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
    "--",
    "- 1",
]
JUNK += [
    "{1: 2}",
    "[null]",
    "!!python/object/apply:os.getpid []",
    "{class_path: os.getpid}",
    "a\nb",
    "/dev/null",
    ".",
]
NAMES = {
    TrainConfig: (
        "model model.num_layers model.rope_scaling model.rope_scaling.type training.remat "
        "data.path seed"
    ),
    SampleOptions: (
        "checkpoint n stop stop_ids logit_bias banned_ids echo dtype rope_factor top_p json"
    ),
}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_value_of_any_option_is_taken_or_answered_in_a_sentence(data):
    options = data.draw(st.sampled_from([*NAMES]))
    name = data.draw(
        st.sampled_from(["config", "print_config", "no_such", *NAMES[options].split()])
    )
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
    assert not any(
        word in said for word in ("typing", "Literal", "<class", "Optional", "Parser key")
    )
