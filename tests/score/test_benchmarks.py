"""Benchmarks against an independent statement of CORE, and what they do with programs and bad data.

lm-eval judges the others, in ``test_benchmarks_of_lm_eval.py``.
"""

import contextlib
import dataclasses
import http.server
import itertools
import json
import random
import tempfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
from helpers import trained_smollm
from hypothesis import given
from hypothesis import strategies as st
from models import SMALL

from jllama.core import JllamaError, UsageError
from jllama.generation.text import Completion
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.language_model import LanguageModel
from jllama.score import benchmarks
from jllama.score.benchmarks import centered, check_benchmarks, evaluate, passes
from jllama.score.scoring import TokenScores
from jllama.system.places import as_place
from jllama.tokenizers.base import BytesTokenizer

CONFIG = dataclasses.replace(SMALL, vocab_size=310, max_seq_len=400)
PARAMS = random_params(CONFIG, 0)
TOKENIZER = trained_smollm(["the cat sat on the mat, and the dog did not sit on it"] * 3, 300)
MODEL = LanguageModel(CONFIG, jax.tree.map(jnp.asarray, PARAMS), TOKENIZER)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# CORE

WORDS = ["the", "cat", "dog", "mat", "sat", "did", "not", "sit", "and", "on", "it"]


def sentence(rng, num_words=4):
    return " ".join(rng.choices(WORDS, k=num_words))


def make_bundle(folder):
    """Two tasks of each type; texts share beginnings and ends, and have outer spaces."""
    rng = random.Random(5)
    tasks = []
    for kind, shots, delimiter in itertools.product(
        ("multiple_choice", "schema", "language_modeling"), (0, 3), (None, "\nAnswer: ")
    ):
        if (shots == 0) == (delimiter is None):
            continue
        label = f"{kind}_{shots}"
        rows = []
        for number in range(11):
            options = [f"{sentence(rng, 2)} {sentence(rng, rng.randrange(1, 5))}" for _ in range(3)]
            rows.append(
                {
                    "multiple_choice": {"query": sentence(rng), "choices": options},
                    "schema": {"context_options": options, "continuation": sentence(rng, 3)},
                    "language_modeling": {
                        "context": f" {sentence(rng)} \n",
                        "continuation": rng.choice(WORDS),
                    },
                }[kind]
                | ({} if kind == "language_modeling" else {"gold": number % 3})
            )
        write_rows(folder / "eval_data" / f"sub/{label}.jsonl", rows)
        task = {"label": label, "dataset_uri": f"sub/{label}.jsonl", "icl_task_type": kind}
        task["num_fewshot"] = [shots]
        if delimiter is not None:
            task["continuation_delimiter"] = delimiter
        tasks.append(task)
    (folder / "core.yaml").write_text(json.dumps({"icl_tasks": tasks}))  # JSON is YAML
    lines = [f"{task['label']},x,{10 * number}" for number, task in enumerate(tasks)]
    (folder / "eval_meta_data.csv").write_text("\n".join(["Eval Task,y,Random baseline", *lines]))
    return tasks


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core") / "eval_bundle"
    make_bundle(folder)
    return folder


def random_scores(row):
    """A log-probability of each token but the first, and whether it is likeliest, by the row."""
    rng = np.random.default_rng(zlib.crc32(np.asarray(row, np.int32).tobytes()))
    log_probs = -rng.exponential(size=len(row) - 1).astype(np.float32)
    return log_probs, rng.random(len(row) - 1) < 0.9


@pytest.fixture
def scored(monkeypatch):
    """Random scores in place of the model's; the rows and counts that were asked for."""
    rows = []

    def score(model, batch, counts, *, batch_size, on_progress):
        rows.extend(([*map(int, row)], count) for row, count in zip(batch, counts, strict=True))
        return [
            TokenScores(*(values[len(values) - count :] for values in random_scores(row)))
            for row, count in zip(batch, counts, strict=True)
        ]

    monkeypatch.setattr(benchmarks, "token_log_probs", score)
    return rows


def expected_core(folder, scores_of, limit=None, context=CONFIG.max_seq_len):
    """nanochat's definition on arrays of losses: results, and the ends of rows that are scored."""
    results, scored = {}, []
    chances = [
        line.split(",") for line in (folder / "eval_meta_data.csv").read_text().split("\n")[1:]
    ]
    chances = {label: float(percent) for label, _, percent in chances}
    for task in json.loads((folder / "core.yaml").read_text())["icl_tasks"]:
        join = task.get("continuation_delimiter", " ").join
        file = folder / "eval_data" / task["dataset_uri"]
        questions = [*map(json.loads, file.read_text().splitlines())]
        random.Random(1337).shuffle(questions)
        questions = questions[:limit]
        num_right = 0
        for place, question in enumerate(questions):
            others = [other for number, other in enumerate(questions) if number != place]
            shown = random.Random(1234 + place).sample(others, task["num_fewshot"][0])
            text = ""
            for row in shown:
                if "query" in row:
                    text += join([row["query"], row["choices"][row["gold"]]])
                elif "context_options" in row:
                    text += join([row["context_options"][row["gold"]], row["continuation"]])
                else:
                    text += join([row["context"].strip(), row["continuation"]])
                text += "\n\n"
            if "query" in question:
                texts = [text + join([question["query"], end]) for end in question["choices"]]
            elif "context_options" in question:
                end = question["continuation"]
                texts = [text + join([start, end]) for start in question["context_options"]]
            else:
                start = text + join([question["context"].strip(), ""])
                texts = [start.strip(), start + question["continuation"]]
            rows = [np.array([TOKENIZER.bos_id, *TOKENIZER.encode(text)]) for text in texts]
            shortest = min(map(len, rows))
            if "context_options" in question:
                ends = np.stack([row[-shortest:] for row in rows])
                is_same = (ends == ends[0]).all(0)[::-1]
                counts = [int(np.cumprod(is_same).sum())] * len(rows)
            else:
                starts = np.stack([row[:shortest] for row in rows])
                num_same = int(np.cumprod((starts == starts[0]).all(0)).sum())
                counts = [len(row) - num_same for row in rows]
            if "context" in question:
                assert num_same == len(rows[0])
                rows, counts = rows[1:], counts[1:]
            rows = [row[-context:] for row in rows]
            scored += [([*map(int, row)], count) for row, count in zip(rows, counts, strict=True)]
            losses, greedy = [], []
            for row, count in zip(rows, counts, strict=True):
                log_probs, is_likeliest = scores_of(row)
                losses.append(-np.float64(log_probs[-count:]).mean())
                greedy.append(is_likeliest[-count:].all())
            if "context" in question:
                num_right += greedy[0]
            else:
                num_right += np.argmin(losses) == question["gold"]
        accuracy = num_right / len(questions)
        chance = 0.01 * chances[task["label"]]
        results[task["label"]] = (accuracy, (accuracy - chance) / (1 - chance))
    return results, scored


def assert_core(results, expected):
    assert results["core"]["too_long"] == 0
    assert results.keys() == {"core", *(f"core/{label}" for label in expected)}
    for label, (accuracy, scaled) in expected.items():
        numbers = results[f"core/{label}"]
        assert numbers["acc"] == pytest.approx(accuracy, abs=1e-12)
        assert numbers["centered"] == pytest.approx(scaled, abs=1e-12)
    mean = np.mean([scaled for _, scaled in expected.values()])
    assert results["core"]["centered"] == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize(("limit", "context"), [(0, 400), (7, 400), (0, 40)])
def test_core_is_as_nanochat_defines_it(bundle, scored, limit, context):
    """Every row, the tokens of it that count, and the results."""
    config = dataclasses.replace(CONFIG, max_seq_len=context)
    model = dataclasses.replace(MODEL, config=config)
    results = evaluate(model, "core", str(bundle), limit=limit)
    expected, rows = expected_core(bundle, random_scores, limit or None, context)
    assert scored == rows
    assert_core(results, expected)
    assert len({accuracy for accuracy, _ in expected.values()}) > 1
    assert results["core/schema_3"]["questions"] == (limit or 11)
    if context == 40:
        assert max(len(row) for row, _ in rows) == 40


def test_questions_of_core_that_do_not_fit_are_wrong_and_counted(tmp_path, scored):
    make_bundle(tmp_path)
    expected = evaluate(MODEL, "core", str(tmp_path))
    data = tmp_path / "eval_data" / "sub" / "multiple_choice_0.jsonl"
    rows = [*map(json.loads, data.read_text().splitlines())]
    for row in rows:
        row["choices"][(row["gold"] + 1) % 3] = "x" * 400  # a wrong one
    write_rows(data, rows)
    actual = evaluate(MODEL, "core", str(tmp_path))
    assert actual["core"]["too_long"] == 11
    assert expected["core/multiple_choice_0"]["acc"] > 0
    assert actual["core/multiple_choice_0"]["acc"] == 0
    assert actual["core/multiple_choice_0"]["questions"] == 11
    assert actual["core/schema_3"] == expected["core/schema_3"]
    model = dataclasses.replace(MODEL, config=dataclasses.replace(CONFIG, max_seq_len=1))
    actual = evaluate(model, "core", str(tmp_path))
    assert actual["core"]["too_long"] > 11
    assert actual["core/language_modeling_3"]["acc"] == 0


def test_core_on_a_model_is_that_of_the_oracle(bundle):
    def scores_of(row):
        logits = oracle.forward(PARAMS, row[None, :-1], CONFIG)[0]
        log_probs = np.log(oracle.softmax(logits))
        return log_probs[np.arange(len(row) - 1), row[1:]], logits.argmax(-1) == row[1:]

    assert_core(
        evaluate(MODEL, "core", str(bundle), limit=4), expected_core(bundle, scores_of, 4)[0]
    )


def test_the_bundle_may_be_a_zip_file_or_the_folder_around_it(bundle, scored, tmp_path):
    expected = evaluate(MODEL, "core", str(bundle))
    assert evaluate(MODEL, "core", str(bundle.parent)) == expected
    path = zip_of(bundle, tmp_path / "eval_bundle.zip")
    assert evaluate(MODEL, "core", str(path)) == expected


@contextlib.contextmanager
def web_server(content, length):
    """A server that redirects each request once; yields its URL and the paths it was asked for."""
    paths = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            is_moved = self.path != "/moved"
            self.send_response(302 if is_moved else 200)
            self.send_header("Location", "/moved")
            self.send_header("Content-Length", str(0 if is_moved else length))
            self.end_headers()
            if not is_moved:
                self.wfile.write(content)

        def log_message(self, format, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_at_a_url_is_copied_once_and_whole(bundle, scored, tmp_path, monkeypatch):
    """From where it has moved to, as the hub of Hugging Face answers."""
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    content = zip_of(bundle, tmp_path / "eval_bundle.zip").read_bytes()
    with web_server(content, len(content) + 1) as (url, _):
        message = f"{url}/a.zip cannot be copied to .*a_zip: it ends 1 bytes too early"
        with pytest.raises(JllamaError, match=message):
            evaluate(MODEL, "core", f"{url}/a.zip")
    assert [*(tmp_path / "cache").iterdir()] == []
    with web_server(content, len(content)) as (url, paths):
        for _ in range(2):
            assert evaluate(MODEL, "core", f"{url}/a.zip") == evaluate(MODEL, "core", str(bundle))
    assert paths == ["/a.zip", "/moved"]
    with pytest.raises(JllamaError, match=r"b\.zip cannot be copied to .*Connection refused"):
        evaluate(MODEL, "core", f"{url}/b.zip")


def zip_of(bundle, path, **others):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(bundle.rglob("*.*")):
            archive.write(file, file.relative_to(bundle.parent))
        for name, text in others.items():
            archive.writestr(name, text)
    return path


def test_no_zip_file_writes_outside_of_its_folder(bundle, scored, tmp_path, monkeypatch):
    temporary = tmp_path / "a" / "b"
    temporary.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    names = {"../evil.txt": "x", "../../evil.txt": "x", str(tmp_path / "evil.txt"): "x"}
    path = zip_of(bundle, tmp_path / "evil.zip", **names)
    assert evaluate(MODEL, "core", str(path)) == evaluate(MODEL, "core", str(bundle))
    assert sorted(tmp_path.rglob("*.*")) == [path]


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_parquet_in_a_folder_or_at_a_url(tmp_path, scored, monkeypatch, scheme):
    """Questions are the files test*, examples the files dev*; other files are left alone."""
    monkeypatch.setenv("JLLAMA_CACHE", str(tmp_path / "cache"))
    place = as_place(f"{scheme}{tmp_path}/all")
    place.mkdir(parents=True)
    for split, subjects in (("test", "ab"), ("dev", "ba"), ("auxiliary_train", "")):
        rows = [
            {"question": f"{split} {number}", "choices": [*"wxyz"], "answer": 1, "subject": subject}
            for subject in subjects
            for number in range(3)
        ]
        table = pyarrow.Table.from_pylist(rows) if rows else pyarrow.table({"x": [1]})
        with (place / f"{split}-0.parquet").open("wb") as file:
            pyarrow.parquet.write_table(table, file)
    results = evaluate(MODEL, "mmlu", str(place), limit=2, num_fewshot=1)
    assert {group: numbers["questions"] for group, numbers in results.items()} == {
        **{"mmlu": 4, "mmlu/a": 2, "mmlu/b": 2},
        "mmlu/stem": 4,
    }
    shown = [TOKENIZER.decode(row) for row, _ in scored]
    assert shown[3] == (
        "The following are multiple choice questions (with answers) about a.\n\n"
        "dev 0\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\ntest 0\nA. w\nB. x\nC. y\nD. z\nAnswer: D"
    )


def test_an_option_without_tokens_of_its_own_is_the_worst(tmp_path, scored):
    """One that another begins with has nothing that the two do not share."""
    make_bundle(tmp_path)
    data = tmp_path / "eval_data" / "sub" / "multiple_choice_0.jsonl"
    for order in (1, -1):
        choices = ["the cat", "the cat sat on the mat"][::order]
        row = {"query": "the dog", "choices": choices, "gold": choices.index(max(choices))}
        write_rows(data, [row])
        results = evaluate(MODEL, "core", str(tmp_path))
        assert results["core/multiple_choice_0"]["acc"] == 1


def test_the_limit_is_of_a_subject_whose_questions_are_apart(tmp_path, scored):
    rows = [
        {"question": f"{number}", "choices": [*"wxyz"], "answer": 1, "subject": subject}
        for number, subject in enumerate("baabab")
    ]
    write_rows(tmp_path / "test.jsonl", rows)
    results = evaluate(MODEL, "mmlu", str(tmp_path), limit=2)
    counts = {group: numbers["questions"] for group, numbers in results.items()}
    assert counts == {"mmlu": 4, "mmlu/a": 2, "mmlu/stem": 4, "mmlu/b": 2}
    shown = [TOKENIZER.decode(row) for row, _ in scored[::4]]
    assert [text.split("\n")[2] for text in shown] == ["1", "2", "0", "3"]


@given(st.floats(0, 0.99), st.floats(0, 1))
def test_chance_is_zero_and_perfect_is_one(chance, accuracy):
    assert centered(chance, chance) == 0
    assert centered(1, chance) == 1
    assert centered(accuracy, chance) <= 1
    assert (centered(accuracy, chance) > 0) == (accuracy > chance)
    assert centered(accuracy, 0) == accuracy


# Programs

PROMPT = 'def double(x):\n    """Return twice x."""\n'
TEST = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n"
RECORD = {"prompt": PROMPT, "test": TEST, "entry_point": "double"}


@pytest.mark.parametrize(
    ("program", "is_right"),
    [
        ("    return 2 * x\n", True),
        ("    import math, heapq, hashlib, random, re, collections\n    return x + x\n", True),
        ("    print(x)\n    return 2 * x\n", True),
        ("    return x * x\n", False),
        ("  return 2 *\n", False),
        ("    import sys\n    sys.exit(0)\n", False),
        ("    import os\n    os._exit(0)\n", False),
        ("    while True: pass\n", False),
        ("    import time\n    time.sleep(60)\n", False),
        ("    y = bytearray(1 << 33)\n    return 2 * x\n", False),
        ("    open(PATH, 'w')\n    return 2 * x\n", False),
        ("    import os\n    os.open(PATH, os.O_CREAT)\n    return 2 * x\n", False),
        ("    import os\n    os.remove('program.py')\n    return 2 * x\n", False),
        ("    import os\n    os.fork()\n    return 2 * x\n", False),
        ("    import os\n    os.system('true')\n    return 2 * x\n", False),
        ("    import subprocess\n    subprocess.run(['true'])\n    return 2 * x\n", False),
        ("    import socket\n    socket.create_server(('', 0))\n    return 2 * x\n", False),
        ("    import ctypes\n    return 2 * x\n", False),
        ("    return int(input())\n", False),
        ("    import os\n    return 2 * x if not os.environ.get('HOME') else 0\n", True),
        ("\ud800", False),
    ],
)
def test_programs(program, is_right, tmp_path, monkeypatch):
    """Nothing of one is left, whatever it does."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(benchmarks, "_PROGRAM_S", 10 if is_right else 3)
    path = repr(str(tmp_path / "left"))
    assert passes(f"PATH = {path}\n{PROMPT}{program}\n{TEST}\ncheck(double)") is is_right
    assert_nothing_left(tmp_path)


def test_a_program_imports_what_has_no_bytecode(tmp_path):
    """As the standard library of some installations; writing it would be refused."""
    (tmp_path / "fresh_module.py").write_text("VALUE = 5")
    lines = f"import sys\nsys.path.append({str(tmp_path)!r})\nimport fresh_module"
    assert passes(f"{lines}\nassert fresh_module.VALUE == 5")
    assert [file.name for file in tmp_path.iterdir()] == ["fresh_module.py"]


def assert_nothing_left(folder):
    assert [*folder.iterdir()] == []
    end_s = time.monotonic() + 5  # a process that is killed does not end at once
    while any(str(folder) in line for line in command_lines()):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def command_lines():
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            yield process.joinpath("cmdline").read_text(errors="replace")


def test_what_a_program_starts_is_killed_with_it(tmp_path, monkeypatch):
    """Also if nothing has refused to start it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    without = benchmarks._PROGRAM.replace("sys.addaudithook(refuse)", "")
    monkeypatch.setattr(benchmarks, "_PROGRAM", without)
    passes("import os, time\nif not os.fork(): time.sleep(60)")
    assert_nothing_left(tmp_path)


@pytest.fixture
def written(monkeypatch):
    """Texts in place of the model's, and the prompts that they were asked for by."""
    prompts, texts = [], []

    def complete(model, requests, batch_size):
        prompts.extend(requests)
        for index in reversed(range(len(requests))):  # as they are done
            yield index, Completion(texts[index], [], "length", [])

    monkeypatch.setattr(benchmarks, "completions", complete)
    return prompts, texts


def test_human_eval(tmp_path, written):
    prompts, texts = written
    write_rows(tmp_path / "test-0.jsonl", [RECORD, RECORD, RECORD])
    texts += ["    return x + x", "    return 3 * x", "    return 2 * x"]
    (results,) = evaluate(MODEL, "humaneval", str(tmp_path)).values()
    assert results["questions"] == 3
    assert results["pass_at_1"] == pytest.approx(2 / 3)
    assert results["pass_at_1_stderr"] == pytest.approx((2 / 9 / 2) ** 0.5)
    assert TOKENIZER.decode(prompts[0].ids) == PROMPT
    assert set(prompts[0].stop) == {"\nclass", "\ndef", "\n#", "\nif", "\nprint"}
    assert (prompts[0].max_new_tokens, prompts[0].sampling.temperature) == (200, 0)


CHAT = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def test_human_eval_of_a_chat_model_begins_the_answer(tmp_path, written):
    prompts, texts = written
    write_rows(tmp_path / "test-0.jsonl", [RECORD])
    texts += ["    return x + x\n"]
    config = dataclasses.replace(CONFIG, max_seq_len=4096)
    model = dataclasses.replace(MODEL, config=config, chat_template=CHAT)
    place = str(tmp_path / "test-0.jsonl")
    results = evaluate(model, "humaneval_instruct", place, apply_chat_template=True)
    assert results["humaneval_instruct"]["pass_at_1"] == 1
    shown = TOKENIZER.decode(prompts[0].ids)
    assert shown.startswith("[user] Write a solution to the following problem and make sure that")
    assert shown.endswith(
        f"[assistant] Here is the completed function:\n```python\n{PROMPT}".strip()
    )
    assert "```" in prompts[0].stop


# What is refused

ARC = {
    "question": "What?",
    "choices": {"text": ["a", "b"], "label": ["A", "B"]},
    "answerKey": "B",
}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "line 2: 'question' is undefined"),
        ({"question": "What?"}, "line 2: 'choices' is undefined"),
        (ARC | {"answerKey": "C"}, "line 2: 'C' is not in list"),
        (ARC | {"choices": {"label": ["A", "B"]}}, "line 2: 'dict object' has no attribute 'text'"),
        (ARC | {"choices": 5}, "line 2: 'int object' has no attribute 'text'"),
        ([1], "line 2 is not a JSON object"),
    ],
)
def test_records_that_do_not_fit(tmp_path, record, message):
    write_rows(tmp_path / "test.jsonl", [ARC, record])
    with pytest.raises(JllamaError, match=rf"test\.jsonl {message}"):
        evaluate(MODEL, "arc_easy", str(tmp_path))


@pytest.mark.parametrize("gold", [3, -1, "a", None])
def test_an_answer_that_is_no_option(tmp_path, gold):
    make_bundle(tmp_path)
    data = tmp_path / "eval_data" / "sub" / "schema_3.jsonl"
    rows = [*map(json.loads, data.read_text().splitlines())]
    rows[1]["gold"] = gold
    write_rows(data, rows)
    with pytest.raises(JllamaError, match=r"schema_3\.jsonl line 2: there is no option -?\d, coun"):
        evaluate(MODEL, "core", str(tmp_path))


def test_places_that_do_not_fit(tmp_path, bundle):
    (tmp_path / "train.jsonl").write_text(json.dumps(ARC))
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.zip").write_bytes(b"PK\x03\x04 and then nothing")
    whole = zip_of(bundle, tmp_path / "whole.zip").read_bytes()
    place = whole.index(b"cat")  # stored, not compressed
    (tmp_path / "changed.zip").write_bytes(whole[:place] + b"dog" + whole[place + 3 :])
    (tmp_path / "blank.jsonl").write_text("\n")
    no_file = "there is no file at .*{}: give a file with some, or a folder"
    for name, place, message in [
        ("arc_easy", "nowhere", no_file.format("nowhere")),
        ("arc_easy", "", no_file.format(r"test\*")),
        ("arc_easy", "*.txt", no_file.format(r"\*\.txt")),
        ("arc_easy", "blank.jsonl", "there are no records in .*blank.jsonl: give a file with some"),
        ("core", "nowhere", "nowhere is no bundle of CORE, .*: No such file or directory"),
        ("core", "empty", "empty is no bundle of CORE, .*: No such file or directory"),
        ("core", "damaged.zip", "no bundle of CORE, or limit is too low: File is not a zip file"),
        ("core", "changed.zip", "no bundle of CORE, .*: Bad CRC-32"),
    ]:
        with pytest.raises(JllamaError, match=message) as error:
            evaluate(MODEL, name, str(tmp_path / place))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"icl_task_type": "essay"}, "limit is too low: 'essay'"),
        ({"label": "unknown"}, "limit is too low: 'unknown'"),
        ({"dataset_uri": None}, "no bundle of CORE"),
        ({"dataset_uri": "gone.jsonl"}, r"there is no file at .*gone\.jsonl"),
        ({"num_fewshot": [11]}, "limit is too low: Sample larger than population"),
    ],
)
def test_bundles_that_do_not_fit(tmp_path, change, message):
    tasks = make_bundle(tmp_path)
    (tmp_path / "core.yaml").write_text(json.dumps({"icl_tasks": [tasks[0] | change]}))
    with pytest.raises(JllamaError, match=message):
        evaluate(MODEL, "core", str(tmp_path))


def test_examples_that_are_not_there(tmp_path):
    write_rows(tmp_path / "test.jsonl", [ARC])
    with pytest.raises(JllamaError, match=r"there is no file at .*train\*"):
        evaluate(MODEL, "arc_easy", str(tmp_path / "test.jsonl"), num_fewshot=1)
    write_rows(tmp_path / "train.jsonl", [ARC])
    with pytest.raises(JllamaError, match="has 1 solved examples of one kind: lower num_"):
        evaluate(MODEL, "arc_easy", str(tmp_path), num_fewshot=2)


def test_options_that_do_not_fit(bundle):
    with pytest.raises(UsageError, match=r"there is no benchmark arc_eas; did you mean arc_easy\?"):
        check_benchmarks(["core", "arc_eas"], False, None, False)
    with pytest.raises(UsageError, match="humaneval runs on this machine, with your rights"):
        check_benchmarks(["humaneval"], False, None, False)
    check_benchmarks(["core", "humaneval", "humaneval_instruct"], True, None, False)
    for options in ((0, False), (None, True)):
        with pytest.raises(UsageError, match="core is of texts with examples of its own"):
            check_benchmarks(["arc_easy", "core"], False, *options)
        check_benchmarks(["arc_easy"], False, *options)
    with pytest.raises(JllamaError, match="no tokenizer"):
        evaluate(LanguageModel(CONFIG, MODEL.params), "core", str(bundle))


def test_an_option_that_is_too_long(tmp_path):
    write_rows(tmp_path / "test.jsonl", [ARC | {"question": "the cat " * 300}])
    model = dataclasses.replace(MODEL, tokenizer=BytesTokenizer())
    assert evaluate(model, "arc_easy", str(tmp_path))["arc_easy"]["questions"] == 1
    long = {"text": ["a" * 500, "b"], "label": ["A", "B"]}
    write_rows(tmp_path / "test.jsonl", [ARC | {"choices": long}])
    with pytest.raises(JllamaError, match="has 501 tokens and the model's context is 400: take"):
        evaluate(model, "arc_easy", str(tmp_path))
