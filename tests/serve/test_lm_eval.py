"""lm-eval gets from the server the numbers of its own Hugging Face model, on local data.

Marked ``lm_eval``; see ``tests/helpers_lm_eval.py``.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers_lm_eval import SENTENCES, TOKENIZERS, hugging_face_model, random_model
from helpers_serve import listening, started
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from jllama.core.engine import MAX_STOPS

pytestmark = pytest.mark.lm_eval

QUESTIONS = [
    {
        "question": f"{sentence}. What sat {place}?",
        "choices": ["the cat", "a dog", "où", " two  mats"],
        "answer": number,
    }
    for number, (sentence, place) in enumerate(
        zip(SENTENCES, ["here", "there ", "on the mat"], strict=True)
    )
]
TEXTS = [{"text": sentence} for sentence in [*SENTENCES, "a"]]
TASKS = {
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")
        ],
    },
    "local_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["the", "\n"], "max_gen_toks": 20, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def ending(model):
    """The same model, but that each text ends at once: other tokens are never the likeliest."""
    stops = np.arange(model.config.vocab_size - 30)[-MAX_STOPS:]
    head = jnp.zeros_like(model.params["lm_head"])
    head = head.at[:, stops].set(model.params["lm_head"][:, stops])
    params = {**model.params, "lm_head": head}
    return dataclasses.replace(model, params=params, stop_ids=tuple(stops.tolist()))


@pytest.fixture(scope="module", params=TOKENIZERS)
def models(request, tmp_path_factory):
    """Two models by name: of the server, and lm-eval's own; the context has 128 tokens."""
    model = random_model(request.param, 128)
    served = {"plain": model, "ending": ending(model)}
    pairs = {}
    with started(served) as engine, listening(engine) as (url, _):
        for name, served_model in served.items():
            folder = tmp_path_factory.mktemp("peer") / "hf"
            peer = hugging_face_model(served_model, folder)
            client = LocalCompletionsAPI(
                f"{url}/v1/completions",
                model=name,
                tokenizer=str(folder),
                tokenizer_backend="huggingface",
                max_length=model.config.max_seq_len,
                add_bos_token=model.text_tokenizer.add_bos,
                num_concurrent=3,
            )
            pairs[name] = client, peer
        yield pairs


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with the three tasks and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, task in TASKS.items():
        rows = QUESTIONS if name == "local_choices" else TEXTS
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"dataset_path": "json", "validation_split": "validation"}
        data["dataset_kwargs"] = {
            "data_files": {"validation": str(folder / f"{name}.jsonl")},
            "cache_dir": str(folder / "cache"),
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **data, **task}))
    return folder


def responses(result, task):
    return [sample["filtered_resps"] for sample in result["samples"][task]]


def evaluate(lm, folder, names, **options):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(
        lm, tasks=[*names], task_manager=manager, bootstrap_iters=0, log_samples=True, **options
    )


def assert_same_scores(actual, expected):
    choices = [responses(result, "local_choices") for result in (actual, expected)]
    for one, other in zip(*choices, strict=True):
        for (log_prob, is_greedy), (reference, reference_is_greedy) in zip(one, other, strict=True):
            assert log_prob == pytest.approx(reference, abs=1e-4)
            assert is_greedy == reference_is_greedy


@pytest.mark.parametrize("options", [{}, {"num_fewshot": 1}, {"apply_chat_template": True}])
def test_numbers_are_those_of_the_hugging_face_model(models, tasks, options):
    client, peer = models["plain"]
    adds_bos = client.tokenizer("a").input_ids[0] == 1
    client.add_bos_token = adds_bos and "apply_chat_template" not in options  # which writes BOS
    actual, expected = (evaluate(lm, tasks, TASKS, **options) for lm in (client, peer))
    assert_same_scores(actual, expected)
    # transformers decodes an answer by itself, where SentencePiece drops a space at its beginning.
    answers, reference = (
        [text.removeprefix(" ") for (text,) in responses(result, "local_answers")]
        for result in (actual, expected)
    )
    assert answers == reference
    assert len({*answers}) > 2
    if "apply_chat_template" in options:  # which whole texts do not go through
        return
    log_probs = [np.array(responses(result, "local_texts")) for result in (actual, expected)]
    assert log_probs[0] == pytest.approx(log_probs[1], rel=1e-6, abs=1e-4)
    for task in TASKS:
        for name, value in expected["results"][task].items():
            if isinstance(value, float):
                assert actual["results"][task][name] == pytest.approx(value, rel=1e-4)


def test_a_text_that_ends_at_once_is_scored_to_its_end(models, tasks):
    """lm-eval leaves out the last log-probability, which it takes for that of a new token."""
    client, _ = models["ending"]
    request = Instance("generate_until", {}, ("the cat", {"max_gen_toks": 9}), 0)
    (text,) = client.generate_until([request])
    assert text == ""
    scored = [evaluate(lm, tasks, ["local_choices"]) for lm in models["ending"]]
    assert_same_scores(*scored)
