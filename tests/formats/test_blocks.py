"""Quantized matrices of GGUF files that a CPU keeps as they are stored."""

import dataclasses
import importlib.util

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllama
from jllama.core.config import LlamaConfig
from jllama.formats import registry
from jllama.functional import DecodeMatrix
from jllama.generation.generate import completions
from jllama.lab.checks import random_params, relative_error

CONFIG = LlamaConfig(
    vocab_size=320,
    num_layers=3,
    embed_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=512,
    max_seq_len=256,
)
TOKENS = jnp.arange(3, 43).reshape(2, 20) * 7 % 320
MIXED = {"layers/0/wv": "Q8_0", "layers/1/w_up": "F32", "layers/2/w_down": "Q5_1"}


def kernels_of(model):
    """The kernel of each matrix, by its name."""
    flat = jax.tree_util.tree_flatten_with_path(
        model.params.weights, is_leaf=lambda leaf: isinstance(leaf, DecodeMatrix)
    )[0]
    return {
        "/".join(entry.key for entry in path): leaf.kernel
        for path, leaf in flat
        if isinstance(leaf, DecodeMatrix)
    }


@pytest.fixture(scope="module")
def model():
    params = jax.tree.map(jnp.asarray, random_params(CONFIG, 0, embed_std=0.1))
    return jllama.LanguageModel(CONFIG, params)


@pytest.fixture(params=["q8_0", "q4_0", "mixed"], scope="module")
def path(model, request, tmp_path_factory):
    """A file of one type, or whose layers have matrices of several."""
    path = tmp_path_factory.mktemp("blocks") / "m.gguf"
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "mixed":
            choose = registry.gguf._type_to_write
            patch.setattr(
                registry.gguf,
                "_type_to_write",
                lambda spec, *rest: (
                    gguf.GGMLQuantizationType[MIXED[spec.key]]
                    if spec.key in MIXED
                    else choose(spec, *rest)
                ),
            )
        jllama.save(model, path, "gguf", "q4_0" if request.param == "mixed" else request.param)
    return path


def test_logits_are_those_of_the_floats(path):
    kept = jllama.load(path)
    floats = jllama.load(path, dtype="float32")
    assert not any(kernels_of(floats).values())
    assert relative_error(kept(TOKENS), np.asarray(floats(TOKENS), np.float64)) < 3e-4


def test_a_layer_of_several_types_stays_apart(path):
    """What has no kernel becomes float32."""
    kernels = kernels_of(jllama.load(path))
    if len(set(kernels.values())) == 1:  # the whole file is of one
        assert kernels["layers/1/wqkv"] in ("Q8_0", "Q4_0")
        return
    assert kernels["layers/0/wv"] == "Q8_0"
    assert kernels["layers/0/wq"] == "Q4_0"
    assert kernels["layers/1/w_up"] == kernels["layers/2/w_down"] == ""
    assert kernels["layers/2/wqkv"] == kernels["layers/2/w_gate_up"] == "Q4_0"


def test_saved_again_nothing_changes(path, tmp_path):
    """From the blocks in memory come the numbers of the file."""
    jllama.save(jllama.load(path), tmp_path / "kept", "hf")
    jllama.save(jllama.load(path, dtype="float32"), tmp_path / "floats", "hf")
    name = "model.safetensors"
    assert (tmp_path / "kept" / name).read_bytes() == (tmp_path / "floats" / name).read_bytes()


def test_answers_are_the_same_alone_and_together(path):
    """Products have the same bits; sums of attention and norms differ by float32's rounding."""
    model = jllama.load(path)
    sampling = jllama.SamplingParams(temperature=0.7, seed=3)
    prompts = [
        jllama.Prompt([7 * index + 1, 5, *[9] * index], sampling, 12, drawn_log_probs=True)
        for index in range(9)
    ]
    together = dict(completions(model, prompts))
    for index, prompt in enumerate(prompts):
        ((_, alone),) = completions(model, [prompt])
        assert alone.ids == together[index].ids
        assert alone.log_probs == pytest.approx(together[index].log_probs, rel=1e-3)


def test_without_numba_it_says_what_is_lost(path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "numba" else find(name)
    )
    floats = jllama.load(path)
    assert not any(kernels_of(floats).values())
    note = capsys.readouterr().err
    assert "without numba" in note
    assert note.endswith("pip install 'jllama[cpu]'\n")
    jllama.load(path, dtype="float32")
    assert capsys.readouterr().err == ""
    quantized = jllama.load(path, quantize="int8")
    assert "without numba" in capsys.readouterr().err
    assert not any(kernels_of(quantized).values())


def test_int8_has_a_kernel_on_one_device(model):
    kernels = kernels_of(model.for_decoding("int8"))
    assert set(kernels.values()) == {"int8"}
    apart = jllama.decode_layout(model.params, CONFIG, "int8", joins=False)
    assert set(kernels_of(dataclasses.replace(model, params=apart)).values()) == {""}
