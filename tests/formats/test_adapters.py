"""Adapters: made for their base alone, read and written in every format, merged as they are
unmerged.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import sys

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
from helpers_checkpoints import change
from models import FILE, SMALL, forward, weights

from jllama.core import JllamaError, UsageError
from jllama.core.parameters import map_by_path
from jllama.formats import adapters
from jllama.formats.gguf_file import read_gguf_file
from jllama.formats.registry import ADAPTER_FORMATS, convert, load, open_checkpoint, save
from jllama.formats.run import read_adapter
from jllama.formats.tensors import base_fingerprint, tensor_specs
from jllama.lab.checks import relative_error
from jllama.models.config import LoraConfig
from jllama.models.language_model import LanguageModel
from jllama.models.lora import adapt

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


def lora_of(kind):
    return LoraConfig(rank=6, alpha=9.0, **KINDS[kind])


@functools.cache
def run_of(base, kind):
    lora = lora_of(kind)
    fingerprint = base_fingerprint(open_checkpoint(base))
    params = adapter_params(CONFIG, lora)
    return make_run(base.parent / kind, base, CONFIG, lora, params, fingerprint)


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
    """The adapters of runs in files, to copy: each as PEFT's, and what GGUF can hold as GGUF."""
    folder = tmp_path_factory.mktemp("exported")
    for kind in KINDS:
        convert(run_of(base, kind), folder / f"{kind}-peft", to="peft")
    convert(run_of(base, "lora"), folder / "lora-gguf-lora", to="gguf-lora")
    return folder


@pytest.fixture
def adapter(exported, tmp_path):
    """PEFT's files of a LoRA, to damage."""
    return shutil.copytree(exported / "lora-peft", tmp_path / "peft")


def params_of(path, **options):
    return load(path, layout="training", **options).params


@functools.cache
def base_params(base):
    return params_of(base)


def logits(path, **options):
    model = load(path, layout="training", **options)
    return np.asarray(forward(model.config, model.params, TOKENS))


@functools.cache
def base_logits(base):
    return logits(base)


def refused(problem, base, adapter, **options):
    with pytest.raises(JllamaError, match=problem):
        open_checkpoint(base, adapter=adapter, **options)


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
    norms = expected.split(":")[0]  # what is left where matrices are rounded otherwise
    for to, dtype, fingerprint in [
        ("orbax", None, expected),
        ("gguf", None, expected),
        ("llama2c", None, expected),
        ("meta", None, expected),
        ("gguf", "bfloat16", expected),
        ("gguf", "float16", norms),
        ("gguf", "q8_0", norms),
    ]:
        convert(tmp_path / "hf", target := tmp_path / f"{to}-{dtype}", to, dtype)
        assert base_fingerprint(open_checkpoint(target)) == fingerprint


def test_a_run_that_trained_an_adapter_is_its_base_with_that(base):
    run, lora = run_of(base, "dora"), lora_of("dora")
    assert open_checkpoint(run).adapter.lora == lora
    expected = forward(CONFIG, adapt(base_params(base), adapter_params(CONFIG, lora), lora), TOKENS)
    assert relative_error(logits(run), expected) < TOLERANCE
    assert_same_bits(params_of(base, adapter=run), params_of(run))
    assert relative_error(base_logits(base), expected) > 0.1
    assert open_checkpoint(run).step == open_checkpoint(base, adapter=run).step == 7


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_exported(peft, base, exported, kind):
    folder = exported / f"{kind}-peft"
    model = peft.PeftModel.from_pretrained(transformers_model(base), folder)
    assert model.active_peft_config.base_model_name_or_path == str(base)
    assert relative_error(torch_logits(model), logits(base, adapter=folder)) < TOLERANCE
    assert_same_bits(params_of(base, adapter=folder), params_of(run_of(base, kind)))


def saved_by_peft(peft, base, folder, **options):
    """Save an adapter of PEFT's with random numbers, and return the logits that it gives."""
    model = peft.get_peft_model(transformers_model(base), peft.LoraConfig(r=5, **options)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, leaf in model.named_parameters():
        if "lora_" in name:
            drawn = torch.randn(leaf.shape, generator=generator)
            if "magnitude" in name:
                leaf.data = leaf * (1 + 0.2 * drawn)
            else:
                leaf.data = drawn / leaf.shape[1] ** 0.5 / 2
    model.save_pretrained(folder)
    return torch_logits(model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_read(peft, base, kind, tmp_path):
    """And written as GGUF, unless it is a DoRA, and as PEFT's again, with the same bits."""
    expected = saved_by_peft(
        peft,
        base,
        tmp_path / "theirs",
        lora_alpha=7,
        target_modules=["q_proj", "v_proj", "o_proj", "gate_proj"],
        lora_dropout=0.1,
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
    )
    actual = logits(base, adapter=tmp_path / "theirs")
    assert relative_error(actual, expected) < TOLERANCE
    assert relative_error(actual, base_logits(base)) > 0.1
    first = open_checkpoint(base, adapter=tmp_path / "theirs").adapter
    assert first.lora.targets == ("wq", "wv", "wo", "w_gate")
    for to in ADAPTER_FORMATS if kind != "dora" else ["peft"]:
        convert(base, tmp_path / to, to=to, adapter=tmp_path / "theirs")
        again = open_checkpoint(base, adapter=tmp_path / to).adapter
        assert again.lora.targets == first.lora.targets
        assert again.lora.scale == pytest.approx(first.lora.scale, rel=1e-6)
        assert_same_bits(again.tensors, first.tensors)


def test_layers_that_peft_does_not_adapt_stay_as_they_are(peft, base, tmp_path):
    """Those not among ``layers_to_transform``, and other matrices in each layer."""
    for options in (
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]},
        {"target_modules": r".*\.0\..*(k_proj|up_proj)|.*\.1\..*down_proj"},
    ):
        expected = saved_by_peft(peft, base, tmp_path / "theirs", **options)
        actual = logits(base, adapter=tmp_path / "theirs")
        assert relative_error(actual, expected) < TOLERANCE
        assert relative_error(actual, base_logits(base)) > 0.01
    # A pair without its other half is damage, and so is a file without any.
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    tensors = safetensors.numpy.load_file(tmp_path / "theirs" / adapters.WEIGHTS)
    del tensors[name]
    safetensors.numpy.save_file(tensors, tmp_path / "theirs" / adapters.WEIGHTS)
    refused(f"{name} is absent", base, tmp_path / "theirs")
    safetensors.numpy.save_file({}, tmp_path / "theirs" / adapters.WEIGHTS)
    refused(r"does not fit this model: .* is absent", base, tmp_path / "theirs")


def test_an_adapter_of_the_head_is_named(peft, base, tmp_path):
    config = peft.LoraConfig(r=5, target_modules=["q_proj", "lm_head"])
    peft.get_peft_model(transformers_model(base), config).save_pretrained(tmp_path / "theirs")
    refused(r"adapts \S*lm_head\S*; jllama adapts matrices", base, tmp_path / "theirs")


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
def test_other_names_in_peft_files(base, exported, rename, tmp_path):
    shutil.copytree(exported / "dora-peft", tmp_path / "peft")
    rewritten(tmp_path / "peft", rename)
    actual, expected = (
        open_checkpoint(base, adapter=folder).adapter.tensors
        for folder in (tmp_path / "peft", exported / "dora-peft")
    )
    assert_same_bits(actual, expected)


def llama_cpps_rows(matrix, heads):
    """``permute`` of llama.cpp's ``convert_hf_to_gguf.py``, which its converter of adapters applies
    to ``lora_b``.
    """
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def write_gguf_lora(path, config, params, alpha):
    """As llama.cpp's ``convert_lora_to_gguf.py`` has it."""
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for spec in tensor_specs(config):
        if part := params["layers"].get(spec.path.removeprefix("layers/")):
            name = spec.name("gguf")
            a, b = part["a"][spec.layer].T, part["b"][spec.layer].T
            b = llama_cpps_rows(b, heads[name.split(".")[2]]) if name.split(".")[2] in heads else b
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_llama_cpps_adapters_are_read(base, tmp_path):
    """And written as llama.cpp writes them, bit for bit."""
    params = adapter_params(CONFIG, lora_of("lora"))
    write_gguf_lora(tmp_path / "theirs.gguf", CONFIG, params, 9.0)
    actual, expected = (
        open_checkpoint(base, adapter=path).adapter
        for path in (tmp_path / "theirs.gguf", run_of(base, "lora"))
    )
    assert actual.lora.scale == expected.lora.scale
    assert_same_bits(actual.tensors, expected.tensors)
    convert(base, tmp_path / "ours.gguf", to="gguf-lora", adapter=tmp_path / "theirs.gguf")
    ours, theirs = (read_gguf_file(tmp_path / name) for name in ("ours.gguf", "theirs.gguf"))
    assert {key: ours[0][key] for key in theirs[0]} == theirs[0]
    assert_same_bits(ours[1], theirs[1])


def test_a_rank_over_the_width_is_read(base, tmp_path):
    """Training refuses it, others do not."""
    tiled = {
        name: {"a": np.tile(part["a"], (1, 1, 12)), "b": np.tile(part["b"] / 12, (1, 12, 1))}
        for name, part in adapter_params(CONFIG, lora_of("lora"))["layers"].items()
    }
    write_gguf_lora(tmp_path / "adapter.gguf", CONFIG, {"layers": tiled}, 12 * 9.0)
    actual = params_of(base, adapter=tmp_path / "adapter.gguf")["layers"]["wq"]
    expected = params_of(run_of(base, "lora"))["layers"]["wq"]
    assert relative_error(actual, expected) < TOLERANCE


def test_on_an_accelerator_the_dtype_is_the_bases(base, exported, tmp_path, monkeypatch):
    """And not that in which the adapter is merged."""
    convert(base, tmp_path / "bfloat16", "hf", "bfloat16")
    options = {"adapter": exported / "lora-peft"}
    expected = params_of(tmp_path / "bfloat16", dtype="bfloat16", **options)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_same_bits(params_of(tmp_path / "bfloat16", **options), expected)


def test_a_merged_model_goes_through_every_format(tmp_path):
    """With the same bits; in one that rounds, as what was merged is rounded."""
    save(LanguageModel(FILE, weights(FILE)), tmp_path / "base", "hf")
    lora = LoraConfig(rank=3, alpha=2.0, dora=True)
    run = make_run(tmp_path / "run", tmp_path / "base", FILE, lora, adapter_params(FILE, lora))
    source, expected = run, params_of(run)
    for to in ("meta", "llama2c", "gguf", "orbax", "hf"):
        convert(source, tmp_path / to, to=to)
        assert_same_bits(params_of(tmp_path / to), expected)
        assert open_checkpoint(tmp_path / to).adapter is None
        source = tmp_path / to
    for dtype in ("bfloat16", "q8_0"):
        for name, start in {"run": run, "hf": source}.items():
            convert(start, tmp_path / f"{name}-{dtype}", "gguf", dtype)
        assert (tmp_path / f"run-{dtype}").read_bytes() == (tmp_path / f"hf-{dtype}").read_bytes()
    int8 = [load(path, quantize="int8").params for path in (run, source)]
    assert_same_bits(*int8)


def test_any_rows_are_those_of_the_whole(base):
    tensor = open_checkpoint(run_of(base, "dora")).tensors["layers/1/wq"]
    assert tensor.shape == (192, 64)
    whole = tensor[0:192]
    for start, stop in ((0, 1), (50, 51), (7, 130), (191, 192)):
        assert relative_error(tensor[start:stop], whole[start:stop]) < TOLERANCE


def test_an_adapter_knows_its_base(base, exported, adapter, tmp_path):
    """However either is written; made elsewhere, it fits what has its shapes."""
    other = map_by_path(lambda _, leaf: leaf * 2, weights(CONFIG))
    save(LanguageModel(CONFIG, other), tmp_path / "other", "hf")
    for dtype in ("float32", "float16", "q8_0"):
        convert(base, tmp_path / dtype, "gguf", dtype)
    for source in (run_of(base, "lora"), exported / "lora-peft", exported / "lora-gguf-lora"):
        for dtype in ("float32", "float16", "q8_0"):
            found = open_checkpoint(tmp_path / dtype, adapter=source).adapter
            assert found.base_fingerprint == base_fingerprint(open_checkpoint(base))
        own = f"({base}|the model that it)"
        refused(f"for another base, by its fingerprint: give {own}", tmp_path / "other", source)
    rewritten(adapter, str)  # without metadata
    unknown = open_checkpoint(tmp_path / "other", adapter=adapter).adapter
    assert unknown.base_fingerprint == ""


def test_an_adapter_on_a_run_that_trained_one(base, tmp_path):
    """The second was trained from the first, merged; the step is that of the given adapter."""
    first = run_of(base, "lora")
    lora = LoraConfig(rank=2, targets=("w_down",))
    fingerprint = base_fingerprint(open_checkpoint(first))
    second = make_run(
        tmp_path / "second", first, CONFIG, lora, adapter_params(CONFIG, lora), fingerprint, step=3
    )
    assert_same_bits(params_of(second), params_of(first, adapter=second))
    assert open_checkpoint(first, adapter=second, step=3).step == open_checkpoint(second).step == 3
    refused("has no checkpoint of step 7; it has 3", first, second, step=7)


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
    "r": 0,
}


@pytest.mark.parametrize(("key", "value"), REFUSED.items())
def test_what_peft_has_besides_lora_is_refused(base, adapter, key, value):
    change(adapter, adapters.CONFIG, **{key: value})
    problem = f"has {key} {json.dumps(value)}; jllama reads LoRA"
    if key == "r":
        problem = "has r 0; it must be a positive whole number"
    refused(re.escape(problem), base, adapter)


def test_what_does_not_fit_is_said(base, exported, adapter, tmp_path):
    save(LanguageModel(FILE, weights(FILE)), tmp_path / "other", "hf")
    problem = r"does not fit this model: .*lora_B.weight is \[192, 6\], expected \[32, 6\]"
    refused(problem, tmp_path / "other", adapter)
    rewritten(
        adapter, lambda name: name.replace("layers.1.self_attn.q_proj", "layers.1.self_attn.qkv")
    )
    refused(r"qkv.lora_A.weight is \[6, 64\], expected none", base, adapter)
    save(LanguageModel(CONFIG, weights(CONFIG)), tmp_path / "model.gguf", "gguf")
    convert(base, tmp_path / "whole", to="orbax")
    for path, problem in {
        tmp_path / "model.gguf": r"has general.type None, so it is not a plain LoRA of a Llama",
        base: "is no adapter that jllama knows: give PEFT's folder, a GGUF LoRA, or a run",
        tmp_path / "nowhere": "there is no adapter at",
        tmp_path / "whole": "is a run that trained no adapter: give it as the checkpoint itself",
    }.items():
        refused(problem, base, path)
    for alone in (adapter, exported / "lora-gguf-lora"):
        refused("is an adapter: give its base as the checkpoint, and the adapter with", alone, None)
    with pytest.raises(UsageError, match="is not a training run, so it has no step 3"):
        open_checkpoint(base, adapter=exported / "lora-gguf-lora", step=3)


def test_a_run_needs_its_base(base, tmp_path):
    lora = LoraConfig(rank=2, targets=("wv",))
    make_run(tmp_path / "gone", tmp_path / "moved", CONFIG, lora, adapter_params(CONFIG, lora))
    make_run(tmp_path / "circle", tmp_path / "circle", CONFIG, lora, adapter_params(CONFIG, lora))
    problem = "has adapters of its init_from: "
    refused(f"gone {problem}there is no checkpoint at", tmp_path / "gone", None)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)  # to go round the circle a few times
    try:
        refused(f"circle {problem}.*maximum recursion depth", tmp_path / "circle", None)
    finally:
        sys.setrecursionlimit(limit)
    assert open_checkpoint(base, adapter=tmp_path / "gone").adapter.lora == lora


def test_what_cannot_be_written_is_refused_and_nothing_is(base, exported, tmp_path):
    run, peft = run_of(base, "dora"), tmp_path / "peft"
    shutil.copytree(exported / "dora-peft", peft)
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
        convert(base, peft, to="hf", adapter=peft, overwrite=True)
    with pytest.raises(JllamaError, match=r"is .*hf itself"):
        convert(run, base, to="hf", overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    convert(run, peft, to="peft", overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("to", ADAPTER_FORMATS)
def test_a_pipe_in_an_adapter_is_refused_at_once(base, exported, to, tmp_path):
    """Reading one would wait for ever."""
    source, target = exported / f"lora-{to}", tmp_path / "adapter"
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    for path in sorted(target.iterdir()) if target.is_dir() else [target]:
        problem = f"{re.escape(str(path))} is a pipe, a socket or a device"
        whole = path.read_bytes()
        for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            path.unlink()
            replace(path)
            refused(problem, base, target)
        path.unlink()
        path.write_bytes(whole)
    open_checkpoint(base, adapter=target)


@pytest.mark.parametrize("to", [*ADAPTER_FORMATS, "run"])
def test_numbers_that_are_not_finite_are_refused(base, to, tmp_path):
    lora = LoraConfig(rank=2, targets=("wv",))
    for name, number in {"nan": np.nan, "endless": -np.inf}.items():
        params = adapter_params(CONFIG, lora)
        params["layers"]["wv"]["b"][1, 0, 3] = number
        source = make_run(tmp_path / f"run-{name}", base, CONFIG, lora, params)
        if to != "run":
            read = read_adapter(source, CONFIG)
            source = tmp_path / name
            if to == "peft":
                source.mkdir()
            ADAPTER_FORMATS[to].write(read, source, None, lambda _: None)
        refused(r"has NaN or infinity in layers/1/wv/b: use another copy, or an", base, source)


def test_two_names_for_one_matrix_are_refused(base, adapter):
    tensors = safetensors.numpy.load_file(adapter / adapters.WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name.replace("lora_A", "lora_A.default")] = 2 * tensors[name]
    safetensors.numpy.save_file(tensors, adapter / adapters.WEIGHTS)
    refused(f"holds {re.escape(name)} twice, once as .*: remove one of them", base, adapter)
