"""Rewards: what the shipped ones say, and that one that fails, hangs or dies is a sentence."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import jllama
from jllama.core import JllamaError
from jllama.rl import REWARDS, RewardError, Scorer
from jllama.rl.shipped import last_number

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def scores(spec, answers, row=None, prompt="?"):
    """What a shipped reward gives to each answer."""
    name, _, argument = spec.partition(":")
    return REWARDS[name](argument)(prompt, answers, row or {})


# Shipped rewards


@pytest.mark.parametrize(
    ("spec", "row", "right", "wrong"),
    [
        ("exact", {"answer": "42"}, ["42", " 42\n"], ["", "4", "42.", "42 42"]),
        ("exact", {"answer": 42}, ["42"], ["43"]),
        ("exact:result", {"result": "yes", "answer": "no"}, ["yes"], ["no"]),
        ("number", {"answer": "42"}, ["42", "It is 42.", "6*7 = 42.0", "$42"], ["", "42 or 43"]),
        ("number", {"answer": "1,234.5"}, ["1234.5", "1,234.50"], ["1234", "234.5"]),
        ("number", {"answer": -7}, ["-7", "it is -7 degrees"], ["7"]),
        ("number:n", {"n": 0.5}, [".5", "0.50"], ["5"]),
        ("number", {"answer": -5}, ["\u22125", "x = \u22125.0", "-5"], ["5", "10-5", "10\u22125"]),
        ("number", {"answer": "\u22125"}, ["-5"], ["5"]),
        ("number", {"answer": 3}, ["5-2 = 3", "(3)"], ["5-3", "1*3", "1+3", "3/4", "2^3", "1.3.3"]),
        ("number", {"answer": "2+2 is 4\n#### 1,004"}, ["1004"], ["4"]),
        (r"regex:[a-c]+", {}, ["abc", " a "], ["", "abd", "x abc"]),
        ("regex", {"pattern": "a.b"}, ["a\nb"], ["ab"]),
        ("regex:a:b", {}, ["a:b"], ["a"]),
        ("json", {"schema": SCHEMA}, ['{"name": "x", "age": 3}'], ['{"name": "x"}', "", "{"]),
        ("json", {"schema": {}}, ["null", "[1]"], ["NaN", "[Infinity]", "{'a': 1}", "1 2"]),
        ("expression:answer == row.a", {"a": "x"}, ["x"], ["y", ""]),
        ("expression:answer|length > 2 and prompt in '??'", {}, ["abc"], ["ab"]),
    ],
)
def test_shipped_rewards(spec, row, right, wrong):
    assert scores(spec, right + wrong, row) == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("field", ["1/2", "5-3", "10^3", "1e3", "4 or 5", "five", "", "#### x"])
def test_a_field_that_is_no_number_is_refused(field):
    with pytest.raises(JllamaError, match="where a number should be"):
        scores("number", ["2"], {"answer": field})


def test_length_takes_off_what_is_too_much():
    assert scores("length:4", ["", "1234", "12345", "12345678", "x" * 99]) == [0, 0, -0.25, -1, -1]


@given(number=st.floats(-1e9, 1e9).map(lambda value: round(value, 3)), text=st.text("abc $=\n"))
def test_a_number_is_found_however_it_is_written(number, text):
    for written in (f"{number:.3f}", f"{number:,.3f}"):
        assert last_number(f"12 {text} {written}") == pytest.approx(number, abs=1e-9)
        assert last_number(f"12 {text} {written}.") == pytest.approx(number, abs=1e-9)


@given(answers=st.lists(st.text(max_size=30), max_size=5), expected=st.text(max_size=10))
def test_every_answer_has_a_score(answers, expected):
    row = {"answer": expected + "1", "n": 1, "pattern": "a*", "schema": SCHEMA}
    for spec in ("exact", "number:n", "regex", "json", "expression:answer|length", "length:5"):
        found = scores(spec, answers, row)
        assert len(found) == len(answers)
        assert all(isinstance(score, float) and math.isfinite(score) for score in found)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("regex:(", r"the pattern '\(' is no regular expression"),
        ("expression", "the reward expression needs one"),
        ("expression:answer ==", "expression"),
        ("length:none", "the reward length has 'none'; it needs a number: length:200"),
        ("length:0", "it needs a number"),
        ("json:missing.json", "missing.json"),
        ("exakt", "reward"),
        ("missing.py:score", "there is no file missing.py"),
    ],
)
def test_a_specification_that_does_not_fit_is_one_sentence(spec, message):
    with pytest.raises(JllamaError, match=message) as caught:
        Scorer({spec: 1.0}).score(["?"], [["a"]], [{}], ["line 1"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    ["answer.__class__", "answer.__class__.__mro__", "[].__class__", "cycler.__init__"],
)
def test_expressions_have_no_way_out(expression):
    with pytest.raises(JllamaError, match="was stopped: it reaches for '__"):
        scores(f"expression:{expression}", ["a"])


# The scorer


def score(scorer, answers=("a", "bb"), prompts=1, **row):
    return scorer.score(
        ["?"] * prompts,
        [[*answers]] * prompts,
        [row] * prompts,
        [f"prompts.jsonl line {index + 1}" for index in range(prompts)],
    )


@pytest.fixture
def scorer_of(tmp_path):
    """Make scorers of functions' source, and close them."""
    scorers = []

    def make(source, **options):
        path = tmp_path / "mine.py"
        path.write_text(source)
        scorers.append(Scorer({f"{path}:score": 1.0}, **options))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def lengths_and_bonus(prompt, answers, row):
    return [len(answer) + row["bonus"] for answer in answers]


def test_parts_have_weights_and_functions_are_called_here():
    scorer = Scorer({"mine": 1.0, "exact": 2.0}, functions={"mine": lengths_and_bonus})
    total, parts, _ = score(scorer, bonus=0.5, answer="bb", prompts=3)
    assert parts["mine"].tolist() == [[1.5, 2.5]] * 3
    assert parts["exact"].tolist() == [[0, 1]] * 3
    assert total.tolist() == [[1.5, 4.5]] * 3
    assert jllama.Scorer is Scorer


def lengths_or_none(prompt, answers, row):
    if row["does"] == "raise":
        raise ValueError("no idea")
    return [None if answer == "bb" else len(answer) for answer in answers]


def test_what_has_no_score_is_left_out():
    """An answer by None, a prompt's answers by an error; the others keep theirs."""
    scorer = Scorer({"mine": 1.0, "length:9": 1.0}, functions={"mine": lengths_or_none})
    rows = [{"does": "raise"}, {"does": "score"}]
    scores = scorer.score(["?"] * 2, [["a", "bb"]] * 2, rows, ["line 1", "line 2"])
    np.testing.assert_equal(scores.total, [[np.nan, np.nan], [1, np.nan]])
    (problem,) = scores.problems
    assert "failed for line 1: ValueError: no idea" in problem


FAILURES = {
    "raises": ("raise ValueError('no idea')", r"ValueError: no idea \(.*mine.py, line 4\)"),
    "no number": ("return [float('nan')] * 2", "no finite number"),
    "infinite": ("return [1, float('inf')]", "no finite number"),
    "too few": ("return [1.0]", "returned 1 scores for the 2 answers"),
    "a text": ("return ['x', 'y']", "could not convert"),
    "nothing": ("return None", "TypeError"),
    "a text of digits": ("return '12'", "it returned a str, where a list of a number"),
    "a dictionary": ("return {'a': 1, 'b': 2}", "it returned a dict, where a list of a number"),
    "no scores": ("return [None, None]", "the rewards gave no answer a score"),
    "dies": ("import os; os._exit(3)", r"its process ended \(exit code 3\)"),
    "spins": ("while True: pass", "it took over 0.3 s"),
}


def test_failures_are_sentences_and_the_next_call_works(scorer_of):
    """All by one function, which does what the row says."""
    branches = "".join(
        f"    if row['does'] == {name!r}:\n        {body}\n" for name, (body, _) in FAILURES.items()
    )
    source = f"def score(prompt, answers, row):\n    print('a note')\n{branches}    return [1, 2]"
    scorer = scorer_of(source, limit_s=0.3)
    for name, (_, message) in FAILURES.items():
        with pytest.raises(RewardError, match=message) as caught:
            score(scorer, does=name)
        text = str(caught.value)
        if name != "no scores":
            assert "mine.py:score" in text, name
            assert "prompts.jsonl line 1" in text, name
        assert "\n" not in text, name
        assert score(scorer, does="its work").total.tolist() == [[1, 2]], name


def test_a_pattern_that_takes_forever_ends():
    scorer = Scorer({"regex:(a|aa)+$": 1.0}, limit_s=0.5)
    try:
        assert score(scorer, ["aaa"]).total.tolist() == [[1.0]]
        with pytest.raises(RewardError, match="took over"):
            score(scorer, ["a" * 200 + "b"])
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(:", "SyntaxError"),
        ("def other(): pass", "score"),
        ("import os; os._exit(1)", "its process ended"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_sentence(scorer_of, source, message):
    with pytest.raises(JllamaError, match=message) as caught:
        scorer_of(source)
    assert "\n" not in str(caught.value)


def test_processes_change_no_score(scorer_of, tmp_path):
    """Nor whose scores they are; a module beside the file can be imported."""
    (tmp_path / "beside.py").write_text("ONE = 1")
    source = "import beside\ndef score(prompt, answers, row):\n"
    source += "    return [row['number'] + beside.ONE, 1]"
    scorer = scorer_of(source, num_processes=2)
    rows = [{"number": number} for number in range(8)]
    for _ in range(2):
        found = scorer.score(["?"] * 8, [["a", "b"]] * 8, rows, ["line"] * 8)
        assert found.total.tolist() == [[number + 1.0, 1.0] for number in range(8)]


def test_a_reward_that_forks_shifts_no_score(scorer_of):
    source = "import os\ndef score(prompt, answers, row):\n    os.fork()\n"
    scorer = scorer_of(source + "    return [len(answer) for answer in answers]")
    for lengths in ([1, 2], [3, 4], [5, 6]):
        answers = ["a" * length for length in lengths]
        assert score(scorer, answers).total.tolist() == [lengths]


def test_an_answer_to_no_request_is_refused(scorer_of):
    """It is not taken for that to the next request."""
    source = "import json, os\ndef score(prompt, answers, row):\n"
    source += "    for number in range(3, 99):\n        try:\n"
    source += "            os.write(number, b'[7, [1, 2]]\\n')\n        except OSError:\n"
    source += "            pass\n    return [1, 2]"
    with pytest.raises(RewardError, match="its process gave two answers"):
        score(scorer_of(source))


def test_modules_of_the_current_folder_are_not_run(scorer_of, tmp_path, monkeypatch):
    folder = tmp_path / "current"
    folder.mkdir()
    for name in ("json", "shlex", "typing", "jllama", "re"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    scorer = scorer_of("def score(prompt, answers, row):\n    return [1.0, 0.0]")
    assert score(scorer).total.tolist() == [[1.0, 0.0]]
    assert not (tmp_path / "ran").exists()


def is_alive(process_id):
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_ended(process_ids):
    deadline_s = time.monotonic() + 30
    while any(map(is_alive, process_ids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


HANGS = """
import os, subprocess, sys
def score(prompt, answers, row):
    child = subprocess.Popen(["sleep", "600"])
    with open("ids.partial", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename("ids.partial", "ids")
    while True:
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_reward_started_ends_with_its_limit(scorer_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match="took over"):
        score(scorer_of(HANGS, limit_s=1.0))
    wait_until_ended((tmp_path / "ids").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_rewards_end_with_their_parent(tmp_path, number):
    """Although they hang, and long before their limit."""
    (tmp_path / "mine.py").write_text(HANGS)
    program = "from jllama.rl import Scorer\n"
    program += "Scorer({'mine.py:score': 1.0}).score(['?'], [['a']], [{}], ['line 1'])"
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "ids").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    parent.send_signal(number)
    parent.communicate(timeout=30)
    wait_until_ended((tmp_path / "ids").read_text().split())


def test_rewards_can_be_added(monkeypatch):
    monkeypatch.setitem(REWARDS, "short", lambda text: lambda *_: [1.0, -1.0])
    assert score(Scorer({"short": 1.0})).total.tolist() == [[1.0, -1.0]]
