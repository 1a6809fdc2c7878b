"""The JAX model against the float64 oracle, and proof that these tests see mistakes.

Ways of running it that must agree are compared in tests/lab/test_equalities.py.
"""

import dataclasses
import functools
import itertools
import warnings

import equalities
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from helpers import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st
from models import decode_params as unstacked
from models import extend, forward
from models import params as weights

import jllama.models.build
from jllama import functional as F
from jllama.core import UsageError, ops
from jllama.core.config import BLOCKS, LlamaConfig
from jllama.core.model import KVCache, Layer, abstract_params, as_token_ids, rope_frequencies
from jllama.core.parameters import PARAMETERS, Parameter, parameter_table
from jllama.formats.tensors import as_matrix
from jllama.lab.checks import random_params, relative_error, worst_error
from jllama.lab.conformance import implementation_of
from jllama.models import oracle
from jllama.models.build import build_model
from jllama.models.decode_params import decode_layout
from jllama.models.language_model import LanguageModel
from jllama.models.rope_scaling import DynamicScaling, Llama3Scaling, YarnScaling
from jllama.training.compiling import compile_training
from jllama.training.config import TrainConfig

TOLERANCE = 1e-5
VISIBLE = 100 * TOLERANCE
BASE, LONG, SHORT = models.LONG, models.LONG.max_seq_len, 24
LLAMA_32 = dataclasses.replace(BASE, rope_theta=500_000.0, rope_scaling=Llama3Scaling(32.0))
DYNAMIC = dataclasses.replace(BASE, rope_scaling=DynamicScaling(4.0, original_max_seq_len=128))
TIED = dataclasses.replace(BASE, tie_embeddings=True)
CONFIGS = {  # that jllama.lab.conformance does not have
    "derived sizes, head_dim 80, one layer, eps 1e-6": LlamaConfig(
        vocab_size=97, num_layers=1, embed_dim=160, num_heads=2, max_seq_len=LONG, norm_eps=1e-6
    ),
    "yarn, every knob": dataclasses.replace(
        BASE, rope_scaling=YarnScaling(4.0, beta_fast=24.0, beta_slow=2.0, attention_factor=1.3)
    ),
    "dynamic, past the context": dataclasses.replace(DYNAMIC, max_seq_len=128),
    "kinds of layers that do not repeat whole": dataclasses.replace(
        BASE, num_layers=3, sliding_window=100, full_attention_layers=(1,)
    ),
}

rng = np.random.default_rng(0)
TOKENS = rng.integers(0, BASE.vocab_size, (3, LONG))
# From zero; spread up to 100,667, so that distances pass 8,192; and neighbors near 100,000.
POSITIONS = np.stack([np.arange(LONG), 197 * np.arange(LONG), 99_700 + np.arange(LONG)])

seeds = st.integers(0, 2**32 - 1)
tokens_of_rows = st.builds(
    lambda seed: np.random.default_rng(seed).integers(0, BASE.vocab_size, (3, SHORT)), seeds
)


PLAIN = implementation_of(jllama.models.build)
forward_, extend_ = PLAIN.forward, PLAIN.extend
WAYS = equalities.ways_of(jllama.models.build)
LOSS = WAYS.loss
loss_and_gradients = equalities.loss_and_gradients(WAYS)


def assert_trees_near(actual, expected, tolerance=TOLERANCE):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(one, other) < tolerance


# Against the oracle


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_oracle(name):
    config = CONFIGS[name]
    tokens, positions = TOKENS[:, ::2], POSITIONS[:, ::2]
    logits = forward(config, weights(config), tokens, None, positions)
    assert logits.dtype == np.float32
    expected = oracle.forward(random_params(config, 0), tokens, config, positions)
    assert worst_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("embed_std", [1.0, 0.01])
def test_positions_default_to_counting_from_zero(embed_std):
    """With small activations, the norm's epsilon counts."""
    params = random_params(BASE, 0, embed_std)
    expected = oracle.forward(params, TOKENS[:, :SHORT], BASE)
    assert relative_error(forward(BASE, params, TOKENS[:, :SHORT]), expected) < TOLERANCE


@settings(max_examples=4)
@given(tokens=tokens_of_rows, seed=seeds)
def test_any_segments_equal_the_oracle(tokens, seed):
    segments = np.random.default_rng(seed).integers(0, 3, tokens.shape)  # not even contiguous
    expected = oracle.forward(random_params(BASE, 0), tokens, BASE, segments=segments)
    assert relative_error(forward(BASE, weights(BASE), tokens, segments), expected) < TOLERANCE


def test_gradient_of_every_parameter_equals_differences_of_the_oracle():
    config, step = TIED, 1e-5
    mask = rng.random((3, SHORT - 1)) < 0.7
    tokens = TOKENS[:, :SHORT]
    loss, gradients = loss_and_gradients(config, weights(config), tokens, mask)

    def exact_loss(params):
        total, count = oracle.cross_entropy(
            oracle.forward(params, tokens[:, :-1], config), tokens[:, 1:], mask
        )
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
    tokens, positions = TOKENS[:, :SHORT], POSITIONS[:, -SHORT:]
    rounded, exact = (
        forward(LLAMA_32, weights(LLAMA_32, dtype), tokens, None, positions)
        for dtype in ("bfloat16", "float32")
    )
    assert rounded.dtype == np.float32
    assert 1e-4 < worst_error(rounded, exact) < equalities.BFLOAT16_TOLERANCE


# Token ids


def ids(*shape, fill=1, dtype=np.int32):
    return np.full(shape, fill, dtype)


WRONG_TOKENS = {
    "float": (jnp.ones((1, 8)), r"tokens is float32\[1, 8\]; token ids are integers"),
    "one row alone": (
        ids(8),
        r"tokens is int32\[8\]; it must be \[batch, seq\]; for a single row, pass tokens\[None\]",
    ),
    "a ragged list": ([[1, 2], [3]], "the rows of tokens differ in length: pad them"),
    "nothing": (None, r"tokens is object\[\]; it must be"),
    "past the vocabulary": (ids(2, 8, fill=97), "tokens holds the id 97; this model's are 0 to 96"),
    "far past it": (
        ids(1, 8, fill=2**40, dtype=np.int64),
        f"tokens holds the id {2**40}; this model's are 0 to 96",
    ),
    "negative": (
        jnp.asarray(ids(1, 8, fill=-5)),
        "tokens holds the id -5; this model's are 0 to 96",
    ),
}


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_wrong_token_ids_are_refused_in_one_sentence(name):
    tokens, sentence = WRONG_TOKENS[name]
    with pytest.raises(UsageError, match=sentence):
        as_token_ids(tokens, BASE)


@pytest.mark.parametrize(
    "tokens", [[[0, 96]], ids(1, 2, dtype=np.uint16), jnp.ones((1, 2), int), ids(0, 2)]
)
def test_ids_may_be_a_list_or_any_integers(tokens):
    np.testing.assert_array_equal(as_token_ids(tokens, BASE), np.asarray(tokens))


def test_models_refuse_what_are_not_ids_of_theirs():
    params, decode = weights(BASE), build_model(BASE, unstacked(BASE)).decode
    cache = KVCache.zeros(BASE, 1, 16)
    for call in (
        LanguageModel(BASE, params),
        build_model(BASE, params),
        build_model(BASE, params).hidden,
        lambda tokens: decode(tokens, cache, jnp.array([1])),
    ):
        with pytest.raises(UsageError, match="tokens holds the id 97; this model's are 0 to 96"):
            call(jnp.full((1, 8), 97))


def test_more_tokens_than_the_context_are_refused_also_while_tracing():
    short = dataclasses.replace(BASE, max_seq_len=SHORT - 1)
    with pytest.raises(
        UsageError, match=f"tokens has {SHORT} a row; the model's context is {SHORT - 1}: cut it"
    ):
        jax.eval_shape(
            lambda params: build_model(short, params)(jnp.asarray(TOKENS[:, :SHORT])), weights(BASE)
        )
    positions = jnp.asarray(POSITIONS[:, :SHORT])  # who gives them says how far they go
    at_positions = functools.partial(forward_, short, positions=positions)
    logits = jax.eval_shape(at_positions, weights(BASE), jnp.asarray(TOKENS[:, :SHORT]))
    assert logits.shape == (3, SHORT, BASE.vocab_size)


def test_an_attention_implementation_that_is_not_there():
    sentence = "there is no attention implementation refrence; did you mean"
    with pytest.raises(UsageError, match=sentence):
        build_model(BASE, weights(BASE), attention="refrence")
    with pytest.raises(UsageError, match=sentence):
        build_model(BASE, unstacked(BASE), attention="refrence")


def test_a_model_needs_a_vocabulary():
    with pytest.raises(
        UsageError, match="vocab_size is 0; give the number of the tokenizer's tokens"
    ):
        abstract_params(LlamaConfig())


# Layouts, remat, causality, documents


@pytest.mark.parametrize("layout", ["training", "decode"])
def test_an_embedding_that_does_not_fit_the_vocabulary_is_refused(layout):
    """As many rows as there are ids, in both layouts."""
    params = {**weights(models.SMALL), "embed": weights(models.SMALL)["embed"][:50]}
    params = params if layout == "training" else models.laid_out(params, models.SMALL)
    with pytest.raises(UsageError, match="embed has 50 rows, and vocab_size is 61: take the conf"):
        build_model(models.SMALL, params)


def test_unstacked_layers_are_the_stacked_ones_in_order():
    stacked, apart = weights(BASE), decode_layout(weights(BASE), BASE, joins=False).weights
    assert list(apart["layers"]) == ["0", "1"]
    layers = [
        (f"layers/{name}", leaf, stacked["layers"][name][int(index)])
        for index, layer in apart["layers"].items()
        for name, leaf in layer.items()
    ]
    others = [(name, apart[name], stacked[name]) for name in stacked if name != "layers"]
    assert len(layers) + len(others) == 2 * 9 + 3
    for path, leaf, share in layers + others:
        matrix = as_matrix(parameter_table(BASE)[path], np.asarray(share))
        np.testing.assert_array_equal(
            leaf.values if isinstance(leaf, F.DecodeMatrix) else leaf, matrix
        )


def test_remat_does_recompute():
    counts = []
    for remat in (False, True):
        program = jax.make_jaxpr(jax.grad(functools.partial(LOSS, BASE, remat=remat)))(
            weights(BASE), TOKENS[:, :SHORT], np.ones((3, SHORT - 1), bool)
        )
        counts.append(str(program).count(" dot_general["))
    assert counts[1] > counts[0]


@settings(max_examples=8)
@given(
    tokens=tokens_of_rows,
    position=st.integers(0, SHORT - 1),
    change=st.integers(1, BASE.vocab_size - 1),
)
def test_a_token_changes_no_earlier_logits(tokens, position, change):
    other = tokens.copy()
    other[:, position] = (other[:, position] + change) % BASE.vocab_size
    before, after = (np.asarray(forward(BASE, weights(BASE), array)) for array in (tokens, other))
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    for row in range(3):
        assert relative_error(after[row, position], before[row, position]) > VISIBLE


@settings(max_examples=8)
@given(tokens=tokens_of_rows, cut=st.integers(1, SHORT - 1), seed=seeds)
def test_a_document_changes_nothing_in_the_next(tokens, cut, seed):
    segments = np.tile(np.arange(SHORT) >= cut, (3, 1)).astype(np.int32)
    other = tokens.copy()
    other[:, :cut] = np.random.default_rng(seed).integers(0, BASE.vocab_size, (3, cut))
    packed, changed = (
        np.asarray(forward(BASE, weights(BASE), array, segments)) for array in (tokens, other)
    )
    np.testing.assert_array_equal(changed[:, cut:], packed[:, cut:])
    # Without segments the same change is seen, unless no token changed.
    if np.any(other != tokens, axis=1).all():
        whole, leaking = (
            np.asarray(forward(BASE, weights(BASE), array)) for array in (tokens, other)
        )
        assert relative_error(leaking[:, cut:], whole[:, cut:]) > VISIBLE


# Tying, padding


def test_tied_embedding_is_one_leaf_whose_gradient_is_the_sum_of_both_uses():
    tied, separate = TIED, BASE
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


def prefilled_and_decoded(config, length):
    """Logits of the first row: all tokens but the last at once, then the last one."""
    tokens = TOKENS[:1, :length] % config.vocab_size
    cache = KVCache.zeros(config, 1, length)
    first, cache = extend(config, unstacked(config), tokens[:, :-1], cache, np.array([length - 1]))
    last, cache = extend(config, unstacked(config), tokens[:, -1:], cache, np.array([1]))
    return np.concatenate([first, last], axis=1)


@pytest.mark.parametrize("config", [LLAMA_32, DYNAMIC], ids=["Llama 3.2", "dynamic"])
def test_prefill_of_unpadded_prompts_equals_the_oracle_over_512_positions(config):
    expected = oracle.forward(random_params(config, 0), TOKENS[:1], config)
    assert relative_error(prefilled_and_decoded(config, LONG), expected) < TOLERANCE


def test_the_base_of_dynamic_scaling_goes_by_the_sequence_or_the_context():
    # A checkpoint's own configuration has its own context.
    short = dataclasses.replace(DYNAMIC, max_seq_len=128)
    plain = rope_frequencies(BASE)
    for seq_len in (0, 100, 128):
        np.testing.assert_array_equal(rope_frequencies(short, seq_len), plain)
        np.testing.assert_array_equal(
            rope_frequencies(DYNAMIC, seq_len), rope_frequencies(short, LONG)
        )
    assert np.all(rope_frequencies(short, 129)[1:] < plain[1:])


def test_the_base_of_dynamic_scaling_stays_with_a_cache():
    # The cached keys are turned, so a row that grows past the context keeps the context's base.
    scaling = DynamicScaling(4.0, original_max_seq_len=16)
    plain = dataclasses.replace(models.SMALL, num_layers=1, max_seq_len=16)
    short = dataclasses.replace(plain, rope_scaling=scaling)
    np.testing.assert_array_equal(
        prefilled_and_decoded(short, SHORT), prefilled_and_decoded(plain, SHORT)
    )


def filled(max_len):
    """A cache with eight tokens in each row."""
    cache = KVCache.zeros(BASE, 3, max_len)
    for start, count in ((0, 6), (6, 2)):
        _, cache = extend(
            BASE, unstacked(BASE), TOKENS[:, start : start + 6], cache, np.full(3, count)
        )
    return cache


@settings(max_examples=6)
@given(used=st.lists(st.integers(0, 8), min_size=3, max_size=3))
def test_writes_past_the_end_are_dropped_and_shift_nothing(used):
    counts = np.minimum(6, 8 - np.array(used))
    caches = {}
    for size in (8, SHORT + 8):  # the second has room to spare: every key where it belongs
        cache = filled(size)._replace(lengths=np.int32(used))
        _, caches[size] = extend(BASE, unstacked(BASE), TOKENS[:, 8:14], cache, counts)
    assert caches[8].keys[0].shape[2] == 8
    np.testing.assert_array_equal(caches[8].lengths, used + counts)
    for small, large in zip(
        jax.tree.leaves(caches[8]), jax.tree.leaves(caches[SHORT + 8]), strict=True
    ):
        if small.ndim == 4:
            assert relative_error(small, large[:, :, :8]) < TOLERANCE


@functools.partial(jax.jit, static_argnames="cache_is_empty")
def decoded(params, tokens, cache, counts, cache_is_empty):
    llama = build_model(BASE, params)
    hidden, cache = llama.decode(tokens, cache, counts, cache_is_empty=cache_is_empty)
    return llama.logits(hidden), cache


@pytest.mark.parametrize(
    ("seq", "cache_is_empty"),
    slow_but([(SHORT, False), (300, True)], itertools.product([SHORT, 300], [False, True])),
)
def test_rows_that_begin_equal_the_oracle_and_their_padding_is_not_written(seq, cache_is_empty):
    """Attention takes the cache or whole sequences, and these are long enough for blocks or not."""
    assert F.choose_attention(seq, seq, backward=False) == (
        "reference" if seq == SHORT else "blocked"
    )
    counts = np.array([seq, seq // 2, 0])
    cache = jax.tree.map(
        lambda leaf: leaf + 7 if leaf.ndim == 4 else leaf, KVCache.zeros(BASE, 3, LONG)
    )
    logits, after = decoded(unstacked(BASE), TOKENS[:, :seq], cache, counts, cache_is_empty)
    expected = oracle.forward(random_params(BASE, 0), TOKENS[:, :seq], BASE)
    np.testing.assert_array_equal(after.lengths, counts)
    for row, count in enumerate(counts):
        if count:
            assert relative_error(logits[row, :count], expected[row, :count]) < TOLERANCE
        for leaf in (*after.keys, *after.values):
            np.testing.assert_array_equal(leaf[row, :, count:], 7)
            assert not np.any(np.asarray(leaf)[row, :, :count] == 7)


def test_a_full_cache_stays_as_it_is():
    full = filled(8)
    np.testing.assert_array_equal(full.lengths, 8)
    _, after = extend(BASE, unstacked(BASE), TOKENS[:, 8:14], full, np.zeros(3, np.int32))
    for leaf, before in zip(jax.tree.leaves(after), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(leaf, before)


def test_a_donated_cache_is_updated_in_place():
    cache = KVCache.zeros(BASE, 3, 64)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    donating = jax.jit(extend_, static_argnames=("config",), donate_argnums=3)
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


# The options of related families


@st.composite
def options(draw):
    """Any combination of them, also of those that no family has together."""
    layers = st.lists(st.integers(0, 3), unique=True, max_size=3).map(sorted).map(tuple)
    window = draw(st.sampled_from([0, 5]))
    factors = st.sampled_from([1.0, 0.5, 3.0])
    return {
        "attention_bias": draw(st.booleans()),
        "qk_norm": draw(st.sampled_from(["none", "head", "whole"])),
        "norm_placement": draw(st.sampled_from(["before", "after"])),
        "no_rope_layers": draw(layers),
        "sliding_window": window,
        "full_attention_layers": draw(layers) if window else (),
        "rope_scaling": draw(st.sampled_from([None, YarnScaling(4.0, original_max_seq_len=16)])),
        "rope_scaling_layers": draw(st.sampled_from(["all", "full_attention"])),
        "partial_rotary_factor": draw(st.sampled_from([1.0, 0.5])),
        "embedding_multiplier": draw(factors),
        "residual_multiplier": draw(factors),
        "attention_multiplier": draw(st.sampled_from([0.0, 0.05])),
        "logits_scaling": draw(factors),
    }


@pytest.mark.slow
@settings(max_examples=5)
@given(options=options(), seed=seeds)
def test_options_in_any_combination(options, seed):
    """Whole passes by either layout, packed documents, and a prompt with tokens after it."""
    config = dataclasses.replace(
        models.SMALL, num_layers=4, norm_eps=1e-6, tie_embeddings=seed % 2 == 0, **options
    )
    params = random_params(config, seed, embed_std=0.1, query_gain=2.0)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (2, SHORT))
    segments = np.sort(rng.integers(1, 4, tokens.shape))
    expected = oracle.forward(params, tokens, config)
    packed = oracle.forward(params, tokens, config, segments=segments)
    for layout in (params, decode_layout(jax.tree.map(jnp.asarray, params), config)):
        assert worst_error(forward(config, layout, tokens), expected) < TOLERANCE
        assert worst_error(forward(config, layout, tokens, segments), packed) < TOLERANCE
    cache = KVCache.zeros(config, 2, SHORT)
    logits = []
    for start, stop in ((0, 9), (9, 18), (18, 19), (19, 20)):
        counts = jnp.full(2, stop - start)
        new, cache = extend(config, layout, tokens[:, start:stop], cache, counts)
        logits.append(new)
    assert worst_error(np.concatenate(logits, axis=1), expected[:, :20]) < TOLERANCE


def test_each_option_is_what_it_says():
    """By the oracle's logits: options that do nothing there are Llama's."""
    config = dataclasses.replace(models.SMALL, num_layers=4)
    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    tokens = TOKENS[:1, :SHORT] % config.vocab_size
    plain = oracle.forward(params, tokens, config)

    def logits(**options):
        return oracle.forward(params, tokens, dataclasses.replace(config, **options))

    same = [
        {"sliding_window": SHORT},
        {"sliding_window": 3, "full_attention_layers": (0, 1, 2, 3)},
        {"attention_multiplier": config.head_dim**-0.5},
    ]
    for options in same:
        np.testing.assert_allclose(logits(**options), plain, atol=1e-12)
    np.testing.assert_allclose(logits(logits_scaling=4.0), plain / 4, atol=1e-12)
    # With a window of one token each token sees itself alone: its logits are those of a row of it.
    alone = oracle.forward(params, tokens[:, 7:8], config)
    np.testing.assert_allclose(logits(sliding_window=1)[:, 7:8], alone, atol=1e-12)
    # Without rotation the order of earlier tokens does not matter to the last one.
    shuffled = tokens.copy()
    shuffled[:, :-1] = shuffled[:, -2::-1]
    nowhere = {"no_rope_layers": (0,), "num_layers": 1}
    first_layer = {name: stack[:1] for name, stack in params["layers"].items()}
    one = dataclasses.replace(config, **nowhere)
    layer = params | {"layers": first_layer}
    np.testing.assert_allclose(
        oracle.forward(layer, shuffled, one)[:, -1], oracle.forward(layer, tokens, one)[:, -1]
    )


def test_a_scale_of_another_shape_is_refused_and_not_broadcast():
    params = weights(models.SMALL)
    with pytest.raises(UsageError, match=r"final_norm is \[1\]; it must be \["):
        build_model(models.SMALL, params | {"final_norm": jnp.ones(1)})
    layers = params["layers"] | {"mlp_norm": jnp.ones((models.SMALL.num_layers, 1))}
    with pytest.raises(UsageError, match="layers/mlp_norm is"):
        build_model(models.SMALL, params | {"layers": layers})


def test_what_is_saved_for_gradients_has_a_name():
    with pytest.raises(UsageError, match="there is no remat blokc; did you mean block"):
        build_model(models.SMALL, weights(models.SMALL), remat="blokc")


def test_no_vocabulary_is_one_sentence():
    with pytest.raises(UsageError, match="vocab_size is 0"):
        compile_training(TrainConfig(LlamaConfig()))


def test_a_block_may_have_a_matrix_that_decoding_joins_with_none(monkeypatch):
    """Beside those that it joins, in the layout for decoding too."""

    class MixedLayer(Layer):
        def feed_forward(self, x):
            gate, up = self.products(x, "w_gate", "w_up")
            (mixed,) = self.products(x, "w_mixed")
            return (ops.silu_gate(gate + mixed, up) @ self.w_down[...]).reshape(x.shape)

    row = Parameter(
        ("layers", "embed", "mlp"), ("embed",), when=lambda config: config.block == "mixed"
    )
    monkeypatch.setitem(PARAMETERS, "layers/w_mixed", row)
    monkeypatch.setitem(BLOCKS, "mixed", MixedLayer)
    config = dataclasses.replace(models.SMALL, block="mixed")
    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    tokens = jnp.asarray(TOKENS[:2, :SHORT] % config.vocab_size)
    whole = build_model(config, params).hidden(tokens)
    layout = decode_layout(params, config)
    cache = KVCache.zeros(config, 2, SHORT)
    counts = jnp.full(2, SHORT)
    decoded, _ = build_model(config, layout).decode(tokens, cache, counts, cache_is_empty=True)
    assert relative_error(decoded, whole) < 1e-5
