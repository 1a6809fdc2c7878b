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
from helpers import assert_same_bits, slow_but

import jllama
from jllama import functional as F
from jllama import oracle
from jllama.commands import cli
from jllama.config import BLOCKS as LAYERS
from jllama.model import KVCache
from jllama.parameters import PARAMETERS
from jllama.rope_scaling import ROPE_SCALINGS
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params

PAGE = Path(__file__).parent.parent / "docs" / "extend.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
REGISTRIES = [
    ROPE_SCALINGS,
    F.TRUNCATIONS,
    F.ATTENTION,
    jllama.OPTIMIZERS,
    jllama.FORMATS,
    PARAMETERS,
    LAYERS,
]
REGISTRIES.append(jllama.OBJECTIVES)  # whose addition on the page needs a teacher first


@pytest.fixture
def page(tmp_path):
    """The page's code in its order, as a file; its registrations are removed afterwards."""
    before = [dict(registry) for registry in REGISTRIES]
    path = tmp_path / "my_additions.py"
    path.write_text("\n\n".join(BLOCKS))
    yield path
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.fixture
def additions(page):
    """The page's code as a module."""
    spec = importlib.util.spec_from_file_location("my_additions", page)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_adds_to_every_registry(additions):
    """And says in at most 30 lines how each of its additions is made."""
    names = [
        "ntk",
        "typical_p",
        "window",
        "lamb",
        "npz",
        "layers/v_norm",
        "value_norm",
    ]
    for name, registry in zip(names, REGISTRIES[:7], strict=True):
        assert name in registry
    assert max(len(block.splitlines()) for block in BLOCKS) <= 30


def test_an_optimizer(tmp_path, additions):
    """It trains with the usual schedule, clip and weight decay, and its runs are resumed."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def train(steps, **changes):
        config = jllama.TrainConfig(
            jllama.LlamaConfig(num_layers=2, embed_dim=32, num_heads=2, max_seq_len=32),
            run_dir=str(tmp_path / "run"),
            data=jllama.DataConfig(
                str(tmp_path / "text.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")
            ),
            optimizer=jllama.OptimizerConfig("lamb", learning_rate=0.02),
            training=jllama.LoopConfig(batch_size=8, steps=steps, log_every=1, sample_tokens=0),
            **changes,
        )
        return jllama.train(config)

    train(20)
    train(40, resume="auto", resume_with_changes=True)
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < losses[19] < losses[0] - 1


def test_an_objective(tmp_path, additions):
    """Its loss and figure are those of float64, in one part and in two; a run logs both."""
    teacher = jllama.LanguageModel(SMALL, random_params(SMALL, 1), BytesTokenizer())
    jllama.OBJECTIVES["distillation"] = additions.distillation(teacher)
    batch = jllama.text_batch(np.random.default_rng(0).integers(0, 256, (4, 17)), bos_id=9)
    segments = batch.segments[:, :-1]
    counted = segments == batch.segments[:, 1:]
    weights = random_params(SMALL, 2)
    student, teacher_probs = (
        np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        for logits in (
            oracle.forward(params, batch.tokens[:, :-1], SMALL, segments=segments)
            for params in (weights, teacher.params)
        )
    )
    expected = -np.sum(teacher_probs * np.log(student), axis=-1)[counted].mean()
    same_choice = (student.argmax(-1) == teacher_probs.argmax(-1))[counted].sum()
    for accumulation in (1, 2):
        loop = jllama.LoopConfig(
            batch_size=4,
            seq_len=16,
            steps=4,
            accumulation=accumulation,
            objective="distillation",
            dtype="float32",
        )
        training = jllama.compile_training(jllama.TrainConfig(SMALL, training=loop))
        state = training.init(jax.random.key(0), jax.tree.map(np.copy, weights))
        nats, count, figures = training.evaluate(state.params, batch)
        assert float(nats / count) == pytest.approx(expected, rel=1e-5)
        _, metrics = training.step(state, batch)
        assert float(metrics.loss) == pytest.approx(expected, rel=1e-5)
        assert float(metrics.figures["same_choice"]) == float(figures["same_choice"]) == same_choice
        assert int(metrics.num_counted) == counted.sum()

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    jllama.train(
        jllama.TrainConfig(
            dataclasses.replace(SMALL, vocab_size=0),
            run_dir=str(tmp_path / "run"),
            data=jllama.DataConfig(
                str(tmp_path / "text.txt"), tokenizer="bytes", cache_dir=str(tmp_path / "cache")
            ),
            optimizer=jllama.OptimizerConfig(learning_rate=0.02),
            training=dataclasses.replace(
                loop, steps=12, log_every=1, eval_every=6, sample_tokens=0
            ),
        )
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    figures = [line["validation_figures"] for line in lines if "validation_loss" in line]
    assert all(0 <= line["same_choice"] <= 1 for line in figures)
    assert "perplexity" not in json.dumps(figures)


def test_an_objective_that_there_is_not_and_one_that_the_data_is_not_for():
    with pytest.raises(
        jllama.UsageError, match=r"^there is no objective next_tokn; did you mean next_token\?$"
    ):
        jllama.compile_training(
            jllama.TrainConfig(SMALL, training=jllama.LoopConfig(objective="next_tokn"))
        )
    training = jllama.compile_training(
        jllama.TrainConfig(SMALL, training=jllama.LoopConfig(objective="preference"))
    )
    batch = jllama.text_batch(np.zeros((16, 17), int), bos_id=9)
    with pytest.raises(
        jllama.UsageError, match=r"^training.objective is preference, and the data has no pairs"
    ):
        training.step.lower(jax.eval_shape(training.init, jax.random.key(0)), batch)


def test_a_parameter_that_an_optimizer_leaves(additions):
    """It has the same bits after steps that moved all others."""

    def frozen_embedding(config):
        optimizers = {"moved": jllama.OPTIMIZERS["adamw"](config), "left": optax.set_to_zero()}
        return optax.multi_transform(
            optimizers, lambda params: {n: "left" if n == "embed" else "moved" for n in params}
        )

    jllama.OPTIMIZERS["frozen_embedding"] = frozen_embedding
    loop = jllama.LoopConfig(batch_size=4, seq_len=16, steps=4)
    config = jllama.TrainConfig(
        SMALL, optimizer=jllama.OptimizerConfig("frozen_embedding", 0.02), training=loop
    )
    training = jllama.compile_training(config)
    state = training.init(jax.random.key(0))
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
        state, _ = training.step(
            state, jllama.text_batch(np.random.default_rng(0).integers(0, 256, (4, 17)), bos_id=257)
        )
    np.testing.assert_array_equal(state.params.pop("embed"), before.pop("embed"))
    moved = jax.tree.map(lambda one, other: not np.array_equal(one, other), state.params, before)
    assert all(jax.tree.leaves(moved))


def test_a_sampler(additions):
    """It draws what NumPy would leave, also beside a row without its field.

    Its default changes nothing.
    """
    config = jllama.LlamaConfig(
        vocab_size=259,
        num_layers=1,
        embed_dim=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        mlp_dim=96,
        max_seq_len=64,
    )
    weights, prompt = random_params(config, 0), [1, 70, 80]
    params = jllama.decode_layout(jax.tree.map(jnp.asarray, weights), config)
    model, options = (
        jllama.LanguageModel(config, params, BytesTokenizer()),
        {"max_new_tokens": 30, "stop_ids": ()},
    )
    TypicalParams = additions.TypicalParams
    del F.TRUNCATIONS["typical_p"]
    with pytest.raises(
        jllama.UsageError, match="nothing applies typical_p of TypicalParams: register a function"
    ):
        jllama.generate(model, prompt, TypicalParams())
    F.TRUNCATIONS["typical_p"] = additions.typical_mask

    plain, typical = jllama.SamplingParams(seed=1), TypicalParams(seed=1, typical_p=0.2)
    (plain_text,) = jllama.generate(model, prompt, plain, **options)
    (typical_text,) = jllama.generate(model, prompt, sampling=typical, **options)
    assert jllama.generate(model, prompt, TypicalParams(seed=1), **options)[0].ids == plain_text.ids
    together = jllama.generate(
        model, [jllama.Prompt(prompt, sampling, **options) for sampling in (typical, plain)]
    )
    assert [row.ids for row in together] == [typical_text.ids, plain_text.ids]
    logits = oracle.forward(weights, np.array([[*prompt, *typical_text.ids]]), config)[
        0, len(prompt) - 1 : -1
    ]
    for scores, token in zip(logits, typical_text.ids, strict=True):
        probs = oracle.softmax(scores)
        order = np.argsort(np.abs(-np.log(probs) + np.sum(probs * np.log(probs))))
        assert token in order[: 1 + np.searchsorted(np.cumsum(probs[order]), 0.2 + 1e-6)]


def test_a_format(tmp_path, additions, capsys):
    """It is loaded, saved and converted like any other, from Python and at the command line."""
    config = jllama.LlamaConfig(
        vocab_size=259, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=1, mlp_dim=48
    )
    weights = random_params(config, 0)
    jllama.save(jllama.LanguageModel(config, weights), tmp_path / "hf", "hf")
    assert cli.run("convert", [str(tmp_path / "hf"), str(tmp_path / "a.npz")]) == 0
    jllama.save(jllama.load(tmp_path / "a.npz"), tmp_path / "b", "npz")
    assert (
        cli.run(
            "convert",
            [str(tmp_path / "b"), str(tmp_path / "c"), "--to", "npz", "--dtype", "float16"],
        )
        == 0
    )
    jllama.convert(tmp_path / "b", tmp_path / "gguf", "gguf")
    for name, dtype in (
        ("a.npz", "float32"),
        ("b", "float32"),
        ("c", "float16"),
        ("gguf", "float32"),
    ):
        expected = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), weights)
        assert_same_bits(jllama.load(tmp_path / name, dtype, layout="training").params, expected)
    capsys.readouterr()
    assert (
        cli.run("convert", [str(tmp_path / "hf"), str(tmp_path / "d.npz"), "--dtype", "bfloat16"])
        == 2
    )
    assert (
        "dtype is 'bfloat16'; with npz it must be one of float32, float16"
        in capsys.readouterr().err
    )


# A RoPE type, an implementation of attention, and rows of the table of parameters


SMALL = jllama.LlamaConfig(
    vocab_size=259,
    num_layers=2,
    embed_dim=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    mlp_dim=96,
    max_seq_len=64,
)


def test_a_rope_type(tmp_path, additions):
    """It is read from options, computed with, and kept by Hugging Face's files."""
    NtkScaling = additions.NtkScaling
    scaling = {"type": "ntk", "factor": 4.0}
    config = dataclasses.replace(SMALL, rope_scaling=scaling)
    assert config.rope_scaling == NtkScaling(4.0)
    params = jllama.initial_params(jax.random.key(0), config)
    jllama.save(jllama.LanguageModel(config, params, BytesTokenizer()), tmp_path / "hf", "hf")
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["rope_scaling"]["rope_type"]
        == "ntk"
    )
    model = jllama.load(tmp_path / "hf")
    assert model.config.rope_scaling == NtkScaling(4.0)
    turned = dataclasses.replace(
        config, rope_theta=config.rope_theta * 4 ** (32 / 30), rope_scaling=None
    )
    tokens = np.arange(20)[None]
    np.testing.assert_allclose(
        model(tokens), oracle.forward(params, tokens, turned), rtol=1e-4, atol=1e-4
    )


def test_an_attention_implementation(additions):
    """It is called by name in training and prefill; with a cache it is an error."""
    params = jllama.initial_params(jax.random.key(0), SMALL)
    tokens = jnp.arange(20)[None]

    def hidden(params, attention, tokens):
        return jllama.build_model(SMALL, params).hidden(tokens, attention=attention)

    for length, equal in ((8, True), (20, False)):
        window, full = (
            hidden(params, name, tokens[:, :length]) for name in ("window", "reference")
        )
        assert np.allclose(window, full, atol=1e-5) == equal
    assert np.isfinite(
        jax.grad(lambda params: hidden(params, "window", tokens).sum())(params)["embed"]
    ).all()
    decoding = jllama.build_model(SMALL, jllama.decode_layout(params, SMALL))
    cache = KVCache.zeros(SMALL, 1, 32, jnp.float32)
    first, cache = decoding.decode(
        tokens, cache, jnp.array([20]), cache_is_empty=True, attention="window"
    )
    np.testing.assert_allclose(first, hidden(params, "window", tokens), atol=1e-4)
    with pytest.raises(
        ValueError, match="the attention implementation 'window' cannot serve a cache"
    ):
        decoding.decode(tokens[:, :1], cache, jnp.array([1]), attention="window")


def test_attention_over_a_cache(additions, monkeypatch):
    """Decoding takes it: the tokens are those of whole sequences in the window."""
    config = dataclasses.replace(SMALL, max_seq_len=48)
    model = jllama.LanguageModel(
        config, jax.tree.map(jnp.asarray, random_params(config, 0)), BytesTokenizer()
    )

    def written():
        return jllama.generate(model, [257, 70], max_new_tokens=30, temperature=0.0, stop_ids=())[
            0
        ].ids

    def likeliest(ids):
        hidden = jllama.build_model(config, model.params)
        return jnp.argmax(
            hidden.logits(hidden.hidden(jnp.array([ids]), attention="window")), axis=-1
        )[0].tolist()

    everything = written()
    jax.clear_caches()  # of programs that were traced without it
    monkeypatch.setitem(F.CACHE_ATTENTION, "cpu", ["cached_window"])
    windowed = written()
    jax.clear_caches()
    assert windowed == likeliest([257, 70, *windowed])[1:-1]
    assert windowed != everything


TINY = """
model: {num_layers: 2, embed_dim: 32, num_heads: 2, max_seq_len: 32}
data: {path: text.txt, tokenizer: bytes, cache_dir: cache}
optimizer: {learning_rate: 0.02}
training: {batch_size: 8, steps: 6, log_every: 1, sample_tokens: 0, dtype: float32}
"""


@pytest.mark.parametrize(
    "block", slow_but(["sinusoids"], ["relu_squared", "sinusoids", "dropout", "value_norm"])
)
def test_a_block(tmp_path, page, block, capsys, monkeypatch):
    """Its run names it: what loads the run computes with it, or says that it is not there."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    Path("plain.yaml").write_text(TINY)
    Path("mine.yaml").write_text(f"imports: [{page.name}]\n{TINY}")
    train = ["mine.yaml", "--run_dir", "run", f"--model.block={block}"]
    assert cli.run("train", train) == 0
    model = jllama.load("run")
    assert model.config.block == block
    tokens = np.arange(20)[None]
    with_it = model(tokens)
    if block in ("relu_squared", "sinusoids"):
        plain = dataclasses.replace(model.config, block="")
        without = dataclasses.replace(model, config=plain)(tokens)
        assert np.abs(with_it - without).max() > 0.01
    np.testing.assert_allclose(jllama.load("run", layout="training")(tokens), with_it, atol=1e-4)
    jllama.save(model, "saved")
    np.testing.assert_array_equal(jllama.load("saved")(tokens), with_it)
    assert cli.run("convert", ["run", "run.gguf"]) == 1
    assert "no family of models has block" in capsys.readouterr().err

    # In another process, with the file and without it.
    def begin_process():
        LAYERS.clear()
        monkeypatch.delitem(sys.modules, str(page), raising=False)

    more = ["--resume", "run", "--training.steps=8", "--resume_with_changes"]
    sample = ["run", "--prompt", "the", "--max_new_tokens", "3"]
    commands = [("sample", sample), ("eval", ["run", "--data", "text.txt"])]
    commands += [("convert", ["run", "copy", "--to", "orbax"]), ("train", more)]
    for command, arguments in commands:
        begin_process()
        assert cli.run(command, arguments) > 0
        assert f"block is {block}; it must be one that" in capsys.readouterr().err
        assert cli.run(command, [*arguments, "--import", page.name]) == 0
        capsys.readouterr()


def test_dropout_is_on_for_gradients_alone(additions):
    """A block with it gives the values of one without it, and other gradients."""
    config = dataclasses.replace(SMALL, block="dropout")
    params = jax.tree.map(jnp.asarray, random_params(SMALL, 0))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 32))

    def loss(params, config, remat="none"):
        model = jllama.build_model(config, params)
        return jnp.sum(jnp.square(model.hidden(tokens, remat=remat) - 0.1))

    usual = float(loss(params, config))
    assert usual == pytest.approx(float(loss(params, SMALL)), rel=1e-6)
    value, gradients = jax.value_and_grad(loss)(params, config)
    assert abs(value - usual) > 1e-4 * usual
    for remat in ("dots", "block"):  # what is computed again leaves out the same elements
        again, others = jax.value_and_grad(loss)(params, config, remat)
        assert float(again) == pytest.approx(float(value), rel=1e-6)
        for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


def test_code_that_only_a_folder_names_is_not_run(tmp_path, capsys, monkeypatch):
    """A run's configuration may not bring files; a file that is not there, or fails, is named."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    Path("plain.yaml").write_text(TINY)
    Path("evil.py").write_text("open('was_run', 'w')\nx = 1 / 0\n")
    assert cli.run("train", ["plain.yaml", "--run_dir", "theirs"]) == 0
    config = Path("theirs/config.yaml")
    config.write_text(config.read_text() + "imports: [evil.py]\n")
    assert cli.run("train", ["--resume", "theirs"]) == 0
    assert cli.run("sample", ["theirs", "--max_new_tokens", "3"]) == 0
    assert not Path("was_run").exists()
    capsys.readouterr()
    assert cli.run("sample", ["theirs", "--import", "evil.py"]) == 2
    error = "error: --import evil.py: ZeroDivisionError: division by zero (evil.py, line 2)\n"
    assert capsys.readouterr().err == error
    assert cli.run("sample", ["theirs", "--import=none.py"]) == 2
    assert "error: --import none.py: FileNotFoundError: " in capsys.readouterr().err
    assert cli.run("sample", ["theirs", "--import=plain.yaml"]) == 2
    assert "--import plain.yaml: give a Python file" in capsys.readouterr().err


def test_rows_of_parameters(additions):
    """They are initialized, trained, laid out for decoding and decoded with."""
    config = dataclasses.replace(SMALL, block="value_norm")
    params = jllama.initial_params(jax.random.key(0), config)
    assert params["layers"].keys() - jllama.initial_params(jax.random.key(0), SMALL)[
        "layers"
    ].keys() == {
        "v_norm",
    }
    loop = jllama.LoopConfig(batch_size=4, seq_len=16, steps=4)
    training = jllama.compile_training(jllama.TrainConfig(config, training=loop))
    state = training.init(jax.random.key(0))
    for _ in range(2):
        state, _ = training.step(
            state, jllama.text_batch(np.random.default_rng(0).integers(0, 256, (4, 17)), bos_id=257)
        )
    assert not np.allclose(state.params["layers"]["v_norm"], 1.0, atol=1e-6)
    model = jllama.LanguageModel(config, state.params, BytesTokenizer())
    prompt = [257, 70, 80]
    (written,) = jllama.generate(
        model.for_decoding(), prompt, max_new_tokens=3, temperature=0.0, stop_ids=()
    )
    logits = np.asarray(model([[*prompt, *written.ids]]))
    assert written.ids == np.argmax(logits[0, 2:-1], axis=-1).tolist()
