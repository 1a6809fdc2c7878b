"""SmolLM2-135M-Instruct, a real Llama: from GGUF to every format and back, against transformers, to
the last token.

Marked ``real_weights``; ``python tests/fetch_real_weights.py`` fetches the file.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jsonschema
import numpy as np
import pytest
import torch
import transformers
from helpers_real import real_file
from safetensors.numpy import load_file, save_file

import jllama
from jllama.checkpoints.registry import convert, open_checkpoint
from jllama.conversation import chat_ids
from jllama.evaluation.scoring import score_texts
from jllama.generation.generate import generate
from jllama.generation.sampling_params import SamplingParams
from jllama.verify.checkpoint import PROSE, verify_checkpoint

pytestmark = pytest.mark.real_weights

ROOT = Path(__file__).parent.parent
FORMATS = ["hf", "meta", "orbax", "gguf"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def gguf():
    return real_file("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def exported(gguf, tmp_path_factory):
    """The GGUF in every other format, each converted from the one before."""
    folder, source = tmp_path_factory.mktemp("smollm2"), gguf
    for to in FORMATS:
        convert(source, folder / to, to)
        source = folder / to
    return folder


@pytest.fixture(scope="module")
def model(gguf):
    return jllama.load(gguf)


@pytest.fixture(scope="module")
def peer(exported):
    return transformers.AutoModelForCausalLM.from_pretrained(exported / "hf", dtype=torch.float32)


@pytest.fixture(scope="module")
def peer_tokenizer(exported):
    return transformers.AutoTokenizer.from_pretrained(exported / "hf")


@pytest.fixture(scope="module")
def prompts(model, peer_tokenizer):
    """A plain text's ids and a question's in the chat template."""
    chat = peer_tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    return {"plain": model.tokenizer.encode(TEXT[:300]), "chat": list(chat)}


def greedy(model, prompt, count=64):
    """Greedy tokens, through the stop that ends them if there is one."""
    (completion,) = generate(model, [prompt], SamplingParams(temperature=0.0), max_new_tokens=count)
    return completion.ids + ([model.stop_ids[0]] if completion.finish_reason == "stop_id" else [])


def test_the_configuration_is_the_released_one(model):
    assert model.config == jllama.preset("smollm2-135m")
    assert model.tokenizer.vocab_size == 49_152
    assert model.stop_ids == (2,)


def test_logits_are_those_of_transformers(model, peer):
    tokens = model.tokenizer.encode(TEXT)[:256]
    assert len(tokens) == 256
    ours = np.asarray(model(np.array([tokens], np.int32)))[0]
    with torch.no_grad():
        theirs = peer(torch.tensor([tokens])).logits[0].numpy()
    assert np.max(np.abs(ours - theirs)) < 1e-3


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_greedy_tokens_are_those_of_transformers(model, peer, prompts, kind):
    prompt = prompts[kind]
    with torch.no_grad():
        whole = peer.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, num_beams=1
        )[0].tolist()
    ours = greedy(model, prompt)
    assert ours == whole[len(prompt) :]
    assert len(ours) == 64 or ours[-1] in model.stop_ids


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_holds_the_same_model(model, exported, prompts, to):
    other = jllama.load(exported / to)
    assert (other.config, other.chat_template, other.stop_ids) == (
        model.config,
        model.chat_template,
        model.stop_ids,
    )
    for found, wanted in zip(
        jax.tree.leaves(other.params), jax.tree.leaves(model.params), strict=True
    ):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    hard = "Hello  wörld\t1234 \n\n 你好 👩‍👩‍👧 <|im_end|> don't\r\n"
    assert other.tokenizer.encode(hard) == model.tokenizer.encode(hard)
    for kind, prompt in prompts.items():
        text = model.tokenizer.decode(greedy(model, prompt))
        assert other.tokenizer.decode(greedy(other, prompt)) == text, kind


def test_ids_are_those_of_transformers(model, peer_tokenizer):
    for text in (
        TEXT[:2000],
        "def f(x):\n    return x ** 2  # ½ of 100%\n",
        " leading",
        "<|im_start|>user",
        "日本語 1999年",
    ):
        ids = peer_tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert model.tokenizer.encode(text) == ids


@pytest.mark.parametrize(
    "system", [[], [{"role": "system", "content": " Be brief.\n"}]], ids=["its own", "ours"]
)
def test_conversations_are_those_of_transformers(model, peer_tokenizer, system):
    """Through its own template, a turn at a time."""
    said = [
        "What is  this? 👩‍👩‍👧\n",
        " It is\n\na family.",
        "",
        "<|im_end|> é",
        "And <|im_start|>this?",
    ]
    messages = system + [
        {"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)
    ]
    for count in range(1, len(messages) + 1):
        for prompt in (True, False):
            theirs = peer_tokenizer.apply_chat_template(
                messages[:count], add_generation_prompt=prompt, return_dict=False
            )
            assert chat_ids(model, messages[:count], add_generation_prompt=prompt) == list(theirs)


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


def test_verified_against_the_oracle(gguf, exported):
    found = verify_checkpoint(gguf)
    assert (found.findings, found.problems, found.preset) == ([], [], "smollm2-135m")
    assert found.num_tokens == 256
    assert max(found.layer_errors) < found.tolerance / 10
    assert found.logits_error < found.tolerance / 5
    assert found.bits_per_byte < 1  # byte frequencies alone give about 4.2
    assert verify_checkpoint(exported / "hf").fingerprint == found.fingerprint


def test_swapped_layers_show_in_the_perplexity(exported, tmp_path):
    shutil.copytree(exported / "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.0.")]:
        other = name.replace("layers.0", "layers.15")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    found = verify_checkpoint(tmp_path / "hf")
    assert found.first_divergent_layer is None
    assert found.passed
    assert found.perplexity > 1000
