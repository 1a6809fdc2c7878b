"""What people add from outside the package, each in at most 30 lines, and used end to end."""

import dataclasses
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import jllama
from jllama import functional as F
from jllama import oracle
from jllama.checkpoints.tensors import Checkpoint, blocks
from jllama.commands import cli
from jllama.model import LAYER_CLASSES, Layer
from jllama.parameters import PARAMETERS, Parameter, tensor_specs
from jllama.rope_scaling import ROPE_SCALINGS, inverse_frequencies
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params


def add_an_optimizer():
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, as long as the parameter that it moves."""

    def lamb(config):
        direction = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        return optax.chain(direction, optax.scale_by_trust_ratio())

    jllama.OPTIMIZERS["lamb"] = lamb


def test_an_optimizer(tmp_path, monkeypatch):
    """It is trained with under the schedule, the clip and the weight decay of all, and its runs are resumed."""
    monkeypatch.setitem(jllama.OPTIMIZERS, "lamb", None)  # gone afterwards
    add_an_optimizer()
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def train(steps, **changes):
        config = jllama.TrainConfig(
            jllama.LlamaConfig(num_layers=2, embed_dim=32, num_heads=2, max_seq_len=32),
            run_dir=str(tmp_path / "run"),
            data=jllama.DataConfig(str(tmp_path / "text.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")),
            optimizer=jllama.OptimizerConfig("lamb", learning_rate=0.02),
            training=jllama.LoopConfig(batch_size=8, steps=steps, log_every=1, sample_tokens=0),
            **changes,
        )
        return jllama.train(config)

    train(20)
    train(40, resume="auto", resume_with_changes=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < losses[19] < losses[0] - 1


@dataclasses.dataclass(frozen=True)
class TypicalParams(jllama.SamplingParams):
    """SamplingParams, and ``typical_p``: draw among the tokens whose surprise is nearest the entropy; 1 is all."""

    typical_p: float = 1.0


def typical_mask(logits, p):
    """Locally typical sampling (Meister et al. 2022, arXiv:2202.00666)."""
    log_probs = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_probs)
    entropy = -jnp.sum(probs * log_probs, axis=-1, keepdims=True, where=probs > 0)
    order = jnp.argsort(jnp.abs(-log_probs - entropy), axis=-1)
    ranked = jnp.take_along_axis(probs, order, axis=-1)
    kept = jnp.cumsum(ranked, axis=-1) - ranked < p[:, None]  # what comes before does not reach p
    return jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1) | (p[:, None] >= 1)


def test_a_sampler(monkeypatch):
    """It draws what NumPy would leave, also beside a row that does not know its field; its default changes nothing."""
    config = jllama.LlamaConfig(
        vocab_size=259, num_layers=1, embed_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=96, max_seq_len=64
    )
    weights, prompt = random_params(config, 0), [1, 70, 80]
    params = jllama.decode_layout(jax.tree.map(jnp.asarray, weights), config)
    model, options = jllama.LanguageModel(config, params, BytesTokenizer()), {"max_new_tokens": 30, "stop_ids": ()}
    with pytest.raises(jllama.UsageError, match="nothing applies typical_p of TypicalParams: register a function"):
        jllama.generate(model, prompt, TypicalParams())
    monkeypatch.setitem(F.TRUNCATIONS, "typical_p", typical_mask)

    plain, typical = jllama.SamplingParams(seed=1), TypicalParams(seed=1, typical_p=0.2)
    (plain_text,) = jllama.generate(model, prompt, plain, **options)
    (typical_text,) = jllama.generate(model, prompt, sampling=typical, **options)
    assert jllama.generate(model, prompt, TypicalParams(seed=1), **options)[0].ids == plain_text.ids
    together = jllama.generate(model, [jllama.Prompt(prompt, sampling, **options) for sampling in (typical, plain)])
    assert [row.ids for row in together] == [typical_text.ids, plain_text.ids]
    logits = oracle.forward(weights, np.array([[*prompt, *typical_text.ids]]), config)[0, len(prompt) - 1 : -1]
    for scores, token in zip(logits, typical_text.ids, strict=True):
        probs = oracle.softmax(scores)
        order = np.argsort(np.abs(-np.log(probs) + np.sum(probs * np.log(probs))))
        assert token in order[: 1 + np.searchsorted(np.cumsum(probs[order]), 0.2 + 1e-6)]


def add_a_format():
    """One NumPy archive: the tensors by their keys, and the configuration as JSON."""

    def read(path):
        arrays = np.load(path)
        config = jllama.LlamaConfig(**json.loads(str(arrays["config"])))
        return Checkpoint(config, {spec.key: arrays[spec.key] for spec in tensor_specs(config)})

    def write(checkpoint, target, dtype, on_progress):
        arrays = {"config": np.array(json.dumps(dataclasses.asdict(checkpoint.config)))}
        for key, tensor in checkpoint.tensors.items():
            arrays[key] = np.concatenate(list(blocks(tensor, dtype or np.float32)))
            on_progress(arrays[key].nbytes)
        with target.open("wb") as file:
            np.savez(file, **arrays)

    dtypes = {"float32": 4, "float16": 2}  # an archive has no bfloat16
    jllama.FORMATS["npz"] = jllama.Format(
        "a NumPy archive", zipfile.is_zipfile, read, write, dtypes, is_file=True, suffix=".npz"
    )


def test_a_format(tmp_path, monkeypatch, capsys):
    """It is loaded, saved and converted like any other, from Python and at the command line."""
    monkeypatch.setitem(jllama.FORMATS, "npz", None)  # gone afterwards
    add_a_format()
    config = jllama.LlamaConfig(vocab_size=259, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=1, mlp_dim=48)
    weights = random_params(config, 0)
    jllama.save(jllama.LanguageModel(config, weights), tmp_path / "hf", "hf")
    assert cli.run("convert", [str(tmp_path / "hf"), str(tmp_path / "a.npz")]) == 0
    jllama.save(jllama.load(tmp_path / "a.npz"), tmp_path / "b", "npz")
    assert cli.run("convert", [str(tmp_path / "b"), str(tmp_path / "c"), "--to", "npz", "--dtype", "float16"]) == 0
    jllama.convert(tmp_path / "b", tmp_path / "gguf", "gguf")
    for name, dtype in (("a.npz", "float32"), ("b", "float32"), ("c", "float16"), ("gguf", "float32")):
        expected = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), weights)
        assert_same_bits(jllama.load(tmp_path / name, dtype, layout="training").params, expected)
    capsys.readouterr()
    assert cli.run("convert", [str(tmp_path / "hf"), str(tmp_path / "d.npz"), "--dtype", "bfloat16"]) == 2
    assert "dtype is 'bfloat16'; with npz it must be one of float32, float16" in capsys.readouterr().err


# A RoPE type, an implementation of attention, and rows of the table of parameters


SMALL = jllama.LlamaConfig(
    vocab_size=259, num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=1, head_dim=32, mlp_dim=96, max_seq_len=64
)


def add_a_rope_type():
    """NTK-aware scaling of any length by one factor: the last pair is slowed by it, the first one kept."""

    @dataclasses.dataclass(frozen=True)
    class NtkScaling(jllama.RopeScaling):
        type = "ntk"

        def frequencies(self, head_dim, theta, length):
            return inverse_frequencies(head_dim, theta * self.factor ** (head_dim / (head_dim - 2)))

    return NtkScaling


def test_a_rope_type(tmp_path, monkeypatch):
    """It is read from options, computed with, and kept by Hugging Face's files."""
    monkeypatch.setitem(ROPE_SCALINGS, "ntk", None)
    NtkScaling = add_a_rope_type()
    scaling = {"type": "ntk", "factor": 4.0}
    config = dataclasses.replace(SMALL, rope_scaling=scaling)
    assert config.rope_scaling == NtkScaling(4.0)
    params = jllama.initial_params(jax.random.key(0), config)
    jllama.save(jllama.LanguageModel(config, params, BytesTokenizer()), tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["rope_scaling"]["rope_type"] == "ntk"
    model = jllama.load(tmp_path / "hf")
    assert model.config.rope_scaling == NtkScaling(4.0)
    turned = dataclasses.replace(config, rope_theta=config.rope_theta * 4 ** (32 / 30), rope_scaling=None)
    tokens = np.arange(20)[None]
    np.testing.assert_allclose(model(tokens), oracle.forward(params, tokens, turned), rtol=1e-4, atol=1e-4)


def sliding_window(query, key, value, mask):
    """Each token sees no further back than eight tokens."""
    near = jnp.arange(query.shape[2])[:, None] - jnp.arange(key.shape[2]) < 8
    return F.grouped_query_attention(query, key, value, mask.dense(query.shape[2], key.shape[2]) & near)


def not_with_a_cache(query, key, mask):
    return None if mask.offset is None else "a cache"


def add_a_sliding_window():
    F.ATTENTION["window"] = F.AttentionImplementation(sliding_window, not_with_a_cache)


def test_an_attention_implementation(monkeypatch):
    """It is called by name in training and prefill; with a cache, which it does not know, it is an error."""

    monkeypatch.setitem(F.ATTENTION, "window", None)
    add_a_sliding_window()
    params = jllama.initial_params(jax.random.key(0), SMALL)
    tokens = jnp.arange(20)[None]

    def hidden(params, attention, tokens):
        return jllama.build_model(SMALL, params).hidden(tokens, attention=attention)

    for length, equal in ((8, True), (20, False)):
        window, full = (hidden(params, name, tokens[:, :length]) for name in ("window", "reference"))
        assert np.allclose(window, full, atol=1e-5) == equal
    assert np.isfinite(jax.grad(lambda params: hidden(params, "window", tokens).sum())(params)["embed"]).all()
    decoding = jllama.build_model(SMALL, jllama.decode_layout(params, SMALL))
    first, cache = decoding.forward_with_cache(tokens, None, jnp.array([20]), "window")
    np.testing.assert_allclose(first, hidden(params, "window", tokens), atol=1e-4)
    with pytest.raises(ValueError, match="the attention implementation 'window' cannot serve a cache"):
        decoding.forward_with_cache(tokens[:, :1], cache, jnp.array([1]), "window")


@dataclasses.dataclass(frozen=True)
class QKNormConfig(jllama.LlamaConfig):
    """A Llama whose queries and keys are normalized (as in Qwen 3)."""


def add_qk_norm():
    """A scale for each, and the block that uses them."""
    for name in ("q_norm", "k_norm"):
        PARAMETERS[f"layers/{name}"] = Parameter(
            ("layers", "head_dim"),
            huggingface=f"self_attn.{name}",
            role="scale",
            init="ones",
            when=lambda config: isinstance(config, QKNormConfig),
        )

    class QKNormLayer(Layer):
        def heads(self, x):
            query, key, value = super().heads(x)
            scales = self.q_norm[...], self.k_norm[...]
            return *(F.rms_norm(h, s, self.norm_eps) for h, s in zip((query, key), scales, strict=True)), value

    LAYER_CLASSES[QKNormConfig] = QKNormLayer


def test_rows_of_parameters(monkeypatch):
    """They are initialized, trained without decay, laid out for decoding and decoded with; other models have none."""
    for name in ("layers/q_norm", "layers/k_norm"):
        monkeypatch.setitem(PARAMETERS, name, None)
    monkeypatch.setitem(LAYER_CLASSES, QKNormConfig, None)
    add_qk_norm()
    config = QKNormConfig(**vars(SMALL))
    params = jllama.initial_params(jax.random.key(0), config)
    assert params["layers"].keys() - jllama.initial_params(jax.random.key(0), SMALL)["layers"].keys() == {
        "q_norm",
        "k_norm",
    }
    loop = jllama.LoopConfig(batch_size=4, seq_len=16, steps=4)
    training = jllama.compile_training(jllama.TrainConfig(config, training=loop), bos_id=257)
    state = training.init(jax.random.key(0))
    for _ in range(2):
        state, _ = training.step(state, np.random.default_rng(0).integers(0, 256, (4, 17)))
    assert not np.allclose(state.params["layers"]["q_norm"], 1.0, atol=1e-6)
    model = jllama.LanguageModel(config, state.params, BytesTokenizer())
    prompt = [257, 70, 80]
    (written,) = jllama.generate(model.for_decoding(), prompt, max_new_tokens=3, temperature=0.0, stop_ids=())
    logits = np.asarray(model([[*prompt, *written.ids]]))
    assert written.ids == np.argmax(logits[0, 2:-1], axis=-1).tolist()
