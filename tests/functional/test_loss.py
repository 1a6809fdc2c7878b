import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama.functional import DecodeMatrix, decode_matrix, linear_cross_entropy, token_log_probs
from jllama.lab.checks import relative_error
from jllama.models import oracle

VOCAB = 50
seeds = st.integers(0, 2**32 - 1)
# Tokens of a row, channels, and tokens of a chunk: one chunk of all; chunks that the tokens do not
# fill; as many channels as it takes to store the gradients of all logits; a token a chunk.
SIZES = {
    "one chunk": (8, 8, 24),
    "chunks": (5, 8, 6),
    "stored gradients": (5, 40, 6),
    "a token a chunk": (8, 8, 1),
}
EVERY_SIZE = pytest.mark.parametrize("size", SIZES)


@functools.partial(jax.jit, static_argnums=(4, 5))
def loss_and_gradients(hidden, head, targets, mask, chunk_tokens, z_loss=0.0):
    """Return ``((total, count), gradients of both factors)``."""

    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, targets, mask, z_loss, chunk_tokens)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)


log_probs_of = jax.jit(token_log_probs, static_argnums=3)


def draw(seed, seq, embed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((3, seq, embed)), rng.standard_normal((embed, VOCAB))
    mask = rng.random((3, seq)) < rng.choice([0, 0.5, 1.0], (3, 1))
    return hidden.astype(dtype), head.astype(dtype), rng.integers(0, VOCAB, (3, seq)), mask


@EVERY_SIZE
@settings(max_examples=10)
@given(seed=seeds)
def test_values_and_gradients_are_those_of_the_formula(size, seed):
    """Value by the oracle; the gradient of logits is the probability minus the target's one."""
    seq, embed, chunk_tokens = SIZES[size]
    hidden, head, targets, mask = draw(seed, seq, embed)
    z_loss, logits = 0.01, hidden @ head
    log_sum = np.log(np.exp(logits).sum(axis=-1))
    plain, expected_count = oracle.cross_entropy(logits, targets, mask)
    probabilities = oracle.softmax(logits)
    slopes = probabilities * (1 + 2 * z_loss * log_sum)[..., None] - np.eye(VOCAB)[targets]
    slopes *= mask[..., None]
    expected = (slopes @ head.T, np.tensordot(hidden, slopes, ((0, 1), (0, 1))))
    with jax.enable_x64(True):
        (total, count), gradients = loss_and_gradients(
            hidden, head, targets, mask, chunk_tokens, z_loss
        )
        log_probs, likeliest = log_probs_of(hidden, head, targets, chunk_tokens)
    assert count == expected_count == mask.sum()
    assert relative_error(total, plain + z_loss * np.sum(log_sum[mask] ** 2)) < 1e-12
    for gradient, reference in zip(gradients, expected, strict=True):
        assert relative_error(gradient, reference) < 1e-12
    target_probabilities = np.take_along_axis(probabilities, targets[..., None], -1)[..., 0]
    assert relative_error(log_probs, np.log(target_probabilities)) < 1e-12
    np.testing.assert_array_equal(likeliest, logits.argmax(-1) == targets)


@EVERY_SIZE
@settings(max_examples=10)
@given(
    seed=seeds,
    garbage=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    target=st.sampled_from([-100, -1, VOCAB, 10**6]),
)
def test_masked_garbage_changes_nothing(size, seed, garbage, target):
    seq, embed, chunk_tokens = SIZES[size]
    hidden, head, targets, mask = draw(seed, seq, embed, np.float32)
    mask[0] = False  # also where a row counts nothing, or none does
    spoilt = np.where(mask[..., None], hidden, np.float32(garbage))
    others = np.where(mask, targets, target)
    clean = loss_and_gradients(hidden, head, targets, mask, chunk_tokens, 0.01)
    dirty = loss_and_gradients(spoilt, head, others, mask, chunk_tokens, 0.01)
    for actual, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(actual, expected)
    (total, count), (of_hidden, of_head) = jax.device_get(dirty)
    assert not of_hidden[~mask].any()
    assert count or not (total or of_head.any())


@pytest.mark.parametrize("target", [VOCAB, 10**6])
def test_a_counted_target_out_of_range_is_not_silent(target):
    hidden, head, targets, mask = draw(0, 8, 8, np.float32)
    mask[:] = True
    targets[1, 2] = target
    assert np.isnan(loss_and_gradients(hidden, head, targets, mask, 24, 0.01)[0][0])


@pytest.mark.parametrize("chunk_tokens", [1, 100])
def test_huge_logits_stay_finite(chunk_tokens):
    where = np.array([[0, 1, 2]]), np.ones((1, 3), bool)
    for size in (1e4, 1e15):
        logits = np.float32([[[size, -size, 0.0], [size, -size, 0.0], [-size, -size, -size]]])
        (total, _), (gradient, _) = loss_and_gradients(
            logits, np.eye(3, dtype=np.float32), *where, chunk_tokens
        )
        assert relative_error(total, 2 * size + np.log(3)) < 1e-5
        assert np.all(np.isfinite(gradient))


@pytest.mark.parametrize("chunk_tokens", [6, 200])
def test_bfloat16_products_are_summed_in_float32(chunk_tokens):
    hidden, head, targets, mask = draw(0, 64, 8, jnp.bfloat16)
    mask[:] = np.arange(64) % 3 > 0
    logits = np.float64(hidden) @ np.float64(head)
    (total, _), gradients = loss_and_gradients(hidden, head, targets, mask, chunk_tokens)
    assert total.dtype == jnp.float32
    assert relative_error(total, oracle.cross_entropy(logits, targets, mask)[0]) < 1e-5
    slopes = (oracle.softmax(logits) - np.eye(VOCAB)[targets]) * mask[..., None]
    assert [gradient.dtype for gradient in gradients] == 2 * [jnp.bfloat16]
    of_head = np.tensordot(np.float64(hidden), slopes, ((0, 1), (0, 1)))
    assert relative_error(gradients[1], of_head) < 1e-2


def test_a_large_offset_of_all_logits_takes_no_digits():
    hidden, head, targets, mask = draw(0, 8, 8)
    mask[:] = True
    logits = np.float32(hidden @ head) + np.float32(1000)
    (total, _), _ = loss_and_gradients(logits, np.eye(VOCAB, dtype=np.float32), targets, mask, 24)
    expected, _ = oracle.cross_entropy(np.float64(logits), targets, mask)
    assert relative_error(total, expected) < 1e-5


def test_every_product_has_operands_of_the_compute_dtype():
    arrays = draw(0, 8, 4, jnp.bfloat16)
    program = jax.make_jaxpr(functools.partial(loss_and_gradients, chunk_tokens=4))(*arrays)
    products = [
        equation
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert len(products) == 3
    assert all(
        operand.aval.dtype == jnp.bfloat16 for product in products for operand in product.invars
    )


def equations(jaxpr):
    """Those of a program and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            yield from equations(inner.jaxpr) if hasattr(inner, "jaxpr") else ()


def test_logits_of_all_tokens_never_exist_at_once():
    arrays = (
        jnp.ones((4, 64, 8)),
        jnp.ones((8, 1000)),
        jnp.ones((4, 64), int),
        jnp.ones((4, 64), bool),
    )

    def all_logits(hidden, head, targets, mask):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(hidden @ head), targets[..., None], -1)[
            ..., 0
        ]
        return -jnp.sum(chosen * mask)

    plain = jax.jit(jax.grad(all_logits, (0, 1)))
    programs = plain.lower(*arrays), loss_and_gradients.lower(*arrays, 16)
    whole, chunked = (
        program.compile().memory_analysis().temp_size_in_bytes for program in programs
    )
    assert chunked < 250_000 < 4 * 64 * 1000 * 4 <= whole


@pytest.mark.parametrize("chunk_tokens", [6, 100])
def test_the_decoding_layout_gives_the_same_and_has_no_gradients(chunk_tokens):
    hidden, head, targets, mask = draw(1, 8, 8, np.float32)
    packed = decode_matrix(jnp.asarray(head), [0])
    assert isinstance(packed, DecodeMatrix)
    logits = np.float64(hidden) @ np.float64(head)
    loss = jax.jit(functools.partial(linear_cross_entropy, z_loss=0.0, chunk_tokens=chunk_tokens))
    total, _ = loss(hidden, packed, targets, mask)
    assert relative_error(total, oracle.cross_entropy(logits, targets, mask)[0]) < 1e-5
    log_probs, _ = log_probs_of(hidden, packed, targets, chunk_tokens)
    exact = np.log(np.take_along_axis(oracle.softmax(logits), targets[..., None], -1))[..., 0]
    assert relative_error(log_probs, exact) < 1e-5
    with pytest.raises(ValueError, match="laid out for decoding, which has no gradients"):
        jax.grad(lambda hidden: loss(hidden, packed, targets, mask)[0])(hidden)
