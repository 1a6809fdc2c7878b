"""Receipts of runs, steps computed again, and where two runs or checkpoints begin to differ."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from models import FILE

import jllama
from jllama.commands import audit, bisect
from jllama.commands.bisect import print_bisection
from jllama.commands.train import read_options
from jllama.core import JllamaError, UsageError
from jllama.formats.receipt import RECEIPT, describe_weights, read_receipt
from jllama.formats.run_checkpoints import RunCheckpoints
from jllama.lab.bisect import bisect as find_difference
from jllama.lab.bisect import compare_values
from jllama.lab.checks import random_params
from jllama.tokenizers.base import BytesTokenizer
from jllama.training import loggers


def run_json(capsys, command, *arguments):
    code = command.main([*map(str, arguments), "--json"], "jllama")
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] == (code == 0)
    return result


def change_losses(run, change):
    """Rewrite the lines of steps in ``metrics.jsonl`` by a function of a line."""
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if "tokens_per_s" in line:
            change(line)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def change_receipt(copied):
    """Rewrite the receipt of the copied run by a function of it."""

    def rewrite(change):
        receipt = json.loads((copied / RECEIPT).read_text())
        change(receipt)
        (copied / RECEIPT).write_text(json.dumps(receipt))

    return rewrite


def test_a_run_writes_what_it_computed(small_run):
    receipt = read_receipt(small_run.folder)
    assert receipt["config"]["training"]["steps"] == 20
    assert set(receipt["weights"]) == {"5", "10", "15", "20"}
    assert len(receipt["weights"]["20"]) == 12
    session = receipt["sessions"]["0"]
    assert session["versions"]["jax"] == jax.__version__
    assert session["code"]["version"] == jllama.__version__
    saved = jllama.load(small_run.folder, layout="training")
    step = str(saved.step)
    assert describe_weights(saved.params) == receipt["weights"][step]


def test_a_fingerprint_shows_every_bit():
    values = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    before = describe_weights({"w": jnp.asarray(values)})
    for bit in range(32):
        changed = values.copy()
        changed.view(np.uint32)[3:5, 2] ^= np.uint32(1 << bit)  # of two elements
        assert describe_weights({"w": jnp.asarray(changed)}) != before
    assert describe_weights({"w": jnp.asarray(values[::-1])}) != before


@pytest.mark.slow
def test_the_fingerprint_of_weights_on_two_devices_is_that_of_the_file(workshop, tmp_path):
    run = tmp_path / "run"
    options = ("--mesh.fsdp", 2, "--training.steps", 2, "--training.eval_every", 2)
    done = workshop.finish(workshop.train(run, *options, devices=2))
    assert done.code == 0, done.err
    saved = jllama.load(run, layout="training")
    assert describe_weights(saved.params) == read_receipt(run)["weights"]["2"]


def test_steps_are_computed_again_in_the_same_bits(copied, capsys):
    before = sorted(path for path in copied.rglob("*") if path.is_file())
    result = run_json(capsys, audit, copied, "--steps", "16:19")
    names = [one["name"] for one in result["compared"] if one["part"] == "training"]
    assert len([name for name in names if name.startswith("step 15/")]) == 12  # what is read
    figures = [f"step {step}/{name}" for step in (17, 18, 19) for name in ("loss", "grad_norm")]
    assert names[12:] == figures
    different = [one["name"] for one in result["compared"] if one["error"]]
    assert set(different) <= {"flags.XLA_FLAGS"}  # of this test's process
    assert result["verdict"].startswith("PASS: the same in every bit")
    assert sorted(path for path in copied.rglob("*") if path.is_file()) == before
    # The beginning, which has no checkpoint any more.
    assert audit.main([str(copied), "--steps", "0:5"], "jllama") == 0
    assert "training: 22 of 22 places agree" in capsys.readouterr().out


def test_what_a_run_did_not_compute_is_found(copied, change_receipt, capsys):
    def change_step(line):
        if line["step"] == 18:
            line["loss"] *= 0.99

    def change_weights(receipt):
        receipt["weights"]["15"]["embed"] = "0" * 16
        receipt["sessions"]["0"]["versions"]["jax"] = "0.0"

    change_losses(copied, change_step)
    result = run_json(capsys, audit, copied, "--steps", "15:20")
    assert "they differ first in training, step 18/loss" in result["verdict"]
    change_receipt(change_weights)
    result = run_json(capsys, audit, copied, "--steps", "15:17")
    assert "first in training, step 15/embed" in result["verdict"]
    assert "their sessions differ in versions.jax" in result["verdict"]


def test_weights_of_another_run_are_found(copied, capsys):
    """Also those of checkpoints that no step is computed from."""
    model = jllama.load(copied, layout="training", step=20)
    changed = jax.tree.map(lambda leaf: leaf * 2, model.params)
    shutil.rmtree(copied / "checkpoints" / "20")
    other = RunCheckpoints(copied / "checkpoints", keep_last=9)
    other.save(20, changed, None, {}, None)
    other.wait()
    result = run_json(capsys, audit, copied, "--steps", "15:19")
    verdict = "checkpoints that are not what receipt.json says, step 20/"
    assert f"FAIL: they differ first in {verdict}" in result["verdict"]


def test_other_bits_are_measured(copied, change_receipt, capsys):
    """As steps on another device have them."""
    model = jllama.load(copied, layout="training", step=20)
    changed = jax.tree.map(lambda leaf: leaf * (1 + 1e-6), model.params)
    shutil.rmtree(copied / "checkpoints" / "20")
    other = RunCheckpoints(copied / "checkpoints", keep_last=9)
    other.save(20, changed, None, {}, None)
    other.wait()
    change_receipt(lambda receipt: receipt["weights"].update({"20": describe_weights(changed)}))
    result = run_json(capsys, audit, copied, "--steps", "16:20")
    assert result["verdict"].startswith("PASS: no difference in "), result["verdict"]
    errors = [one["error"] for one in result["compared"] if one["name"].startswith("step 20/")]
    assert 1e-7 < max(errors) < 1e-5


def damages(content):
    """The bytes of a file with a bit flipped somewhere, cut, and zeros."""
    for place in (0, len(content) // 3, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 4
        yield bytes(changed)
    yield content[: len(content) // 2]
    yield bytes(len(content))


def params_or_none(run, layout):
    """The parameters that are loaded; None if an error of one sentence refuses them."""
    try:
        return jllama.load(run, layout=layout).params
    except JllamaError as error:
        return None if "\n" not in str(error) else error


@pytest.mark.slow
def test_damaged_weights_are_never_loaded(copied):
    """Each file of the parameters, by both ways to read them; harmless damage changes no weight."""
    expected = {layout: jllama.load(copied, layout=layout) for layout in ("training", "decode")}
    folder = copied / "checkpoints" / str(expected["training"].step) / "params"
    num_refused = 0
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]:
        content = path.read_bytes()
        for damaged in damages(content):
            path.write_bytes(damaged)
            for layout, model in expected.items():
                actual = params_or_none(copied, layout)
                num_refused += actual is None
                if actual is not None:
                    assert_same_bits(actual, model.params)
        path.write_bytes(content)
    assert num_refused > 10


def test_neither_a_model_nor_a_run_begins_from_damaged_weights(copied):
    folder = copied / "checkpoints" / "20" / "params" / "ocdbt.process_0" / "d"
    for path in folder.iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    for layout in ("training", "decode"):
        with pytest.raises(JllamaError, match="are not those that were saved"):
            jllama.load(copied, layout=layout, step=20)
    config = read_options(["--resume", str(copied), "--training.steps", "25"], "jllama")
    config = dataclasses.replace(config, resume_with_changes=True)
    with pytest.raises(JllamaError, match=r"are not those that were saved .* differ from receipt"):
        jllama.train(config)


def test_an_audit_copies_only_ordinary_files_and_starts_no_logger(copied, monkeypatch):
    (copied / "extra.bin").symlink_to("/dev/zero")
    config = copied / "config.yaml"
    text = config.read_text()
    assert "logger: ''" in text
    config.write_text(text.replace("logger: ''", "logger: tensorboard"))
    copies = []
    copy = shutil.copy

    def noted(source, target):
        copies.append(source.name)
        copy(source, target)

    monkeypatch.setattr(shutil, "copy", noted)
    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", lambda *_: pytest.fail("it is started"))
    assert audit.main([str(copied), "--steps", "15:17"], "jllama") == 0
    assert "config.yaml" in copies
    assert "extra.bin" not in copies


RECEIPTS = {
    "weights": [5, {"x": 5}, {"x": {}}, {"9" * 5000: {}}, []],
    "sessions": [[], {"1": 5}, {"one": {}}],
    "config": [None, "text"],
    "data": [None, 5],
}


@pytest.mark.parametrize("name", RECEIPTS)
def test_a_receipt_that_is_none_is_one_sentence(copied, change_receipt, name):
    problem = r"receipt\.json is not the receipt of a run"
    for value in RECEIPTS[name]:
        change_receipt(lambda receipt, value=value: receipt.update({name: value}))
        with pytest.raises(JllamaError, match=problem):
            bisect.main([str(copied), str(copied)], "jllama")
    with pytest.raises(JllamaError, match=problem):
        audit.main([str(copied), "--steps", "15:16"], "jllama")


@pytest.mark.parametrize("name", [RECEIPT, "metrics.jsonl"])
def test_without_a_receipt_runs_are_not_the_same(small_run, copied, capsys, name):
    (copied / name).unlink()
    result = run_json(capsys, bisect, small_run.folder, copied)
    assert f"differ first in files that are there, {name}: True and False" in result["verdict"]


def test_odd_lines_are_passed_over(small_run, copied):
    lines = [b"[" * 100_000, "x".encode("utf-16"), b'{"step": ' + b"9" * 5000]
    lines += [b'{"step": 3, "tokens_per_s": 1}', b'{"tokens_per_s": 1}']
    lines.append(b'{"step": "x", "tokens_per_s": 1, "loss": 1}')
    with (copied / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b"\n".join([*lines, b""]))
    assert bisect.main([str(small_run.folder), str(copied)], "jllama") == 0


def test_a_terminal_gets_no_control_characters(small_run, copied, capsys):
    def change(line):
        if line["step"] == 3:
            line["loss"] = "\x1b[2J"

    change_losses(copied, change)
    assert bisect.main([str(small_run.folder), str(copied)], "jllama") == 1
    captured = capsys.readouterr()
    assert "\x1b[2J" not in captured.out + captured.err


def test_changed_data_are_named(small_run, copied, change_receipt, capsys):
    def change(receipt):
        receipt["data"] = "0" * 64
        receipt["weights"]["10"]["embed"] = "0" * 16

    change_receipt(change)
    result = run_json(capsys, bisect, small_run.folder, copied)
    assert "their sessions differ in data fingerprint" in result["verdict"]


def test_steps_of_which_nothing_is_known_do_not_pass(copied):
    metrics = copied / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if "tokens_per_s" not in line]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(JllamaError, match="has no figures of steps 2 to 3: choose a range"):
        audit.main([str(copied), "--steps", "1:3"], "jllama")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "it must be FIRST:LAST"),
        (["--steps", "5:5"], "expected two steps"),
        (["--steps", "15:25"], "which is saved up to step 20"),
    ],
)
def test_a_wrong_range_is_one_sentence(small_run, arguments, message):
    with pytest.raises(UsageError, match=message):
        audit.main([str(small_run.folder), *arguments], "jllama")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="is not the folder of a run"):
        audit.main([str(tmp_path), "--steps", "1:2"], "jllama")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model in two formats, and as a function changes it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    params = random_params(FILE, 0)
    tokenizer = BytesTokenizer()
    jllama.save(jllama.LanguageModel(FILE, params, tokenizer), folder / "a", "hf")
    jllama.save(jllama.LanguageModel(FILE, params, tokenizer), folder / "b.gguf", "gguf")

    def changed(config, change=lambda layers: layers):
        layers = {name: leaf.copy() for name, leaf in params["layers"].items()}
        change(layers)
        model = jllama.LanguageModel(config, params | {"layers": layers}, tokenizer)
        jllama.save(model, folder / "c", "hf", overwrite=True)
        return folder / "c"

    return folder / "a", folder / "b.gguf", changed


def test_formats_of_one_model_agree(checkpoints, capsys):
    a, b, _ = checkpoints
    assert bisect.main([str(a), str(b)], "jllama") == 0
    assert "PASS: the same in every bit" in capsys.readouterr().out


def test_the_first_different_tensor_and_operation_are_found(checkpoints, capsys):
    a, _, changed = checkpoints

    def change(layers):
        layers["wk"][1] *= 1.01

    result = find_difference(a, changed(FILE, change))
    assert result.first.name == "layers/1/wk"
    assert result.first.error == pytest.approx(0.01, rel=1e-3)
    over = [one.name for one in result.compared if one.error > 1e-5]
    assert over == ["layers/1/wk", "layers/1/attention"]
    assert print_bisection(result, as_json=False) == 1
    assert "wk: relative difference 1.0e-02  <- first" in capsys.readouterr().out
    # A configuration with the same weights: each layer alone differs in its attention.
    result = find_difference(a, changed(dataclasses.replace(FILE, rope_theta=5e5)))
    over = [one.name for one in result.compared if one.error > 1e-5]
    assert over == ["rope_theta", "layers/0/attention", "layers/1/attention"]


def test_a_number_that_is_none_is_a_difference(checkpoints, capsys):
    a, _, changed = checkpoints

    def change(layers):
        layers["w_up"][0, 3, 2] = np.nan

    result = run_json(capsys, bisect, a, changed(FILE, change))
    assert "they differ first in weights, layers/0/w_up" in result["verdict"]
    assert any(one["error"] is None for one in result["compared"])  # JSON has no NaN


def test_two_runs_differ_first_at_a_step(small_run, copied, change_receipt, capsys):
    assert run_json(capsys, bisect, small_run.folder, copied)["passed"]

    def change_steps(line):
        if line["step"] >= 7:
            line["loss"] += 1e-3

    def change(receipt):
        receipt["config"]["seed"] = 5
        receipt["weights"]["10"]["layers/wq"] = "0" * 16

    change_losses(copied, change_steps)
    change_receipt(change)
    result = run_json(capsys, bisect, small_run.folder, copied)
    assert "they differ first in training, step 7/loss" in result["verdict"]
    assert "their sessions differ in seed" in result["verdict"]
    over = [one["name"] for one in result["compared"] if one["error"] == 1]
    assert "step 10/layers/wq" in over


def test_a_figure_that_was_0_differs_by_what_it_is_now():
    (difference,) = compare_values("step", {"grad_norm": 0.0}, {"grad_norm": 0.5})
    assert difference.error == 0.5
