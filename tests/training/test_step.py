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

from jllama import oracle
from jllama.data.batches import Batch, text_batch
from jllama.errors import UsageError
from jllama.functional import ATTENTION, AttentionImplementation
from jllama.sharding import MeshConfig, make_mesh
from jllama.training.config import LoopConfig, OptimizerConfig, TrainConfig
from jllama.training.optimizer import OPTIMIZERS
from jllama.training.step import compile_training
from jllama.verify.checks import relative_error

BOS, CONFIG, WEIGHTS = 1, SMALL, weights(SMALL)
MESH = make_mesh(MeshConfig(), jax.devices()[:1])
# Half the time to compile; the arithmetic is the same.
QUICK = {"xla_backend_optimization_level": 0}


def make_windows():
    """Eight windows of 24 targets; half of the rows hold many documents, so that parts of a batch
    count unequally.
    """
    windows = np.random.default_rng(0).integers(2, CONFIG.vocab_size, (8, 25)).astype(np.int32)
    windows[0, 0] = windows[1, 7] = BOS
    windows[4:, ::3] = windows[6, 1] = BOS
    return windows


WINDOWS = make_windows()
BATCH = text_batch(WINDOWS, BOS)


@pytest.fixture(autouse=True)
def plain_descent(monkeypatch):
    """An optimizer whose state is the last gradient."""
    monkeypatch.setitem(OPTIMIZERS, "plain", lambda _: optax.trace(0.0))


PLAIN = OptimizerConfig("plain", weight_decay=0.0, clip_norm=1e30)


@functools.cache
def compiled(optimizer=PLAIN, **options):
    options = LoopConfig(**{"dtype": "float32", "batch_size": 8, "steps": 100} | options)
    config = TrainConfig(CONFIG, optimizer=optimizer, training=options)
    return compile_training(config, MESH, compiler_options=QUICK)


def initial_state(training):
    return training.init(jax.random.key(0), WEIGHTS)


def counted_targets(mask):
    """Which tokens of a window count, by which of its targets do."""
    return np.pad(mask, ((0, 0), (1, 0)))


def gradients(windows=WINDOWS, **options):
    """The gradient that a step of plain descent takes, and the step's metrics."""
    training = compiled(**options)
    state, metrics = training.step(initial_state(training), text_batch(windows, BOS))
    return jax.tree.map(np.asarray, state.opt_state[1][0].trace), metrics


def assert_trees_close(actual, expected, tolerance):
    for leaf, reference in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(leaf, reference) < tolerance


def documents_apart(windows):
    """Loss and count with every document sent through the oracle as a text of its own, where it
    stands.
    """
    total, count = 0.0, 0
    for row in windows:
        starts = [0, *np.flatnonzero(row[:-1] == BOS).tolist(), len(row) - 1]
        for start, end in itertools.pairwise(starts):
            if start == end:
                continue
            positions = np.arange(start, end)[None]
            logits = oracle.forward(WEIGHTS, row[None, start:end], CONFIG, positions=positions)
            targets = row[None, start + 1 : end + 1]
            part, number = oracle.cross_entropy(logits, targets, targets != BOS)
            total, count = total + part, count + number
    return total, count


def test_the_loss_is_the_oracles():
    actual, metrics = gradients()
    total, count = documents_apart(WINDOWS)
    assert int(metrics.num_counted) == count == np.sum(WINDOWS[:, 1:] != BOS)
    assert int(metrics.tokens) == WINDOWS[:, 1:].size
    assert relative_error(metrics.loss, total / count) < 1e-5
    norm = np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(actual)))
    assert relative_error(metrics.grad_norm, norm) < 1e-5
    # The things it must not be: attention across documents, BOS as a target too, or no shift.
    logits, inputs, targets = (
        oracle.forward(WEIGHTS, WINDOWS[:, :-1], CONFIG),
        WINDOWS[:, :-1],
        WINDOWS[:, 1:],
    )
    for wrong_targets, mask in [
        (targets, targets != BOS),
        (targets, targets > -1),
        (inputs, targets != BOS),
    ]:
        wrong_total, wrong_count = oracle.cross_entropy(logits, wrong_targets, mask)
        assert relative_error(wrong_total / wrong_count, total / count) > 1e-3


def test_a_document_is_deaf_to_the_one_before():
    """What stands before a BOS changes nothing in the loss of what follows it."""
    changed, after = WINDOWS.copy(), np.zeros((8, 24), bool)
    changed[1, :7] = changed[1, :7][::-1]
    after[1, 7:] = True
    params = jax.tree.map(jnp.asarray, WEIGHTS)

    def loss(windows, mask):
        return compiled().evaluate(params, text_batch(windows, BOS, counted_targets(mask)))[0]

    assert loss(WINDOWS, after) == loss(changed, after)
    before = np.zeros((8, 24), bool)
    before[1, :6] = True
    assert loss(WINDOWS, before) != loss(changed, before)


def test_accumulation_gives_the_gradient_of_the_whole():
    counts = [int(np.sum(part[:, 1:] != BOS)) for part in WINDOWS.reshape(4, 2, -1)]
    assert len(set(counts)) > 2
    whole, whole_metrics = gradients()
    parts, parts_metrics = gradients(accumulation=4)
    # The order of the sums differs; a mean of means is off by 1e-2.
    assert_trees_close(parts, whole, 3e-6)
    assert_trees_close(parts_metrics, whole_metrics, 1e-6)


def test_accumulation_in_64_bit_mode():
    """The masters, the moments and the losses stay float32."""
    with jax.enable_x64(True):
        for dtype in ("float32", "bfloat16"):
            training = compiled(OptimizerConfig(), accumulation=2, dtype=dtype)
            state = jax.eval_shape(training.init, jax.random.key(0))
            assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
            after, metrics = training.step.lower(state, BATCH).out_info
            assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(
                lambda leaf: leaf.dtype, state
            )
            assert metrics.loss.dtype == jnp.float32


def test_remat_changes_nothing():
    assert_trees_close(gradients(remat="block")[0], gradients()[0], 1e-6)


def test_every_attention_gives_the_same_gradients():
    whole = gradients()[0]
    for name, implementation in ATTENTION.items():
        if not implementation.backward or implementation.platform:
            continue
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
    segments = np.cumsum(WINDOWS[:, :-1] == BOS, axis=1)
    logits = oracle.forward(WEIGHTS, WINDOWS[:, :-1], CONFIG, segments=segments)
    normalizer = np.log(np.exp(logits).sum(-1))[WINDOWS[:, 1:] != BOS]
    assert relative_error(metrics_z.loss - metrics.loss, 0.1 * np.mean(normalizer**2)) < 1e-4
    assert relative_error(with_z["lm_head"], plain["lm_head"]) > 1e-2


def test_a_batch_without_targets_moves_nothing():
    actual, metrics = gradients(np.full((8, 25), BOS, np.int32))
    assert float(metrics.loss) == 0
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(actual))


def test_small_steps_move_the_float32_masters_under_bfloat16():
    """A learning rate of 1e-6 is far below bfloat16's resolution near 1, which is 0.004."""
    settings = OptimizerConfig(
        learning_rate=1e-6, final_fraction=1.0, warmup_fraction=0.0, weight_decay=0.0
    )
    moved, losses, norms = {}, {}, {}
    for dtype in ("bfloat16", "float32"):
        training = compiled(settings, batch_size=2, dtype=dtype)
        state = initial_state(training)
        for _ in range(100):
            state, metrics = training.step(state, text_batch(WINDOWS[:2], BOS))
        losses[dtype], norms[dtype] = metrics.loss, metrics.grad_norm
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        assert {leaf.dtype for leaf in jax.tree.leaves(state.opt_state)} == {
            jnp.dtype("float32"),
            jnp.dtype("int32"),
        }
        moved[dtype] = jax.tree.map(
            lambda before, after: np.asarray(after, np.float64) - before, WEIGHTS, state.params
        )
    assert relative_error(losses["bfloat16"], losses["float32"]) < 0.03
    assert relative_error(norms["bfloat16"], norms["float32"]) < 0.03
    for low, high in zip(
        jax.tree.leaves(moved["bfloat16"]), jax.tree.leaves(moved["float32"]), strict=True
    ):
        # Under an all but constant gradient Adam moves by its learning rate: 100 times 1e-6.
        assert np.median(np.abs(low)) == pytest.approx(1e-4, rel=0.1)
        assert np.mean(np.sign(low) == np.sign(high)) > 0.95
        # Bfloat16 is really used: losses and norms may be near by chance.
        assert relative_error(low, high) > 1e-2


def test_eval_sums_do_not_depend_on_the_batching():
    rng = np.random.default_rng(1)
    mask = rng.random((8, 24)) < 0.7
    mask[3] = False
    params = jax.tree.map(jnp.asarray, WEIGHTS)
    step = compiled(z_loss=0.1).evaluate  # which is for training alone
    batch = text_batch(WINDOWS, BOS, counted_targets(mask))

    def sums(rows):
        return np.sum(
            [
                step(params, Batch(*(array[i : i + rows] for array in batch[:3])))[:2]
                for i in range(0, 8, rows)
            ],
            axis=0,
        )

    whole = sums(8)
    np.testing.assert_allclose(sums(2), whole, rtol=1e-6)
    segments = np.cumsum(WINDOWS[:, :-1] == BOS, axis=1)
    logits = oracle.forward(WEIGHTS, WINDOWS[:, :-1], CONFIG, segments=segments)
    nats, tokens = oracle.cross_entropy(logits, WINDOWS[:, 1:], mask & (WINDOWS[:, 1:] != BOS))
    np.testing.assert_allclose(whole, [nats, tokens], rtol=1e-5)


def test_a_donated_state_is_used_up_without_a_warning(recwarn):
    training = compiled(OptimizerConfig(), accumulation=2)
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


def test_gradients_that_are_nan_change_no_bit_of_the_state():
    training = compiled(OptimizerConfig(), accumulation=2)
    state, _ = training.step(initial_state(training), BATCH)
    broken = state.params["final_norm"].at[0].set(jnp.nan)
    state = state._replace(params=state.params | {"final_norm": broken})
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    after, metrics = training.step(state, BATCH)
    assert metrics.skipped
    assert jnp.isnan(metrics.grad_norm)
    assert_same_bits((after.params, after.opt_state), before)


def test_a_step_copies_nothing_of_the_state():
    training = compiled(OptimizerConfig())
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
        training.step.lower(state, text_batch(make_windows(), BOS))
