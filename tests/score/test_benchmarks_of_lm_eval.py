"""Benchmarks have the results of lm-eval's own tasks, whose definitions are read from its package,
with its own Hugging Face model, on local data.

Marked ``lm_eval``; see ``tests/helpers_lm_eval.py``.
"""

import itertools
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers_lm_eval import TOKENIZERS, hugging_face_model, random_model
from lm_eval import tasks as lm_eval_tasks
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jllama.generation.text import Completion
from jllama.score import benchmarks
from jllama.score.benchmarks import evaluate
from jllama.score.scoring import TokenScores

pytestmark = pytest.mark.lm_eval

OWN = Path(lm_eval_tasks.__file__).parent
WORDS = ["the", "cat", "sat", "on", "mats", "question", "asked", "answer", ""]
SUBJECTS = ["virology", "world_religions", "abstract_algebra"]


@pytest.fixture(params=TOKENIZERS)
def model(request):
    return random_model(request.param, 2048)


# Random scores and texts by the tokens that they follow, so that other tokens have others.


def drawn_scores(ids, count):
    seed = zlib.crc32(np.asarray(ids, np.int32).tobytes())
    return -np.random.default_rng(seed).exponential(size=count)


def drawn_text(ids, max_new_tokens, stop):
    rng = random.Random(repr(([*map(int, ids)], max_new_tokens, stop)))
    number = rng.choice(["1", "2", "1,002", "$2", "2.", "-1", "x"])
    text = f"{rng.choice('12x')} {rng.choice(['#### ', '####', ''])}{number}"
    return text + rng.choice(["", ".", " cats"])


class Drawn(HFLM):
    """lm-eval's model up to the tokens, whose scores and texts are drawn."""

    def _loglikelihood_tokens(self, requests, **ignored):
        rows = [(context + rest, len(rest)) for _, context, rest in requests]
        return [
            (float(drawn_scores(ids[-self.max_length - 1 :], count).sum()), True)
            for ids, count in rows
        ]

    def generate_until(self, requests, disable_tqdm=False):
        texts = []
        for request in requests:
            context, arguments = request.args
            room = self.max_length - 256
            (ids,), _ = self.tok_batch_encode([context], left_truncate_len=room)
            texts.append(drawn_text(ids, 256, arguments["until"]))
        return texts


@pytest.fixture
def drawn(monkeypatch):
    def score(model, rows, counts, *, batch_size, on_progress):
        pairs = zip(rows, counts, strict=True)
        return [TokenScores(drawn_scores(*pair), np.ones(pair[1], bool)) for pair in pairs]

    def complete(model, prompts, batch_size):
        for index, prompt in enumerate(prompts):
            text = drawn_text(prompt.ids, prompt.max_new_tokens, [*prompt.stop])
            yield index, Completion(text, [], "length", [])

    monkeypatch.setattr(benchmarks, "token_log_probs", score)
    monkeypatch.setattr(benchmarks, "completions", complete)
    return Drawn


def write(folder, split, rows):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(rng, num_words=5):
    return " ".join(rng.choices(WORDS, k=num_words))


def arc_rows(rng, count):
    labels = [["A", "B", "C", "D"], ["1", "2", "3"]]
    rows = []
    for number in range(count):
        label = labels[number % 2]
        texts = [text(rng, rng.randrange(1, 6)) + "." for _ in label]
        choices = {"text": texts, "label": label}
        row = {"question": text(rng), "choices": choices, "answerKey": rng.choice(label)}
        rows.append(row)
    return rows


def mmlu_rows(rng, count, subject):
    return [
        {
            "question": f" {text(rng)} ",
            "choices": [text(rng, 2) for _ in range(4)],
            "answer": rng.randrange(4),
            "subject": subject,
        }
        for _ in range(count)
    ]


def gsm8k_rows(rng, count):
    numbers = ["1", "2", "1,002", "-1"]
    return [
        {"question": text(rng), "answer": f"{text(rng)}\n#### {rng.choice(numbers)}"}
        for _ in range(count)
    ]


def results_of_lm_eval(model, folder, tasks, kind=HFLM, **options):
    """Evaluate tasks, from their YAML's content, their name and their files."""
    for name, content, files in tasks:
        kwargs = {"data_files": files, "cache_dir": str(folder / "cache")}
        data = {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs}
        for unused in ("dataset_name", "validation_split", "training_split", "tag", "include"):
            content.pop(unused, None)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({**content, **data}))
    lm = hugging_face_model(model, folder / "hf", kind)
    names = [name for name, _, _ in tasks]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=1, **options)
    return result["results"]


def content_of(path):
    return yaml.safe_load((OWN / path).read_text())


OPTIONS = [(None, False, 0), (2, False, 9), (None, True, 0), (2, True, 9)]


@pytest.mark.parametrize(("fewshot", "as_chat", "limit"), OPTIONS)
def test_arc(model, drawn, tmp_path, fewshot, as_chat, limit):
    rng = random.Random(1)
    files = {name: write(tmp_path / "data", name, arc_rows(rng, 40)) for name in ("train", "test")}
    content = {**content_of("arc/arc_easy.yaml"), "fewshot_split": "train"}
    options = {"apply_chat_template": as_chat, "num_fewshot": fewshot}
    expected = results_of_lm_eval(
        model, tmp_path, [("local_arc", content, files)], drawn, limit=limit or None, **options
    )["local_arc"]
    challenge = {**content, **content_of("arc/arc_challenge.yaml")}
    assert {name for name in challenge if challenge[name] != content.get(name)} <= {
        *("include", "task", "dataset_name", "tag")
    }
    for name in ("arc_easy", "arc_challenge"):
        place = str(tmp_path / "data")
        actual = evaluate(model, name, place, limit=limit, **options)[name]
        assert actual["questions"] == (limit or 40)
        for metric in ("acc", "acc_norm"):
            assert actual[metric] == pytest.approx(expected[f"{metric},none"])
            error = expected[f"{metric}_stderr,none"]
            assert actual[f"{metric}_stderr"] == pytest.approx(error)
        assert actual["acc"] > 0
        assert limit or actual["acc"] != actual["acc_norm"]


@pytest.mark.parametrize(("fewshot", "as_chat", "limit"), OPTIONS)
def test_mmlu(model, drawn, tmp_path, fewshot, as_chat, limit):
    rng = random.Random(2)
    rows = {
        split: {
            subject: mmlu_rows(rng, 12 if split == "test" else 5, subject) for subject in SUBJECTS
        }
        for split in ("dev", "test")
    }
    tasks = []
    for subject in SUBJECTS:
        files = {}
        for split, by_subject in rows.items():
            files[split] = write(tmp_path / subject, split, by_subject[subject])
        content = content_of("mmlu/default/_default_template_yaml")
        content |= content_of(f"mmlu/default/mmlu_{subject}.yaml")
        tasks.append((f"local_{subject}", content, files))
    for split, by_subject in rows.items():
        write(tmp_path / "all", split, [*itertools.chain.from_iterable(by_subject.values())])
    options = {"apply_chat_template": as_chat, "num_fewshot": fewshot}
    expected = results_of_lm_eval(model, tmp_path, tasks, drawn, limit=limit or None, **options)
    actual = evaluate(model, "mmlu", str(tmp_path / "all"), limit=limit, **options)
    accuracies = [expected[f"local_{subject}"]["acc,none"] for subject in SUBJECTS]
    assert len({*accuracies}) > 1
    for subject, accuracy in zip(SUBJECTS, accuracies, strict=True):
        assert actual[f"mmlu/{subject}"]["acc"] == accuracy
    assert actual["mmlu"]["acc"] == pytest.approx(np.mean(accuracies))
    assert actual["mmlu"]["questions"] == 3 * (limit or 12)


def test_the_subjects_of_mmlu_have_lm_evals_categories_and_descriptions(tmp_path, model):
    rows = []
    expected = {}
    for path in sorted((OWN / "mmlu/default").glob("mmlu_*.yaml")):
        content = yaml.safe_load(path.read_text())
        rows += mmlu_rows(random.Random(0), 1, content["dataset_name"])
        category = content["tag"].removeprefix("mmlu_").removesuffix("_tasks")
        expected[content["dataset_name"]] = content["description"], category
    assert len(expected) == 57
    path = Path(write(tmp_path, "test", rows))
    for item in benchmarks._items(benchmarks._DEFINITIONS["mmlu"], path, "test"):
        subject, category = item["groups"]
        description, expected_category = expected[subject]
        assert (item["description"].split(), category) == (description.split(), expected_category)
        assert item["description"].endswith(".\n\n")


@pytest.mark.parametrize(("fewshot", "as_chat", "limit"), OPTIONS)
def test_gsm8k(model, drawn, tmp_path, fewshot, as_chat, limit):
    rng = random.Random(3)
    files = {
        name: write(tmp_path / "data", name, gsm8k_rows(rng, 60)) for name in ("train", "test")
    }
    content = content_of("gsm8k/gsm8k.yaml")
    options = {"apply_chat_template": as_chat, "num_fewshot": fewshot}
    expected = results_of_lm_eval(
        model, tmp_path, [("local_gsm8k", content, files)], drawn, limit=limit or None, **options
    )["local_gsm8k"]
    actual = evaluate(model, "gsm8k", str(tmp_path / "data"), limit=limit, **options)["gsm8k"]
    for metric, name in (
        ("strict_match", "strict-match"),
        ("flexible_extract", "flexible-extract"),
    ):
        assert actual[metric] == pytest.approx(expected[f"exact_match,{name}"])
    if not limit:
        assert 0 < actual["strict_match"] < actual["flexible_extract"] < 1


def test_a_whole_model(model, tmp_path):
    """Nothing is drawn: transformers finds the same options likeliest."""
    rng = random.Random(4)
    files = {"test": write(tmp_path / "arc", "test", arc_rows(rng, 60))}
    tasks = [("local_arc", content_of("arc/arc_easy.yaml"), files)]
    expected = results_of_lm_eval(model, tmp_path, tasks)["local_arc"]
    actual = evaluate(model, "arc_easy", files["test"])["arc_easy"]
    for metric in ("acc", "acc_norm"):
        assert actual[metric] == pytest.approx(expected[f"{metric},none"])


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct"])
def test_the_definition_of_human_eval(name):
    """lm-eval's needs a download; the texts are compared."""
    lines = (OWN / f"humaneval/{name}.yaml").read_text().replace("!function", "")
    content = yaml.safe_load(lines)
    if name == "humaneval":
        stops, arguments = content["generation_kwargs"], benchmarks._DEFINITIONS[name]
        assert arguments["stop"] == stops["until"]
        assert arguments["max_new_tokens"] == stops["max_gen_toks"]
    record = {"prompt": "def f():\n", "test": "check", "entry_point": "f"}
    read = benchmarks._JINJA.compile_expression(benchmarks._DEFINITIONS[name]["item"])
    item = read(**record)
    render = lambda text: benchmarks._JINJA.from_string(text).render(**record)  # noqa: E731
    # Jinja drops a newline at a template's end, and YAML has one more than Jinja.
    assert item["contexts"][0].rstrip("\n") == render(content["doc_to_text"]).rstrip("\n")
    if name == "humaneval_instruct":
        assert item["prefix"].rstrip("\n") == render(content["gen_prefix"]).rstrip("\n")
    else:
        assert item["program"][1] == "\n" + render(content["doc_to_target"])
