import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_gradients_match
from hypothesis import given
from hypothesis import strategies as st

from jllama import oracle
from jllama.functional import DecodeMatrix, decode_matrix, linear_cross_entropy, token_log_probs
from jllama.verify.checks import relative_error

VOCAB = 50
seeds = st.integers(0, 2**32 - 1)
shapes = st.sampled_from([(7,), (2, 9)])
Z_LOSS = 1e-4


def in_chunks(chunk_tokens):
    """Compute the loss of logits: as activations, with the identity as the head."""

    def loss(logits, targets, mask, z_loss=0.0):
        rows = logits if logits.ndim == 3 else logits[None]
        head = jnp.eye(logits.shape[-1], dtype=logits.dtype)
        where = targets.reshape(rows.shape[:2]), mask.reshape(rows.shape[:2])
        return linear_cross_entropy(rows, head, *where, z_loss, chunk_tokens)

    return loss


class Loss:
    """One way to compute it, and its gradients, compiled."""

    def __init__(self, function):
        self.function = function
        self.value = jax.jit(function, static_argnames="z_loss")
        self.gradient = jax.jit(jax.grad(lambda *arrays: function(*arrays)[0]))
        self.z_gradient = jax.jit(jax.grad(lambda *arrays: function(*arrays, z_loss=Z_LOSS)[0]))


LOSSES = {
    "one chunk": in_chunks(600),
    "chunks of 4": in_chunks(4),
    "a token a chunk": in_chunks(1),
}


@pytest.fixture(scope="module", params=LOSSES.values(), ids=LOSSES)
def loss(request):
    return Loss(request.param)


def draw(seed, shape, size=3.0, density=0.6):
    rng = np.random.default_rng(seed)
    logits = np.float64(
        np.float32(size * rng.standard_normal((*shape, VOCAB)) + rng.uniform(-20, 20, (*shape, 1)))
    )
    return logits, rng.integers(0, VOCAB, shape), rng.random(shape) < density


def on_device(logits, targets, mask):
    return jnp.float32(logits), jnp.asarray(targets, jnp.int32), jnp.asarray(mask)


@given(
    seed=seeds,
    shape=shapes,
    size=st.sampled_from([0.1, 3.0, 100.0]),
    density=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_equals_the_oracle(loss, seed, shape, size, density):
    logits, targets, mask = draw(seed, shape, size, density)
    expected, expected_count = oracle.cross_entropy(logits, targets, mask)
    total, count = loss.value(*on_device(logits, targets, mask))
    assert total.dtype == jnp.float32
    assert count == expected_count == mask.sum()
    assert relative_error(total, expected) < 1e-5
    with jax.enable_x64(True):
        total, _ = loss.value(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask))
        assert relative_error(total, expected) < 1e-12


@given(seed=seeds, z_loss=st.sampled_from([1e-4, 0.1]))
def test_z_loss_adds_the_squared_log_normalizer(loss, seed, z_loss):
    logits, targets, mask = draw(seed, (2, 9))
    log_normalizer = np.log(np.exp(logits).sum(axis=-1))
    expected = oracle.cross_entropy(logits, targets, mask)[0] + z_loss * np.sum(
        log_normalizer[mask] ** 2
    )
    with jax.enable_x64(True):
        total, count = loss.value(
            jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(mask), z_loss=z_loss
        )
        assert relative_error(total, expected) < 1e-12
        assert count == mask.sum()


def test_uniform_logits_cost_log_vocab_each(loss):
    total, count = loss.value(jnp.zeros((5, VOCAB)), jnp.arange(5), jnp.ones(5, bool))
    assert relative_error(total / count, np.log(VOCAB)) < 1e-6


@given(
    seed=seeds,
    garbage=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]),
    target=st.sampled_from([-100, -1, VOCAB, 10**6]),
)
def test_masked_garbage_changes_nothing(loss, seed, garbage, target):
    logits, targets, mask = draw(seed, (2, 9))
    spoilt = (np.where(mask[..., None], logits, garbage), np.where(mask, targets, target), mask)
    clean, dirty = on_device(logits, targets, mask), on_device(*spoilt)
    np.testing.assert_array_equal(loss.value(*dirty), loss.value(*clean))
    gradient = np.asarray(loss.z_gradient(*dirty))
    np.testing.assert_array_equal(gradient, loss.z_gradient(*clean))
    assert not gradient[~mask].any()


def test_all_masked_is_zero_with_zero_gradients(loss):
    logits, targets, _ = draw(0, (2, 9))
    arrays = on_device(
        np.full_like(logits, np.nan), np.full_like(targets, -100), np.zeros((2, 9), bool)
    )
    assert tuple(map(float, loss.value(*arrays))) == (0.0, 0.0)
    assert not np.any(loss.gradient(*arrays))


@pytest.mark.parametrize("target", [VOCAB, 10**6])
def test_a_counted_target_out_of_range_is_not_silent(loss, target):
    assert np.isnan(loss.value(jnp.zeros((1, VOCAB)), jnp.array([target]), jnp.ones(1, bool))[0])


@given(seed=seeds, cut=st.sampled_from([0, 1, 4]))
def test_parts_add_up(loss, seed, cut):
    arrays = draw(seed, (2, 9))
    first, second = (
        on_device(*(a[:, part] for a in arrays)) for part in (slice(cut), slice(cut, None))
    )
    whole = loss.value(*on_device(*arrays))
    parts = [a + b for a, b in zip(loss.value(*first), loss.value(*second), strict=True)]
    assert relative_error(parts[0], whole[0]) < 1e-6
    assert parts[1] == whole[1]


@given(seed=seeds)
def test_gradient_is_probability_minus_target(loss, seed):
    logits, targets, mask = draw(seed, (2, 9))
    expected = (oracle.softmax(logits) - np.eye(VOCAB)[targets]) * mask[..., None]
    assert relative_error(loss.gradient(*on_device(logits, targets, mask)), expected) < 1e-5


@pytest.mark.parametrize("size", [1e4, 1e15])
def test_huge_logits_stay_finite(loss, size):
    logits = jnp.float32([[size, -size, 0.0], [size, -size, 0.0], [-size, -size, -size]])
    arrays = (logits, jnp.array([0, 1, 2]), jnp.ones(3, bool))
    assert relative_error(loss.value(*arrays)[0], 2 * size + np.log(3)) < 1e-5
    assert np.all(np.isfinite(loss.z_gradient(*arrays)))


def test_bfloat16_logits_are_summed_in_float32(loss):
    logits, targets, mask = draw(0, (512,))
    low = jnp.asarray(logits, jnp.bfloat16)
    total, _ = loss.value(low, jnp.asarray(targets), jnp.asarray(mask))
    assert total.dtype == jnp.float32
    assert (
        relative_error(total, oracle.cross_entropy(np.asarray(low, np.float64), targets, mask)[0])
        < 1e-5
    )


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_gradients(loss, z_loss):
    rng = np.random.default_rng(0)
    targets, mask = jnp.asarray(rng.integers(0, 6, (2, 4))), jnp.asarray(rng.random((2, 4)) < 0.6)
    assert_gradients_match(
        lambda logits: loss.function(logits, targets, mask, z_loss)[0],
        2 * rng.standard_normal((2, 4, 6)),
    )


# From activations and a head


def draw_products(seed, seq, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((3, seq, 8)), rng.standard_normal((8, VOCAB))
    hidden, head = (
        np.float64(jnp.asarray(array, dtype)) for array in (hidden, head)
    )  # that can be written in it
    return (
        hidden,
        head,
        rng.integers(0, VOCAB, (3, seq)),
        rng.random((3, seq)) < rng.choice([0, 0.5, 1.0], (3, 1)),
    )


@given(seed=seeds, seq=st.sampled_from([1, 5, 8]), chunk_tokens=st.sampled_from([1, 6, 12, 24]))
def test_products_in_chunks_equal_the_oracle(seed, seq, chunk_tokens):
    hidden, head, targets, mask = draw_products(seed, seq)
    logits = hidden @ head
    expected, count = oracle.cross_entropy(logits, targets, mask)
    slopes = (oracle.softmax(logits) - np.eye(VOCAB)[targets]) * mask[..., None]
    with jax.enable_x64(True):
        where = jnp.asarray(targets), jnp.asarray(mask)
        (total, counted), gradients = products_and_gradients(
            jnp.asarray(hidden), jnp.asarray(head), *where, chunk_tokens
        )
        assert counted == count
        assert relative_error(total, expected) < 1e-12
        for gradient, reference in zip(
            gradients,
            (slopes @ head.T, np.tensordot(hidden, slopes, ((0, 1), (0, 1)))),
            strict=True,
        ):
            assert relative_error(gradient, reference) < 1e-12
        log_probs, likeliest = jax.jit(token_log_probs, static_argnums=3)(
            hidden, head, where[0], chunk_tokens
        )
    assert (
        relative_error(
            log_probs,
            np.log(np.take_along_axis(oracle.softmax(logits), targets[..., None], -1))[..., 0],
        )
        < 1e-12
    )
    np.testing.assert_array_equal(likeliest, logits.argmax(-1) == targets)


@functools.partial(jax.jit, static_argnums=4)
def products_and_gradients(hidden, head, targets, mask, chunk_tokens):
    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, targets, mask, 0.0, chunk_tokens)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)


@pytest.mark.parametrize("chunk_tokens", [4, 9, 100])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_both_factors(chunk_tokens, tied):
    rng = np.random.default_rng(0)
    targets, mask = jnp.asarray(rng.integers(0, 6, (2, 9))), jnp.asarray(rng.random((2, 9)) < 0.6)

    def total(hidden, head):
        return linear_cross_entropy(
            hidden, head.T if tied else head, targets, mask, 0.01, chunk_tokens
        )[0]

    assert_gradients_match(
        total, rng.standard_normal((2, 9, 4)), rng.standard_normal((6, 4) if tied else (4, 6))
    )


@pytest.mark.parametrize("chunk_tokens", [6, 100])
def test_bfloat16_products_are_summed_in_float32(chunk_tokens):
    hidden, head, targets, mask = draw_products(0, 64, jnp.bfloat16)
    low = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    (total, _), gradients = products_and_gradients(
        *low, jnp.asarray(targets), jnp.asarray(mask), chunk_tokens
    )
    assert total.dtype == jnp.float32
    assert relative_error(total, oracle.cross_entropy(hidden @ head, targets, mask)[0]) < 1e-5
    slopes = (oracle.softmax(hidden @ head) - np.eye(VOCAB)[targets]) * mask[..., None]
    assert [gradient.dtype for gradient in gradients] == 2 * [jnp.bfloat16]
    assert relative_error(gradients[1], np.tensordot(hidden, slopes, ((0, 1), (0, 1)))) < 1e-2


def test_every_product_has_operands_of_the_compute_dtype():
    arrays = (
        jnp.ones((2, 8, 4), jnp.bfloat16),
        jnp.ones((4, 6), jnp.bfloat16),
        jnp.ones((2, 8), int),
        jnp.ones((2, 8), bool),
    )
    program = jax.make_jaxpr(functools.partial(products_and_gradients, chunk_tokens=4))(*arrays)
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
    programs = plain.lower(*arrays), products_and_gradients.lower(*arrays, 16)
    whole, chunked = (
        program.compile().memory_analysis().temp_size_in_bytes for program in programs
    )
    assert chunked < 250_000 < 4 * 64 * 1000 * 4 <= whole


def test_chunks_without_counted_tokens_are_not_computed():
    spoilt = jnp.full((2, 8, 4), jnp.nan).at[:, 0].set(1.0)
    mask = jnp.zeros((2, 8), bool).at[:, 0].set(True)
    for chunk_tokens in (2, 100):
        total, count = linear_cross_entropy(
            spoilt, jnp.ones((4, 6)), jnp.zeros((2, 8), int), mask, 0.0, chunk_tokens
        )
        assert relative_error(total / count, np.log(6)) < 1e-6


def test_the_decoding_layout_gives_the_same_and_has_no_gradients():
    hidden, head, targets, mask = (jnp.asarray(array) for array in draw_products(1, 8))
    packed = decode_matrix(head, [0])
    assert isinstance(packed, DecodeMatrix)
    for chunk_tokens in (6, 100):
        expected = linear_cross_entropy(hidden, head, targets, mask, 0.0, chunk_tokens)
        assert (
            relative_error(
                linear_cross_entropy(hidden, packed, targets, mask, 0.0, chunk_tokens)[0],
                expected[0],
            )
            < 1e-5
        )
        log_probs, _ = token_log_probs(hidden, packed, targets, chunk_tokens)
        assert (
            relative_error(log_probs, token_log_probs(hidden, head, targets, chunk_tokens)[0])
            < 1e-5
        )
    with pytest.raises(ValueError, match="laid out for decoding, which has no gradients"):
        jax.grad(lambda hidden: linear_cross_entropy(hidden, packed, targets, mask)[0])(hidden)
