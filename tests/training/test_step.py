"""One step against the float64 oracle, and the equalities that a step must keep."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, copies_of_state
from models import SMALL, weights
from tuning import assert_trees_close

from jllama.core import UsageError
from jllama.core.step import Batch
from jllama.data.batches import text_batch
from jllama.functional import ATTENTION, AttentionImplementation
from jllama.lab.checks import relative_error
from jllama.models import oracle
from jllama.parallel.sharding import MeshConfig, make_mesh
from jllama.training.compiling import compile_training
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.optimizer import OPTIMIZERS
from jllama.training.plan import decide

BOS, CONFIG, WEIGHTS = 1, SMALL, weights(SMALL)
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
# Half the time to compile; the arithmetic is the same.
QUICK = {"xla_backend_optimization_level": 0}


# Eight windows of 24 targets; half of the rows hold many documents, so that parts of a batch count
# unequally.
WINDOWS = np.random.default_rng(0).integers(2, CONFIG.vocab_size, (8, 25)).astype(np.int32)
WINDOWS[0, 0] = WINDOWS[1, 7] = BOS
WINDOWS[4:, ::3] = WINDOWS[6, 1] = BOS
BATCH = text_batch(WINDOWS, BOS)


@pytest.fixture(autouse=True)
def plain_descent(monkeypatch):
    """An optimizer whose state is the last gradient."""
    monkeypatch.setitem(OPTIMIZERS, "plain", lambda _: optax.trace(0.0))


PLAIN = OptimizerConfig("plain", weight_decay=0.0, clip_norm=1e30)
ADAMW = OptimizerConfig(
    learning_rate=2.0**-20, final_fraction=1.0, warmup_fraction=0.0, weight_decay=0.0
)
"""With steps that are some units of the last place of a number near 1."""
ADAMW_OPTIONS = {"accumulation": 2, "spike_factor": 3.0}


@functools.cache
def compiled(optimizer=PLAIN, **options):
    options = LoopConfig(**{"dtype": "float32", "batch_size": 8, "steps": 100} | options)
    config = TrainConfig(CONFIG, optimizer=optimizer, training=options)
    return compile_training(config, MESH, compiler_options=QUICK)


def initial_state(training):
    return training.init(jax.random.key(0), WEIGHTS)


def batch_of(windows, mask):
    """The batch whose targets count by a mask."""
    return text_batch(windows, BOS, np.pad(mask, ((0, 0), (1, 0))))


def gradients(windows=WINDOWS, **options):
    """The gradient that a step of plain descent takes, and the step's metrics."""
    training = compiled(**options)
    state, metrics = training.step(initial_state(training), text_batch(windows, BOS))
    return jax.tree.map(np.asarray, state.opt_state[1][0].trace), metrics


def documents_apart(windows):
    """Loss and count with every document sent through the oracle as a text of its own, where it
    stands.
    """
    sums = []
    for row in windows:
        starts = {0, *np.flatnonzero(row[:-1] == BOS).tolist(), len(row) - 1}
        for start, end in itertools.pairwise(sorted(starts)):
            positions = np.arange(start, end)[None]
            logits = oracle.forward(WEIGHTS, row[None, start:end], CONFIG, positions=positions)
            targets = row[None, start + 1 : end + 1]
            sums.append(oracle.cross_entropy(logits, targets, targets != BOS))
    return np.sum(sums, axis=0)


@functools.cache
def oracle_logits():
    segments = np.cumsum(WINDOWS[:, :-1] == BOS, axis=1)
    return oracle.forward(WEIGHTS, WINDOWS[:, :-1], CONFIG, segments=segments)


def test_the_loss_is_the_oracles():
    actual, metrics = gradients()
    total, count = documents_apart(WINDOWS)
    assert int(metrics.num_counted) == count == np.sum(WINDOWS[:, 1:] != BOS)
    assert int(metrics.tokens) == WINDOWS[:, 1:].size
    assert relative_error(metrics.loss, total / count) < 1e-5
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(actual)))
    assert relative_error(metrics.grad_norm, norm) < 1e-5
    # The things it must not be: attention across documents, BOS as a target too, or no shift.
    inputs, targets, counts = WINDOWS[:, :-1], WINDOWS[:, 1:], WINDOWS[:, 1:] != BOS
    logits = oracle.forward(WEIGHTS, inputs, CONFIG)
    for wrong in ((targets, counts), (targets, targets > -1), (inputs, counts)):
        wrong_total, wrong_count = oracle.cross_entropy(logits, *wrong)
        assert relative_error(wrong_total / wrong_count, total / count) > 1e-3


def test_a_document_is_deaf_to_the_one_before():
    """What stands before a BOS changes nothing in the loss of what follows it."""
    changed, after = WINDOWS.copy(), np.zeros((8, 24), bool)
    changed[1, :7] = changed[1, :7][::-1]
    after[1, 7:] = True

    def loss(windows, mask):
        return compiled(z_loss=0.1).evaluate(WEIGHTS, batch_of(windows, mask))[0]

    assert loss(WINDOWS, after) == loss(changed, after)
    before = np.zeros((8, 24), bool)
    before[1, :6] = True
    assert loss(WINDOWS, before) != loss(changed, before)


def test_parts_whose_layers_are_computed_again_give_the_gradient_of_the_whole():
    counts = [int(np.sum(part[:, 1:] != BOS)) for part in WINDOWS.reshape(4, 2, -1)]
    assert len(set(counts)) > 2
    whole, whole_metrics = gradients()
    parts, parts_metrics = gradients(accumulation=4, remat="block")
    # The order of the sums differs; a mean of means is off by 1e-2.
    assert_trees_close(parts, whole, 3e-6)
    assert_trees_close(parts_metrics, whole_metrics, 1e-6)


def test_accumulation_in_64_bit_mode():
    """The masters, the moments and the losses stay float32."""
    with jax.enable_x64(True):
        for dtype in ("float32", "bfloat16"):
            training = compiled(ADAMW, **ADAMW_OPTIONS, dtype=dtype)
            state = jax.eval_shape(training.init, jax.random.key(0))
            assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
            after, metrics = jax.eval_shape(training.step.program, state, BATCH)
            assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
                lambda leaf: leaf.dtype, state
            )
            assert metrics.loss.dtype == jnp.float32


def test_every_attention_gives_the_same_gradients():
    whole, usual = gradients()[0], decide(TrainConfig(CONFIG), MESH).attention
    others = [name for name, one in ATTENTION.items() if one.backward and not one.platform]
    others.remove(usual)
    for name in others:
        assert_trees_close(gradients(attention=name)[0], whole, 1e-5)
    with pytest.raises(
        UsageError, match=r"^there is no attention implementation blockt; did you mean blocked\?$"
    ):
        compiled(attention="blockt")
    with pytest.raises(
        UsageError, match=r"^attention is cached, which has no backward pass: take another to train"
    ):
        compiled(attention="cached")


def test_z_loss_is_the_squared_log_normalizer():
    plain, metrics = gradients()
    with_z, metrics_z = gradients(z_loss=0.1)
    normalizer = np.log(np.exp(oracle_logits()).sum(-1))[WINDOWS[:, 1:] != BOS]
    assert relative_error(metrics_z.loss - metrics.loss, 0.1 * np.mean(normalizer**2)) < 1e-4
    assert relative_error(with_z["lm_head"], plain["lm_head"]) > 1e-2


def test_a_batch_without_targets_moves_nothing():
    actual, metrics = gradients(np.full((8, 25), BOS, np.int32))
    assert float(metrics.loss) == 0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(actual))


def test_small_steps_move_the_float32_masters_under_bfloat16():
    """A learning rate of 1e-6 is far below bfloat16's resolution near 1, which is 0.004."""
    num_steps, moved, means, losses, norms = 20, {}, {}, {}, {}
    for dtype in ("bfloat16", "float32"):
        training = compiled(ADAMW, **ADAMW_OPTIONS, dtype=dtype)
        state = initial_state(training)
        for _ in range(num_steps):
            state, metrics = training.step(state, BATCH)
        losses[dtype], norms[dtype] = metrics.loss, metrics.grad_norm
        state = jax.device_get((state.params, state.opt_state))
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state[0])} == {"float32"}
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state[1])} == {"float32", "int32"}
        moved[dtype] = jax.tree.map(lambda before, after: after - before, WEIGHTS, state[0])
        means[dtype] = state[1][1][0].mu
    assert relative_error(losses["bfloat16"], losses["float32"]) < 0.03
    assert relative_error(norms["bfloat16"], norms["float32"]) < 0.03
    for low, high in zip(*map(jax.tree.leaves, moved.values()), strict=True):
        # Under an all but constant gradient Adam moves by its learning rate.
        expected = num_steps * ADAMW.learning_rate
        assert np.median(np.abs(low)) == pytest.approx(expected, rel=0.1)
        assert np.mean(np.sign(low) == np.sign(high)) > 0.95
    # Bfloat16 is really used: losses and norms may be near by chance.
    for low, high in zip(*map(jax.tree.leaves, means.values()), strict=True):
        assert relative_error(low, high) > 1e-3


def test_eval_sums_do_not_depend_on_the_batching():
    rng = np.random.default_rng(1)
    mask = rng.random((8, 24)) < 0.7
    mask[3] = False
    step = compiled(z_loss=0.1).evaluate  # which is for training alone
    batch = batch_of(WINDOWS, mask)

    def sums(size):
        parts = [
            Batch(*(array[start : start + size] for array in batch[:3]))
            for start in range(0, 8, size)
        ]
        return np.sum([step(WEIGHTS, part)[:2] for part in parts], axis=0)

    whole = sums(8)
    np.testing.assert_allclose(sums(2), whole, rtol=1e-6)
    mask &= WINDOWS[:, 1:] != BOS
    expected = oracle.cross_entropy(oracle_logits(), WINDOWS[:, 1:], mask)
    np.testing.assert_allclose(whole, expected, rtol=1e-5)


def test_a_donated_state_is_used_up_without_a_warning(recwarn):
    training = compiled(ADAMW, **ADAMW_OPTIONS)
    before = initial_state(training)
    after, _ = training.step(before, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))
    assert int(after.step) == 1
    assert not [warning for warning in recwarn if "donated" in str(warning.message)]


@pytest.mark.parametrize("id", [-1, CONFIG.vocab_size])
def test_an_id_of_no_token_is_refused_before_the_step(id):
    """In one sentence, and the state is not donated; arrays on a device are not waited for."""
    training, wrong = compiled(), WINDOWS.copy()
    wrong[5, 3] = id
    state = initial_state(training)
    batch = text_batch(wrong, BOS)
    with pytest.raises(UsageError, match=rf"^tokens holds the id {id}; this model's are 0 to 60$"):
        training.step(state, batch)
    state, metrics = training.step(state, BATCH)
    assert not metrics.skipped

    training.step.check(batch._replace(tokens=jnp.asarray(wrong)))
    with pytest.raises(UsageError, match=r"\(8, 25\), \(8, 24\), \(8, 25\); each must be"):
        training.step.check(batch._replace(segments=batch.segments[:, 1:]))


def test_a_bad_step_leaves_all_as_it_was():
    """Parameters and moments keep every bit, the step is counted, and the next good one goes on:
    after a spike, and after numbers that are not finite.
    """
    training = compiled(ADAMW, **ADAMW_OPTIONS)
    state = initial_state(training)
    for _ in range(2):
        state, metrics = training.step(state, BATCH)
        assert not metrics.skipped
    good = np.array(state.params["final_norm"])
    for norm, final_norm in ((metrics.grad_norm / 4, good), (metrics.grad_norm, good * np.nan)):
        params = state.params | {"final_norm": final_norm}
        before = jax.tree.map(np.array, state._replace(params=params, usual_norm=norm, key=None))
        state, metrics = training.step(state._replace(params=params, usual_norm=norm), BATCH)
        assert metrics.skipped
        after = state._replace(key=None)
        assert_same_bits(after, before._replace(step=before.step + 1))
        params = state.params | {"final_norm": good}
        state = state._replace(params=params, usual_norm=jnp.float32(0.0))
        state, metrics = training.step(state, BATCH)
        assert not metrics.skipped
        assert (state.params["embed"] != before.params["embed"]).any()
        assert float(state.usual_norm) == pytest.approx(float(metrics.grad_norm))


def test_a_step_copies_nothing_of_the_state():
    training = compiled(ADAMW, **ADAMW_OPTIONS)
    state = jax.eval_shape(training.init, jax.random.key(0))
    assert not copies_of_state(training.step, state, BATCH)


def test_a_profile_is_readable():
    training = compiled()
    state = jax.eval_shape(training.init, jax.random.key(0))
    program = training.step.lower(state, BATCH).as_text(debug_info=True)
    for scope in ("embedding", "attention", "feed_forward", "head", "optimizer"):
        assert re.search(rf"[(/]{scope}[)/]", program)


def test_an_attention_that_cannot_serve_the_rows_is_one_sentence(monkeypatch):
    refusing = AttentionImplementation(lambda *arrays: None, lambda *arrays: "documents")
    monkeypatch.setitem(ATTENTION, "mine", refusing)
    options = LoopConfig(batch_size=8, seq_len=24, attention="mine")
    training = compile_training(TrainConfig(CONFIG, training=options))
    state = jax.eval_shape(training.init, jax.random.key(0))
    problem = "'mine' cannot serve documents: take another training.attention"
    with pytest.raises(UsageError, match=problem):
        training.step.lower(state, BATCH)
