"""SmolLM2-135M-Instruct, a real Llama: from GGUF to every format and back, against transformers, to
the last token.

Marked ``real_weights``; ``python tests/fetch_real_weights.py`` fetches the file.
"""

import shutil

import jax
import numpy as np
import pytest
import torch
import transformers
from helpers_real import QUESTION, TEXT, greedy, real_file
from safetensors.numpy import load_file, save_file

import jllama
from jllama.formats.registry import convert
from jllama.generation.conversation import chat_ids
from jllama.lab.checkpoint import verify_checkpoint

pytestmark = pytest.mark.real_weights

FORMATS = ["hf", "meta", "orbax", "gguf"]


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


def test_the_configuration_is_the_released_one(model):
    assert model.config == jllama.preset("smollm2-135m")
    assert model.tokenizer.vocab_size == 49_152
    assert model.stop_ids == (2,)


def test_logits_are_those_of_transformers(gguf, model, peer):
    """In float32, and as the file is stored, where activations have 16 bits in products."""
    tokens = model.tokenizer.encode(TEXT)[:256]
    assert len(tokens) == 256
    with torch.no_grad():
        theirs = peer(torch.tensor([tokens])).logits[0].numpy()
    for ours, limit in ((jllama.load(gguf, dtype="float32"), 1e-3), (model, 1e-2)):
        logits = np.asarray(ours(np.array([tokens], np.int32)))[0]
        assert np.max(np.abs(logits - theirs)) < limit


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
def test_every_format_holds_the_same_model(gguf, exported, prompts, to):
    """In float32: as it is stored, the file's matrices are multiplied in other sums."""
    model = jllama.load(gguf, dtype="float32")
    other = jllama.load(exported / to)
    assert (other.config, other.chat_template, other.stop_ids) == (
        model.config,
        model.chat_template,
        model.stop_ids,
    )
    for found, wanted in zip(
        jax.tree.leaves(other.params), jax.tree.leaves(model.params), strict=True
    ):
        assert np.array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))
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
