"""The JAX model against the float64 oracle, the equalities it must keep, and proof that these tests see mistakes."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import functional as F
from jllama import oracle
from jllama.config import LlamaConfig, RopeScaling
from jllama.functional import cross_entropy, half_split_from_interleaved
from jllama.model import KVCache, merge, rope_frequencies, unstack_layers
from jllama.verify.compare import random_params, relative_error

TOLERANCE = 1e-5
VISIBLE = 100 * TOLERANCE
LONG, SHORT = 512, 24

BASE = LlamaConfig(
    vocab_size=97, num_layers=2, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=160, max_seq_len=LONG
)  # head_dim is not embed_dim / num_heads
LLAMA_32 = dataclasses.replace(BASE, rope_theta=500_000.0, rope_scaling=RopeScaling("llama3", 32.0))
YARN = dataclasses.replace(BASE, rope_scaling=RopeScaling("yarn", 16.0, original_max_seq_len=2048))
DYNAMIC = dataclasses.replace(BASE, rope_scaling=RopeScaling("dynamic", 4.0, original_max_seq_len=128))
CONFIGS = {
    "grouped": BASE,
    "multi-head": dataclasses.replace(BASE, num_kv_heads=4),
    "multi-query": dataclasses.replace(BASE, num_kv_heads=1),
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "derived sizes": LlamaConfig(vocab_size=97, num_layers=2, embed_dim=128, num_heads=2, max_seq_len=LONG),
    "head_dim 80, one layer, eps 1e-6": dataclasses.replace(BASE, head_dim=80, num_layers=1, norm_eps=1e-6),
    "linear": dataclasses.replace(BASE, rope_scaling=RopeScaling("linear", 4.0)),
    "Llama 3.1": dataclasses.replace(LLAMA_32, rope_scaling=RopeScaling("llama3", 8.0)),
    "Llama 3.2": LLAMA_32,
    "yarn": YARN,
    "yarn, every knob": dataclasses.replace(
        BASE, rope_scaling=RopeScaling("yarn", 4.0, beta_fast=24.0, beta_slow=2.0, attention_factor=1.3)
    ),
    "dynamic": DYNAMIC,
    "dynamic, past the context": dataclasses.replace(DYNAMIC, max_seq_len=128),
}

rng = np.random.default_rng(0)
TOKENS = rng.integers(0, BASE.vocab_size, (3, LONG))
# From zero; all of them spread up to 100,667, so that distances pass 8,192; and neighbours near 100,000.
POSITIONS = np.stack([np.arange(LONG), 197 * np.arange(LONG), 99_700 + np.arange(LONG)])
FAR = slice(1, 2)

seeds = st.integers(0, 2**32 - 1)
tokens_of_rows = st.builds(lambda seed: np.random.default_rng(seed).integers(0, BASE.vocab_size, (3, SHORT)), seeds)


def forward_(config, params, tokens, segments=None, positions=None, remat=False):
    llama = merge(config, params)
    return llama.logits(llama.hidden(tokens, segments, positions, remat=remat))


def extend_(config, params, tokens, cache, counts):
    llama = merge(config, params)
    hidden, cache = llama.extend(tokens, cache, counts)
    return llama.logits(hidden), cache


forward = jax.jit(forward_, static_argnames=("config", "remat"))
extend = jax.jit(extend_, static_argnames=("config",))


@functools.cache
def weights(config):
    return jax.tree.map(jnp.asarray, random_params(config, 0))


@functools.cache
def unstacked(config):
    return unstack_layers(weights(config))


@functools.cache
def judged(config):
    """The oracle's logits of TOKENS at POSITIONS."""
    return oracle.forward(random_params(config, 0), TOKENS, config, POSITIONS)


@functools.cache
def ours(config):
    return np.asarray(forward(config, weights(config), TOKENS, None, POSITIONS))


def with_layers(params, **changed):
    return params | {"layers": params["layers"] | changed}


def mean_loss(config, params, tokens, mask, remat=False):
    total, count = cross_entropy(forward_(config, params, tokens[:, :-1], remat=remat), tokens[:, 1:], mask)
    return total / jnp.maximum(count, 1)


loss_and_gradients = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnames=("config", "remat"))


def assert_trees_near(actual, expected, tolerance=TOLERANCE):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(ours, theirs) < tolerance


# Against the oracle


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_oracle(name):
    config = CONFIGS[name]
    assert ours(config).dtype == np.float32
    for row in range(len(POSITIONS)):  # each by itself, so that the largest logit of one does not excuse another
        assert relative_error(ours(config)[row], judged(config)[row]) < TOLERANCE


def test_positions_default_to_counting_from_zero():
    expected = oracle.forward(random_params(BASE, 0), TOKENS[:, :SHORT], BASE)
    assert relative_error(short_logits(), expected) < TOLERANCE


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_eps_at_small_activations(eps):
    config = dataclasses.replace(BASE, norm_eps=eps)
    params = random_params(config, 0)
    params["embed"] *= np.float32(1e-2)
    expected = oracle.forward(params, TOKENS[:, :SHORT], config)
    assert relative_error(forward(config, params, TOKENS[:, :SHORT]), expected) < TOLERANCE
    other = oracle.forward(params, TOKENS[:, :SHORT], dataclasses.replace(config, norm_eps=10 * eps))
    assert relative_error(other, expected) > VISIBLE


@settings(max_examples=15)
@given(tokens=tokens_of_rows, seed=seeds)
def test_any_segments_equal_the_oracle(tokens, seed):
    segments = np.random.default_rng(seed).integers(0, 3, tokens.shape)  # not even contiguous
    expected = oracle.forward(random_params(BASE, 0), tokens, BASE, segments=segments)
    assert relative_error(forward(BASE, weights(BASE), tokens, segments), expected) < TOLERANCE


def test_gradient_of_every_parameter_equals_differences_of_the_oracle():
    config, step = CONFIGS["tied"], 1e-5
    mask = rng.random((3, SHORT - 1)) < 0.7
    tokens = TOKENS[:, :SHORT]
    loss, gradients = loss_and_gradients(config, weights(config), tokens, mask)

    def exact_loss(params):
        total, count = oracle.cross_entropy(oracle.forward(params, tokens[:, :-1], config), tokens[:, 1:], mask)
        return total / count

    params = jax.tree.map(np.float64, random_params(config, 0))
    leaves, structure = jax.tree.flatten(params)
    assert relative_error(loss, exact_loss(params)) < TOLERANCE
    for index, gradient in enumerate(jax.tree.leaves(gradients)):
        gradient = np.float64(gradient)
        size = np.linalg.norm(gradient)
        noise = rng.standard_normal(gradient.shape)
        direction = gradient / size + noise / np.linalg.norm(noise)
        sides = []
        for sign in (1, -1):
            moved = [*leaves[:index], leaves[index] + sign * step * direction, *leaves[index + 1 :]]
            sides.append(exact_loss(jax.tree.unflatten(structure, moved)))
        difference = (sides[0] - sides[1]) / (2 * step)
        assert abs(np.sum(gradient * direction) - difference) < 1e-4 * size


def test_bfloat16_weights_give_float32_logits_nearby():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights(LLAMA_32))
    logits = forward(LLAMA_32, params, TOKENS, None, POSITIONS)
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, judged(LLAMA_32)) < 3e-2


# Equalities: layouts, remat, causality, documents


def test_scanned_equals_unrolled():
    assert relative_error(forward(BASE, unstacked(BASE), TOKENS[:, :SHORT]), short_logits()) < 1e-6


def test_unstacked_layers_are_the_stacked_ones_in_order():
    stacked, apart = weights(BASE), unstacked(BASE)
    assert list(apart["layers"]) == ["0", "1"]
    for index, layer in apart["layers"].items():
        for name, leaf in layer.items():
            np.testing.assert_array_equal(leaf, stacked["layers"][name][int(index)])
    assert {name: apart[name] for name in apart if name != "layers"} == {
        name: stacked[name] for name in stacked if name != "layers"
    }


def test_remat_changes_no_value_and_no_gradient():
    mask = np.ones((3, SHORT - 1), bool)
    loss, gradients = loss_and_gradients(BASE, weights(BASE), TOKENS[:, :SHORT], mask)
    again, recomputed = loss_and_gradients(BASE, weights(BASE), TOKENS[:, :SHORT], mask, remat=True)
    assert relative_error(again, loss) < 1e-6
    assert_trees_near(recomputed, gradients)


def test_remat_does_recompute():
    counts = []
    for remat in (False, True):
        program = jax.make_jaxpr(jax.grad(functools.partial(mean_loss, BASE, remat=remat)))(
            weights(BASE), TOKENS[:, :SHORT], np.ones((3, SHORT - 1), bool)
        )
        counts.append(str(program).count(" dot_general["))
    assert counts[1] > counts[0]


@settings(max_examples=15)
@given(tokens=tokens_of_rows, position=st.integers(0, SHORT - 1), change=st.integers(1, BASE.vocab_size - 1))
def test_a_token_changes_no_earlier_logits(tokens, position, change):
    other = tokens.copy()
    other[:, position] = (other[:, position] + change) % BASE.vocab_size
    before, after = (np.asarray(forward(BASE, weights(BASE), each)) for each in (tokens, other))
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    for row in range(3):
        assert relative_error(after[row, position], before[row, position]) > VISIBLE


@settings(max_examples=15)
@given(tokens=tokens_of_rows, cuts=st.sets(st.integers(1, SHORT - 1), max_size=4))
def test_packed_documents_equal_each_alone(tokens, cuts):
    bounds = [0, *sorted(cuts), SHORT]
    segments = np.searchsorted(sorted(cuts), np.arange(SHORT), side="right")
    segments = np.tile(segments, (3, 1))
    packed = np.asarray(forward(BASE, weights(BASE), tokens, segments))
    for start, end in itertools.pairwise(bounds):
        alone = np.zeros_like(tokens)
        alone[:, : end - start] = tokens[:, start:end]  # what comes after is not seen
        expected = forward(BASE, weights(BASE), alone)[:, : end - start]
        assert relative_error(packed[:, start:end], expected) < TOLERANCE


@settings(max_examples=15)
@given(tokens=tokens_of_rows, cut=st.integers(1, SHORT - 1), seed=seeds)
def test_a_document_changes_nothing_in_the_next(tokens, cut, seed):
    segments = np.tile(np.arange(SHORT) >= cut, (3, 1)).astype(np.int32)
    other = tokens.copy()
    other[:, :cut] = np.random.default_rng(seed).integers(0, BASE.vocab_size, (3, cut))
    packed, changed = (np.asarray(forward(BASE, weights(BASE), each, segments)) for each in (tokens, other))
    np.testing.assert_array_equal(changed[:, cut:], packed[:, cut:])
    # Without segments the same change is seen, unless no token changed.
    if np.any(other != tokens, axis=1).all():
        whole, leaking = (np.asarray(forward(BASE, weights(BASE), each)) for each in (tokens, other))
        assert relative_error(leaking[:, cut:], whole[:, cut:]) > VISIBLE


# Equalities: tying, padding


def test_tied_embedding_is_one_leaf_whose_gradient_is_the_sum_of_both_uses():
    tied, separate = CONFIGS["tied"], BASE
    params = weights(tied)
    assert "lm_head" not in params
    twice = params | {"lm_head": params["embed"].T}
    tokens, mask = TOKENS[:, :SHORT], np.ones((3, SHORT - 1), bool)
    loss, gradients = loss_and_gradients(tied, params, tokens, mask)
    separate_loss, parts = loss_and_gradients(separate, twice, tokens, mask)
    assert relative_error(separate_loss, loss) < 1e-6
    head = parts.pop("lm_head").T
    assert min(float(jnp.linalg.norm(part)) for part in (head, parts["embed"])) > 1e-2
    assert_trees_near(gradients, parts | {"embed": parts["embed"] + head})


def test_a_row_of_padding_adds_nothing_to_loss_and_gradients():
    tokens = TOKENS[:, :SHORT].copy()
    mask = np.ones((3, SHORT - 1), bool)
    mask[2] = False
    other_loss, others = loss_and_gradients(BASE, weights(BASE), tokens, mask)
    tokens[2] = 0
    loss, gradients = loss_and_gradients(BASE, weights(BASE), tokens, mask)
    logits = oracle.forward(random_params(BASE, 0), tokens[:2, :-1], BASE)
    total, count = oracle.cross_entropy(logits, tokens[:2, 1:], mask[:2])
    assert count == 2 * (SHORT - 1)
    assert relative_error(loss, total / count) < TOLERANCE
    assert relative_error(loss, other_loss) < 1e-6
    assert_trees_near(gradients, others)
    nothing, zeros = loss_and_gradients(BASE, weights(BASE), tokens, np.zeros_like(mask))
    assert float(nothing) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zeros))


# The cache


def short_logits():
    return np.asarray(forward(BASE, weights(BASE), TOKENS[:, :SHORT]))


def poisoned(batch, max_len=SHORT + 8, poison=1e4):
    empty = KVCache.zeros(BASE, batch, max_len)
    return jax.tree.map(lambda leaf: leaf + poison if leaf.ndim == 4 else leaf, empty)


def run_chunks(tokens, chunks, width, cache):
    """Feed row ``b`` its tokens in chunks of ``chunks[i][b]`` (0 to width), padded with garbage; all logits."""
    garbage = np.random.default_rng(1)
    done = np.zeros(len(tokens), int)
    logits = np.full((*tokens.shape, BASE.vocab_size), np.nan)
    for counts in chunks:
        counts = np.minimum(counts, tokens.shape[1] - done)
        padded = garbage.integers(0, BASE.vocab_size, (len(tokens), width))
        for row, count in enumerate(counts):
            padded[row, :count] = tokens[row, done[row] : done[row] + count]
        new, cache = extend(BASE, unstacked(BASE), padded, cache, jnp.asarray(counts))
        for row, count in enumerate(counts):
            logits[row, done[row] : done[row] + count] = new[row, :count]
        done += counts
        np.testing.assert_array_equal(cache.lengths, done)
    return logits, cache


@pytest.mark.parametrize("first", range(1, SHORT + 1, 3))
def test_prefill_and_decode_equal_one_forward_at_every_split(first):
    # Three rows at a time: prefilled with ``first``, ``first + 1`` and ``first + 2`` tokens, then decoded to the end.
    splits = np.arange(first, first + 3)
    cache, expected = poisoned(3), short_logits()
    logits, cache = run_chunks(TOKENS[:, :SHORT], [splits], SHORT, cache)
    while np.any(unfinished := np.asarray(cache.lengths) < SHORT):
        column = np.minimum(cache.lengths, SHORT - 1)
        step = TOKENS[np.arange(3), column][:, None]
        new, cache = extend(BASE, unstacked(BASE), step, cache, jnp.asarray(unfinished.astype(np.int32)))
        logits[unfinished, column[unfinished]] = new[unfinished, 0]
    np.testing.assert_array_equal(cache.lengths, SHORT)
    for row in range(3):
        assert relative_error(logits[row], expected[row]) < TOLERANCE


@settings(max_examples=15)
@given(data=st.data(), width=st.sampled_from([1, 6]))
def test_ragged_chunks_equal_one_forward(data, width):
    chunk = st.lists(st.integers(0, width), min_size=3, max_size=3)
    chunks = data.draw(st.lists(chunk, max_size=6)) + [[width] * 3] * -(-SHORT // width)
    logits, _ = run_chunks(TOKENS[:, :SHORT], chunks, width, poisoned(3))
    expected = short_logits()
    for row in range(3):
        assert relative_error(logits[row], expected[row]) < TOLERANCE


def prefilled_and_decoded(config):
    """Logits of the first row: all tokens but the last at once, then the last one."""
    cache = KVCache.zeros(config, 1, LONG)
    first, cache = extend(config, unstacked(config), TOKENS[:1, :-1], cache, jnp.array([LONG - 1]))
    last, cache = extend(config, unstacked(config), TOKENS[:1, -1:], cache, jnp.array([1]))
    return np.concatenate([first, last], axis=1)


@pytest.mark.parametrize("config", [LLAMA_32, YARN, DYNAMIC], ids=["Llama 3.2", "yarn", "dynamic"])
def test_prefill_of_unpadded_prompts_equals_the_oracle_over_512_positions(config):
    expected = oracle.forward(random_params(config, 0), TOKENS[:1], config)
    assert relative_error(prefilled_and_decoded(config), expected) < TOLERANCE


def test_the_base_of_dynamic_scaling_goes_by_the_sequence_or_the_context():
    short = dataclasses.replace(DYNAMIC, max_seq_len=128)  # as a checkpoint's own configuration has it
    plain = rope_frequencies(BASE)
    for seq_len in (0, 100, 128):
        np.testing.assert_array_equal(rope_frequencies(short, seq_len), plain)
        np.testing.assert_array_equal(rope_frequencies(DYNAMIC, seq_len), rope_frequencies(short, LONG))
    assert np.all(rope_frequencies(short, 129)[1:] < plain[1:])
    few = forward(DYNAMIC, weights(BASE), TOKENS[:1, :SHORT])
    assert relative_error(few, ours(DYNAMIC)[:1, :SHORT]) < TOLERANCE


def test_the_base_of_dynamic_scaling_stays_with_a_cache():
    # Its keys are already turned, so that a row that grows past the context keeps the context's base.
    short = dataclasses.replace(DYNAMIC, max_seq_len=128)
    np.testing.assert_array_equal(prefilled_and_decoded(short), prefilled_and_decoded(BASE))


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(0, SHORT), min_size=3, max_size=3), seed=seeds)
def test_padding_batch_mates_and_unused_slots_change_nothing(lengths, seed):
    draws = np.random.default_rng(seed)
    results = []
    for poison in (0.0, 1e4, -1e4):
        padded = draws.integers(0, BASE.vocab_size, (3, SHORT))
        for row, length in enumerate(lengths):
            padded[row, :length] = TOKENS[row, :length]
        logits, cache = extend(BASE, unstacked(BASE), padded, poisoned(3, poison=poison), jnp.array(lengths))
        results.append([np.asarray(logits)[row, :length] for row, length in enumerate(lengths)])
        step, _ = extend(BASE, unstacked(BASE), TOKENS[:, :1], cache, jnp.ones(3, jnp.int32))
        results[-1].append(np.asarray(step))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(actual, expected)
    # The first row with other mates, which are as long as can be.
    mates = np.concatenate([TOKENS[:1, :SHORT], draws.integers(0, BASE.vocab_size, (2, SHORT))])
    logits, _ = extend(BASE, unstacked(BASE), mates, poisoned(3), jnp.array([lengths[0], SHORT, SHORT]))
    np.testing.assert_array_equal(np.asarray(logits)[0, : lengths[0]], results[0][0])


def filled(max_len):
    """A cache with eight tokens in each row."""
    cache = KVCache.zeros(BASE, 3, max_len)
    for start, count in ((0, 6), (6, 2)):
        _, cache = extend(BASE, unstacked(BASE), TOKENS[:, start : start + 6], cache, jnp.full(3, count))
    return cache


@settings(max_examples=10)
@given(used=st.lists(st.integers(0, 8), min_size=3, max_size=3))
def test_writes_past_the_end_are_dropped_and_shift_nothing(used):
    counts = np.minimum(6, 8 - np.array(used))
    caches = {}
    for size in (8, SHORT + 8):  # the second has room to spare: every key where it belongs
        cache = filled(size)._replace(lengths=jnp.asarray(used, jnp.int32))
        _, caches[size] = extend(BASE, unstacked(BASE), TOKENS[:, 8:14], cache, jnp.asarray(counts))
    assert caches[8].keys[0].shape[2] == 8
    np.testing.assert_array_equal(caches[8].lengths, used + counts)
    for small, large in zip(jax.tree.leaves(caches[8]), jax.tree.leaves(caches[SHORT + 8]), strict=True):
        if small.ndim == 4:
            assert relative_error(small, large[:, :, :8]) < TOLERANCE


def test_a_full_cache_stays_as_it_is():
    full = filled(8)
    np.testing.assert_array_equal(full.lengths, 8)
    _, after = extend(BASE, unstacked(BASE), TOKENS[:, 8:14], full, jnp.zeros(3, jnp.int32))
    for kept, before in zip(jax.tree.leaves(after), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(kept, before)


def test_a_donated_cache_is_updated_in_place():
    cache = KVCache.zeros(BASE, 3, 64)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    donating = jax.jit(extend_, static_argnames=("config",), donate_argnames=("cache",))
    arguments = (unstacked(BASE), jnp.asarray(TOKENS[:, :1]), cache, jnp.ones(3, jnp.int32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = donating.lower(BASE, *arguments).compile()
        compiled(*arguments)
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    unusable = jax.jit(lambda cache: cache.keys[0].sum(), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        unusable(KVCache.zeros(BASE, 1, 8))


# Mutations: each mistake moves the logits by at least 100 tolerances


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 1_000_000.0},
        {"rope_scaling": None},
        {"rope_scaling": RopeScaling("llama3", 8.0)},
        {"rope_scaling": RopeScaling("linear", 32.0)},
        {"rope_scaling": RopeScaling("llama3", 32.0, original_max_seq_len=4096)},
    ],
    ids=str,
)
def test_a_wrong_rotary_setting_is_seen(changed):
    assert_seen(LLAMA_32, changed)


def assert_seen(config, changed):
    other = oracle.forward(
        random_params(config, 0), TOKENS[FAR], dataclasses.replace(config, **changed), POSITIONS[FAR]
    )
    assert relative_error(ours(config)[FAR], other) > VISIBLE


@pytest.mark.parametrize(
    "changed",
    [
        {"factor": 8.0},
        {"attention_factor": 1.0},
        {"beta_fast": 16.0},
        {"beta_slow": 2.0},
        {"original_max_seq_len": 4096},
        {"type": "linear", "attention_factor": 0.0},
    ],
    ids=str,
)
def test_a_wrong_yarn_setting_is_seen(changed):
    assert YARN.rope_scaling is not None
    assert_seen(YARN, {"rope_scaling": dataclasses.replace(YARN.rope_scaling, **changed)})


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_scaling": None},
        {"rope_scaling": RopeScaling("dynamic", 2.0, original_max_seq_len=128)},
        {"rope_scaling": RopeScaling("dynamic", 4.0, original_max_seq_len=256)},
        {"max_seq_len": 2 * LONG},
    ],
    ids=str,
)
def test_a_wrong_dynamic_setting_is_seen(changed):
    assert_seen(DYNAMIC, changed)


def interleaved_from_half_split(w):
    return np.stack(np.split(w, 2, axis=-1), axis=-1).reshape(w.shape)


def permuted(w, heads):
    """Meta's interleaved rows of a ``[embed, kv_heads, head_dim]`` matrix to half-split ones, with this many heads."""
    pairs = w.reshape(len(w), heads, -1, 2)
    return pairs.swapaxes(2, 3).reshape(w.shape)


def wrong_grouping(layers):
    """What ``n % kv_heads`` instead of ``n // group`` computes."""
    in_turn = np.array([0, 2, 1, 3])
    return {"wq": layers["wq"][:, :, in_turn], "wo": layers["wo"][:, in_turn]}


def left_interleaved(layers):
    return {name: interleaved_from_half_split(layers[name]) for name in ("wq", "wk")}


def permuted_twice(layers):
    return {name: np.asarray(half_split_from_interleaved(jnp.asarray(layers[name]))) for name in ("wq", "wk")}


def only_queries_permuted(layers):
    return {"wk": interleaved_from_half_split(layers["wk"])}


def keys_permuted_with_num_heads(layers):
    published = [interleaved_from_half_split(w) for w in layers["wk"]]
    np.testing.assert_array_equal(np.stack([permuted(w, BASE.num_kv_heads) for w in published]), layers["wk"])
    return {"wk": np.stack([permuted(w, BASE.num_heads) for w in published])}


def norms_exchanged(layers):
    return {"attn_norm": layers["mlp_norm"], "mlp_norm": layers["attn_norm"]}


def gate_and_up_exchanged(layers):
    return {"w_gate": layers["w_up"], "w_up": layers["w_gate"]}


def layers_in_reverse(layers):
    return {name: stack[::-1] for name, stack in layers.items()}


@pytest.mark.parametrize(
    "mistake",
    [
        wrong_grouping,
        left_interleaved,
        permuted_twice,
        only_queries_permuted,
        keys_permuted_with_num_heads,
        norms_exchanged,
        gate_and_up_exchanged,
        layers_in_reverse,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_wrong_layout_is_seen(mistake):
    params = random_params(BASE, 0)
    wrong = with_layers(params, **mistake(params["layers"]))
    logits = np.asarray(forward(BASE, wrong, TOKENS, None, POSITIONS))
    for row in range(len(POSITIONS)):
        assert relative_error(logits[row], judged(BASE)[row]) > VISIBLE


def test_a_head_that_is_not_the_embedding_is_seen():
    tied = CONFIGS["tied"]
    params = random_params(tied, 0)
    same = oracle.forward(params | {"lm_head": params["embed"].T}, TOKENS[:1], BASE)
    assert relative_error(ours(tied)[:1], same) < TOLERANCE
    other = oracle.forward(params | {"lm_head": random_params(BASE, 1)["lm_head"]}, TOKENS[:1], BASE)
    assert relative_error(ours(tied)[:1], other) > VISIBLE


def in_other_order(params, tokens, config, order):
    """The oracle's forward, norms elsewhere: ``pre`` is Llama, ``post`` the Transformer of 2017, ``branch`` OLMo 2."""
    positions, logits = np.arange(tokens.shape[1]), []
    for row in tokens:
        x = np.float64(params["embed"])[row]
        for index in range(config.num_layers):
            w = {name: np.float64(stack[index]) for name, stack in params["layers"].items()}

            def attend(h, w=w):
                q, k, v = (np.tensordot(h, w[name], axes=1).swapaxes(0, 1) for name in ("wq", "wk", "wv"))
                q, k = (oracle.rotate(heads, positions, oracle.rope_frequencies(config)) for heads in (q, k))
                return np.einsum("nth,nhd->td", oracle.attention(q, k, v, np.tri(len(h), dtype=bool)), w["wo"])

            def feed(h, w=w):
                return oracle.swiglu(h, w["w_gate"], w["w_up"], w["w_down"])

            for block, name in ((attend, "attn_norm"), (feed, "mlp_norm")):
                norm = functools.partial(oracle.rms_norm, scale=w[name], eps=config.norm_eps)
                if order == "pre":
                    x = x + block(norm(x))
                elif order == "post":
                    x = norm(x + block(x))
                else:
                    x = x + norm(block(x))
        logits.append(oracle.rms_norm(x, params["final_norm"], config.norm_eps) @ params["lm_head"])
    return np.stack(logits)


def test_norms_in_another_order_are_seen():
    params = random_params(BASE, 0)
    assert relative_error(ours(BASE)[:1], in_other_order(params, TOKENS[:1], BASE, "pre")) < TOLERANCE
    for order in ("post", "branch"):
        assert relative_error(ours(BASE)[:1], in_other_order(params, TOKENS[:1], BASE, order)) > VISIBLE


def bfloat16_tables(positions, frequencies):
    return tuple(
        table.astype(jnp.bfloat16).astype(jnp.float32) for table in RIGHT["rope_tables"](positions, frequencies)
    )


def bfloat16_angles(positions, frequencies):
    angles = positions.astype(jnp.bfloat16)[..., None] * jnp.asarray(frequencies, jnp.bfloat16)
    return jnp.cos(angles).astype(jnp.float32), jnp.sin(angles).astype(jnp.float32)


def float32_angles(positions, frequencies):
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def sees_one_ahead(query_positions, key_positions):
    return RIGHT["causal_mask"](query_positions + 1, key_positions)


def does_not_see_itself(query_positions, key_positions):
    return RIGHT["causal_mask"](query_positions - 1, key_positions)


RIGHT = {name: getattr(F, name) for name in ("rope_tables", "causal_mask", "cache_mask")}


@functools.cache
def sharp():
    """Weights with larger queries, whose attention tells small turns apart; and the oracle's logits."""
    params = random_params(BASE, 0)
    params = with_layers(params, wq=3 * params["layers"]["wq"])
    return params, oracle.forward(params, TOKENS, BASE, POSITIONS)


@pytest.mark.parametrize(
    ("name", "mistake", "row"),
    [
        ("rope_tables", bfloat16_tables, 0),
        ("rope_tables", bfloat16_angles, 0),
        ("rope_tables", float32_angles, 2),
        ("causal_mask", sees_one_ahead, 0),
        ("causal_mask", does_not_see_itself, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_table_or_mask_is_seen(monkeypatch, name, mistake, row):
    params, expected = sharp()
    monkeypatch.setattr(F, name, mistake)
    wrong = jax.jit(lambda *arguments: forward_(BASE, *arguments))(params, TOKENS, None, POSITIONS)  # traced anew
    assert relative_error(wrong[row], expected[row]) > VISIBLE


def test_right_tables_and_masks_are_right_for_those_weights():
    params, expected = sharp()
    logits = forward(BASE, params, TOKENS, None, POSITIONS)
    for row in range(len(POSITIONS)):
        assert relative_error(logits[row], expected[row]) < TOLERANCE


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_cache_mask_off_by_one_is_seen(monkeypatch, offset):
    expected = short_logits()
    monkeypatch.setattr(F, "cache_mask", lambda positions, size: RIGHT["cache_mask"](positions + offset, size))
    again = jax.jit(lambda *arguments: extend_(BASE, *arguments))
    logits, _ = again(unstacked(BASE), TOKENS[:, :SHORT], KVCache.zeros(BASE, 3, SHORT), jnp.full(3, SHORT))
    assert relative_error(logits, expected) > VISIBLE


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_cache_position_off_by_one_is_seen(offset):
    empty = KVCache.zeros(BASE, 3, SHORT + 8)
    _, cache = extend(BASE, unstacked(BASE), TOKENS[:, :SHORT], empty, jnp.full(3, SHORT - 1))
    moved = cache._replace(lengths=cache.lengths + offset)
    logits, _ = extend(BASE, unstacked(BASE), TOKENS[:, SHORT - 1 : SHORT], moved, jnp.ones(3, jnp.int32))
    error = relative_error(np.asarray(logits)[:, 0], short_logits()[:, -1])
    assert error > VISIBLE if offset else error < TOLERANCE
