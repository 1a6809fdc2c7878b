"""lm-eval on a jllama model gives the numbers of its own Hugging Face model, on tasks made of local
data.

Marked ``lm_eval``, as it takes 480 MB of packages (accelerate is for lm-eval's Hugging Face model
alone): ``pip install -e '.[eval]' accelerate``, then ``python -m pytest -m lm_eval``.
"""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = (
    "1"  # read when lm-eval is imported
)
pytest.importorskip(
    "lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]' accelerate"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from helpers import trained_smollm
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from models import SMALL

import jllama
from jllama.commands import cli
from jllama.core import JllamaError, UsageError
from jllama.generation.sampling_params import SamplingParams
from jllama.lab import harness
from jllama.lab.checks import random_params
from jllama.lab.harness import JllamaLM, evaluate_tasks, generation_arguments, task_manager
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.sentencepiece import train_sentencepiece

pytestmark = pytest.mark.lm_eval

SENTENCES = [
    "the cat sat on the mat, and the other cats sat on the other mats",
    "naïve café, où est le garçon? 世界 🙂 the dog is on the mat",
    "a question is asked: what is it that sat on the mat? the answer is a cat",
]
QUESTIONS = [
    {
        "question": f"{sentence}. What sat {place}?",
        "choices": ["the cat", "a dog", "où", " two  mats"],
        "answer": number,
    }
    for number, (sentence, place) in enumerate(
        zip(SENTENCES, ["here", "there ", "on the mat"], strict=True)
    )
] + [{"question": "", "choices": ["cat", "the mat is on the cat", "a", "🙂"], "answer": 3}]
# The fourth: several windows.
TEXTS = [{"text": sentence} for sentence in [*SENTENCES, " ".join(SENTENCES * 2), "a"]]
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
CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


TOKENIZERS = {
    "without BOS": trained_smollm(SENTENCES, 300),
    "with BOS": train_sentencepiece([f"{s}\n" for s in SENTENCES], 310),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def model(request):
    tokenizer = TOKENIZERS[request.param]
    assert tokenizer.add_bos is (request.param == "with BOS")
    config = dataclasses.replace(SMALL, vocab_size=310)
    params = random_params(config, 0)
    # Never the likeliest: single bytes, of which runs that are no text decode differently in
    # pieces; and ids that the tokenizer does not have, which transformers does draw.
    params["lm_head"][:, 3:259] = params["lm_head"][:, tokenizer.vocab_size :] = 0
    params = jax.tree.map(jnp.asarray, params)
    return LanguageModel(config, params, tokenizer, CHAT, (tokenizer.eos_id,))


@pytest.fixture(scope="module")
def peer(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer") / "hf"
    jllama.save(model, folder, "hf")
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)


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


def simple(lm, tasks, **arguments):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(
        lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **arguments
    )


def numbers(result):
    return {
        (task, name): value
        for task, metrics in result["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float)
    }


def responses(result, task):
    return [sample["filtered_resps"] for sample in result["samples"][task]]


def instances(kind, *arguments):
    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]


def assert_equal_results(actual, reference):
    assert len(numbers(actual)) == 6
    assert numbers(actual) == pytest.approx(numbers(reference), rel=1e-4)
    accuracy = "local_choices", "acc,none"
    assert numbers(actual)[accuracy] == numbers(reference)[accuracy]
    choices = [responses(result, "local_choices") for result in (actual, reference)]
    for one, other in zip(*choices, strict=True):
        for (log_prob, is_greedy), (expected, expected_is_greedy) in zip(one, other, strict=True):
            assert log_prob == pytest.approx(expected, abs=1e-4)
            assert is_greedy == expected_is_greedy
    log_probs = [np.array(responses(result, "local_texts")) for result in (actual, reference)]
    assert log_probs[0] == pytest.approx(log_probs[1], rel=1e-6, abs=1e-4)
    assert responses(actual, "local_answers") == responses(reference, "local_answers")


@pytest.mark.parametrize("fewshot", [0, 1])
def test_numbers_are_those_of_the_hugging_face_model(model, peer, tasks, fewshot):
    actual = simple(JllamaLM(model, batch_size=3), tasks, num_fewshot=fewshot)
    reference = simple(peer, tasks, num_fewshot=fewshot)
    assert_equal_results(actual, reference)
    assert len({text for (text,) in responses(actual, "local_answers")}) > 2
    if fewshot:
        chats, reference = (
            simple(lm, tasks, num_fewshot=1, apply_chat_template=True)
            for lm in (JllamaLM(model), peer)
        )
        assert_equal_results(chats, reference)
        assert responses(chats, "local_choices") != responses(actual, "local_choices")


def test_chats_are_rendered_as_transformers_does(model, peer):
    history = [
        {"role": "user", "content": " Hi there "},
        {"role": "assistant", "content": "the cat "},
    ]
    for generation_prompt in (True, False):
        text = JllamaLM(model).apply_chat_template(history, generation_prompt)
        assert text == peer.apply_chat_template(history, generation_prompt)
        assert JllamaLM(model).tok_encode(text) == peer.tok_encode(text)


@pytest.mark.parametrize(
    "text", ["", "the cat", " two  spaces ", "<|im_end|>the</s> cat", "<s>the cat", "<|im_start|>a"]
)
def test_texts_are_encoded_as_the_hugging_face_model_does(model, peer, text):
    lm = JllamaLM(model)
    for special in (None, False):
        assert lm.tok_encode(text, add_special_tokens=special) == peer.tok_encode(
            text, add_special_tokens=special
        )
    assert (lm.prefix_token_id, lm.eot_token_id, lm.max_length) == (1, 2, peer.max_length)


def test_until_and_the_number_of_tokens_are_honored(model, peer):
    """One batch in which every request has its own."""
    arguments = [
        {"max_gen_toks": 30},
        {"until": "t", "max_gen_toks": 30},
        {"until": ["zzz", "e"], "max_new_tokens": 30},
        {"until": ["<|im_end|>", "</s>"], "max_gen_toks": 7, "do_sample": False},
        {"max_gen_toks": 0},
    ]
    pairs = [(sentence, options) for options in arguments for sentence in SENTENCES]
    requests = instances("generate_until", *pairs)
    actual = JllamaLM(model).generate_until(requests)
    for start in range(0, len(requests) - 3, 3):  # transformers refuses to make no token
        assert actual[start : start + 3] == peer.generate_until(requests[start : start + 3])
    assert actual[-3:] == ["", "", ""]
    assert not any("e" in text for text in actual[6:9])


def test_until_may_name_a_special_token(model, monkeypatch):
    seen = []
    monkeypatch.setattr(
        harness, "completions", lambda _, prompts, batch_size: seen.extend(prompts) or ()
    )
    name = next(text for text, id in model.tokenizer.special_tokens.items() if id == 0)
    pairs = [("a", {"until": until, "max_gen_toks": 9}) for until in (name, ["x"])]
    JllamaLM(model).generate_until(instances("generate_until", *pairs))
    assert [list(prompt.stop_ids) for prompt in seen] == [[0, 2], [2]]


OTHERS = {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 4}


def test_sampling_is_honored(model):
    lm = JllamaLM(model)

    def text(**arguments):
        return lm.generate_until(
            instances("generate_until", ("the cat", {"max_gen_toks": 12, **arguments}))
        )[0]

    greedy = text()
    drawn = text(do_sample=True, temperature=2.0, seed=1)
    assert drawn != greedy
    assert drawn == text(temperature=2.0, seed=1)
    assert drawn != text(temperature=2.0, seed=2)
    assert text(temperature=2.0, top_k=1) == text(temperature=2.0, top_p=1e-6) == greedy


@pytest.mark.parametrize(
    ("arguments", "stops", "max_new_tokens", "fields"),
    [
        ({}, [], 256, {"temperature": 0.0}),
        ({"until": "a"}, ["a"], 256, {"temperature": 0.0}),
        ({"do_sample": True}, [], 256, {}),
        (
            {"do_sample": False, "temperature": 1, "top_p": 0.9},
            [],
            256,
            {"temperature": 0.0, "top_p": 0.9},
        ),
        ({"temperature": 1, "num_beams": 1, "max_tokens": 3}, [], 3, {"temperature": 1.0}),
        ({"temperature": 0, "max_gen_toks": 4, "max_tokens": 3}, [], 4, {"temperature": 0.0}),
        (OTHERS, [], 256, OTHERS),
    ],
)
def test_generation_arguments(arguments, stops, max_new_tokens, fields):
    assert generation_arguments(arguments) == (stops, max_new_tokens, SamplingParams(**fields))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"num_beams": 4},
            "generation_kwargs has num_beams: 4, which jllama does not honor; it knows until",
        ),
        ({"typical_p": 0.5}, "generation_kwargs has typical_p: 0.5"),
        ({"temperature": 1, "top_p": 3}, "top_p is 3; it must be"),
    ],
)
def test_arguments_that_cannot_be_honored(arguments, message):
    with pytest.raises(JllamaError, match=message):
        generation_arguments(arguments)


def test_what_does_not_fit(model):
    lm = JllamaLM(model, max_length=16)
    with pytest.raises(
        JllamaError, match="max_gen_toks 16 leaves no room for a prompt in max_length 16"
    ):
        lm.generate_until(instances("generate_until", ("the cat", {"max_gen_toks": 16})))
    with pytest.raises(
        JllamaError, match=r"the continuation .* has \d+ tokens and max_length is 16"
    ):
        lm.loglikelihood(instances("loglikelihood", ("the cat", " ".join(SENTENCES))))
    with pytest.raises(
        UsageError, match="max_length is 65; it must be between 1 and the model's context of 64"
    ):
        JllamaLM(model, max_length=65)
    with pytest.raises(UsageError, match="batch_size is 0; it must be at least 1"):
        JllamaLM(model, batch_size=0)
    with pytest.raises(JllamaError, match="no tokenizer"):
        JllamaLM(LanguageModel(model.config, model.params))


def test_a_shorter_window_cuts_as_the_hugging_face_model_does(model, peer):
    requests = instances("loglikelihood", (" ".join(SENTENCES), " cat"), ("", "a question"))
    rolling = instances("loglikelihood_rolling", (" ".join(SENTENCES),), ("",))
    generated = instances("generate_until", (" ".join(SENTENCES), {"max_gen_toks": 9}))
    peer._max_length = 20
    try:
        actual = JllamaLM(model, max_length=20)
        for one, other in zip(
            actual.loglikelihood(requests), peer.loglikelihood(requests), strict=True
        ):
            assert one == pytest.approx(other, abs=1e-4)
        assert actual.loglikelihood_rolling(rolling) == pytest.approx(
            peer.loglikelihood_rolling(rolling), abs=1e-3
        )
        assert actual.generate_until(generated) == peer.generate_until(generated)
    finally:
        peer._max_length = None


# The command


def run_eval(*words):
    return cli.run("eval", [str(word) for word in words])


@pytest.fixture
def checkpoint(model, tmp_path):
    jllama.save(model, tmp_path / "model", "hf")
    return tmp_path / "model"


def test_the_command(checkpoint, model, tasks, capsys):
    arguments = [checkpoint, "--tasks", "local_choices,local_texts", "--include_path", tasks]
    assert run_eval(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    names = ["local_choices", "local_texts"]
    expected = evaluate_tasks(JllamaLM(model), names, task_manager(names, str(tasks)))["results"]
    for task in expected:
        assert result[task].keys() == expected[task].keys()
        for name, value in expected[task].items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=1e-3)
            assert result[task][name] == value
    changes = ["--limit", "2", "--num_fewshot", "1", "--apply_chat_template"]
    assert run_eval(*arguments, *changes) == 0
    assert "|local_choices|" in capsys.readouterr().out


def test_each_option_reaches_lm_eval(checkpoint, tasks, monkeypatch):
    seen = {}

    def record(lm, **arguments):
        seen.update(arguments, batch_size=lm.batch_size, max_length=lm.max_length)
        return {"results": {}}

    monkeypatch.setattr(harness, "simple_evaluate", record)
    arguments = [checkpoint, "--tasks", "local_choices, local_texts", "--include_path", tasks]
    names = ("limit", "num_fewshot", "apply_chat_template", "batch_size", "max_length")
    assert run_eval(*arguments, "--json") == 0
    assert seen["tasks"] == ["local_choices", "local_texts"]
    assert [seen[name] for name in names] == [None, None, False, 8, 64]
    changes = "--limit 1 --num_fewshot 0 --apply_chat_template --batch_size 2 --window 24"
    assert run_eval(*arguments, "--json", *changes.split()) == 0
    assert [seen[name] for name in names] == [1, 0, True, 2, 24]


def test_tasks_that_are_not_there(tmp_path):
    with pytest.raises(
        UsageError, match=r"lm-eval has no task 'arc_easi'; did you mean arc_easy\?"
    ):
        task_manager(["arc_easi"])
    with pytest.raises(UsageError, match="there is no folder at include_path nowhere"):
        task_manager(["arc_easy"], "nowhere")


def test_data_that_are_not_there(model, tmp_path):
    task = {
        "task": "lost",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "no.json")}},
    }
    (tmp_path / "lost.yaml").write_text(
        yaml.safe_dump(task | {"test_split": "test"} | TASKS["local_texts"])
    )
    with pytest.raises(JllamaError, match=r"lm-eval stopped with FileNotFoundError: .*no\.json"):
        evaluate_tasks(JllamaLM(model), ["lost"], task_manager(["lost"], str(tmp_path)))
