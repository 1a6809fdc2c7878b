"""What people add from outside the package, as docs/extend.md shows it, used end to end."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, run_command
from models import SERVED, params, weights

import jllama
from jllama import functional as F
from jllama.core.config import BLOCKS as LAYERS
from jllama.core.config import ROPE_SCALINGS
from jllama.core.model import KVCache
from jllama.core.parameters import PARAMETERS
from jllama.lab.checks import random_params, relative_error
from jllama.models import oracle
from jllama.tokenizers.base import BytesTokenizer

PAGE = Path(__file__).parent.parent / "docs" / "extend.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
ADDED = [
    (ROPE_SCALINGS, "ntk"),
    (F.TRUNCATIONS, "typical_p"),
    (F.ATTENTION, "window"),
    (jllama.OPTIMIZERS, "lamb"),
    (jllama.FORMATS, "npz"),
    (PARAMETERS, "layers/v_norm"),
    (LAYERS, "value_norm"),
    (jllama.REWARDS, "ends_with"),
]
SMALL = dataclasses.replace(SERVED, max_seq_len=64)
IN_A_WINDOW = dataclasses.replace(SMALL, sliding_window=8)  # as far as the page's attention sees
WEIGHTS = weights(SMALL)
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 20))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's code in its order, as a file; its registrations are removed afterwards."""
    registries = [registry for registry, _ in ADDED] + [jllama.OBJECTIVES]
    before = [dict(registry) for registry in registries]
    path = tmp_path_factory.mktemp("page") / "my_additions.py"
    path.write_text("\n\n".join(BLOCKS))
    yield path
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture(scope="module")
def additions(page):
    """The page's code as a module."""
    spec = importlib.util.spec_from_file_location("my_additions", page)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_adds_to_every_registry(additions):
    """And says in at most 30 lines how each of its additions is made."""
    for registry, name in ADDED:
        assert name in registry
    assert max(len(block.splitlines()) for block in BLOCKS) <= 30


# Training: a block with a parameter, an optimizer and an objective


def teacher():
    """A model that is sure of its predictions, so that there is something to learn from it."""
    params = random_params(SMALL, 1)
    return jllama.LanguageModel(SMALL, params | {"lm_head": 8 * params["lm_head"]})


@pytest.fixture(scope="module")
def run(page, additions):
    """A folder with a run that has them all, made at the command line."""
    jllama.OBJECTIVES["distillation"] = additions.distillation(teacher())
    folder = page.parent
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (folder / "mine.yaml").write_text(f"""
imports: [{page.name}]
run_dir: run
model: {{num_layers: 2, embed_dim: 32, num_heads: 2, max_seq_len: 32, block: value_norm}}
data: {{path: text.txt, tokenizer: bytes, cache_dir: cache}}
optimizer: {{name: lamb, learning_rate: 0.02}}
training: {{objective: distillation, batch_size: 8, steps: 10, log_every: 1, sample_tokens: 0}}
""")
    done = run_command("train", "mine.yaml", place=folder)
    assert done.code == 0, done.err
    return folder / "run"


def test_a_run_is_used_with_the_file_alone(page, run, monkeypatch):
    """Each command needs it on its own command line: a folder's configuration brings no code."""
    folder = page.parent
    (folder / "evil.py").write_text("open('was_run', 'w')\nx = 1 / 0\n")
    config = run / "config.yaml"
    config.write_text(config.read_text() + "imports: [evil.py]\n")
    more = ["--training.steps=20", "--resume_with_changes"]
    for command in (
        ["sample", "run", "--prompt", "the", "--max_new_tokens", "3"],
        ["eval", "run", "--data", "text.txt"],
        ["convert", "run", "copy", "--to", "orbax"],
        ["train", "--resume", "run", *more],
    ):
        # As in another process.
        monkeypatch.delitem(LAYERS, "value_norm", raising=False)
        monkeypatch.delitem(sys.modules, str(page), raising=False)
        done = run_command(*command, place=folder)
        assert done.code > 0
        assert "block is value_norm; it must be one that" in done.err
        done = run_command(*command, "--import", page.name, place=folder)
        assert done.code == 0, done.err
    assert not (folder / "was_run").exists()
    done = run_command("convert", "run", "run.gguf", place=folder)
    assert done.code == 1
    assert "no family of models has block" in done.err

    # 1) The log.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[9] < losses[0] - 0.5
    figures = [line["validation_figures"] for line in lines if "validation_loss" in line]
    assert figures
    assert all(0 <= line["same_choice"] <= 1 for line in figures)
    assert "perplexity" not in json.dumps(figures)

    # 2) The model, in both layouts, and saved again.
    model = jllama.load(run)
    trained = jllama.load(run, layout="training")
    assert model.config.block == "value_norm"
    assert np.abs(trained.params["layers"]["v_norm"] - 1).max() > 1e-3
    prompt = [257, 70, 80]
    (text,) = jllama.generate(model, prompt, max_new_tokens=3, temperature=0.0, stop_ids=())
    logits = np.asarray(trained([[*prompt, *text.ids]]))
    assert relative_error(model([[*prompt, *text.ids]]), logits) < 1e-5
    assert text.ids == np.argmax(logits[0, 2:-1], axis=-1).tolist()
    jllama.save(model, folder / "saved")
    assert_same_bits(jllama.load(folder / "saved").params, model.params)


def test_files_that_cannot_be_imported_are_named(tmp_path):
    (tmp_path / "evil.py").write_text("x = 0\nx = 1 / 0\n")
    for name, problem in {
        "evil.py": "ZeroDivisionError: division by zero (evil.py, line 2)\n",
        "none.py": "FileNotFoundError: ",
        "plain.yaml": "give a Python file",
    }.items():
        done = run_command("sample", "run", f"--import={name}", place=tmp_path)
        assert done.code == 2
        assert f"error: --import {name}: {problem}" in done.err


def test_an_objective_and_a_parameter_that_an_optimizer_leaves(additions):
    """Loss and figure are those of float64, and the parameter has the same bits after steps."""

    def frozen_embedding(config):
        optimizers = {True: optax.set_to_zero(), False: jllama.OPTIMIZERS["adamw"](config)}
        return optax.multi_transform(
            optimizers, lambda params: {name: name == "embed" for name in params}
        )

    jllama.OPTIMIZERS["frozen_embedding"] = frozen_embedding
    teaching = teacher()
    jllama.OBJECTIVES["distillation"] = additions.distillation(teaching)
    batch = jllama.text_batch(np.random.default_rng(0).integers(0, 256, (4, 17)), bos_id=9)
    segments = batch.segments[:, :-1]
    counted = segments == batch.segments[:, 1:]
    student_probs, teacher_probs = (
        oracle.softmax(oracle.forward(params, batch.tokens[:, :-1], SMALL, segments=segments))
        for params in (WEIGHTS, teaching.params)
    )
    expected = -np.sum(teacher_probs * np.log(student_probs), axis=-1)[counted].mean()
    same_choice = (student_probs.argmax(-1) == teacher_probs.argmax(-1))[counted].sum()

    loop = jllama.LoopConfig(
        batch_size=4, seq_len=16, steps=4, accumulation=2, objective="distillation"
    )
    optimizer = jllama.OptimizerConfig("frozen_embedding", 0.02)
    training = jllama.compile_training(
        jllama.TrainConfig(SMALL, optimizer=optimizer, training=loop)
    )
    state = training.init(jax.random.key(0), jax.tree.map(np.copy, WEIGHTS))
    nats, count, figures = training.evaluate(state.params, batch)
    assert float(nats / count) == pytest.approx(expected, rel=1e-5)
    state, metrics = training.step(state, batch)
    assert float(metrics.loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics.figures["same_choice"]) == float(figures["same_choice"]) == same_choice
    assert int(metrics.num_counted) == counted.sum()
    state, _ = training.step(state, batch)
    same = jax.tree.map(np.array_equal, state.params, WEIGHTS)
    assert same.pop("embed")
    assert not any(jax.tree.leaves(same))


def test_an_objective_that_there_is_not_and_one_that_the_data_is_not_for():
    def training_for(objective):
        loop = jllama.LoopConfig(objective=objective)
        return jllama.compile_training(jllama.TrainConfig(SMALL, training=loop))

    message = r"^there is no objective next_tokn; did you mean next_token\?$"
    with pytest.raises(jllama.UsageError, match=message):
        training_for("next_tokn")
    training = training_for("preference")
    state = jax.eval_shape(training.init, jax.random.key(0))
    batch = jllama.text_batch(np.zeros((16, 17), int), bos_id=9)
    message = r"^training.objective is preference, and the data has no pairs"
    with pytest.raises(jllama.UsageError, match=message):
        training.step.lower(state, batch)


# What is computed


def logits_of(config, **options):
    """The logits of ``TOKENS``, compiled."""

    def logits(params):
        model = jllama.build_model(config, params, **options)
        return model.logits(model.hidden(TOKENS))

    return jax.jit(logits)


def test_a_sampler(additions, monkeypatch):
    """It draws what NumPy would leave, also beside a row without its field.

    Its default changes nothing.
    """
    TypicalParams = additions.TypicalParams
    model = jllama.LanguageModel(SMALL, params(SMALL), BytesTokenizer()).for_decoding()
    prompt = [1, 70, 80]
    message = "nothing applies typical_p of TypicalParams: register a function"
    with monkeypatch.context() as patch:
        patch.delitem(F.TRUNCATIONS, "typical_p")
        with pytest.raises(jllama.UsageError, match=message):
            jllama.generate(model, prompt, TypicalParams())

    options = {"max_new_tokens": 30, "stop_ids": ()}
    plain = jllama.SamplingParams(seed=1)
    (alone,) = jllama.generate(model, prompt, plain, **options)
    settings = [TypicalParams(seed=1, typical_p=0.2), plain, TypicalParams(seed=1)]
    prompts = [jllama.Prompt(prompt, sampling, **options) for sampling in settings]
    typical, beside, default = (text.ids for text in jllama.generate(model, prompts))
    assert beside == default == alone.ids
    logits = oracle.forward(WEIGHTS, np.array([[*prompt, *typical]]), SMALL)[0]
    for scores, token in zip(logits[len(prompt) - 1 : -1], typical, strict=True):
        probs = oracle.softmax(scores)
        order = np.argsort(np.abs(-np.log(probs) + np.sum(probs * np.log(probs))))
        assert token in order[: 1 + np.searchsorted(np.cumsum(probs[order]), 0.2 + 1e-6)]


def test_a_rope_type(tmp_path, additions):
    """It is read from options, computed with, and kept by Hugging Face's files."""
    NtkScaling = ROPE_SCALINGS["ntk"]  # of the last import of the page
    config = dataclasses.replace(SMALL, rope_scaling={"type": "ntk", "factor": 4.0})
    assert config.rope_scaling == NtkScaling(4.0)
    jllama.save(jllama.LanguageModel(config, WEIGHTS, BytesTokenizer()), tmp_path / "hf", "hf")
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert fields["rope_scaling"]["rope_type"] == "ntk"
    model = jllama.load(tmp_path / "hf")
    assert model.config.rope_scaling == NtkScaling(4.0)
    turned = dataclasses.replace(SMALL, rope_theta=SMALL.rope_theta * 4 ** (32 / 30))
    assert relative_error(model(TOKENS), oracle.forward(WEIGHTS, TOKENS, turned)) < 1e-5


def test_an_attention_implementation(additions):
    """It is called by name in training and prefill; with a cache it is an error."""
    logits = logits_of(SMALL, attention="window")
    expected = oracle.forward(WEIGHTS, TOKENS, IN_A_WINDOW)

    def decoded(params, cache, tokens, is_empty):
        layout = jllama.decode_layout(params, SMALL)
        decoding = jllama.build_model(SMALL, layout, attention="window")
        counts = jnp.full(2, tokens.shape[1])
        hidden, _ = decoding.decode(tokens, cache, counts, cache_is_empty=is_empty)
        return decoding.logits(hidden)

    @jax.jit
    def compute(params, cache):
        gradients = jax.grad(lambda params: logits(params).sum())(params)
        return logits(params), decoded(params, cache, TOKENS, True), gradients["embed"]

    cache = KVCache.zeros(SMALL, 2, 32, jnp.float32)
    whole, prefilled, gradient = compute(WEIGHTS, cache)
    assert relative_error(whole, expected) < 1e-5
    assert relative_error(prefilled, expected) < 1e-5
    assert np.isfinite(gradient).all()
    message = "the attention implementation 'window' cannot serve a cache"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda params: decoded(params, cache, TOKENS[:, :1], False), WEIGHTS)


def test_attention_over_a_cache(additions, monkeypatch):
    """Decoding takes it: the tokens are those of whole sequences in the window."""
    # Of a shape that no other test has, as programs that were traced without it know nothing of it.
    config = dataclasses.replace(SMALL, max_seq_len=48)
    model = jllama.LanguageModel(config, params(SMALL), BytesTokenizer()).for_decoding()
    monkeypatch.setitem(F.CACHE_ATTENTION, "cpu", ["cached_window"])
    (text,) = jllama.generate(model, [257, 70], max_new_tokens=30, temperature=0.0, stop_ids=())
    written = np.array([[257, 70, *text.ids]])
    windowed, everything = (
        oracle.forward(WEIGHTS, written, seen)[0].argmax(axis=-1)[1:-1].tolist()
        for seen in (IN_A_WINDOW, SMALL)
    )
    assert text.ids == windowed != everything


def test_a_format(tmp_path, additions):
    """It is loaded, saved and converted like any other, from Python and at the command line."""
    jllama.save(jllama.LanguageModel(SMALL, WEIGHTS), tmp_path / "hf", "hf")
    assert run_command("convert", "hf", "a.npz", place=tmp_path).code == 0
    jllama.save(jllama.load(tmp_path / "a.npz"), tmp_path / "b", "npz")
    narrow = ["convert", "b", "c", "--to", "npz", "--dtype", "float16"]
    assert run_command(*narrow, place=tmp_path).code == 0
    jllama.convert(tmp_path / "b", tmp_path / "gguf", "gguf")
    for name in ("a.npz", "b", "c", "gguf"):
        dtype = "float16" if name == "c" else "float32"
        expected = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), WEIGHTS)
        assert_same_bits(jllama.load(tmp_path / name, dtype, layout="training").params, expected)
    done = run_command("convert", "hf", "d.npz", "--dtype", "bfloat16", place=tmp_path)
    assert done.code == 2
    assert "dtype is 'bfloat16'; with npz it must be one of float32, float16" in done.err


@pytest.mark.parametrize("block", ["relu_squared", "sinusoids"])
def test_a_block_computes_otherwise(additions, block):
    logits = logits_of(dataclasses.replace(SMALL, block=block))(WEIGHTS)
    assert relative_error(logits, oracle.forward(WEIGHTS, TOKENS, SMALL)) > 0.01


def test_dropout_is_on_for_gradients_alone(additions):
    """A block with it gives the values of one without it, and other gradients."""
    config = dataclasses.replace(SMALL, block="dropout")

    def loss(params, remat="none"):
        logits = logits_of(config, remat=remat)(params)
        return jnp.sum(jnp.square(logits - 0.1))

    usual = float(jax.jit(loss)(WEIGHTS))
    expected = np.sum((oracle.forward(WEIGHTS, TOKENS, SMALL) - 0.1) ** 2)
    assert usual == pytest.approx(expected, rel=1e-5)
    compute = jax.jit(jax.value_and_grad(loss), static_argnames="remat")
    value, gradients = compute(WEIGHTS)
    assert abs(value - usual) > 1e-4 * usual
    again, others = compute(WEIGHTS, "block")  # it leaves out the same elements
    assert float(again) == pytest.approx(float(value), rel=1e-6)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
        assert relative_error(one, other) < 1e-5
