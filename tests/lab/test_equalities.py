"""Each equality holds whatever is drawn, and sees the mistakes that it is there for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equalities import (
    BFLOAT16_TOLERANCE,
    CONFIG,
    SEQ,
    Case,
    cache_error,
    equality_checks,
    packed_error,
    padding_error,
    ragged_error,
    ways_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import jllama.models.build
from jllama import functional as F
from jllama.lab.attention import (
    DTYPES,
    attention_checks,
    attention_error,
    attention_masks,
    attentions,
)
from jllama.lab.checks import TOLERANCE, VISIBLE, random_params, run_check
from jllama.lab.mutations import model_with
from jllama.models.decode_params import DecodeParams

JLLAMA, PARAMS = ways_of(jllama.models.build), random_params(CONFIG, 0)
PREFILL = "prefill and decode against one forward/every split of 24"
CHUNKS = "chunked prefill against one forward/chunks of up to 1"
RAGGED = "ragged batch against single rows/24 lengths"
PADDING = "ragged batch against single rows/other padding and mates"
PACKED = "packed documents against each alone/up to 4 in a row"
SCANNED = "scanned against unrolled layers/logits"
LOSS, GRADIENTS = "remat on against off/loss", "remat on against off/gradients"
BFLOAT16 = "bfloat16 against float32 weights/up to position 100,000"


def rows_of(implementation):
    return {
        check.name.removeprefix("equalities/"): check for check in equality_checks(implementation)
    }


ROWS = rows_of(JLLAMA)
SHARDED = [check for name, check in ROWS.items() if name.startswith("sharded")]

seeds = st.integers(0, 2**32 - 1)


def integers(shape, low, high):
    """Arrays of numbers from ``low`` to ``high``, by seed: a failure is shrunk at once."""
    return seeds.map(
        lambda seed: np.random.default_rng(seed).integers(low, high, shape, endpoint=True)
    )


tokens_of_rows = integers((SEQ, SEQ), 0, CONFIG.vocab_size - 1)


# Right code


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("sharded")])
def test_ways_of_running_a_model_agree(name):
    assert run_check(ROWS[name]).passed, run_check(ROWS[name])


def test_bfloat16_is_really_used():
    assert ROWS[BFLOAT16].tolerance == BFLOAT16_TOLERANCE
    assert ROWS[BFLOAT16].compute() > 1e-4


# An example has 24 rows, each with lengths, splits or documents of its own.


@settings(max_examples=3)
@given(tokens=tokens_of_rows, splits=integers(SEQ, 0, SEQ))
def test_prefill_and_decode_equal_one_forward(tokens, splits):
    fed = [(SEQ, splits), *[(1, 1)] * SEQ]
    assert cache_error(Case(JLLAMA, CONFIG, PARAMS, tokens), fed) < TOLERANCE


@settings(max_examples=4)
@given(tokens=tokens_of_rows, data=st.data(), width=st.sampled_from([1, 5, 16]))
def test_ragged_chunks_equal_one_forward(tokens, data, width):
    chunks = data.draw(integers((data.draw(st.integers(0, 6)), SEQ), 0, width))
    fed = [*((width, counts) for counts in chunks), *[(width, width)] * SEQ]
    assert cache_error(Case(JLLAMA, CONFIG, PARAMS, tokens), fed) < TOLERANCE


@settings(max_examples=3)
@given(tokens=tokens_of_rows, lengths=integers(SEQ, 0, SEQ))
def test_a_ragged_batch_equals_single_rows_whatever_is_beside_them(tokens, lengths):
    case = Case(JLLAMA, CONFIG, PARAMS, tokens)
    assert ragged_error(case, lengths) < TOLERANCE
    assert padding_error(case, lengths) == 0


@settings(max_examples=3)
@given(tokens=tokens_of_rows, numbers=integers((SEQ, SEQ), 0, 5))
def test_packed_documents_equal_each_alone(tokens, numbers):
    assert packed_error(Case(JLLAMA, CONFIG, PARAMS, tokens), np.sort(numbers)) < TOLERANCE


def test_attention_equals_the_oracle_under_any_mask():
    """Rows have from no tokens of a second document to nothing else, and some see nothing."""
    rng = np.random.default_rng(0)
    density = np.repeat([0.0, 0.1, 0.5, 1.0], 2)
    segments = np.sort(rng.random((8, 64)) < density[:, None]).astype(np.int32)
    offset, lengths = rng.integers(0, 64, (2, 8))
    lengths[rng.random(8) > density] = 0
    mask = F.Mask(*map(jnp.asarray, (offset, segments, segments, lengths)))
    keys = np.arange(64)
    dense = (keys <= offset[:, None, None] + keys[:, None]) & (keys < lengths[:, None])[:, None]
    dense &= segments[:, :, None] == segments[:, None]
    for dtype, _, tolerance in DTYPES:
        for attention in attentions().values():
            assert attention_error(attention, mask, dense, dtype) < tolerance


def test_a_registered_implementation_has_its_rows(monkeypatch):
    """A mistake fails those of its masks; what is refused is said and is no failure."""

    def forgets_the_segments(query, key, value, mask):
        whole_row = dataclasses.replace(mask, query_segments=None)
        return F.attention(query, key, value, whole_row, "reference")

    def refuses(query, key, mask):
        return None if mask.lengths is None else "a mask with lengths"

    reference = F.ATTENTION["reference"]
    mine = reference._replace(function=forgets_the_segments, refuses=refuses)
    monkeypatch.setitem(F.ATTENTION, "mine", mine)
    monkeypatch.setitem(F.ATTENTION, "elsewhere", reference._replace(platform="tpu"))
    rows = rows_of(JLLAMA) | {check.name: check for check in attention_checks()}
    assert not [name for name in rows if "elsewhere" in name]
    checks = {
        check.row: check
        for name, check in rows.items()
        if name.endswith("/mine") and "bfloat16" not in name
    }
    ragged = run_check(checks.pop("ragged lengths"))
    assert ragged.passed
    assert ragged.refusal == "the attention implementation 'mine' cannot serve a mask with lengths"
    assert len(checks) == 6
    wrong = {
        name for name, check in checks.items() if not check.compute() < VISIBLE * check.tolerance
    }
    assert wrong == {
        "packed documents against reference attention",
        "packed documents",
        "packed documents in a window",
    }


def test_fewer_than_eight_devices_are_a_failure_with_a_name():
    """A check that raises has no error, and does not pass."""
    for check in map(run_check, SHARDED):
        assert np.isnan(check.error)
        assert not check.passed
        expected = "JAX has 1 CPU devices; sharding needs 8: set JAX_NUM_CPU_DEVICES=8"
        assert check.problem == expected


# Wrong code


def with_mask(function, **wrong):
    """The model with one of its functions taken from a copy with another mask."""
    copy = ways_of(model_with(**wrong))
    return JLLAMA._replace(**{function: getattr(copy, function)})


def moved(by):
    """The mask of queries that stand ``by`` further on."""
    return lambda offset=None, **segments: F.Mask(
        jnp.full(1, by) if offset is None else offset + by, **segments
    )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["offset", "query_segments", "key_segments", "lengths"],
    meta_fields=["window"],
)
class AndTheLastSlot(F.Mask):
    def dense(self, *where):
        return F.Mask.dense(self, *where).at[..., -1].set(True)


def wrapped(**wrong):
    """The model with a function replaced by one that is given it first."""
    return JLLAMA._replace(
        **{name: functools.partial(wrap, getattr(JLLAMA, name)) for name, wrap in wrong.items()}
    )


def a_slot_too_far(extend, *args):
    logits, cache = extend(*args)
    return logits, cache._replace(lengths=cache.lengths + 1)


def no_segments(forward, config, params, tokens, segments=None, positions=None):
    return forward(config, params, tokens, None, positions)


def stand_in_loss(params, tokens, mask):
    """One product stands in for the Llama here and below: it compiles at once."""
    return F.linear_cross_entropy(
        params["embed"][tokens[:, :-1]], params["lm_head"], tokens[:, 1:], mask
    )[0]


def other_value(_, config, params, tokens, mask, remat):
    return stand_in_loss(params, tokens, mask) * (1.001 if remat else 1.0)


def other_gradient(_, config, params, tokens, mask, remat):
    loss = stand_in_loss(params, tokens, mask)
    return loss + 0.01 * (loss - jax.lax.stop_gradient(loss)) if remat else loss


def layers_in_reverse(forward, config, params, *others):
    if isinstance(params, DecodeParams):
        layers = params.weights["layers"]
        reverse = dict(zip(layers, reversed(layers.values()), strict=True))
        params = DecodeParams(params.weights | {"layers": reverse})
    return forward(config, params, *others)


def positions_in_the_dtype_of_weights(
    forward, config, params, tokens, segments=None, positions=None
):
    if positions is not None:
        positions = positions.astype(params.dtype).astype(jnp.int32)
    return forward(config, params, tokens, segments, positions)


CACHED = {PREFILL, CHUNKS, RAGGED}
LAYOUTS = [*CACHED, PADDING, PACKED]
# What is wrong, which rows are looked at, and which of them fail.
MISTAKES = {
    "sees one ahead": (with_mask("forward", Mask=moved(1)), LAYOUTS, {*CACHED, PACKED}),
    "does not see itself": (with_mask("forward", Mask=moved(-1)), LAYOUTS, CACHED),
    "cache: sees one ahead": (with_mask("extend", Mask=moved(1)), LAYOUTS, {*CACHED, PADDING}),
    "cache: does not see itself": (with_mask("extend", Mask=moved(-1)), LAYOUTS, CACHED),
    "cache: sees an unused slot": (
        with_mask("extend", Mask=AndTheLastSlot),
        LAYOUTS,
        {*CACHED, PADDING},
    ),
    "cache: a slot too far": (wrapped(extend=a_slot_too_far), LAYOUTS, {*CACHED, PADDING}),
    "segments ignored": (wrapped(forward=no_segments), LAYOUTS, {PACKED}),
    "layers in reverse": (wrapped(forward=layers_in_reverse), [SCANNED, PACKED], {SCANNED}),
    "remat: other value": (wrapped(loss=other_value), [LOSS, GRADIENTS], {LOSS, GRADIENTS}),
    "remat: other gradient": (wrapped(loss=other_gradient), [LOSS, GRADIENTS], {GRADIENTS}),
    "positions in bfloat16": (
        wrapped(forward=positions_in_the_dtype_of_weights),
        [BFLOAT16, PACKED],
        {BFLOAT16},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen_where_it_should_be(mistake):
    implementation, looked_at, expected = MISTAKES[mistake]
    rows = rows_of(implementation)
    ratios = {name: rows[name].compute() / rows[name].tolerance for name in looked_at}
    assert {name for name, ratio in ratios.items() if ratio > 30} == expected
    assert {name for name, ratio in ratios.items() if not ratio < 1} == expected


def grouped_in_turn(query, key, value, mask):
    copies = (1, query.shape[1] // key.shape[1], 1, 1)
    return F.attention(query, jnp.tile(key, copies), jnp.tile(value, copies), mask)


def unscaled(query, key, value, mask):
    return F.attention(query * query.shape[-1] ** 0.5, key, value, mask)


def with_dense(change):
    """Attention under a mask that is changed."""

    def attention(query, key, value, mask):
        seen = mask.dense(query.shape[2], key.shape[2])
        return F.grouped_query_attention(query, key, value, change(seen))

    return attention


def blind_queries_are_nan(query, key, value, mask):
    blind = ~mask.dense(query.shape[2], key.shape[2]).any(-1)
    return F.attention(query, key, value, mask) + jnp.where(blind, jnp.nan, 0)[:, None, :, None]


MASKS = {*attention_masks()}
WRONG_ATTENTION = {
    "grouped in turn": (grouped_in_turn, MASKS),
    "unscaled": (unscaled, MASKS),
    "mask ignored": (with_dense(jnp.ones_like), MASKS),
    "blind queries see all": (
        with_dense(lambda seen: seen | ~seen.any(axis=-1, keepdims=True)),
        {"ragged lengths"},
    ),
    "blind queries are NaN": (blind_queries_are_nan, {"ragged lengths"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG_ATTENTION)
def test_wrong_attention_is_seen(mistake):
    wrong, masks = WRONG_ATTENTION[mistake]
    errors = {kind: attention_error(wrong, *arrays) for kind, arrays in attention_masks().items()}
    assert {kind for kind, error in errors.items() if not error < VISIBLE * TOLERANCE} == masks
