"""Tuning on conversations: loss and gradient against the float64 oracle, twenty steps against torch
(transformers' models, PEFT's adapters, AdamW, the same rows), what stays as it was, mistakes seen.
"""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tuning
from helpers import pretend_devices, slow_but
from helpers_torch import their_losses, their_tuning
from models import FAMILIES, family_weights
from tuning import CONFIG, KINDS, ONE_DEVICE, STEPS, WEIGHTS, apart, begun, compiled, packed

import jllama
from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.lab.checks import random_params, relative_error
from jllama.models import lora
from jllama.models.config import LoraConfig
from jllama.tokenizers.base import BytesTokenizer
from jllama.training import compiling, opening
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.metrics import mean_figures

LOSS, SLOPE = 1e-6, 1e-5
"""The largest relative errors of right code, of a loss and of a gradient."""
ROWS, ADAPTER = packed(tuning.conversations(0)), tuning.random_adapter("lora")
merge = jax.jit(lora.merge, static_argnums=(2, 3))
SCRIPT = Path(__file__).parents[1] / "tuned_on_eight_devices.py"


def assert_right(kind, rows, training, loss=tuning.answers_loss):
    """Loss and gradient of a first step are the oracle's."""
    errors = tuning.first_errors(kind, rows, training, loss)
    assert errors[0] < LOSS
    assert errors[1] < SLOPE


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("lora", {}),
        pytest.param("dora", {"accumulation": 4}, marks=pytest.mark.slow),
        pytest.param("full", {}, marks=pytest.mark.slow),
        pytest.param("full", {"accumulation": 4}, marks=pytest.mark.slow),
        pytest.param("rslora", {"accumulation": 2, "remat": "block"}, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradient_are_the_oracles(kind, options):
    assert_right(kind, ROWS, compiled(kind, **options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_so_they_are_with_the_loss_in_chunks(kind, monkeypatch):
    monkeypatch.setattr(compiling, "loss_chunk_tokens", lambda *_: 7)
    assert_right(kind, ROWS, compiled.__wrapped__(kind))


@pytest.mark.slow
def test_so_they_are_on_eight_devices():
    path = os.pathsep.join(map(str, SCRIPT.parents[:2]))
    environment = os.environ | pretend_devices(8) | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len({row["mesh"] for row in report}) == 4
    for row in report:
        assert row["errors"][0] < LOSS, row
        assert row["errors"][1] < SLOPE, row


def test_packed_rows_are_each_conversation_alone():
    training = compiled("lora")
    _, together, metrics = tuning.first_step("lora", ROWS, training)
    _, alone, metrics_alone = tuning.first_step("lora", apart(tuning.conversations(0)), training)
    assert metrics.tokens == metrics_alone.tokens == (ROWS.segments > 0).sum()
    assert relative_error(metrics.loss, metrics_alone.loss) < LOSS
    tuning.assert_trees_close(together, alone, 5e-6)


def test_a_neighbor_changes_nothing():
    """One that does not count says something else: not a bit of loss or gradient is another."""
    training, (first, *others) = compiled("lora"), tuning.conversations(0)
    silent = first[0], np.zeros_like(first[1])
    changed = CONFIG.vocab_size - 1 - first[0], silent[1]
    before, after = (
        tuning.first_step("lora", packed([neighbor, *others]), training)
        for neighbor in (silent, changed)
    )
    assert tuning.digest(before) == tuning.digest(after)


def test_a_segment_s_first_token_is_no_target():
    """Also where it counts: nothing of its own is before it."""
    first = np.diff(ROWS.segments, axis=1, prepend=0) != 0
    marked = ROWS._replace(counted=ROWS.counted | first)
    actual, expected = (
        tuning.first_step("lora", rows, compiled("lora")) for rows in (marked, ROWS)
    )
    assert tuning.digest(actual) == tuning.digest(expected)


def test_adapters_alone_are_trained():
    """After twenty steps the base, with the head that is the embedding, has the same bits, and no
    optimizer state.
    """
    training = compiled("lora")
    state = begun("lora", training)
    before, adapters = tuning.digest(state.base), jax.tree.map(np.array, state.params)
    losses = []
    for _ in range(STEPS):
        state, metrics = training.step(state, ROWS)
        losses.append(float(metrics.loss))
        assert not metrics.skipped
    assert losses[-1] < losses[0] - 1
    assert tuning.digest(state.base) == before
    assert before == tuning.digest(WEIGHTS)
    after = jax.device_get(state.params)
    assert all(jax.tree.leaves(jax.tree.map(lambda old, new: np.all(old != new), adapters, after)))
    trained = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * trained
    # Bytes, layers, rank, inputs and outputs.
    assert trained == 4 * 2 * 4 * (192 + 128 + 128 + 192 + 3 * 160)


def test_merged_weights_are_the_sums_in_float64():
    """With fresh adapters they are the base."""
    initial = jax.jit(lora.initial_adapter, static_argnums=(2, 3))
    for kind in ("lora", "dora"):
        adapter = tuning.random_adapter(kind)
        whole = merge(WEIGHTS, adapter, CONFIG, KINDS[kind])
        tuning.assert_trees_close(whole, tuning.merged(kind, adapter), 1e-6)
        adapter = jax.device_get(initial(jax.random.key(0), WEIGHTS, CONFIG, KINDS[kind]))
        tuning.assert_trees_close(tuning.merged(kind, adapter), WEIGHTS, 1e-6)
        for name, part in adapter["layers"].items():
            # Six deviations of the variance of 512 numbers with a uniform distribution.
            assert abs(3 * part["a"].shape[1] * np.var(part["a"]) - 1) < 0.25, name


# Preference training

IN_PARTS = {"accumulation": 2}


def preferred(training):
    """Three pairs and padding, scored by the model before training."""
    state, pairs = begun("lora", training), apart(tuning.conversations(0, 6))
    reference = training.log_probs(state.params, pairs, base=state.base)
    return pairs._replace(reference=np.asarray(reference))


def test_the_first_preference_loss_is_ln_2():
    training = compiled("lora", **IN_PARTS)
    pairs = preferred(training)
    expected = tuning.log_probs(tuning.merged("lora", ADAPTER), pairs)
    assert relative_error(pairs.reference, expected) < LOSS
    _, metrics = training.step(begun("lora", training), pairs)
    assert abs(float(metrics.loss) - math.log(2)) < 1e-7  # float32 has no nearer number


def test_the_preference_gradient_and_figures_are_the_oracles():
    """Of a step, and figures of an evaluation too; padding is no pair."""
    training = compiled("lora", **IN_PARTS)
    pairs = preferred(training)
    moved = pairs._replace(reference=pairs.reference + np.float32([3, -4, 10, 20, -20, 5, 9, 1]))
    assert_right("lora", moved, training, tuning.preference_loss)

    actual = tuning.log_probs(tuning.merged("lora", ADAPTER), moved)
    rewards = 0.1 * (actual - moved.reference).reshape(-1, 2)[:3]
    expected = {
        "accuracy": np.sum(rewards[:, 0] > rewards[:, 1]),
        "margin": np.sum(rewards[:, 0] - rewards[:, 1]),
        "chosen_reward": rewards[:, 0].sum(),
        "rejected_reward": rewards[:, 1].sum(),
    }
    assert 0 < expected["accuracy"] < 3
    state = begun("lora", training)
    _, *evaluated = training.evaluate(state.params, moved, state.base)
    _, metrics = training.step(state, moved)
    for count, figures in (evaluated, (metrics.num_counted, metrics.figures)):
        assert float(count) == 3
        assert jax.device_get(figures) == pytest.approx(expected, rel=1e-5)
    means = mean_figures([metrics.figures] * 2, [metrics.num_counted] * 2)
    assert means == pytest.approx({name: value / 3 for name, value in expected.items()}, rel=1e-5)


# Torch


def compare_losses(kind, arranged, architecture="llama"):
    """Compare the losses of twenty steps; return by how much they fall."""
    batches = [arranged(tuning.conversations(step % 5)) for step in range(STEPS)]
    training = tuning.compiled(kind)  # a family's own
    state, actual, clipped = begun(kind, training), [], 0
    for rows in batches:
        state, metrics = training.step(state, rows)
        actual.append(float(metrics.loss))
        clipped += bool(metrics.grad_norm > tuning.OPTIMIZER.clip_norm)
    expected = their_losses(their_tuning(kind, architecture), batches)
    assert clipped > 10
    assert max(map(relative_error, actual, expected)) < 1e-5
    return actual[0] - actual[-1]


@pytest.mark.parametrize("arranged", [packed, apart])
@pytest.mark.parametrize("kind", slow_but(["lora"], KINDS))
def test_twenty_steps_have_torchs_losses(kind, arranged):
    assert compare_losses(kind, arranged) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "olmo2"])
def test_twenty_steps_of_other_families_have_torchs_losses(name):
    """Mistral's window is shorter than the rows."""
    with tuning.family(name):
        assert compare_losses("lora", apart, name) > 0.1


# Families with biases, norms and windows

ALL = "all at once"


def assert_family_right(name, kind, options=(), loss=tuning.answers_loss, rows=None):
    """As ``assert_right``, on packed rows if none are given."""
    with tuning.family(name):
        rows = tuning.packed(tuning.conversations(0)) if rows is None else rows
        assert_right(kind, rows, tuning.compiled(kind, **dict(options)), loss)


@pytest.mark.parametrize("name", slow_but([ALL], [name for name in FAMILIES if name != "llama"]))
def test_loss_and_gradient_of_a_family_are_the_oracles(name):
    assert_family_right(name, "full")


@pytest.mark.slow
def test_so_are_those_of_adapters_beside_biases_and_norms():
    assert_family_right(ALL, "lora", {"accumulation": 4, "remat": "block"})


def test_so_are_those_of_preferences_and_dora():
    with tuning.family(ALL):
        pairs = tuning.apart(tuning.conversations(0, 6))
    pairs = pairs._replace(reference=np.linspace(-30, -20, 8, dtype=np.float32))
    assert_family_right(ALL, "dora", {"remat": "none"}, tuning.preference_loss, pairs)


@pytest.mark.slow
def test_a_selection_of_biases_and_norms_moves_alone():
    selected = tuning.Selection(["layers/[1-9]/bq", "layers/*/q_norm_whole"])
    with tuning.family(ALL):
        training = tuning.compiled("full", trainable=selected)
        rows = tuning.packed(tuning.conversations(0))
        state, _ = training.step(begun("full", training), rows)
    moves = {"bq": [False, True, True, True], "q_norm_whole": [True] * 4}
    for name, stack in family_weights(ALL)["layers"].items():
        has_moved = np.reshape(state.params["layers"][name] != stack, (4, -1)).all(axis=1)
        assert has_moved.tolist() == moves.get(name, [False] * 4), name
    for name in ("embed", "final_norm", "lm_head"):
        np.testing.assert_array_equal(state.params[name], family_weights(ALL)[name])


# Bases in fewer bits

ERRORS = {"bfloat16": 2**-8, "int8": 0.02, "nf4": 0.15}
"""How far a base in these bits may be from what it holds, as a share of its size."""
DTYPES = {"bfloat16": {"bfloat16"}, "int8": {"int8", "float32"}, "nf4": {"uint4", "float32"}}


@pytest.mark.parametrize("base", slow_but(["nf4"], ERRORS))
def test_a_base_in_fewer_bits_is_computed_with_as_it_is(base, monkeypatch):
    """It is near the weights, keeps biases and norms, and the loss is the oracle's of what it
    stands for.
    """
    monkeypatch.setitem(KINDS, base, LoraConfig(rank=4, alpha=6.0, base=base))
    expected = family_weights(ALL)["layers"]
    with tuning.family(ALL):
        rows, training = tuning.packed(tuning.conversations(0)), tuning.compiled(base)
        state = begun(base, training)
        stored = {leaf.dtype.name for leaf in jax.tree.leaves(state.base["layers"]["wq"])}
        assert stored == DTYPES[base]
        nothing = jax.tree.map(np.zeros_like, state.params)
        plain, whole = (
            jax.device_get(merge(state.base, adapter, FAMILIES[ALL], KINDS[base]))
            for adapter in (nothing, state.params)
        )
        nats, count, _ = training.evaluate(state.params, rows, state.base)
        assert relative_error(nats / count, tuning.answers_loss(whole, rows)) < LOSS
    for name, stack in expected.items():
        if name.startswith("w"):
            assert relative_error(plain["layers"][name], stack) < ERRORS[base]
        elif base != "bfloat16":
            np.testing.assert_array_equal(plain["layers"][name], stack)


@pytest.mark.parametrize("base", slow_but(["nf4"], ["int8", "nf4"]))
def test_a_run_reads_its_base_in_its_final_form(base, tmp_path, monkeypatch):
    """Its state is what ``init`` makes of whole weights, to the bit, and it trains, ends and
    merges.
    """
    tokenizer = BytesTokenizer()
    model = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    params = random_params(model, 0)
    jllama.save(jllama.LanguageModel(model, params, tokenizer), tmp_path / "model", "hf")
    rows = np.random.default_rng(0).integers(3, 250, (8, 25))
    source = jllama.BatchSource(
        tokenizer,
        lambda: itertools.repeat(jllama.text_batch(rows, bos_id=1)),
        lambda: [jllama.text_batch(rows, bos_id=1)],
    )
    config = TrainConfig(
        LlamaConfig(),
        run_dir=str(tmp_path / "run"),
        init_from=str(tmp_path / "model"),
        lora=LoraConfig(rank=2, base=base),
        training=LoopConfig(dtype="float32", batch_size=8, seq_len=24, steps=2, sample_tokens=0),
    )
    states = []
    monkeypatch.setattr(
        opening, "log_facts", lambda run: states.append(jax.tree.map(np.asarray, run.state.base))
    )
    final = jllama.train(config, data=source)
    assert np.isfinite(final.validation_loss)
    whole = compile_training(dataclasses.replace(config, model=model), ONE_DEVICE).init(
        jax.random.key(0), params
    )
    jax.tree.map(np.testing.assert_array_equal, states[0], jax.tree.map(np.asarray, whole.base))
    merged = jax.device_get(jllama.load(tmp_path / "run", layout="training").params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(merged))


def test_nf4_without_its_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    monkeypatch.setitem(KINDS, "nf4", LoraConfig(rank=4, base="nf4"))
    with pytest.raises(UsageError, match=r"nf4, which needs .* pip install 'jllama\[nf4\]'"):
        compiled.__wrapped__("nf4")


def test_targets_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(
        UsageError, match=r"lora.targets has q_proj; the matrices of a layer are wq, wk"
    ):
        lora.adapter_shapes(CONFIG, LoraConfig(rank=4, targets=("q_proj",)))
    with pytest.raises(UsageError, match=r"lora.rank is 4000; it must be at most"):
        lora.adapter_shapes(CONFIG, LoraConfig(rank=4000))
    with pytest.raises(UsageError, match="each once"):
        LoraConfig(rank=4, targets=())


# Mistakes


def seen(loss):
    """By how many tolerances a loss with adapters is not the oracle's."""
    return relative_error(loss, tuning.answers_loss(tuning.merged("lora", ADAPTER), ROWS)) / LOSS


def loss_of(rows=ROWS, embed=WEIGHTS["embed"], adapter=ADAPTER):
    base = jax.tree.map(np.float32, WEIGHTS | {"embed": embed})
    total, count, _ = compiled("lora").evaluate(adapter, rows, base=base)
    return float(total / count)


def with_layers(layers):
    return jax.tree.map(np.float32, {"layers": layers})


def test_mistakes_are_seen():
    layers = ADAPTER["layers"]
    # Several conversations in a row, and padding.
    assert ROWS.segments.max() == 3
    assert (ROWS.segments == 0).any()
    assert seen(loss_of()) < 1
    shifted = (np.roll(ROWS.counted, shift, axis=1) & (ROWS.segments > 0) for shift in (-1, 1))
    wrong = [loss_of(ROWS._replace(counted=counted)) for counted in shifted]  # one token off
    wrong.append(loss_of(ROWS._replace(segments=np.minimum(ROWS.segments, 1))))  # of neighbors
    # A head that is trained, moved as far as AdamW moves what has a gradient in one step.
    rate, embed = np.float32(tuning.OPTIMIZER.learning_rate), WEIGHTS["embed"]
    wrong.append(
        loss_of(embed=embed + rate * np.random.default_rng(0).choice([-1, 1], embed.shape))
    )
    # The scale without the rank, and with its root.
    for factor in (KINDS["lora"].rank, math.sqrt(KINDS["lora"].rank)):
        scaled = {name: part | {"a": part["a"] * factor} for name, part in layers.items()}
        wrong.append(loss_of(adapter=with_layers(scaled)))
    # The factors of square matrices, each for the other.
    swapped = {"a": "b", "b": "a"}
    turned = {
        name: {new: layers[name][old].swapaxes(1, 2) for new, old in swapped.items()}
        for name in ("wk", "wv")
    }
    wrong.append(loss_of(adapter=with_layers(layers | turned)))
    assert min(map(seen, wrong)) > 100
