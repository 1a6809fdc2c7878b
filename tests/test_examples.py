"""The examples run; the notebooks show what they were committed with."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import helpers
import matplotlib.pyplot as plt
import pytest
from notebook import code_cells, run_cells

import jllama

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TEXT = str(ROOT / "jllama" / "core" / "*.py")  # less than Python's standard library


def text_of(output):
    return "".join(output.get("text") or output["data"]["text/plain"])


def committed(path):
    """What the cells of a notebook show, as the file has it."""
    cells = code_cells(json.loads(path.read_text()))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    return ["".join(map(text_of, cell["outputs"])) for cell in cells]


CHECK_YOUR_OWN = EXAMPLES / "check_your_own.ipynb"


def test_a_notebook_shows_what_it_was_committed_with():
    assert ["".join(shown) for shown in run_cells(CHECK_YOUR_OWN)] == committed(CHECK_YOUR_OWN)


def test_each_component_is_wrong_first_and_right_in_the_end():
    verdicts = {}
    for value in committed(CHECK_YOUR_OWN):
        component, _, said = value.partition(": ")
        verdicts.setdefault(component, []).append(said)
    for component in ("rms_norm", "rope", "attention"):
        *wrong, last = verdicts[component]
        assert wrong
        assert all("\nIt behaves like this known mistake: " in said for said in wrong)
        assert last == "equal to the oracle (tolerance 1e-04)."


def test_a_llama_from_scratch():
    """Its numbers depend on the machine, so that it is committed without outputs."""
    path = EXAMPLES / "llama_from_scratch.ipynb"
    for cell in code_cells(json.loads(path.read_text())):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    plt.switch_backend("agg")
    try:
        cells = list(run_cells(path, TEXT=TEXT, STEPS=20, SEQ_LEN=64))
        figures = [plt.figure(number) for number in plt.get_fignums()]
        assert [len(figure.axes) for figure in figures] == [1, 12]
    finally:
        plt.close("all")
    verdicts = [value.partition(": ") for _, value in cells if "oracle" in value]
    assert [name for name, *_ in verdicts] == [
        "rms_norm",
        "rope",
        "attention",
        "swiglu",
        "block",
        "model",
    ]
    assert all(verdict.startswith("equal to the oracle") for *_, verdict in verdicts)
    printed = "".join(shown for shown, _ in cells)
    first, *_, last = map(float, re.findall(r"step \d+: loss ([\d.]+)", printed))
    assert last < first - 0.3
    assert "all heads are equal to jllama's, and causal" in printed


# Scripts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that the scripts of this file run in, one after the other."""
    return tmp_path_factory.mktemp("examples")


def run_script(name, folder, monkeypatch, capsys, *options):
    """Run a script in this process, and return what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *options])
    with helpers.quick_runs():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_scripts_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert {"train.py", "lora.py", "dpo.py", "grpo.py", "mesh.py"} <= set(lengths)
    assert max(lengths.values()) <= 130


def test_train_and_then_lora(folder, monkeypatch, capsys):
    sizes = ["--path", TEXT, "--steps", "20", "--eval_every", "10", "--seq_len", "64"]
    printed = run_script("train.py", folder, monkeypatch, capsys, *sizes)
    first, last = map(float, re.findall(r"validation loss ([\d.]+)", printed))
    assert last < first
    assert "A sample:\ndef get" in printed
    base = jllama.load(folder / "runs" / "example_train")

    sizes = ["--epochs", "0.3", "--rank", "4", "--question", "Where do you live?"]
    printed = run_script("lora.py", folder, monkeypatch, capsys, *sizes)
    assert re.search(r"\nWhere do you live\?\n  before: .*\n  after:  .*\n", printed)
    adapter = folder / "runs" / "example_lora_peft"
    tuned = jllama.load(folder / "runs" / "example_train", adapter=adapter)
    assert abs(tuned([[1, 2, 3]]) - base([[1, 2, 3]])).max() > 1e-3


def test_dpo(folder, monkeypatch, capsys):
    sizes = ["--first_steps", "30", "--steps", "4", "--learning_rate", "1e-3"]
    printed = run_script("dpo.py", folder, monkeypatch, capsys, *sizes)
    margins = [float(margin) for margin in re.findall(r"at step \d+: (.*)", printed)]
    assert len(margins) == 3
    assert margins[0] == 0.0
    assert margins[-1] > 0.01
    assert printed.count(" even? ") == 16  # before and after


def test_grpo_and_the_loop_inside(folder, monkeypatch, capsys):
    sizes = ["--base_steps", "20", "--steps", "2", "--prompts", "2", "--group_size", "4"]
    printed = run_script("grpo.py", folder, monkeypatch, capsys, *sizes)
    assert re.search(r"held-out prompts reward \d\.\d{3}, answer tokens .*\n$", printed)
    score = runpy.run_path(str(EXAMPLES / "grpo.py"))["score"]
    assert score("1+2=", ["<3>", "<13>", "(3)"], {"answer": "<3>"}) == [1.0, 0.2, 0.0]

    # The loop inside, with its constants made small.
    source = (EXAMPLES / "own_rewards.py").read_text()
    constants = "NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 8, 8, 60\n"
    assert constants in source
    script = folder / "own_rewards.py"
    script.write_text(source.replace(constants, constants.replace("8, 8, 60", "2, 4, 10")))
    data = folder / "runs" / "example_grpo_data"
    output = folder / "my_model"
    paths = [script, data / "base", data / "prompts.jsonl", output]
    monkeypatch.setattr(sys, "argv", [str(path) for path in paths])
    monkeypatch.setitem(jllama.OBJECTIVES, "reinforce", None)  # removed at the end
    runpy.run_path(str(script), run_name="__main__")
    line = capsys.readouterr().out
    assert re.fullmatch(r"step 10: reward \d\.\d{3}, mismatch .*\n", line)
    assert float(line.split()[-1]) < 1e-4
    assert jllama.load(output).config.max_seq_len == 32


def test_mesh():
    """The devices are set before JAX is used, so in a process of its own."""
    command = [sys.executable, EXAMPLES / "mesh.py", "--steps", "2", "--seq_len", "32"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "mesh: data 1, fsdp 4, expert 1, sequence 1, tensor 2" in run.stdout
    assert re.search(r"layers/wq +\(2, 128, 8, 16\) +\(2, 32, 4, 16\)", run.stdout)
    assert run.stdout.endswith("The losses are equal.\n")
