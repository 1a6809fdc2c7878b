"""``python -m jllama verify``: what it prints, what it writes, and when it fails."""

import functools
import io
import json
import math
import re
import time

import jax
import numpy as np
import pytest
from helpers import run_command
from models import planted
from rich.console import Console

import jllama
from jllama.commands import cli
from jllama.core.config import LlamaConfig
from jllama.functional import UnsupportedAttention
from jllama.lab.checks import Check, matrix, matrix_json, precision_note, random_params, run_checks
from jllama.lab.mutations import MUTATIONS
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.base import BytesTokenizer

THETA = next(mutation for mutation in MUTATIONS if mutation.name == "theta x2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model in Hugging Face's format."""
    config = LlamaConfig(
        vocab_size=BytesTokenizer().vocab_size, num_layers=2, embed_dim=64, num_heads=4
    )
    path = tmp_path_factory.mktemp("random") / "model"
    jllama.save(LanguageModel(config, random_params(config, 0), BytesTokenizer()), path, "hf")
    return path


def result(group, row, column, error, problem=""):
    return Check(group, row, column, lambda: error, error=error, problem=problem)


# The matrix


def test_part_of_the_matrix_as_a_user_runs_it(tmp_path):
    page = tmp_path / "report.html"
    names = "conformance/llama2.c/hf, mutations/llama2.c/eps*"
    done = run_command("verify", "--only", names, "--json", "--html", page)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["passed"]
    assert found["machine"]["jax"] == jax.__version__
    names = [(one["group"], one["row"], one["column"]) for one in found["results"]]
    assert names == [("conformance", "llama2.c", "hf"), ("mutations", "llama2.c", "eps x10")]
    right, wrong = found["results"]
    assert right["error"] < right["tolerance"] == 1e-5
    assert wrong["error"] > 1e-3
    assert "2 of 2 checks done" in done.err
    html = page.read_text()
    assert "PASS" in html
    assert len(re.findall(r"\d\.\de[+-]\d\d</span>", html)) == 2


def test_a_failure_is_exit_code_1_and_says_where(monkeypatch, capsys):
    monkeypatch.setattr("jllama.lab.conformance.compiled_jllama", lambda: planted(THETA))
    assert cli.run("verify", ["--only", "conformance/llama2.c/hf"]) == 1
    out = capsys.readouterr().out
    problem = r"conformance/llama2.c/hf: relative error \d\.\de[+-]\d\d, tolerance 1e-05"
    assert re.search(problem, out)
    assert re.search(r"^FAIL: 0 of 1 checks passed", out, re.M)


MISTAKES = """
--only llama_4 -> no check's name contains 'llama_4'; names are made of
--text x.txt -> --text is about a checkpoint: give its path too
--html no/such/page.html -> cannot write no/such/page.html: No such file or directory
--html /proc/page.html -> /proc/page.html: No such file or directory; choose another
--html /dev/null -> cannot write /dev/null: there is something that is no ordinary file
some/path --only gguf -> --only chooses among the checks of the matrix
--against http://x -> --against is about a checkpoint: give its path too
some/path --precision float16 -> --precision is about another program
some/path --against x --text y -> --text is for the checkpoint alone
some/path --against x --parallel 0 -> parallel is 0; it must be from 1
some/path --against x --timeout_s 0 -> timeout_s is 0.0; it must be pos
some/path --against x --max_tokens 9 -> max_tokens is 9; it must be at
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_what_makes_no_sense_is_refused(line):
    arguments, problem = line.split(" -> ")
    done = run_command("verify", *arguments.split())
    assert done.code == 2
    assert problem in done.err


def test_another_program_as_a_user_runs_it(tmp_path, checkpoint):
    page = tmp_path / "judgment.html"
    arguments = ("--against", "transformers", "--max_tokens", 256, "--json", "--html", page)
    done = run_command("verify", checkpoint, *arguments)
    assert done.code == 0, done.err
    judgment = json.loads(done.out)
    assert judgment["passed"]
    assert judgment["precision"] == "float32"
    assert judgment["groups"][0][0] == "text"
    assert judgment["verdict"].startswith("PASS: transformers computes this checkpoint")
    assert "computing the oracle" in done.err
    assert "By prompt and position" in page.read_text()


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/v1/models gave no answer within 120 s: "),
        ("nonsense", "nonsense/v1/models is no address of a server: it must begin with http://"),
        ("llama.cpp", "llama.cpp opens a GGUF file, which"),
    ],
)
def test_a_program_that_is_not_there_is_one_sentence(checkpoint, against, message, capsys):
    assert cli.run("verify", [str(checkpoint), "--against", against]) in (1, 2)
    *_, problem = capsys.readouterr().err.splitlines()
    assert message in problem


def test_a_check_that_raises_has_failed_and_the_others_go_on():
    def broken():
        raise ValueError("shapes differ")

    def unreadable():
        raise jllama.system.errors.JllamaError("the file is cut off")

    def refused():
        raise UnsupportedAttention("the attention implementation 'mine' cannot serve a mask")

    checks = [
        Check("conformance", "a", "x", broken),
        Check("conformance", "a", "y", unreadable),
        Check("conformance", "b", "x", lambda: 1e-6),
        Check("mutations", "b", "x", lambda: math.nan),
        Check("attention", "masked", "mine", refused),
    ]
    results = list(run_checks(checks))
    problems = [one.problem for one in results]
    assert problems == ["ValueError: shapes differ", "the file is cut off", "", "", ""]
    assert [one.passed for one in results] == [False, False, True, False, True]
    refusals = [one.refusal for one in results if one.refusal]
    assert refusals == ["the attention implementation 'mine' cannot serve a mask"]
    assert matrix_json(results)["results"][0]["error"] is None
    *_, first, _, _, verdict = map(str, matrix(results, 80, 1.0))
    assert first == "conformance/a/x: ValueError: shapes differ"
    assert verdict.startswith("FAIL: 1 of 4 checks passed, 1 refused by a format")
    *_, table, _, verdict = matrix(results[-1:], 80, 1.0)
    assert [cell.plain for cell in table.columns[1].cells] == ["refused"]
    assert str(verdict).startswith("PASS: 0 of 0 checks passed, 1 refused by a format")


def printed(results, width):
    console = Console(width=width, record=True, file=io.StringIO())
    for line in matrix(results, width, 1.0):
        console.print(line)
    return console


@pytest.mark.parametrize("width", [40, 80, 140])
def test_tables_fit_and_hold_every_cell(width):
    results = [
        result("conformance", f"row {r}", f"column {c}", 1e-6 * (r + 1))
        for r in range(3)
        for c in range(12)
    ]
    results.append(result("mutations", "row 0", "theta", 0.5))
    results.append(result("attention", "remat", "loss", 1e-7))
    shown = printed(results, width).export_text()
    for row, extra in ((1, 0), (2, 0), (3, 1)):  # the largest is in the last line, too
        assert shown.count(f"{row}.0e-06") == 12 + extra
    assert "50,000x" in shown
    assert max(map(len, shown.splitlines())) <= width


def test_the_page_shows_what_failed_in_red_and_escapes():
    results = [
        result("conformance", "<b>", "x", 1e-2),
        result("conformance", "b", "x", math.nan, "<cut> off"),
    ]
    page = printed(results, 100).export_html(inline_styles=True)
    red = re.findall(r"<span style=[^>]*#800000[^>]*>[^<]*(?:1.0e-02|failed)</span>", page)
    assert len(red) == 2
    assert "<b>" not in page
    assert "&lt;cut&gt; off" in page


# A checkpoint


def test_a_random_model_computes_rightly_and_its_perplexity_is_told(checkpoint, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.run("verify", [str(checkpoint), "--html", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "layer 2 of 2" in err
    assert re.search(r"^perplexity       \d", out, re.M)
    assert re.search(r"^bits per byte    \d+\.\d\d$", out, re.M)
    assert re.search(r"^PASS: ", out, re.M)
    assert "bits per byte" in page.read_text()


def test_json_of_a_checkpoint(checkpoint, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("abc " * 20)
    assert cli.run("verify", [str(checkpoint), "--json", "--text", str(tmp_path / "text.txt")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 81
    assert len(found["layer_errors"]) == 2
    assert max(found["layer_errors"]) < found["tolerance"]
    assert found["first_divergent_layer"] is None


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", None])
def test_a_text_that_is_none(checkpoint, content, tmp_path, capsys):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert cli.run("verify", [str(checkpoint), "--text", str(path)]) in (1, 2)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_checkpoint_with_nan_is_reported_and_not_a_traceback(checkpoint, tmp_path, capsys):
    model = jllama.load(checkpoint, layout="training")
    params = jax.tree.map(np.array, model.params)
    params["layers"]["wq"][1, 0, 0, 0] = np.nan
    jllama.save(LanguageModel(model.config, params, model.tokenizer), tmp_path / "nan", "hf")
    assert cli.run("verify", [str(tmp_path / "nan"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert any("layers/1/wq" in problem for problem in found["problems"])


def test_what_an_accelerator_multiplies_in_is_said():
    assert precision_note("cpu") == ""
    assert "TF32" in precision_note("gpu")
    assert "bfloat16, with 7 bits" in precision_note("tpu")


def test_checks_side_by_side_come_in_their_order():
    def compute(number):
        time.sleep(0.02 * (4 - number))
        return float(number)

    several = [
        Check("attention", "row", str(number), functools.partial(compute, number))
        for number in range(4)
    ]
    assert [check.error for check in run_checks(several, 4)] == [0.0, 1.0, 2.0, 3.0]
