"""The engine against the oracle run token by token.

Rows that know of no others; nothing compiled twice.
"""

import dataclasses
import functools
import inspect
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL, decode_params, weights

from jllama import functional as F
from jllama import oracle
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams, decode_layout
from jllama.errors import UsageError
from jllama.generation import engine as engines
from jllama.generation import steps
from jllama.generation.decode_batch import MAX_STOPS
from jllama.generation.engine import Engine
from jllama.generation.generate import completions
from jllama.generation.prompt_lookup import draft_tokens
from jllama.generation.requests import Answer, Piece, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.steps import STEPS
from jllama.generation.text import encode_prompt
from jllama.grammar import Grammar
from jllama.language_model import LanguageModel
from jllama.tokenizers import BytesTokenizer
from jllama.verify.checks import random_params

CONFIG, WEIGHTS, PARAMS = SMALL, weights(SMALL), decode_params(SMALL)
MODEL = LanguageModel(CONFIG, PARAMS)
CONTEXT = CONFIG.max_seq_len
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
PARAMS_OF_ONE_LAYER = DecodeParams(
    PARAMS.weights | {"layers": {"0": PARAMS.weights["layers"]["0"]}}
)
GREEDY = SamplingParams(temperature=0.0)
MATES = 3
LONGEST_PROMPT = 20

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (3, 20, 11)]

prompts_of_rows = st.lists(
    st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=LONGEST_PROMPT),
    min_size=MATES,
    max_size=MATES,
)
tokens = st.integers(0, CONFIG.vocab_size - 1)
sampling_options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5, CONFIG.vocab_size + 5]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-2.0, 3.0]), max_size=3),
        "banned_ids": st.lists(tokens, max_size=20).map(tuple),
        "seed": st.integers(0, 2**32 - 1),
    }
)
options_of_rows = st.lists(sampling_options, min_size=MATES, max_size=MATES)


def configs(options):
    return [SamplingParams(**each) for each in options]


def prompt_of(ids, sampling=GREEDY, new=None, stop_ids=()):
    return Prompt(ids, sampling, new, stop_ids=tuple(stop_ids))


def answers_of(engine, prompts):
    """Each prompt's row, and its answer once the engine is done.

    The pieces before it are all of it.
    """
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    pieces, answers = run(engine)
    for row in rows:
        assert (
            tuple(token for piece in pieces.get(row, []) for token in piece.tokens)
            == answers[row].tokens
        )
    return rows, [answers[row] for row in rows]


def run(engine):
    """Pieces and answers of all rows that are under way, until the engine has nothing to do."""
    pieces, answers = {}, {}
    while engine.busy:
        for row, event in engine.step():
            assert row not in answers
            if isinstance(event, Piece):
                pieces.setdefault(row, []).append(event)
            else:
                answers[row] = event
    return pieces, answers


def tokens_of(row, answer):
    """The tokens of a row, with the stop id that ended it, and their log-probabilities."""
    ids = [token.id for token in answer.tokens]
    log_probs = [token.log_prob for token in answer.tokens]
    assert (answer.completion.ids, answer.completion.log_probs) == (ids, log_probs)
    if answer.completion.finish_reason == "stop_id":
        stop = row.tokens[-1]
        assert stop.id in row.request.prompt.stop_ids
        ids.append(stop.id)
        log_probs.append(stop.log_prob)
    return ids, log_probs


def generated_by(prompts, config=CONFIG, params=PARAMS, draft_len=0, tokenizer=None, **sizes):
    """The new tokens of each row, and their log-probabilities."""
    engine = Engine(
        LanguageModel(config, params, tokenizer), len(prompts), draft_len=draft_len, **sizes
    )
    rows, answers = answers_of(engine, prompts)
    lengths = np.asarray(engine._batches[0].cache.lengths)
    found = [tokens_of(*pair) for pair in zip(rows, answers, strict=True)]
    for row, (ids, _) in zip(
        rows, found, strict=True
    ):  # the device computed no more than it had to
        assert not ids or lengths[row.slot] + 1 == len(row.request.prompt.ids) + len(ids)
    return [ids for ids, _ in found], [log_probs for _, log_probs in found]


def generated(prompts, sampling, new, stops=(), config=CONFIG, params=PARAMS, **options):
    """All tokens as one ``[batch, new]`` array, -1 after a row's end."""
    requests = [
        prompt_of(prompt, each, new, stops) for prompt, each in zip(prompts, sampling, strict=True)
    ]
    rows, _ = generated_by(requests, config, params, **options)
    assert all(len(row) <= new for row in rows)
    return np.array([row + [-1] * (new - len(row)) for row in rows], int).reshape(len(rows), new)


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
    new = 2 * STEPS + 3
    expected = [likeliest(tuple(prompt), new) for prompt in prompts]
    assert generated(prompts, [GREEDY] * MATES, new).tolist() == expected


@settings(max_examples=15)
@given(
    prompts=prompts_of_rows,
    options=options_of_rows,
    new=st.lists(st.none() | st.integers(0, 40), min_size=MATES, max_size=MATES),
    stops=st.lists(st.lists(tokens, max_size=9), min_size=MATES, max_size=MATES),
)
def test_a_row_comes_out_as_it_would_alone(prompts, options, new, stops):
    requests = [
        prompt_of(*parts) for parts in zip(prompts, configs(options), new, stops, strict=True)
    ]
    together, log_probs = generated_by(requests)
    for row, request in enumerate(requests):
        alone, its_log_probs = generated_by([request])
        assert together[row] == alone[0]
        np.testing.assert_allclose(log_probs[row], its_log_probs[0], rtol=1e-5, atol=1e-5)
        assert len(alone[0]) <= request.limit(CONTEXT) - len(request.ids)
        assert (
            len(alone[0]) == request.limit(CONTEXT) - len(request.ids)
            or alone[0][-1] in request.stop_ids
        )


@settings(max_examples=10)
@given(options=options_of_rows)
def test_log_probabilities_are_those_of_the_raw_logits(options):
    rows, log_probs = generated_by(
        [prompt_of(*parts, 20) for parts in zip(PROMPTS, configs(options), strict=True)]
    )
    for prompt, row, found in zip(PROMPTS, rows, log_probs, strict=True):
        logits = oracle.forward(WEIGHTS, np.array([prompt + row]), CONFIG)[0, len(prompt) - 1 : -1]
        expected = np.log(oracle.softmax(logits))[np.arange(20), row]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=8)
@given(data=st.data())
def test_greedy_with_penalties_biases_and_bans_equals_numpy(data):
    """Token by token: the oracle's logits, and the settings spelled out."""
    settings_ = SamplingParams(**data.draw(sampling_options) | {"temperature": 0.0})
    prompt, new = data.draw(st.sampled_from(PROMPTS)), 20
    ids: list[int] = list(prompt)
    for _ in range(new):
        scores = oracle.forward(WEIGHTS, np.array([ids]), CONFIG)[0, -1]
        for token, bias in settings_.logit_bias.items():
            scores[token] += bias
        scores[list(settings_.banned_ids)] = -np.inf
        for token in set(ids):
            penalty = settings_.repetition_penalty
            scores[token] = (
                scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
            )
        for token in ids[len(prompt) :]:
            scores[token] -= settings_.frequency_penalty
        for token in set(ids[len(prompt) :]):
            scores[token] -= settings_.presence_penalty
        ids.append(int(scores.argmax()))
    assert generated([prompt], [settings_], new)[0].tolist() == ids[len(prompt) :]


@settings(max_examples=10)
@given(
    cuts=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 2.0]),
            st.sampled_from([0, 1, 5]),
            st.sampled_from([0.1, 0.9, 1.0]),
        ),
        min_size=MATES,
        max_size=MATES,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_tokens_are_among_those_that_the_settings_leave(cuts, seed):
    sampling = [SamplingParams(*each, seed=seed) for each in cuts]
    rows = generated(PROMPTS, sampling, 20)
    for prompt, settings_, row in zip(PROMPTS, sampling, rows, strict=True):
        logits = oracle.forward(WEIGHTS, np.array([prompt + row.tolist()]), CONFIG)[
            0, len(prompt) - 1 : -1
        ]
        for scores, token in zip(logits, row, strict=True):
            rank = int(np.sum(scores > scores[token]))
            if settings_.temperature == 0:
                assert rank == 0
                continue
            kept = settings_.top_k or len(scores)
            assert rank < kept
            ranked = oracle.softmax(np.sort(scores)[::-1][:kept] / settings_.temperature)
            assert ranked[:rank].sum() < settings_.top_p + 1e-6


@pytest.mark.parametrize("draft_len", [0, 2])
def test_first_tokens_follow_the_softmax(draft_len):
    rows, temperature = 400, 1.0
    sampling = [SamplingParams(temperature=temperature, seed=seed) for seed in range(rows)]
    drawn = generated([PROMPTS[0]] * rows, sampling, 1, draft_len=draft_len)[:, 0]
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
    # With all logits equal only the random numbers decide: uniform over tokens, and no step repeats
    # another.
    uniform = DecodeParams(
        PARAMS.weights | {"lm_head": jax.tree.map(jnp.zeros_like, PARAMS.weights["lm_head"])}
    )
    rows = generated(
        PROMPTS, [SamplingParams(seed=seed) for seed in range(MATES)], 40, params=uniform
    )
    for row in rows:
        assert len(set(row.tolist())) > 20  # 29 expected of 40 draws among 61
    for first in range(40):
        for second in range(first):
            assert np.any(rows[:, first] != rows[:, second])
    assert np.mean(rows[0] == rows[1]) < 0.2


def test_seeds():
    def draw(seeds, new=40):
        return generated([PROMPTS[0]] * MATES, [SamplingParams(seed=seed) for seed in seeds], new)

    first = draw([7, 2**32 - 1, 7])
    np.testing.assert_array_equal(draw([7, 2**32 - 1, 7]), first)
    np.testing.assert_array_equal(first[0], first[2])
    others = draw([8, 2**31, 0])
    assert len({tuple(row) for row in [*first[:2], *others]}) == 5
    np.testing.assert_array_equal(
        draw([7, 2**32 - 1, 7], 18), first[:, :18]
    )  # asking for less changes nothing


def test_bfloat16_weights_run():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS_OF_ONE_LAYER)
    rows = generated(PROMPTS, [GREEDY] * MATES, 3, config=ONE_LAYER, params=params)
    assert rows.shape == (MATES, 3)
    assert np.all((rows >= 0) & (rows < CONFIG.vocab_size))


# How many


def test_no_new_tokens():
    assert generated(PROMPTS, [GREEDY] * MATES, 0).shape == (MATES, 0)


@pytest.mark.parametrize("new", [1, 2, STEPS, STEPS + 1, STEPS + 2])
def test_as_many_as_asked_for(new):
    rows, _ = generated_by([prompt_of(prompt, GREEDY, new) for prompt in PROMPTS])
    assert rows == [likeliest(tuple(prompt), 35)[:new] for prompt in PROMPTS]


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
    return steps.prefill_chunk._cache_size(), steps.decode_block._cache_size()


class Ids:
    """All that is asked of a tokenizer about ids."""

    vocab_size, eos_id = CONFIG.vocab_size, 0
    special_tokens = {}  # noqa: RUF012


def request(**changed):
    return dataclasses.replace(prompt_of([1, 2], GREEDY, 4), **changed)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            request(content=[1] * 20, max_new_tokens=45),
            "prompt's 20 tokens and 45 new ones exceed .* 64: .* at most 44$",
        ),
        (
            request(content=[1] * CONTEXT, max_new_tokens=1),
            "exceed the context of 64: shorten the prompt$",
        ),
        (
            request(content=[1] * (CONTEXT + 1), max_new_tokens=0),
            "exceed the context of 64: shorten the prompt$",
        ),
        (
            request(content=[1] * CONTEXT, max_new_tokens=None),
            "exceed the context of 64: shorten the prompt$",
        ),
        (request(content=[]), "a prompt has no tokens"),
        (request(max_new_tokens=-1), "max_new_tokens is -1; it must not be negative"),
        (request(content=[1, 61]), "^the prompt has token 61; the ids run from 0 to 60$"),
        (request(content=[-1]), "^the prompt has token -1; the ids run from 0 to 60$"),
        (request(stop_ids=[99]), "^the stop_ids have token 99; the ids run from 0 to 60$"),
        (
            request(sampling=SamplingParams(logit_bias={61: 1.0})),
            "^the logit_bias has token 61; the ids",
        ),
        (
            request(sampling=SamplingParams(banned_ids=(70,))),
            "^the banned_ids have token 70; the ids",
        ),
        (
            request(sampling=SamplingParams(banned_ids=tuple(range(61)))),
            "^banned_ids bans every token",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(asked, message):
    with pytest.raises(UsageError, match=message):
        inspect.unwrap(encode_prompt)(
            types.SimpleNamespace(config=CONFIG, text_tokenizer=Ids(), stop_ids=()), asked
        )


# Stops


@settings(max_examples=15)
@given(data=st.data())
def test_a_row_ends_after_its_stop_while_others_go_on(data):
    new = 35
    rows = [likeliest(tuple(prompt), new) for prompt in PROMPTS]
    stops = data.draw(
        st.sets(
            st.sampled_from(sorted({token for row in rows for token in row})),
            min_size=2,
            max_size=2,
        )
    )
    actual = generated(PROMPTS, [GREEDY] * MATES, new, sorted(stops))
    assert actual.tolist() == [cut(row, stops) for row in rows]


@pytest.mark.parametrize("index", [0, 1, STEPS - 1, STEPS, STEPS + 1, 33, 34])
def test_a_stop_at_any_step(index):
    # Uniform logits but for what the seed draws: the first 35 tokens of a row are known, and one of
    # them is the stop.
    uniform = DecodeParams(
        PARAMS.weights | {"lm_head": jax.tree.map(jnp.zeros_like, PARAMS.weights["lm_head"])}
    )
    sampling = [SamplingParams(seed=seed) for seed in range(MATES)]
    rows = generated(PROMPTS, sampling, 35, params=uniform).tolist()
    stop = rows[1][index]
    actual = generated(
        PROMPTS, sampling, 35, [stop, CONFIG.vocab_size - 1], params=uniform
    ).tolist()
    assert actual == [cut(row, {stop, CONFIG.vocab_size - 1}) for row in rows]


@pytest.fixture
def blocks(monkeypatch):
    """The rows that each block of steps is for."""
    rows = []
    original = steps.decode_block

    def record(params, config, batch, quotas, *others):
        rows.append(np.flatnonzero(quotas).tolist())
        return original(params, config, batch, quotas, *others)

    monkeypatch.setattr(steps, "decode_block", record)
    return rows


def test_nothing_more_is_computed_when_every_row_has_ended(blocks):
    first = [likeliest(tuple(prompt), 35)[0] for prompt in PROMPTS]
    engine = Engine(MODEL, MATES)
    rows, answers = answers_of(engine, [prompt_of(prompt, GREEDY, 35, first) for prompt in PROMPTS])
    assert [tokens_of(*pair)[0] for pair in zip(rows, answers, strict=True)] == [
        [token] for token in first
    ]
    assert np.asarray(engine._batches[0].finished).all()
    lengths = [
        len(prompt) for prompt in PROMPTS
    ]  # those of the prompts but the last tokens, and one step
    assert np.asarray(engine._batches[0].cache.lengths).tolist() == lengths
    assert blocks == [[0, 1, 2]] * 2  # the second before the first was read
    assert engine.step() == []
    assert len(blocks) == 2
    arguments = np.full(MATES, STEPS, np.int32), np.int32(STEPS), np.bool_(False), 0
    batch, block = steps.decode_block(PARAMS, CONFIG, engine._batches[0], *arguments)
    assert np.all(np.asarray(block.tokens) == -1)
    assert np.asarray(batch.cache.lengths).tolist() == lengths


def test_a_row_that_is_cancelled_stays_stopped_and_the_others_go_on(monkeypatch, blocks):
    monkeypatch.setattr(engines, "STEPS", 5)
    engine = Engine(MODEL, MATES)
    rows = [engine.submit(Request(prompt_of(prompt, GREEDY, 35))) for prompt in PROMPTS]
    while not rows[1].tokens:
        engine.step()
    engine.cancel(rows[1])
    num_blocks = len(blocks)
    pieces, answers = run(engine)
    assert rows[1] not in answers
    assert rows[1] not in pieces
    assert len(rows[1].tokens) == 5
    assert len(blocks) == 7
    assert blocks[num_blocks:] == [[0, 2]] * (7 - num_blocks)
    assert np.asarray(engine._batches[0].cache.lengths)[1] == len(PROMPTS[1]) - 1 + 5 * num_blocks
    for row in (0, 2):
        assert answers[rows[row]].completion.ids == likeliest(tuple(PROMPTS[row]), 35)


def test_a_row_that_is_cancelled_while_it_waits_leaves_the_queue():
    engine = Engine(MODEL, 1)
    first, second, third = (
        engine.submit(Request(prompt_of(prompt, GREEDY, 3))) for prompt in PROMPTS
    )
    assert engine.num_free == -2
    engine.cancel(second)
    assert engine.num_free == -1
    assert run(engine)[1].keys() == {first, third}
    assert (engine.num_free, engine.busy) == (1, False)


# Coming and going


def answers_in_company(engine, prompts, arrivals, cancelled=()):
    """The answers of prompts that come in before the steps of these numbers.

    Some are broken off after a while.
    """
    rows = {}
    answers = {}
    for number in range(10**6):
        for index, arrival in enumerate(arrivals):
            if arrival == number:
                rows[index] = engine.submit(Request(prompts[index]))
        if number >= max(arrivals) and not engine.busy:
            break
        answers.update((row, event) for row, event in engine.step() if isinstance(event, Answer))
        for index in cancelled:
            if index in rows and arrivals[index] + 2 == number:
                engine.cancel(rows[index])
    return {index: answers[row] for index, row in rows.items() if row in answers}


@settings(max_examples=10)
@given(
    data=st.data(),
    block_s=st.sampled_from([None, 1e-9]),
    context=st.sampled_from([0, 60]),
    together_tokens=st.sampled_from([0, 64]),
)
def test_a_row_that_joins_others_gets_the_bits_that_it_has_alone_in_as_many_slots(
    data, block_s, context, together_tokens
):
    """Log-probabilities, too.

    Whenever it comes, whatever leaves, and whether the cache has its prompt or not.
    """
    num = 2 * MATES
    shared = data.draw(st.lists(tokens, min_size=18, max_size=18))
    prompts = []
    for options in data.draw(st.lists(sampling_options, min_size=num, max_size=num)):
        ids = data.draw(st.sampled_from([[], shared])) + data.draw(
            st.lists(tokens, min_size=1, max_size=20)
        )
        stops = data.draw(st.lists(tokens, max_size=3))
        prompts.append(
            prompt_of(ids, SamplingParams(**options), data.draw(st.integers(0, 20)), stops)
        )
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=num, max_size=num))
    cancelled = data.draw(st.sets(st.integers(0, num - 1), max_size=2))

    def engine(**changed):
        made = Engine(
            MODEL, MATES, **{"context": context, "chunk_tokens": 16, "block_s": block_s, **changed}
        )
        made.together_tokens = together_tokens
        return made

    crowded = engine(prefix_tokens=48, prefill_budget=16)
    found = answers_in_company(crowded, prompts, arrivals, cancelled)
    assert {*range(num)} - cancelled <= found.keys()
    for index, answer in found.items():
        _, (alone,) = answers_of(engine(), [prompts[index]])
        assert answer._replace(cached_tokens=0) == alone


def test_short_prompts_are_computed_together_by_a_program_that_has_always_as_many_rows(
    monkeypatch, prefilled
):
    monkeypatch.setitem(engines.TOGETHER_TOKENS, "cpu", 64)
    shapes = []
    original = steps.prefill_short

    def record(params, config, tokens, counts):
        shapes.append((tokens.shape, [*counts]))
        return original(params, config, tokens, counts)

    monkeypatch.setattr(steps, "prefill_short", record)
    ids = [LONG_PROMPT[:length] for length in (5, 20, 50, 1, 9, 12, 16, 17)]
    prompts = [prompt_of(row, SamplingParams(seed=seed), 6) for seed, row in enumerate(ids)]
    model = LanguageModel(LONG, PARAMS_OF_ONE_LAYER)
    engine = Engine(model, len(prompts))
    _, together = answers_of(engine, prompts)
    # Those of 16 tokens and fewer four at a time, that of 19 with room for another, that of 49 by
    # itself.
    assert shapes == [((4, 16), [4, 0, 8, 11]), ((2, 32), [19, 0]), ((4, 16), [15, 16, 0, 0])]
    assert prefilled == [49]
    for prompt, answer in zip(prompts, together, strict=True):
        assert answers_of(Engine(model, len(prompts)), [prompt])[1] == [answer]
        assert [answer.completion.ids] == generated_by([prompt], LONG, PARAMS_OF_ONE_LAYER)[0]
    assert Engine(model, 1).together_tokens == 0


def test_in_bfloat16_a_row_beside_others_has_the_bits_that_it_has_alone_in_as_many_slots():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS_OF_ONE_LAYER)
    model = LanguageModel(ONE_LAYER, params)
    prompts = [
        prompt_of(ids, SamplingParams(seed=seed), 30)
        for seed, ids in enumerate([*PROMPTS, PROMPTS[1][:5]])
    ]
    found = answers_in_company(Engine(model, MATES), prompts, [0, 2, 0, 1])
    for index, prompt in enumerate(prompts):
        assert found[index] == answers_of(Engine(model, MATES), [prompt])[1][0]


@dataclasses.dataclass(frozen=True)
class FirstTokens(SamplingParams):
    """Of a field that the others do not know: only so many tokens of the vocabulary may be drawn, 0
    for all."""

    first_tokens: int = 0


@pytest.fixture
def first_tokens(monkeypatch):
    def mask(logits, count):
        return (jnp.arange(logits.shape[-1]) < count[:, None]) | (count[:, None] == 0)

    monkeypatch.setitem(F.TRUNCATIONS, "first_tokens", mask)


def test_a_row_with_settings_of_its_own_joins_others_that_have_none(first_tokens):
    plain = [
        prompt_of(prompt, SamplingParams(seed=seed), 40) for seed, prompt in enumerate(PROMPTS[:2])
    ]
    own = prompt_of(PROMPTS[2], FirstTokens(seed=7, first_tokens=9), 20)
    engine = Engine(MODEL, MATES)
    found = answers_in_company(engine, [*plain, own, plain[0]], [0, 0, 2, 3])
    alone = [answers_of(Engine(MODEL, MATES), [prompt])[1][0] for prompt in (*plain, own)]
    for index, expected in enumerate([*alone, alone[0]]):
        assert found[index].completion.ids == expected.completion.ids
        np.testing.assert_allclose(
            found[index].completion.log_probs, expected.completion.log_probs, rtol=1e-5, atol=1e-5
        )
    assert max(found[2].completion.ids) < 9 < max(found[0].completion.ids)
    free = dataclasses.replace(own, sampling=SamplingParams(seed=7))
    before, after = (
        answers_of(each, [free])[1][0].completion.ids for each in (Engine(MODEL, MATES), engine)
    )
    assert before == after


def test_settings_that_nothing_applies_are_refused_at_the_door():
    engine = Engine(MODEL, 1)
    with pytest.raises(
        UsageError, match="nothing applies first_tokens of FirstTokens: register a function"
    ):
        engine.submit(Request(prompt_of([1], FirstTokens())))
    assert not engine.busy
    (answer,) = answers_of(engine, [prompt_of(PROMPTS[0], GREEDY, 5)])[1]
    assert answer.completion.ids == likeliest(tuple(PROMPTS[0]), 5)


def test_a_row_may_have_more_stop_ids_than_there_is_room_for_and_the_others_keep_theirs():
    sampling = [SamplingParams(seed=seed) for seed in range(MATES)]
    free = generated(PROMPTS, sampling, 35).tolist()
    few = [max(free[0], key=free[0].index)]  # which comes late
    assert free[0].index(few[0]) > STEPS
    never = [token for token in range(CONFIG.vocab_size) if token not in free[2]]
    many = [*never[: MAX_STOPS + 4], free[2][9]]
    assert len(many) == MAX_STOPS + 5
    stops = [few, [], many]
    prompts = [
        prompt_of(*parts[:2], 35, parts[2]) for parts in zip(PROMPTS, sampling, stops, strict=True)
    ]
    engine = Engine(MODEL, MATES)
    rows = [engine.submit(Request(prompt)) for prompt in prompts[:2]]
    while not rows[0].tokens:
        engine.step()
    assert not rows[0].ended
    rows.append(engine.submit(Request(prompts[2])))
    _, answers = run(engine)
    found = [tokens_of(row, answers[row])[0] for row in rows]
    expected = [
        [token for token in cut(row, stop) if token >= 0]
        for row, stop in zip(free, stops, strict=True)
    ]
    assert found == expected
    (last,) = answers_of(engine, prompts[:1])[1]
    assert last.completion == answers[rows[0]].completion


# Long texts, kept prefixes

LONG = dataclasses.replace(ONE_LAYER, max_seq_len=400)
LONG_PROMPT = rng.integers(0, CONFIG.vocab_size, 150).tolist()


@pytest.fixture
def prefilled(monkeypatch):
    """How many tokens each chunk of a prompt had."""
    counts = []
    original = steps.prefill_chunk

    def record(params, config, cache, tokens, count, cache_is_empty):
        counts.append(int(count[0]))
        return original(params, config, cache, tokens, count, cache_is_empty)

    monkeypatch.setattr(steps, "prefill_chunk", record)
    return counts


def test_a_long_prompt_is_prefilled_in_chunks_and_the_cache_grows_as_it_must(
    monkeypatch, prefilled
):
    requests = [
        prompt_of(LONG_PROMPT, SamplingParams(seed=1), 200),
        prompt_of(LONG_PROMPT[:9], GREEDY, None),
    ]
    expected = generated_by(requests, LONG, PARAMS_OF_ONE_LAYER)[0]
    assert prefilled == [149, 8]
    del prefilled[:]
    monkeypatch.setattr(engines, "_ROOM_TOKENS", 2 * STEPS)
    engine = Engine(LanguageModel(LONG, PARAMS_OF_ONE_LAYER), 2, chunk_tokens=64)
    rows = [engine.submit(Request(prompt)) for prompt in requests]
    engine.step()
    assert engine._batches[0].tokens.shape == (2, 256)
    _, answers = run(engine)
    assert engine._batches[0].tokens.shape == (2, 512)
    assert [answers[row].completion.ids for row in rows] == expected
    assert [len(row) for row in expected] == [200, 391]
    assert [answers[row].completion.finish_reason for row in rows] == ["length", "context"]
    assert prefilled == [64, 64, 21, 8]


def test_a_text_outgrows_the_room_that_it_was_given_by_far():
    """Without a number of tokens it goes on to the end of the context, with drafts and beside a row
    that joins."""
    config = dataclasses.replace(ONE_LAYER, max_seq_len=1500)
    whole, late = prompt_of([1, 2, 3], GREEDY, None), prompt_of(LONG_PROMPT, GREEDY, 700)
    model = LanguageModel(config, PARAMS_OF_ONE_LAYER)
    expected = [
        answers_of(Engine(model, 1), [prompt])[1][0].completion.ids for prompt in (whole, late)
    ]
    assert [*map(len, expected)] == [1497, 700]
    for draft_len in (0, 3):
        found = answers_in_company(Engine(model, 2, draft_len=draft_len), [whole, late], [0, 20])
        assert [found[index].completion.ids for index in range(2)] == expected


def test_a_prompt_whose_padding_would_pass_the_end_of_the_context():
    prompt = rng.integers(0, CONFIG.vocab_size, 390).tolist()
    whole, half = prompt_of(prompt, GREEDY, None), prompt_of(prompt[:200], GREEDY, 3)
    (alone,), _ = generated_by([whole], LONG, PARAMS_OF_ONE_LAYER)
    assert len(alone) == 10
    assert generated_by([whole, half], LONG, PARAMS_OF_ONE_LAYER)[0][0] == alone
    weights = WEIGHTS | {"layers": {name: stack[:1] for name, stack in WEIGHTS["layers"].items()}}
    assert alone[0] == int(oracle.forward(weights, np.array([prompt]), LONG)[0, -1].argmax())


@pytest.mark.parametrize("batch_size", [0, 1, 2])
def test_equal_prompts_are_prefilled_once(prefilled, batch_size):
    requests = [
        prompt_of(PROMPTS[row], SamplingParams(seed=seed), 20)
        for seed, row in enumerate((1, 2, 1, 1))
    ]
    found = dict(completions(MODEL, requests, batch_size=batch_size))
    assert prefilled == [19, 10]
    assert [found[row].ids for row in range(4)] == [
        generated_by([request])[0][0] for request in requests
    ]


def test_an_engine_computes_only_what_is_new_in_a_conversation(monkeypatch, prefilled):
    engine = Engine(MODEL, 1, resumes=True)
    first = generated_by([prompt_of(PROMPTS[1], GREEDY, 5)])[0][0]
    del prefilled[:]

    def continued(ids, new):
        (answer,) = answers_of(engine, [prompt_of(ids, GREEDY, new)])[1]
        return answer.completion.ids

    assert continued(PROMPTS[1], 5) == first
    longer = [*PROMPTS[1], *first, 7, 8, 9]
    assert continued(longer, 6) == generated_by([prompt_of(longer, GREEDY, 6)])[0][0]
    assert prefilled[:2] == [
        19,
        3,
    ]  # the answer's last token was not in the cache; the new last one need not be
    other = [*PROMPTS[1][:12], 1, 2, 3]
    del prefilled[:]
    assert continued(other, 6) == generated_by([prompt_of(other, GREEDY, 6)])[0][0]
    assert prefilled[0] == 2
    expected = generated_by([prompt_of(other, GREEDY, 30)])[0][0]
    del prefilled[:]
    row = engine.submit(Request(prompt_of(other, GREEDY, 30)))
    while not row.tokens:
        engine.step()
    engine.cancel(row)  # as when somebody stops listening
    assert prefilled == []
    heard = [token.id for token in row.tokens]
    longer = [*other, *heard, 5]
    assert heard == expected[: len(heard)]
    assert continued(longer, 6) == generated_by([prompt_of(longer, GREEDY, 6)])[0][0]
    assert prefilled[0] == 1
    del prefilled[:]

    def broken(*arguments):
        steps_of(*arguments)
        raise KeyboardInterrupt

    steps_of = steps.decode_block
    with monkeypatch.context() as patch:
        patch.setattr(steps, "decode_block", broken)
        with pytest.raises(KeyboardInterrupt):
            continued(other, 30)
    assert not engine.busy
    del prefilled[:]
    assert continued(other, 6) == expected[:6]  # what was in the cache went with the step
    assert prefilled == [len(other) - 1]


# Drafts


@given(
    rows=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=MATES, max_size=MATES
    ),
    count=st.integers(1, 4),
)
def test_drafts_are_what_followed_last_time(rows, count):
    lengths = [len(row) for row in rows]
    padded = np.array([row + [3] * (12 - len(row)) for row in rows], np.int32)
    drafts, found = jax.jit(draft_tokens, static_argnums=2)(padded, np.array(lengths), count)
    for row, known in enumerate(rows):
        ends = [  # the longest match of two or three tokens, then the latest
            (size, end)
            for size in (2, 3)
            for end in range(size, len(known))
            if known[end - size : end] == known[len(known) - size :]
        ]
        assert bool(found[row]) == bool(ends)
        if ends:
            period = known[max(ends)[1] :]
            assert drafts[row].tolist() == [period[place % len(period)] for place in range(count)]


@settings(max_examples=8)
@given(prompts=prompts_of_rows, options=options_of_rows, data=st.data())
def test_drafts_change_nothing(prompts, options, data):
    """Greedy or drawn, with penalties or a stop: the same tokens, each from the same random
    numbers."""
    few = {"banned_ids": tuple(range(5, 61))}  # so guesses come true
    sampling = configs(each | few for each in options)
    stops = [[data.draw(st.integers(0, 4))] if data.draw(st.booleans()) else [] for _ in prompts]
    requests = [
        prompt_of(*parts) for parts in zip(prompts, sampling, [None, 40, 17], stops, strict=True)
    ]
    expected, log_probs = generated_by(requests)
    found, its_log_probs = generated_by(requests, draft_len=3)
    assert found == expected
    for one, other in zip(log_probs, its_log_probs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_drafts_leave_the_distribution_as_it_is():
    """Three tokens, equally likely, whatever came before: of all runs of three, each is as frequent
    as another."""
    uniform = DecodeParams(
        PARAMS.weights | {"lm_head": jax.tree.map(jnp.zeros_like, PARAMS.weights["lm_head"])}
    )
    rows = [
        prompt_of([0, 1, 2], SamplingParams(seed=seed, banned_ids=tuple(range(3, 61))), 60)
        for seed in range(100)
    ]
    _, answers = answers_of(Engine(LanguageModel(CONFIG, uniform), 100, draft_len=3), rows)
    drafted = sum(answer.completion.drafted for answer in answers)
    accepted = sum(answer.completion.accepted for answer in answers)
    assert drafted > 1000
    assert accepted / drafted == pytest.approx((1 / 3 + 1 / 9 + 1 / 27) / 3, abs=0.02)
    texts = [answer.completion.ids for answer in answers]
    assert {len(text) for text in texts} == {60}
    counts = np.bincount(
        [9 * a + 3 * b + c for text in texts for a, b, c in zip(*[iter(text)] * 3, strict=True)]
    )
    expected = 100 * 20 / 27
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - 26) < 5 * np.sqrt(2 * 26)


def test_a_text_that_repeats_itself_takes_fewer_steps(monkeypatch):
    biased = SamplingParams(
        temperature=0.0, banned_ids=tuple(token for token in range(61) if token != 7)
    )
    monkeypatch.setattr(engines, "STEPS", 9)
    engine = Engine(MODEL, 1, draft_len=3)
    row = engine.submit(Request(prompt_of([7, 7], biased, 33)))
    engine.step()
    (_, answer) = engine.step()[-1]  # the first block had all of it
    assert (
        [token.id for token in row.tokens] == answer.completion.ids == [7] * 33
    )  # one, and eight times four
    assert (answer.completion.drafted, answer.completion.accepted) == (24, 24)


def test_with_drafts_neither_grammars_nor_the_likeliest_tokens_are_served():
    engine = Engine(MODEL, 1, draft_len=3)
    with pytest.raises(
        UsageError,
        match="speculate guesses several tokens, and a grammar allows one after the other",
    ):
        engine.submit(
            Request(dataclasses.replace(prompt_of([1], GREEDY, 3), grammar=Grammar("regex", "a")))
        )
    with pytest.raises(
        UsageError, match="speculate guesses tokens, and of those the likeliest others are not kept"
    ):
        engine.submit(Request(prompt_of([1], GREEDY, 3), top=2))
    assert not engine.busy


# Compilations


def test_twenty_prompts_in_two_buckets_compile_two_buckets(caplog):
    config = dataclasses.replace(ONE_LAYER, max_seq_len=256)
    params = jax.device_put(
        PARAMS_OF_ONE_LAYER, jax.devices()[0]
    )  # committed to a device, as loaded ones are

    def run(seed):
        draws = np.random.default_rng(seed)
        lengths = [*draws.integers(2, 18, 10), *draws.integers(18, 34, 10)]
        for length in lengths:
            sampling = SamplingParams(
                temperature=float(draws.choice([0.0, draws.uniform(0.1, 2)])),
                top_k=int(draws.integers(0, 80)),
                top_p=float(draws.uniform(0.1, 1)),
                min_p=float(draws.uniform(0, 0.1)),
                repetition_penalty=float(draws.uniform(0.9, 1.3)),
                presence_penalty=float(draws.uniform(-1, 1)),
                frequency_penalty=float(draws.uniform(-1, 1)),
                logit_bias={int(draws.integers(60)): 1.5},
                banned_ids=tuple(draws.integers(0, 60, int(draws.integers(4))).tolist()),
                seed=int(draws.integers(2**32)),
            )
            stops = draws.integers(0, config.vocab_size, int(draws.integers(5))).tolist()
            prompt = draws.integers(0, config.vocab_size, length).tolist()
            generated_by(
                [prompt_of(prompt, sampling, int(draws.integers(2, 40)), stops)], config, params
            )

    def compilations():
        return [
            record.message for record in caplog.records if record.message.startswith("Compiling")
        ]

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
        ({"min_p": -0.1}, "^min_p is -0.1; it must be between 0"),
        ({"min_p": float("nan")}, "^min_p is nan; it must be between 0"),
        ({"repetition_penalty": 0.0}, "^repetition_penalty is 0.0; it must be positive"),
        (
            {"presence_penalty": float("inf")},
            "^presence_penalty is inf; it must be a finite number",
        ),
        (
            {"frequency_penalty": float("nan")},
            "^frequency_penalty is nan; it must be a finite number",
        ),
        (
            {"logit_bias": {3: float("-inf")}},
            "^logit_bias is {3: -inf}; it must be of finite numbers",
        ),
        (
            {"temperature": 1e39},
            "^temperature is 1e\\+39; it must be 0",
        ),  # over the largest float32
        ({"top_k": 2**31}, "^top_k is 2147483648; it must be 0"),
        ({"repetition_penalty": 1e39}, "^repetition_penalty is 1e\\+39; it must be positive"),
        ({"repetition_penalty": 1e-46}, "^repetition_penalty is 1e-46; it must be positive"),
        ({"presence_penalty": -1e39}, "^presence_penalty is -1e\\+39; it must be a finite number"),
        ({"logit_bias": {3: 1e39}}, "^logit_bias is {3: 1e\\+39}; it must be of finite numbers"),
        ({"seed": -1}, r"^seed is -1; it must be between 0 and 2\*\*32 - 1$"),
        ({"seed": 2**32}, r"^seed is 4294967296; it must be between 0 and 2\*\*32 - 1$"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams(**changed)


# Masks


class AllowedTokens:
    """What the engine asks of a grammar's matcher: before each token those that may come next."""

    failed = False

    def __init__(self, of_steps):
        self.of_steps, self.accepted = of_steps, []

    def allowed(self):
        flags = np.isin(
            np.arange(-(-CONFIG.vocab_size // 32) * 32), self.of_steps[len(self.accepted)]
        )
        return np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token):
        self.accepted.append(token)


def under_masks(prompts, of_steps=None):
    """The answers of rows of which the second may take only what is allowed at each step, if
    anything is said."""
    engine = Engine(MODEL, MATES)
    if of_steps is not None:
        prompts = [
            prompts[0],
            dataclasses.replace(prompts[1], grammar=Grammar("regex", ".*")),
            prompts[2],
        ]
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    if of_steps is not None:
        rows[1].text._matcher = AllowedTokens(of_steps)
    _, answers = run(engine)
    return [answers[row] for row in rows]


@settings(max_examples=5)
@given(options=options_of_rows, seed=st.integers(0, 9))
def test_a_mask_leaves_its_tokens_and_no_other_row_knows_of_it(options, seed):
    """Row 1 may take five tokens of each step alone.

    The others' bits are as without, and so are programs' number.
    """
    random = np.random.default_rng(seed)
    five = [random.choice(CONFIG.vocab_size, 5, replace=False) for _ in range(9)]
    options[1]["banned_ids"] = ()
    prompts = [
        prompt_of(ids, SamplingParams(**each), 8)
        for ids, each in zip(PROMPTS, options, strict=True)
    ]
    free, programs = under_masks(prompts), compiled()
    masked = under_masks(prompts, five)
    assert compiled() == programs
    assert [masked[row] for row in (0, 2)] == [free[row] for row in (0, 2)]
    drawn = masked[1].completion.ids
    assert len(drawn) == 8
    assert all(token in allowed for token, allowed in zip(drawn, five[:8], strict=True))
    logits = oracle.forward(WEIGHTS, np.array([PROMPTS[1] + drawn]), CONFIG)[
        0, len(PROMPTS[1]) - 1 : -1
    ]
    raw = np.log(oracle.softmax(logits))[np.arange(8), drawn]
    np.testing.assert_allclose(masked[1].completion.log_probs, raw, rtol=1e-4, atol=1e-5)


class FiftyTokens(BytesTokenizer):
    vocab_size = 50


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    """Weights under which the last ids are by far the likeliest.

    The tokenizer does not have them.
    """
    config = LlamaConfig(vocab_size=64, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=64)
    params = random_params(config, 0)
    params["lm_head"][:, 50:] *= 50
    unstacked = decode_layout(jax.tree.map(jnp.asarray, params), config)
    rows = [SamplingParams(temperature=0.0), SamplingParams(seed=3)]

    def drawn(tokenizer):
        return generated([[1, 2], [3]], rows, 40, (), config, unstacked, tokenizer=tokenizer)

    assert drawn(None).max() >= 50
    assert 0 <= drawn(FiftyTokens()).min() <= drawn(FiftyTokens()).max() < 50
