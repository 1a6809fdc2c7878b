"""Adapters: made for their base alone, read and written in every format, merged as they are
unmerged.
"""

import dataclasses
import functools
import importlib
import json
import os
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from helpers import assert_same_bits
from helpers_adapters import adapter_params, make_run
from hypothesis import given
from hypothesis import strategies as st
from models import FILE, SMALL, forward, weights

from jllama.checkpoints import adapters, registry
from jllama.checkpoints.gguf_file import read_gguf_file
from jllama.checkpoints.registry import ADAPTER_FORMATS, convert, load, open_checkpoint, save
from jllama.checkpoints.tensors import base_fingerprint
from jllama.config import LoraConfig
from jllama.errors import JllamaError, UsageError
from jllama.language_model import LanguageModel
from jllama.lora import adapt
from jllama.parameters import map_by_path, tensor_specs
from jllama.verify.checks import relative_error

CONFIG = dataclasses.replace(SMALL, vocab_size=97, head_dim=48, max_seq_len=80)
"""Heads that are not as wide together as the embedding, sharing keys and values."""
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 70))
KINDS = {"lora": {}, "rslora": {"rank_stabilized": True}, "dora": {"dora": True}}
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def peft():
    """Imported here, since that takes seconds, also in processes that run other tests."""
    return importlib.import_module("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base of float32 numbers that bfloat16 holds, as most released models are."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    rounded = map_by_path(lambda _, leaf: np.float32(leaf.astype(jnp.bfloat16)), weights(CONFIG))
    save(LanguageModel(CONFIG, rounded), folder, "hf")
    return folder


@functools.cache
def run_of(base, kind):
    lora = LoraConfig(rank=6, alpha=9.0, **KINDS[kind])
    folder = base.parent / kind
    return make_run(
        folder,
        base,
        CONFIG,
        lora,
        adapter_params(CONFIG, lora),
        base_fingerprint(open_checkpoint(base)),
    )


def logits(path, **options):
    model = load(path, layout="training", **options)
    return np.asarray(forward(model.config, model.params, TOKENS))


def transformers_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def torch_logits(model):
    return model(torch.tensor(TOKENS)).logits.numpy()


def test_a_base_has_one_fingerprint_in_every_format_and_dtype(tmp_path):
    rounded = map_by_path(lambda _, leaf: np.float32(leaf.astype(jnp.bfloat16)), weights(FILE))
    save(LanguageModel(FILE, rounded), tmp_path / "hf", "hf")
    expected = base_fingerprint(open_checkpoint(tmp_path / "hf"))
    assert len(expected) == 129
    for to, dtype in [
        ("orbax", None),
        ("gguf", None),
        ("llama2c", None),
        ("meta", None),
        ("gguf", "bfloat16"),
    ]:
        convert(tmp_path / "hf", target := tmp_path / f"{to}-{dtype}", to, dtype)
        assert base_fingerprint(open_checkpoint(target)) == expected
    for dtype in ("float16", "q8_0"):  # rounded: the norms are left
        convert(tmp_path / "hf", target := tmp_path / f"{dtype}.gguf", "gguf", dtype)
        assert base_fingerprint(open_checkpoint(target)) == expected.split(":")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_trained_an_adapter_is_its_base_with_that(base, kind):
    run = run_of(base, kind)
    lora = open_checkpoint(run).adapter.lora
    params = load(base, layout="training").params
    expected = forward(CONFIG, adapt(params, adapter_params(CONFIG, lora), lora), TOKENS)
    assert relative_error(logits(run), expected) < 1e-6
    assert np.array_equal(logits(run), logits(base, adapter=run))
    assert relative_error(logits(base), expected) > 0.1
    assert open_checkpoint(run).step == open_checkpoint(base, adapter=run).step == 7


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_exported(peft, base, kind, tmp_path):
    convert(run_of(base, kind), tmp_path / "peft", to="peft")
    model = peft.PeftModel.from_pretrained(transformers_model(base), tmp_path / "peft")
    assert model.active_peft_config.base_model_name_or_path == str(base)
    assert relative_error(torch_logits(model), logits(run_of(base, kind))) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_read(peft, base, kind, tmp_path):
    """And written as GGUF, unless it is a DoRA, and as PEFT's again, with the same bits."""
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj"]
    options = {"use_rslora": kind == "rslora", "use_dora": kind == "dora"}
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=targets, lora_dropout=0.1, **options)
    model = peft.get_peft_model(transformers_model(base), config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, leaf in model.named_parameters():
        if "lora_" in name:
            drawn = torch.randn(leaf.shape, generator=generator)
            leaf.data = (
                leaf * (1 + 0.2 * drawn) if "magnitude" in name else drawn / leaf.shape[1] ** 0.5
            )
    model.save_pretrained(tmp_path / "theirs")
    found = logits(base, adapter=tmp_path / "theirs")
    assert relative_error(found, torch_logits(model)) < TOLERANCE
    assert relative_error(found, logits(base)) > 0.1
    first = open_checkpoint(base, adapter=tmp_path / "theirs").adapter
    assert first.lora.targets == ("wq", "wv", "wo", "w_gate")
    for to in ADAPTER_FORMATS if kind != "dora" else ["peft"]:
        convert(base, tmp_path / to, to=to, adapter=tmp_path / "theirs")
        again = open_checkpoint(base, adapter=tmp_path / to).adapter
        assert again.lora.targets == first.lora.targets
        assert again.lora.scale == pytest.approx(
            7 / 5**0.5 if kind == "rslora" else 7 / 5, rel=1e-7
        )
        assert_same_bits(again.tensors, first.tensors)


def test_layers_that_peft_does_not_adapt_stay_as_they_are(peft, base, tmp_path):
    """Those not among ``layers_to_transform``, and other matrices in each layer."""
    for options in (
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.0\..*(k_proj|up_proj)|.*\.1\..*down_proj"},
    ):
        model = peft.get_peft_model(transformers_model(base), peft.LoraConfig(r=5, **options))
        for name, leaf in model.named_parameters():
            if "lora_" in name:
                leaf.data = torch.randn(leaf.shape) / leaf.shape[1] ** 0.5
        model.eval().save_pretrained(tmp_path / "theirs")
        found = logits(base, adapter=tmp_path / "theirs")
        assert relative_error(found, torch_logits(model)) < TOLERANCE
        assert relative_error(found, logits(base)) > 0.01
    # A pair without its other half is damage, and so is a file without any.
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    tensors = safetensors.numpy.load_file(tmp_path / "theirs" / adapters.WEIGHTS)
    del tensors[name]
    safetensors.numpy.save_file(tensors, tmp_path / "theirs" / adapters.WEIGHTS)
    with pytest.raises(JllamaError, match=f"{name} is absent"):
        open_checkpoint(base, adapter=tmp_path / "theirs")
    safetensors.numpy.save_file({}, tmp_path / "theirs" / adapters.WEIGHTS)
    with pytest.raises(JllamaError, match=r"does not fit this model: .* is absent"):
        open_checkpoint(base, adapter=tmp_path / "theirs")


def test_an_adapter_of_the_head_is_named(peft, base, tmp_path):
    config = peft.LoraConfig(r=5, target_modules=["q_proj", "lm_head"])
    peft.get_peft_model(transformers_model(base), config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(JllamaError, match=r"adapts \S*lm_head\S*; jllama adapts matrices"):
        open_checkpoint(base, adapter=tmp_path / "theirs")


def rewritten(folder, rename):
    tensors = safetensors.numpy.load_file(folder / adapters.WEIGHTS)
    safetensors.numpy.save_file(
        {rename(name): tensor for name, tensor in tensors.items()}, folder / adapters.WEIGHTS
    )


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: re.sub(r"(lora_[AB])", r"\1.default", name).replace(
            "vector", "vector.default.weight"
        ),
        lambda name: name.replace(
            "base_model.model.model.", "base_model.model."
        ),  # trained without the head
        lambda name: name.replace("base_model.model.", "").replace("vector", "vector.weight"),
    ],
    ids=["default", "headless", "bare"],
)
def test_other_names_in_peft_files(base, rename, tmp_path):
    convert(run_of(base, "dora"), tmp_path / "peft", to="peft")
    rewritten(tmp_path / "peft", rename)
    assert np.array_equal(logits(base, adapter=tmp_path / "peft"), logits(run_of(base, "dora")))


def llama_cpps_rows(matrix, heads):
    """``permute`` of llama.cpp's ``convert_hf_to_gguf.py``, which its converter of adapters applies
    to ``lora_b``.
    """
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf_lora(path, config, params, alpha, heads=None, swapped=False):
    """As llama.cpp's ``convert_lora_to_gguf.py`` has it; with mistakes, if asked."""
    heads = heads or {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for spec in tensor_specs(config):
        if part := params["layers"].get(spec.path.removeprefix("layers/")):
            name = spec.name("gguf")
            a, b = part["a"][spec.layer].T, part["b"][spec.layer].T
            b = llama_cpps_rows(b, heads[name.split(".")[2]]) if name.split(".")[2] in heads else b
            if swapped:
                a, b = b.T, a.T
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SQUARE = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=2, head_dim=16)
SQUARE_LORA = LoraConfig(rank=6, alpha=9.0, targets=("wq", "wk", "wo"))


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """A base with matrices that are square, so that A and B can take each other's place; its
    adapter; its logits.
    """
    folder = tmp_path_factory.mktemp("square") / "hf"
    save(LanguageModel(SQUARE, weights(SQUARE)), folder, "hf")
    params = adapter_params(SQUARE, SQUARE_LORA)
    whole = adapt(load(folder, layout="training").params, params, SQUARE_LORA)
    return folder, params, np.asarray(forward(SQUARE, whole, TOKENS))


def test_llama_cpps_adapters_are_read(square, tmp_path):
    folder, params, expected = square
    write_gguf_lora(tmp_path / "adapter.gguf", SQUARE, params, SQUARE_LORA.alpha)
    assert relative_error(logits(folder, adapter=tmp_path / "adapter.gguf"), expected) < 1e-6
    # And written as llama.cpp writes them, bit for bit.
    convert(folder, tmp_path / "ours.gguf", to="gguf-lora", adapter=tmp_path / "adapter.gguf")
    ours, theirs = (read_gguf_file(tmp_path / name) for name in ("ours.gguf", "adapter.gguf"))
    assert {key: ours[0][key] for key in theirs[0]} == theirs[0]
    assert {name: np.asarray(tensor).tobytes() for name, tensor in ours[1].items()} == {
        name: np.asarray(tensor).tobytes() for name, tensor in theirs[1].items()
    }


@pytest.mark.parametrize(
    "mistake",
    [
        {"alpha": SQUARE_LORA.alpha * SQUARE_LORA.rank},
        {"alpha": SQUARE_LORA.alpha / SQUARE_LORA.rank},
        {"heads": {"attn_q": 1, "attn_k": 1}, "alpha": 9.0},
        {"heads": {"none": 1}, "alpha": 9.0},
        {"heads": {"attn_q": 4, "attn_k": 4}, "alpha": 9.0},
        {"targets": ("wq", "wo"), "swapped": True, "alpha": 9.0},
    ],
    ids=["undivided", "divided_twice", "one_head", "not_permuted", "heads_of_queries", "swapped"],
)
def test_a_mistake_in_a_file_would_be_seen(square, tmp_path, mistake):
    folder, params, expected = square
    targets = mistake.pop("targets", SQUARE_LORA.targets)
    some = {"layers": {name: params["layers"][name] for name in targets}}
    if targets != SQUARE_LORA.targets:
        write_gguf_lora(tmp_path / "right.gguf", SQUARE, some, 9.0)
        expected = logits(folder, adapter=tmp_path / "right.gguf")
    write_gguf_lora(tmp_path / "wrong.gguf", SQUARE, some, **mistake)
    assert (
        relative_error(logits(folder, adapter=tmp_path / "wrong.gguf"), expected) > 100 * TOLERANCE
    )


def test_a_rank_over_the_width_is_read(square, tmp_path):
    """Training refuses it, others do not."""
    folder, params, expected = square
    tiled = {
        name: {"a": np.tile(part["a"], (1, 1, 12)), "b": np.tile(part["b"] / 12, (1, 12, 1))}
        for name, part in params["layers"].items()
    }
    write_gguf_lora(tmp_path / "adapter.gguf", SQUARE, {"layers": tiled}, 12 * SQUARE_LORA.alpha)
    assert relative_error(logits(folder, adapter=tmp_path / "adapter.gguf"), expected) < TOLERANCE


def test_on_an_accelerator_the_dtype_is_the_bases(base, tmp_path, monkeypatch):
    """And not that in which the adapter is merged."""
    convert(base, tmp_path / "bfloat16", "hf", "bfloat16")
    expected = load(
        tmp_path / "bfloat16", "bfloat16", layout="training", adapter=run_of(base, "lora")
    ).params
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_same_bits(
        load(tmp_path / "bfloat16", layout="training", adapter=run_of(base, "lora")).params,
        expected,
    )


def test_a_merged_model_goes_through_every_format(tmp_path):
    """With the same bits; in one that rounds, as what was merged is rounded."""
    save(LanguageModel(FILE, weights(FILE)), tmp_path / "base", "hf")
    lora = LoraConfig(rank=3, alpha=2.0, dora=True)
    run = make_run(tmp_path / "run", tmp_path / "base", FILE, lora, adapter_params(FILE, lora))
    source, expected = run, load(run, layout="training").params
    for to in ("meta", "llama2c", "gguf", "hf", "orbax"):
        convert(source, tmp_path / to, to=to)
        assert_same_bits(load(tmp_path / to, layout="training").params, expected)
        assert open_checkpoint(tmp_path / to).adapter is None
        source = tmp_path / to
    for dtype in ("bfloat16", "q8_0"):
        for name, start in {"run": run, "hf": source}.items():
            convert(start, tmp_path / f"{name}-{dtype}", "gguf", dtype)
        assert (tmp_path / f"run-{dtype}").read_bytes() == (tmp_path / f"hf-{dtype}").read_bytes()
    int8 = [load(path, quantize="int8").params for path in (run, source)]
    assert_same_bits(*int8)


@functools.cache
def adapted_rows(base):
    return open_checkpoint(run_of(base, "dora")).tensors["layers/1/wq"]


@given(
    rows=st.tuples(st.integers(0, 191), st.integers(1, 192)).filter(lambda rows: rows[0] < rows[1])
)
def test_any_rows_are_those_of_the_whole(base, rows):
    tensor = adapted_rows(base)
    start, stop = rows
    assert tensor.shape == (192, 64)
    np.testing.assert_allclose(tensor[start:stop], tensor[0:192][start:stop], rtol=1e-5, atol=1e-6)


def test_an_adapter_knows_its_base(base, tmp_path):
    """However either is written; made elsewhere, it fits what has its shapes."""
    save(
        LanguageModel(CONFIG, map_by_path(lambda _, leaf: leaf * 2, weights(CONFIG))),
        tmp_path / "other",
        "hf",
    )
    run = run_of(base, "lora")
    for to in ADAPTER_FORMATS:
        convert(run, tmp_path / to, to=to)
    for dtype in ("float32", "float16", "q8_0"):
        convert(base, tmp_path / dtype, "gguf", dtype)
        for adapter in (run, *(tmp_path / to for to in ADAPTER_FORMATS)):
            found = open_checkpoint(tmp_path / dtype, adapter=adapter).adapter
            assert found.base_fingerprint == base_fingerprint(open_checkpoint(base))
    for adapter in (run, *(tmp_path / to for to in ADAPTER_FORMATS)):
        with pytest.raises(
            JllamaError,
            match=f"for another base, by its fingerprint: give ({base}|the model that it)",
        ):
            open_checkpoint(tmp_path / "other", adapter=adapter)
    rewritten(tmp_path / "peft", str)  # without metadata
    assert (
        open_checkpoint(tmp_path / "other", adapter=tmp_path / "peft").adapter.base_fingerprint
        == ""
    )


def test_an_adapter_on_a_run_that_trained_one(base, tmp_path):
    """The second was trained from the first, merged; the step is that of the given adapter."""
    first = run_of(base, "lora")
    lora = LoraConfig(rank=2, targets=("w_down",))
    fingerprint = base_fingerprint(open_checkpoint(first))
    second = make_run(
        tmp_path / "second", first, CONFIG, lora, adapter_params(CONFIG, lora), fingerprint, step=3
    )
    assert np.array_equal(logits(second), logits(first, adapter=second))
    assert open_checkpoint(first, adapter=second, step=3).step == open_checkpoint(second).step == 3
    with pytest.raises(JllamaError, match="has no checkpoint of step 7; it has 3"):
        open_checkpoint(first, adapter=second, step=7)


REFUSED = {
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "init_lora_weights": "pissa",
    "alora_invocation_tokens": [1],
    "fan_in_fan_out": True,
    "peft_type": "VERA",
    "some_future_option": True,
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_peft_has_besides_lora_is_refused(base, key, tmp_path):
    convert(run_of(base, "lora"), tmp_path / "peft", to="peft")
    config = json.loads((tmp_path / "peft" / adapters.CONFIG).read_text())
    (tmp_path / "peft" / adapters.CONFIG).write_text(json.dumps(config | {key: REFUSED[key]}))
    with pytest.raises(
        JllamaError, match=re.escape(f"has {key} {json.dumps(REFUSED[key])}; jllama reads LoRA")
    ):
        open_checkpoint(base, adapter=tmp_path / "peft")
    (tmp_path / "peft" / adapters.CONFIG).write_text(json.dumps(config | {"r": 0}))
    with pytest.raises(JllamaError, match="has r 0; it must be a positive whole number"):
        open_checkpoint(base, adapter=tmp_path / "peft")


def test_what_does_not_fit_is_said(base, square, tmp_path):
    convert(run := run_of(base, "lora"), tmp_path / "peft", to="peft")
    with pytest.raises(
        JllamaError,
        match=r"does not fit this model: .*lora_B.weight is \[192, 6\], expected \[64, 6\]",
    ):
        open_checkpoint(square[0], adapter=tmp_path / "peft")
    rewritten(
        tmp_path / "peft",
        lambda name: name.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.qkv"),
    )
    with pytest.raises(JllamaError, match=r"qkv.lora_A.weight is \[6, 64\], expected none"):
        open_checkpoint(base, adapter=tmp_path / "peft")
    convert(run, tmp_path / "adapter.gguf", to="gguf-lora")
    save(LanguageModel(CONFIG, weights(CONFIG)), tmp_path / "model.gguf", "gguf")
    cases = {
        tmp_path / "model.gguf": r"has general.type None, so it is not a plain LoRA of a Llama",
        base: "is no adapter that jllama knows: give PEFT's folder, a GGUF LoRA, or a run",
        tmp_path / "nowhere": "there is no adapter at",
    }
    for adapter, message in cases.items():
        with pytest.raises(JllamaError, match=message):
            open_checkpoint(base, adapter=adapter)
    for alone in ("peft", "adapter.gguf"):
        with pytest.raises(
            JllamaError,
            match="is an adapter: give its base as the checkpoint, and the adapter with --adapter",
        ):
            open_checkpoint(tmp_path / alone)
    with pytest.raises(UsageError, match="is not a training run, so it has no step 3"):
        open_checkpoint(base, adapter=tmp_path / "adapter.gguf", step=3)
    convert(base, tmp_path / "whole", to="orbax")
    with pytest.raises(
        JllamaError, match="is a run that trained no adapter: give it as the checkpoint itself"
    ):
        open_checkpoint(base, adapter=tmp_path / "whole")


def test_a_run_needs_its_base(base, tmp_path):
    lora = LoraConfig(rank=2, targets=("wv",))
    make_run(tmp_path / "gone", tmp_path / "moved", CONFIG, lora, adapter_params(CONFIG, lora))
    make_run(tmp_path / "circle", tmp_path / "circle", CONFIG, lora, adapter_params(CONFIG, lora))
    for name, reason in {
        "gone": "there is no checkpoint at",
        "circle": "maximum recursion depth",
    }.items():
        with pytest.raises(JllamaError, match=f"{name} has adapters of its init_from: .*{reason}"):
            open_checkpoint(tmp_path / name)
    assert open_checkpoint(base, adapter=tmp_path / "gone").adapter.lora == lora


def test_what_cannot_be_written_is_refused_and_nothing_is(base, tmp_path):
    convert(run := run_of(base, "dora"), tmp_path / "peft", to="peft")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        JllamaError, match=r"has DoRA, which GGUF cannot carry: merge it \(gguf\), or choose peft"
    ):
        convert(run, tmp_path / "adapter.gguf", to="gguf-lora")
    with pytest.raises(UsageError, match="has no adapter to write as peft: give one with adapter"):
        convert(base, tmp_path / "none", to="peft")
    with pytest.raises(
        UsageError, match="dtype is 'bfloat16'; with peft it must be one of float32"
    ):
        convert(run, tmp_path / "none", to="peft", dtype="bfloat16")
    # What a merged model is made of must outlive it.
    with pytest.raises(JllamaError, match=r"is .*peft itself"):
        convert(base, tmp_path / "peft", to="hf", adapter=tmp_path / "peft", overwrite=True)
    with pytest.raises(JllamaError, match=r"is .*hf itself"):
        convert(run, base, to="hf", overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    convert(run, tmp_path / "peft", to="peft", overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("to", ["peft", "gguf-lora"])
def test_a_pipe_in_an_adapter_is_refused_at_once(base, to, tmp_path):
    """Reading one would wait for ever."""
    convert(run_of(base, "lora"), tmp_path / "adapter", to=to)
    for path in (
        [tmp_path / "adapter"] if to == "gguf-lora" else sorted((tmp_path / "adapter").iterdir())
    ):
        whole = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(
            JllamaError, match=f"{re.escape(str(path))} is a pipe, a socket or a device"
        ):
            open_checkpoint(base, adapter=tmp_path / "adapter")
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(
            JllamaError, match=f"{re.escape(str(path))} is a pipe, a socket or a device"
        ):
            open_checkpoint(base, adapter=tmp_path / "adapter")
        path.unlink()
        path.write_bytes(whole)
    open_checkpoint(base, adapter=tmp_path / "adapter")


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("to", ["peft", "gguf-lora", "run"])
def test_numbers_that_are_not_finite_are_refused(base, number, to, tmp_path):
    lora = LoraConfig(rank=2, targets=("wv",))
    params = adapter_params(CONFIG, lora)
    params["layers"]["wv"]["b"][1, 0, 3] = number
    adapter = make_run(tmp_path / "run", base, CONFIG, lora, params)
    message = r"has NaN or infinity in layers/1/wv/b: use another copy, or an earlier one"
    if to != "run":
        read = registry._read_adapter(adapter, CONFIG, None)
        (tmp_path / "peft").mkdir()
        adapter = tmp_path / "peft" if to == "peft" else tmp_path / "adapter.gguf"
        ADAPTER_FORMATS[to].write(read, adapter, None, lambda _: None)
    with pytest.raises(JllamaError, match=message):
        open_checkpoint(base, adapter=adapter)


def test_two_names_for_one_matrix_are_refused(base, tmp_path):
    convert(run_of(base, "lora"), tmp_path / "peft", to="peft")
    path = tmp_path / "peft" / adapters.WEIGHTS
    tensors = safetensors.numpy.load_file(path)
    name = next(name for name in tensors if "lora_A" in name)
    other = name.replace("lora_A", "lora_A.default")
    safetensors.numpy.save_file(tensors | {other: 2 * tensors[name]}, path)
    with pytest.raises(
        JllamaError, match=f"holds {re.escape(name)} twice, once as .*: remove one of them"
    ):
        open_checkpoint(base, adapter=tmp_path / "peft")
