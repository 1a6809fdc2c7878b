"""SmolLM2-135M-Instruct generates, is quantized, answers under a schema, and is trained further."""

import json
import subprocess
import sys

import jsonschema
import pytest
from helpers_real import QUESTION, ROOT, TEXT, greedy, real_file

import jllama
from jllama.formats.registry import convert, open_checkpoint
from jllama.generation.conversation import chat_ids
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.lab.checkpoint import PROSE
from jllama.score.scoring import score_texts

pytestmark = pytest.mark.real_weights


@pytest.fixture(scope="module")
def gguf():
    return real_file("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def model(gguf):
    return jllama.load(gguf)


@pytest.fixture(scope="module")
def prompts(model):
    """A plain text's ids and a question's in the chat template."""
    return {"plain": model.tokenizer.encode(TEXT[:300]), "chat": chat_ids(model, QUESTION)}


def test_guessed_tokens_change_nothing(model, prompts):
    text = "The cat sat on the mat.\n" * 5
    settings = SamplingParams(temperature=0.0)
    for prompt in (text, prompts["plain"], prompts["chat"]):
        (plain,) = generate(model, [prompt], settings, max_new_tokens=48)
        (quick,) = generate(model, [prompt], settings, max_new_tokens=48, speculate=4)
        assert quick.ids == plain.ids
    (quick,) = generate(model, [text], settings, max_new_tokens=48, speculate=4)
    assert quick.accepted > 24


def test_int8_weights_predict_text_almost_as_well(model, gguf):
    """Perplexity within one percent, on the README and the plainest of prose."""
    texts = [(ROOT / "README.md").read_text(), PROSE]
    small = jllama.load(gguf, quantize="int8")
    for text in texts:
        exact, rounded = (
            score_texts(each, [text], window=512, stride=256, max_tokens=1500).perplexity
            for each in (model, small)
        )
        assert abs(rounded / exact - 1) < 0.01


def test_an_answer_under_a_schema(model, prompts):
    """Whatever is drawn, and however unlikely the schema is to the model."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "knows": {
                "type": "array",
                "items": {"enum": ["Paris", "Lyon"]},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "knows"],
        "additionalProperties": False,
    }
    grammar = jllama.Grammar("json_schema", json.dumps(person))
    rows = [(prompts["chat"], 0.0), (prompts["plain"], 1.0), (prompts["chat"], 2.0)]
    asked = [
        jllama.Prompt(ids, SamplingParams(temperature, seed=5), 200, grammar=grammar)
        for ids, temperature in rows
    ]
    for completion in generate(model, asked):
        assert completion.finish_reason == "stop_id"
        jsonschema.validate(json.loads(completion.text), person)


def test_quantized_to_q8_0_it_still_answers(gguf, tmp_path, prompts):
    convert(gguf, tmp_path / "q8.gguf", "gguf", "q8_0")
    checkpoint = open_checkpoint(tmp_path / "q8.gguf")
    assert checkpoint.tokenizer.encode("a b") == open_checkpoint(gguf).tokenizer.encode("a b")
    quantized = jllama.load(tmp_path / "q8.gguf")
    assert "Paris" in quantized.tokenizer.decode(greedy(quantized, prompts["chat"]))


def test_training_goes_on_from_it(gguf, tmp_path):
    """A few steps on its own kind of text begin at a trained model's loss and lower it."""
    (tmp_path / "text.txt").write_text(TEXT * 3)
    run = tmp_path / "run"
    arguments = {
        "init_from": gguf,
        "run_dir": run,
        "data.path": tmp_path / "text.txt",
        "data.cache_dir": tmp_path / "cache",
        "training.seq_len": 64,
        "training.batch_size": 2,
        "training.steps": 8,
        "training.eval_every": 8,
        "training.log_every": 1,
        "training.sample_tokens": 0,
        "training.eval_tokens": 256,
        "optimizer.learning_rate": 1e-4,
    }
    options = [f"--{name}={value}" for name, value in arguments.items()]
    done = subprocess.run(
        [sys.executable, "train.py", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [
        json.loads(line)["loss"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert losses[0] < 4.0  # ln 49,152 is 10.8: it begins trained
    assert losses[-1] < losses[0]
    assert jllama.load(run).config == jllama.preset("smollm2-135m")
