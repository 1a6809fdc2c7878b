"""Prefill and decode against the oracle run token by token; rows on their own; nothing compiled twice."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jllama import oracle
from jllama.config import LlamaConfig
from jllama.errors import UsageError
from jllama.generation import engine
from jllama.generation.engine import CHUNK_TOKENS, SamplingConfig, generate_tokens
from jllama.model import unstack_layers
from jllama.verify.compare import random_params

CONTEXT = 64
CONFIG = LlamaConfig(
    vocab_size=61, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=96, max_seq_len=CONTEXT
)
WEIGHTS = random_params(CONFIG, 0)
PARAMS = unstack_layers(jax.tree.map(jnp.asarray, WEIGHTS))
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
PARAMS_OF_ONE_LAYER = PARAMS | {"layers": {"0": PARAMS["layers"]["0"]}}
GREEDY = SamplingConfig(temperature=0.0)
MATES = 3
LONGEST_PROMPT = 20

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (3, 20, 11)]

prompts_of_rows = st.lists(
    st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=LONGEST_PROMPT), min_size=MATES, max_size=MATES
)
sampling_configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, CONFIG.vocab_size + 5]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
sampling_of_rows = st.lists(sampling_configs, min_size=MATES, max_size=MATES)


def generated(prompts, sampling, new, stops=(), config=CONFIG, params=PARAMS):
    """All tokens as one ``[batch, new]`` array, -1 after a row's end."""
    chunks = list(generate_tokens(params, config, prompts, sampling, new, stops))
    made = np.concatenate(chunks, axis=1) if chunks else np.zeros((len(prompts), 0), int)
    assert made.shape[1] <= new
    return np.pad(made, ((0, 0), (0, new - made.shape[1])), constant_values=-1)


@functools.cache
def likeliest(prompt, new):
    """The greedy continuation by the oracle, each token from a whole forward pass."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(oracle.forward(WEIGHTS, np.array([ids]), CONFIG)[0, -1].argmax()))
    return ids[len(prompt) :]


def cut(row, stops):
    """``row`` up to its first stop, which stays, and -1 from there on."""
    for index, token in enumerate(row):
        if token in stops:
            return row[: index + 1] + [-1] * (len(row) - index - 1)
    return row


# What comes out


@settings(max_examples=6)
@given(prompts=prompts_of_rows)
def test_greedy_equals_argmax_of_whole_forward_passes(prompts):
    new = 2 * CHUNK_TOKENS + 3
    expected = [likeliest(tuple(prompt), new) for prompt in prompts]
    assert generated(prompts, [GREEDY] * MATES, new).tolist() == expected


@settings(max_examples=10)
@given(prompts=prompts_of_rows, sampling=sampling_of_rows)
def test_a_row_comes_out_as_it_would_alone(prompts, sampling):
    together = generated(prompts, sampling, 20)
    for row in range(MATES):
        alone = generated(prompts[row : row + 1], sampling[row : row + 1], 20)
        np.testing.assert_array_equal(together[row], alone[0])


@settings(max_examples=10)
@given(sampling=sampling_of_rows)
def test_drawn_tokens_are_among_those_that_the_settings_leave(sampling):
    rows = generated(PROMPTS, sampling, 20)
    for prompt, settings_, row in zip(PROMPTS, sampling, rows, strict=True):
        logits = oracle.forward(WEIGHTS, np.array([prompt + row.tolist()]), CONFIG)[0, len(prompt) - 1 : -1]
        for scores, token in zip(logits, row, strict=True):
            rank = int(np.sum(scores > scores[token]))
            if settings_.temperature == 0:
                assert rank == 0
                continue
            kept = settings_.top_k or len(scores)
            assert rank < kept
            ranked = oracle.softmax(np.sort(scores)[::-1][:kept] / settings_.temperature)
            assert ranked[:rank].sum() < settings_.top_p + 1e-6


def test_first_tokens_follow_the_softmax():
    rows, temperature = 400, 1.0
    sampling = [SamplingConfig(temperature=temperature, seed=seed) for seed in range(rows)]
    drawn = generated([PROMPTS[0]] * rows, sampling, 1)[:, 0]
    scores = oracle.forward(WEIGHTS, np.array([PROMPTS[0]]), CONFIG)[0, -1]
    expected = rows * oracle.softmax(scores / temperature)
    observed = np.bincount(drawn, minlength=len(scores))
    common = expected >= 5
    assert 10 < common.sum() < len(common)
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    freedom = len(expected) - 1
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_every_step_and_every_row_draws_anew():
    # With all logits equal only the random numbers decide: uniform over tokens, and no step repeats another.
    uniform = PARAMS | {"lm_head": jnp.zeros_like(PARAMS["lm_head"])}
    rows = generated(PROMPTS, [SamplingConfig(seed=seed) for seed in range(MATES)], 40, params=uniform)
    for row in rows:
        assert len(set(row.tolist())) > 20  # 29 expected of 40 draws among 61
    for first in range(40):
        for second in range(first):
            assert np.any(rows[:, first] != rows[:, second])
    assert np.mean(rows[0] == rows[1]) < 0.2


def test_seeds():
    def draw(seeds, new=40):
        return generated([PROMPTS[0]] * MATES, [SamplingConfig(seed=seed) for seed in seeds], new)

    first = draw([7, 2**32 - 1, 7])
    np.testing.assert_array_equal(draw([7, 2**32 - 1, 7]), first)
    np.testing.assert_array_equal(first[0], first[2])
    others = draw([8, 2**31, 0])
    assert len({tuple(row) for row in [*first[:2], *others]}) == 5
    np.testing.assert_array_equal(draw([7, 2**32 - 1, 7], 18), first[:, :18])  # asking for less changes nothing


def test_bfloat16_weights_run():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS_OF_ONE_LAYER)
    rows = generated(PROMPTS, [GREEDY] * MATES, 3, config=ONE_LAYER, params=params)
    assert rows.shape == (MATES, 3)
    assert np.all((rows >= 0) & (rows < CONFIG.vocab_size))


# How many


def test_no_new_tokens():
    assert list(generate_tokens(PARAMS, CONFIG, PROMPTS, [GREEDY] * MATES, 0, [])) == []


@pytest.mark.parametrize("new", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1, CHUNK_TOKENS + 2])
def test_as_many_as_asked_for(new):
    chunks = list(generate_tokens(PARAMS, CONFIG, PROMPTS, [GREEDY] * MATES, new, []))
    assert sum(chunk.shape[1] for chunk in chunks) == new
    assert np.concatenate(chunks, axis=1).tolist() == [likeliest(tuple(prompt), 35)[:new] for prompt in PROMPTS]


@pytest.mark.parametrize("spare", [0, 1])
def test_up_to_the_end_of_the_context(spare):
    new = CONTEXT - len(PROMPTS[1]) - spare
    expected = [likeliest(tuple(prompt), new) for prompt in PROMPTS]
    assert generated(PROMPTS, [GREEDY] * MATES, new).tolist() == expected


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2])
def test_a_prompt_that_leaves_next_to_nothing(length):
    prompt = np.random.default_rng(1).integers(0, CONFIG.vocab_size, length).tolist()
    new = CONTEXT - length
    assert generated([prompt], [GREEDY], new).tolist() == [likeliest(tuple(prompt), new)]


def compiled():
    return engine._prefill._cache_size(), engine._decode._cache_size()


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        (PROMPTS, CONTEXT - 19, f"prompt's 20 tokens and {CONTEXT - 19} new ones exceed .* {CONTEXT}: .* at most 44$"),
        ([[1] * CONTEXT], 1, "at most 0$"),
        ([[1] * (CONTEXT + 1)], 1, "at most 0$"),
        ([[1] * (CONTEXT + 1)], 0, "at most 0$"),
        ([[1, 2], []], 4, "a prompt has no tokens"),
        (PROMPTS, -1, "max_new_tokens is -1; it must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(prompts, new, message):
    before = compiled()
    new_config = dataclasses.replace(CONFIG, norm_eps=1e-3)  # never compiled, so running it would show
    with pytest.raises(UsageError, match=message):
        list(generate_tokens(PARAMS, new_config, prompts, [GREEDY] * len(prompts), new, []))
    assert compiled() == before


# Stops


@settings(max_examples=15)
@given(data=st.data())
def test_a_row_ends_after_its_stop_while_others_go_on(data):
    new = 35
    rows = [likeliest(tuple(prompt), new) for prompt in PROMPTS]
    stops = data.draw(
        st.sets(st.sampled_from(sorted({token for row in rows for token in row})), min_size=2, max_size=2)
    )
    made = generated(PROMPTS, [GREEDY] * MATES, new, sorted(stops))
    assert made.tolist() == [cut(row, stops) for row in rows]


@pytest.mark.parametrize("index", [0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 33, 34])
def test_a_stop_at_any_step(index):
    # Uniform logits but for what the seed draws: the first 35 tokens of a row are known, and one of them is the stop.
    uniform = PARAMS | {"lm_head": jnp.zeros_like(PARAMS["lm_head"])}
    sampling = [SamplingConfig(seed=seed) for seed in range(MATES)]
    rows = generated(PROMPTS, sampling, 35, params=uniform).tolist()
    stop = rows[1][index]
    made = generated(PROMPTS, sampling, 35, [stop, CONFIG.vocab_size - 1], params=uniform).tolist()
    assert made == [cut(row, {stop, CONFIG.vocab_size - 1}) for row in rows]


def test_nothing_more_is_computed_when_every_row_has_ended():
    first = [likeliest(tuple(prompt), 35)[0] for prompt in PROMPTS]
    chunks = list(generate_tokens(PARAMS, CONFIG, PROMPTS, [GREEDY] * MATES, 35, first))
    assert [chunk.tolist() for chunk in chunks] == [[[token] for token in first]]


# Compilations


def test_twenty_prompts_in_two_buckets_compile_twice(caplog):
    config, params = dataclasses.replace(ONE_LAYER, max_seq_len=256), PARAMS_OF_ONE_LAYER

    def run(seed):
        draws = np.random.default_rng(seed)
        lengths = [*draws.integers(1, 17, 10), *draws.integers(17, 33, 10)]
        for length in lengths:
            prompt = draws.integers(0, config.vocab_size, length).tolist()
            temperature = draws.choice([0.0, draws.uniform(0.1, 2)])
            chosen = SamplingConfig(
                float(temperature), int(draws.integers(0, 80)), float(draws.uniform(0.1, 1)), int(draws.integers(2**32))
            )
            new = int(draws.integers(2, 40))
            generated([prompt], [chosen], new, [int(draws.integers(config.vocab_size))], config, params)

    def compilations():
        return [record.message for record in caplog.records if record.message.startswith("Compiling")]

    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        prefills, decodes = compiled()
        run(0)
        # One prefill a bucket; one decode, as both buckets and their new tokens fit the same cache.
        assert compiled() == (prefills + 2, decodes + 1)
        assert len(compilations()) >= 3
        caplog.clear()
        run(1)
        assert compiled() == (prefills + 2, decodes + 1)
        assert compilations() == []


# Settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": -0.1}, "^temperature is -0.1; it must be 0"),
        ({"temperature": float("nan")}, "^temperature is nan; it must be 0"),
        ({"temperature": float("inf")}, "^temperature is inf; it must be 0"),
        ({"top_k": -1}, "^top_k is -1; it must be 0"),
        ({"top_p": 0.0}, "^top_p is 0.0; it must be over 0 and at most 1$"),
        ({"top_p": 1.1}, "^top_p is 1.1; it must be over 0 and at most 1$"),
        ({"top_p": float("nan")}, "^top_p is nan; it must be over 0 and at most 1$"),
        ({"seed": -1}, r"^seed is -1; it must be between 0 and 2\*\*32 - 1$"),
        ({"seed": 2**32}, r"^seed is 4294967296; it must be between 0 and 2\*\*32 - 1$"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        SamplingConfig(**changed)


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    """Weights under which the last ids are by far the likeliest; the tokenizer does not have them."""
    config = LlamaConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=64)
    params = random_params(config, 0)
    params["lm_head"][:, 50:] *= 50
    unstacked = unstack_layers(jax.tree.map(jnp.asarray, params))
    rows = [SamplingConfig(temperature=0.0), SamplingConfig(seed=3)]

    def drawn(vocab_size):
        return np.hstack(list(generate_tokens(unstacked, config, [[1, 2], [3]], rows, 40, [], vocab_size)))

    assert drawn(None).max() >= 50
    assert 0 <= drawn(50).min() <= drawn(50).max() < 50
