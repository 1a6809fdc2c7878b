"""The engine against the oracle.

Rows that know of no others; nothing compiled twice.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SMALL, weights

from jllama import functional as F
from jllama.core import UsageError
from jllama.core.engine import MAX_STOPS, STEPS
from jllama.generation import engine as engines
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.generate import completions
from jllama.generation.grammar import Grammar
from jllama.generation.prompt_lookup import draft_tokens
from jllama.generation.requests import Answer, Piece, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.lab.checks import random_params
from jllama.models import oracle
from jllama.models.decode_params import DecodeParams, decode_layout
from jllama.models.language_model import LanguageModel
from jllama.tokenizers.base import BytesTokenizer


class FiftyTokens(BytesTokenizer):
    vocab_size = 50


def on_device(tree):
    """Committed to a device, as loaded weights are."""
    return jax.device_put(tree, jax.devices()[0])


# One layer, one context and few numbers of slots: all tests share the programs. Other models have
# test_families.py.
CONFIG = dataclasses.replace(SMALL, num_layers=1, max_seq_len=200)
LAYOUT = jax.jit(decode_layout, static_argnums=1)
WEIGHTS, PARAMS = weights(CONFIG), on_device(LAYOUT(weights(CONFIG), CONFIG))
MODEL = LanguageModel(CONFIG, PARAMS)
CONTEXT, VOCAB = CONFIG.max_seq_len, CONFIG.vocab_size
UNIFORM = DecodeParams(
    PARAMS.weights | on_device({"lm_head": jax.tree.map(np.zeros_like, PARAMS.weights["lm_head"])})
)
"""With all logits equal only the random numbers decide."""
GREEDY = SamplingParams(temperature=0.0)
MATES = 3

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, VOCAB, length).tolist() for length in (3, 20, 11)]
LONG_PROMPT = rng.integers(0, VOCAB, CONTEXT - 1).tolist()

tokens = st.integers(0, VOCAB - 1)
prompts_of_rows = st.lists(
    st.lists(tokens, min_size=1, max_size=20), min_size=MATES, max_size=MATES
)
sampling_options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB + 5]),
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


@pytest.fixture(autouse=True, scope="module")
def little_room():
    """Let caches grow while texts do, as two blocks take no more than this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "_ROOM_TOKENS", 2 * STEPS)
        yield


def configs(options):
    return [SamplingParams(**values) for values in options]


def seeded(count=MATES):
    return [SamplingParams(seed=seed) for seed in range(count)]


def prompt_of(ids, sampling=GREEDY, new=None, stop_ids=()):
    return Prompt(ids, sampling, new, stop_ids=tuple(stop_ids))


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


def answers_of(engine, prompts):
    """Each prompt's row, and its answer once the engine is done.

    The pieces before it are all of it.
    """
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    pieces, answers = run(engine)
    for row in rows:
        pieces_tokens = [token for piece in pieces.get(row, []) for token in piece.tokens]
        assert tuple(pieces_tokens) == answers[row].tokens
    return rows, [answers[row] for row in rows]


def answer_of(engine, prompt):
    return answers_of(engine, [prompt])[1][0]


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


def generated_by(prompts, params=PARAMS, num_slots=MATES, draft_len=0, tokenizer=None):
    """The new tokens of each row, and their log-probabilities."""
    engine = Engine(LanguageModel(CONFIG, params, tokenizer), num_slots, draft_len=draft_len)
    rows, answers = answers_of(engine, prompts)
    lengths = np.asarray(engine.batch.cache.lengths)
    found = [tokens_of(*pair) for pair in zip(rows, answers, strict=True)]
    # The device computed no more than it had to.
    for row, (ids, _) in zip(rows, found, strict=True):
        assert not ids or lengths[row.slot] + 1 == len(row.request.prompt.ids) + len(ids)
    return [ids for ids, _ in found], [log_probs for _, log_probs in found]


def generated(prompts, sampling, new, stops=(), **options):
    """The new tokens of each row."""
    pairs = zip(prompts, sampling, strict=True)
    requests = [prompt_of(prompt, values, new, stops) for prompt, values in pairs]
    return generated_by(requests, **options)[0]


def logits_before(prompt, ids):
    """The oracle's logits ``[new, vocab]`` that each of the ids is chosen by."""
    return oracle.forward(WEIGHTS, np.array([[*prompt, *ids]]), CONFIG)[0, len(prompt) - 1 : -1]


def likeliest(prompt, ids):
    """What the oracle finds likeliest after each token of the text but the prompt's."""
    return logits_before(prompt, ids).argmax(axis=-1).tolist()


def assert_likeliest(prompts, rows):
    assert rows == [likeliest(*pair) for pair in zip(prompts, rows, strict=True)]


def cut(row, stops):
    """``row`` up to its first stop, which stays."""
    ends = [index for index, token in enumerate(row) if token in stops]
    return row[: min(ends) + 1] if ends else row


# What comes out


@settings(max_examples=10)
@given(
    prompts=prompts_of_rows,
    options=options_of_rows,
    new=st.lists(st.integers(0, 40), min_size=MATES, max_size=MATES),
    stops=st.lists(st.lists(tokens, max_size=9), min_size=MATES, max_size=MATES),
)
def test_a_row_comes_out_as_it_would_alone(prompts, options, new, stops):
    requests = [
        prompt_of(*parts) for parts in zip(prompts, configs(options), new, stops, strict=True)
    ]
    together, log_probs = generated_by(requests)
    for row, request in enumerate(requests):
        (alone,), (its_log_probs,) = generated_by([request], num_slots=1)
        assert together[row] == alone
        np.testing.assert_allclose(log_probs[row], its_log_probs, rtol=1e-5, atol=1e-5)
        assert len(alone) <= new[row]
        assert len(alone) == new[row] or alone[-1] in request.stop_ids


@settings(max_examples=12)
@given(prompts=prompts_of_rows, options=options_of_rows)
def test_tokens_are_those_that_the_settings_leave_of_the_oracles_logits(prompts, options):
    """Greedy ones are the likeliest of these. Log-probabilities are those of the raw logits."""
    sampling = configs(options)
    rows, log_probs = generated_by(
        [prompt_of(*parts, 20) for parts in zip(prompts, sampling, strict=True)]
    )
    for prompt, values, row, found in zip(prompts, sampling, rows, log_probs, strict=True):
        logits = logits_before(prompt, row)
        expected = np.log(oracle.softmax(logits))[np.arange(20), row]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        for step, scores in enumerate(logits):
            for token, bias in values.logit_bias.items():
                scores[token] += bias
            scores[list(values.banned_ids)] = -np.inf
            for token in {*prompt, *row[:step]}:
                penalty = values.repetition_penalty
                scores[token] *= 1 / penalty if scores[token] > 0 else penalty
            for token in row[:step]:
                scores[token] -= values.frequency_penalty
            for token in set(row[:step]):
                scores[token] -= values.presence_penalty
            assert scores[row[step]] > -np.inf
            rank = int(np.sum(scores > scores[row[step]]))
            if values.temperature == 0:
                assert rank == 0
                continue
            num_left = min(values.top_k or VOCAB, VOCAB)
            assert rank < num_left
            ranked = np.sort(scores)[::-1][:num_left] / values.temperature
            assert oracle.softmax(ranked)[:rank].sum() < values.top_p + 1e-6
            assert np.exp(ranked[rank] - ranked[0]) >= values.min_p - 1e-6


def test_first_tokens_follow_the_softmax():
    rows = 400
    prompts = [prompt_of(PROMPTS[0], sampling, 1) for sampling in seeded(rows)]
    _, answers = answers_of(Engine(MODEL, MATES), prompts)
    drawn = [answer.completion.ids[0] for answer in answers]
    expected = rows * oracle.softmax(logits_before(PROMPTS[0], [0])[0])
    observed = np.bincount(drawn, minlength=VOCAB)
    common = expected >= 5
    assert 10 < common.sum() < len(common)
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    freedom = len(expected) - 1
    chi_square = np.sum((observed - expected) ** 2 / expected)
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_every_step_and_every_row_draws_anew():
    rows = np.array(generated(PROMPTS, seeded(), 40, params=UNIFORM))
    for row in rows:
        assert len(set(row.tolist())) > 20  # 29 expected of 40 draws among 61
    assert len({tuple(column) for column in rows.T}) == 40
    assert np.mean(rows[0] == rows[1]) < 0.2


def test_seeds():
    def draw(seeds, new=40):
        sampling = [SamplingParams(seed=seed) for seed in seeds]
        return generated([PROMPTS[0]] * MATES, sampling, new)

    first = draw([7, 2**32 - 1, 7])
    assert first[0] == first[2]
    assert len({*map(tuple, [*first, *draw([8, 2**31, 0])])}) == 5
    # Asking for less changes nothing.
    assert draw([7, 2**32 - 1, 7], 18) == [row[:18] for row in first]


# How many


@pytest.mark.parametrize("new", [0, 1, 2, STEPS, STEPS + 1, STEPS + 2])
def test_as_many_as_asked_for(new):
    rows = generated(PROMPTS, [GREEDY] * MATES, new)
    assert [len(row) for row in rows] == [new] * MATES
    assert_likeliest(PROMPTS, rows)


@pytest.mark.parametrize(
    ("lengths", "draft_len"),
    [((20, 3, 11), 0), ((20, 3, 11), 3), ((CONTEXT - 1, CONTEXT - 2, 190), 0)],
)
def test_up_to_the_end_of_the_context(lengths, draft_len):
    """Also if the padding of a prompt would pass it."""
    prompts = [LONG_PROMPT[:length] for length in lengths]
    rows = generated(prompts, [GREEDY] * MATES, None, draft_len=draft_len)
    assert [len(row) for row in rows] == [CONTEXT - length for length in lengths]
    assert_likeliest(prompts, rows)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_new_tokens", 199, "prompt's 2 tokens and 199 new ones exceed .* 200: .* most 198$"),
        ("max_new_tokens", -1, "max_new_tokens is -1; it must not be negative"),
        ("content", [1] * CONTEXT, "exceed the context of 200: shorten the prompt$"),
        ("content", [], "a prompt has no tokens"),
        ("content", [1, 50], "^the prompt has token 50; the ids run from 0 to 49$"),
        ("content", [-1], "^the prompt has token -1; the ids run from 0 to 49$"),
        ("stop_ids", [99], "^the stop_ids have token 99; the ids run from 0 to 49$"),
        ("logit_bias", {50: 1.0}, "^the logit_bias has token 50; the ids"),
        ("banned_ids", (70,), "^the banned_ids have token 70; the ids"),
        ("banned_ids", tuple(range(50)), "^banned_ids bans every token"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(field, value, message):
    prompt = prompt_of([1, 2], GREEDY, 4)
    if hasattr(GREEDY, field):
        prompt = dataclasses.replace(prompt, sampling=SamplingParams(**{field: value}))
    else:
        prompt = dataclasses.replace(prompt, **{field: value})
    with pytest.raises(UsageError, match=message):
        encode_prompt(LanguageModel(CONFIG, PARAMS, FiftyTokens()), prompt)


# Stops


@pytest.mark.parametrize("index", [0, 1, STEPS - 1, STEPS, STEPS + 1, 33, 34])
def test_a_stop_at_any_step_while_others_go_on(index):
    # The first 35 tokens of a row are known from its seed, and one of them is the stop.
    rows = generated(PROMPTS, seeded(), 35, params=UNIFORM)
    stops = [VOCAB - 1, rows[1][index]]
    actual = generated(PROMPTS, seeded(), 35, stops, params=UNIFORM)
    assert actual == [cut(row, stops) for row in rows]


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
    first = [likeliest(prompt, [0])[0] for prompt in PROMPTS]
    engine = Engine(MODEL, MATES)
    rows, answers = answers_of(engine, [prompt_of(prompt, GREEDY, 35, first) for prompt in PROMPTS])
    found = [tokens_of(*pair)[0] for pair in zip(rows, answers, strict=True)]
    assert found == [[token] for token in first]
    assert np.asarray(engine.batch.finished).all()
    # Those of the prompts but the last tokens, and one step.
    lengths = [len(prompt) for prompt in PROMPTS]
    assert np.asarray(engine.batch.cache.lengths).tolist() == lengths
    assert blocks == [[0, 1, 2]] * 2  # the second before the first was read
    assert engine.step() == []
    assert len(blocks) == 2
    arguments = np.full(MATES, STEPS, np.int32), np.int32(STEPS), np.bool_(False), 0
    batch, block = steps.decode_block(PARAMS, CONFIG, engine.batch, *arguments)
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
    assert np.asarray(engine.batch.cache.lengths)[1] == len(PROMPTS[1]) - 1 + 5 * num_blocks
    for row in (0, 2):
        ids = answers[rows[row]].completion.ids
        assert len(ids) == 35
        assert ids == likeliest(PROMPTS[row], ids)


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

    def engine(**sizes):
        made = Engine(MODEL, MATES, context=context, chunk_tokens=16, block_s=block_s, **sizes)
        made.together_tokens = together_tokens
        return made

    crowded = engine(prefix_tokens=48, prefill_budget=16)
    found = answers_in_company(crowded, prompts, arrivals, cancelled)
    assert {*range(num)} - cancelled <= found.keys()
    for index, answer in found.items():
        assert answer._replace(cached_tokens=0) == answer_of(engine(), prompts[index])


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


def test_short_prompts_are_computed_together_by_a_program_that_has_always_as_many_rows(
    monkeypatch, prefilled
):
    assert Engine(MODEL, MATES).together_tokens == 0
    monkeypatch.setitem(engines.TOGETHER_TOKENS, "cpu", 64)
    shapes = []
    original = steps.prefill_short

    def record(params, config, tokens, counts):
        shapes.append((tokens.shape, [*counts]))
        return original(params, config, tokens, counts)

    monkeypatch.setattr(steps, "prefill_short", record)
    lengths = (5, 12, 20, 33, 1, 17)
    prompts = [
        prompt_of(LONG_PROMPT[:length], sampling, 6)
        for length, sampling in zip(lengths, seeded(len(lengths)), strict=True)
    ]
    _, together = answers_of(Engine(MODEL, MATES, chunk_tokens=32), prompts)
    # Those of 16 tokens and fewer four at a time, that of 19 with room for another, that of 32 by
    # itself. The first three are admitted together, and so are the others.
    assert shapes == [((4, 16), [4, 11, 0, 0]), ((2, 32), [19, 0]), ((4, 16), [0, 16, 0, 0])]
    assert prefilled == [32]
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer_of(Engine(MODEL, MATES, chunk_tokens=32), prompt) == answer
        assert [answer.completion.ids] == generated_by([prompt], num_slots=1)[0]
    assert Engine(MODEL, 1).together_tokens == 0


def test_in_bfloat16_a_row_beside_others_has_the_bits_that_it_has_alone_in_as_many_slots():
    params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), PARAMS)
    model = LanguageModel(CONFIG, on_device(params))
    ids = [*PROMPTS, PROMPTS[1][:5]]
    prompts = [prompt_of(*pair, 30) for pair in zip(ids, seeded(4), strict=True)]
    found = answers_in_company(Engine(model, MATES), prompts, [0, 2, 0, 1])
    for index, prompt in enumerate(prompts):
        assert found[index] == answer_of(Engine(model, MATES), prompt)
        assert len(found[index].completion.ids) == 30


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
    plain = [prompt_of(*pair, 40) for pair in zip(PROMPTS, seeded(), strict=True)][:2]
    own = prompt_of(PROMPTS[2], FirstTokens(seed=7, first_tokens=9), 20)
    engine = Engine(MODEL, MATES)
    found = answers_in_company(engine, [*plain, own, plain[0]], [0, 0, 2, 3])
    alone = [answer_of(Engine(MODEL, MATES), prompt) for prompt in (*plain, own)]
    for index, expected in enumerate([*alone, alone[0]]):
        assert found[index].completion.ids == expected.completion.ids
        np.testing.assert_allclose(
            found[index].completion.log_probs, expected.completion.log_probs, rtol=1e-5, atol=1e-5
        )
    assert max(found[2].completion.ids) < 9 < max(found[0].completion.ids)
    free = dataclasses.replace(own, sampling=SamplingParams(seed=7))
    before, after = (answer_of(one, free).completion.ids for one in (Engine(MODEL, MATES), engine))
    assert before == after


def test_a_row_may_have_more_stop_ids_than_there_is_room_for_and_the_others_keep_theirs():
    free = generated(PROMPTS, seeded(), 35)
    few = [max(free[0], key=free[0].index)]  # which comes late
    assert free[0].index(few[0]) > STEPS
    never = [token for token in range(VOCAB) if token not in free[2]]
    many = [*never[: MAX_STOPS + 4], free[2][9]]
    assert len(many) == MAX_STOPS + 5
    stops = [few, [], many]
    prompts = [
        prompt_of(prompt, sampling, 35, ids)
        for prompt, sampling, ids in zip(PROMPTS, seeded(), stops, strict=True)
    ]
    engine = Engine(MODEL, MATES)
    rows = [engine.submit(Request(prompt)) for prompt in prompts[:2]]
    while not rows[0].tokens:
        engine.step()
    assert not rows[0].ended
    rows.append(engine.submit(Request(prompts[2])))
    _, answers = run(engine)
    found = [tokens_of(row, answers[row])[0] for row in rows]
    assert found == [cut(*pair) for pair in zip(free, stops, strict=True)]
    assert answer_of(engine, prompts[0]).completion == answers[rows[0]].completion


# Long texts, kept prefixes


def test_a_long_prompt_is_prefilled_in_chunks_and_the_cache_grows_as_it_must(prefilled):
    ids = [LONG_PROMPT[:60], LONG_PROMPT[:9], LONG_PROMPT[:3]]
    prompts = [prompt_of(*pair) for pair in zip(ids, [GREEDY] * MATES, [100, None, 2], strict=True)]
    engine = Engine(MODEL, MATES, chunk_tokens=16)
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    engine.step()
    assert engine.batch.tokens.shape == (MATES, 128)
    _, answers = run(engine)
    assert engine.batch.tokens.shape == (MATES, 256)
    found = [answers[row].completion for row in rows]
    assert [len(answer.ids) for answer in found] == [100, CONTEXT - 9, 2]
    assert [answer.finish_reason for answer in found] == ["length", "context", "length"]
    assert prefilled == [16, 16, 16, 11, 8, 2]
    assert_likeliest(ids, [answer.ids for answer in found])


@pytest.mark.parametrize("batch_size", [1, MATES])
def test_equal_prompts_are_prefilled_once(prefilled, batch_size):
    requests = [
        prompt_of(PROMPTS[row], sampling, 20)
        for sampling, row in zip(seeded(4), (1, 2, 1, 1), strict=True)
    ]
    found = dict(completions(MODEL, requests, batch_size=batch_size))
    assert prefilled == [19, 10]
    assert [found[row].ids for row in range(4)] == [
        generated_by([request])[0][0] for request in requests
    ]


def test_an_engine_computes_only_what_is_new_in_a_conversation(monkeypatch, prefilled):
    engine = Engine(MODEL, 1, resumes=True)

    def continued(ids, new, num_prefilled=None):
        """The greedy continuation, after so many tokens are computed of the prompt."""
        del prefilled[:]
        answer = answer_of(engine, prompt_of(ids, GREEDY, new)).completion.ids
        assert answer == likeliest(ids, answer)
        assert len(answer) == new
        assert num_prefilled is None or prefilled == [num_prefilled]
        return answer

    first = continued(PROMPTS[1], 5, 19)
    # The answer's last token was not in the cache; the new last one need not be.
    continued([*PROMPTS[1], *first, 7, 8, 9], 6, 3)
    other = [*PROMPTS[1][:12], 1, 2, 3]
    expected = continued(other, 6, 2)
    del prefilled[:]
    row = engine.submit(Request(prompt_of(other, GREEDY, 30)))
    while not row.tokens:
        engine.step()
    engine.cancel(row)  # as when somebody stops listening
    assert prefilled == []
    heard = [token.id for token in row.tokens]
    assert heard[:6] == expected
    continued([*other, *heard, 5], 6, 1)

    def broken(*arguments):
        steps_of(*arguments)
        raise KeyboardInterrupt

    steps_of = steps.decode_block
    with monkeypatch.context() as patch:
        patch.setattr(steps, "decode_block", broken)
        with pytest.raises(KeyboardInterrupt):
            continued(other, 30)
    assert not engine.busy
    # What was in the cache went with the step.
    assert continued(other, 6, len(other) - 1) == expected


def test_other_weights_take_the_place_of_the_first():
    """What was computed by those is forgotten."""
    params = on_device(LAYOUT(random_params(CONFIG, 1), CONFIG))
    other = LanguageModel(CONFIG, params)
    sizes = {"chunk_tokens": 16, "prefix_tokens": 48}
    engine, prompt = Engine(MODEL, MATES, **sizes), prompt_of(PROMPTS[1], GREEDY, 9)
    first = answer_of(engine, prompt)
    assert answer_of(engine, prompt).cached_tokens == 16
    engine.replace_weights(other)
    second = answer_of(engine, prompt)
    assert second == answer_of(Engine(other, MATES, **sizes), prompt)
    assert second.completion.ids != first.completion.ids
    with pytest.raises(UsageError, match="the new weights differ in shape"):
        engine.replace_weights(LanguageModel(SMALL, params))
    engine.submit(Request(prompt))
    with pytest.raises(UsageError, match="let it end before its weights change"):
        engine.replace_weights(other)


# Drafts


@given(
    rows=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=MATES, max_size=MATES
    ),
    count=st.sampled_from([1, 4]),
)
def test_drafts_are_what_followed_last_time(rows, count):
    lengths = [len(row) for row in rows]
    padded = np.array([row + [3] * (12 - len(row)) for row in rows], np.int32)
    result = jax.jit(draft_tokens, static_argnums=2)(padded, np.array(lengths), count)
    drafts, found = jax.device_get(result)
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
    few = {"banned_ids": tuple(range(5, VOCAB))}  # so guesses come true
    sampling = configs(values | few for values in options)
    stops = [[data.draw(st.integers(0, 4))] if data.draw(st.booleans()) else [] for _ in prompts]
    requests = [
        prompt_of(*parts) for parts in zip(prompts, sampling, [150, 40, 17], stops, strict=True)
    ]
    expected, log_probs = generated_by(requests)
    found, its_log_probs = generated_by(requests, draft_len=3)
    assert found == expected
    for one, other in zip(log_probs, its_log_probs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_drafts_of_three_tokens_are_right_as_often_as_they_must():
    """The tokens are equally likely, whatever came before."""
    three = tuple(range(3, VOCAB))
    prompts = [
        prompt_of([0, 1, 2], SamplingParams(seed=seed, banned_ids=three), 130) for seed in range(50)
    ]
    engine = Engine(LanguageModel(CONFIG, UNIFORM), MATES, draft_len=3)
    _, answers = answers_of(engine, prompts)
    drafted = sum(answer.completion.drafted for answer in answers)
    accepted = sum(answer.completion.accepted for answer in answers)
    assert drafted > 1000
    assert accepted / drafted == pytest.approx((1 / 3 + 1 / 9 + 1 / 27) / 3, abs=0.02)


def test_a_text_that_repeats_itself_takes_fewer_steps(monkeypatch):
    seven = tuple(token for token in range(VOCAB) if token != 7)
    biased = SamplingParams(temperature=0.0, banned_ids=seven)
    monkeypatch.setattr(engines, "STEPS", 9)
    engine = Engine(MODEL, MATES, draft_len=3)
    engine.make_room(CONTEXT)  # as other tests' texts have, whose program this is
    row = engine.submit(Request(prompt_of([7, 7], biased, 33)))
    engine.step()
    (_, answer) = engine.step()[-1]  # the first block had all of it: one, and eight times four
    assert [token.id for token in row.tokens] == answer.completion.ids == [7] * 33
    assert (answer.completion.drafted, answer.completion.accepted) == (24, 24)
    # The room of a longer one is enough for all that drafts may bring until the engine looks.
    answer = answer_of(Engine(MODEL, MATES, draft_len=3), prompt_of([7, 7], biased, 150))
    assert answer.completion.ids == [7] * 150


@pytest.mark.parametrize(
    ("draft_len", "fields", "options", "message"),
    [
        (0, {"sampling": FirstTokens()}, {}, "nothing applies first_tokens of FirstTokens: regis"),
        (3, {"grammar": Grammar("regex", "a")}, {}, "guesses several tokens, and a grammar allows"),
        (3, {}, {"top": 2}, "speculate guesses tokens, and of those the likeliest others are not"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_at_the_door(draft_len, fields, options, message):
    engine = Engine(MODEL, 1, draft_len=draft_len)
    prompt = dataclasses.replace(prompt_of([1], GREEDY, 3), **fields)
    with pytest.raises(UsageError, match=message):
        engine.submit(Request(prompt, **options))
    assert not engine.busy


# Compilations


def test_no_setting_and_no_length_within_a_bucket_compiles_anew(caplog):
    def compiled():
        return steps.prefill_chunk._cache_size(), steps.decode_block._cache_size()

    def run(lengths, sampling, new, stops):
        for length in lengths:
            generated_by([prompt_of(LONG_PROMPT[:length], sampling, new, stops)], num_slots=1)

    every = SamplingParams(0.7, 5, 0.9, 0.05, 1.3, 0.7, 0.4, {3: 1.5}, (1, 2), 7)
    assert all(vars(every)[name] != value for name, value in vars(SamplingParams()).items())
    prefills, decodes = compiled()
    run((2, 18), GREEDY, 3, [])
    # At most one prefill a bucket, and one decode: other tests may have compiled them.
    after = compiled()
    assert after[0] <= prefills + 2
    assert after[1] <= decodes + 1
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        jax.jit(lambda: 0)()
        assert any(record.message.startswith("Compiling") for record in caplog.records)
        caplog.clear()
        run((2, 5, 17, 18, 33), every, 39, [4, 5])
    assert compiled() == after
    assert not any(record.message.startswith("Compiling") for record in caplog.records)


# Settings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "-0.1; it must be 0"),
        ("temperature", float("nan"), "nan; it must be 0"),
        ("temperature", 1e39, "1e\\+39; it must be 0"),  # over the largest float32
        ("top_k", -1, "-1; it must be 0"),
        ("top_k", 2**31, "2147483648; it must be 0"),
        ("top_p", 0.0, "0.0; it must be over 0 and at most 1$"),
        ("top_p", 1.1, "1.1; it must be over 0 and at most 1$"),
        ("min_p", -0.1, "-0.1; it must be between 0"),
        ("repetition_penalty", 0.0, "0.0; it must be positive"),
        ("repetition_penalty", 1e39, "1e\\+39; it must be positive"),
        ("repetition_penalty", 1e-46, "1e-46; it must be positive"),
        ("presence_penalty", float("inf"), "inf; it must be a finite number"),
        ("frequency_penalty", -1e39, "-1e\\+39; it must be a finite number"),
        ("logit_bias", {3: float("-inf")}, "{3: -inf}; it must be of finite numbers"),
        ("logit_bias", {3: 1e39}, "{3: 1e\\+39}; it must be of finite numbers"),
        ("seed", -1, r"-1; it must be between 0 and 2\*\*32 - 1$"),
        ("seed", 2**32, r"4294967296; it must be between 0 and 2\*\*32 - 1$"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name, value, message):
    with pytest.raises(UsageError, match=f"^{name} is {message}"):
        SamplingParams(**{name: value})


# Masks


class AllowedTokens:
    """What the engine asks of a grammar's matcher: before each token those that may come next."""

    failed = False

    def __init__(self, of_steps):
        self.of_steps, self.accepted = of_steps, []

    def allowed(self):
        flags = np.isin(np.arange(-(-VOCAB // 32) * 32), self.of_steps[len(self.accepted)])
        return np.packbits(flags, bitorder="little").view(np.int32)

    def accept(self, token):
        self.accepted.append(token)


@settings(max_examples=5)
@given(options=options_of_rows, seed=st.integers(0, 9))
def test_a_mask_leaves_its_tokens_and_no_other_row_knows_of_it(options, seed):
    """Row 1 may take five tokens of each step alone.

    The others' bits are as without, and so are programs' number.
    """
    random = np.random.default_rng(seed)
    five = [random.choice(VOCAB, 5, replace=False) for _ in range(9)]
    options[1]["banned_ids"] = ()
    prompts = [prompt_of(*pair, 8) for pair in zip(PROMPTS, configs(options), strict=True)]
    _, free = answers_of(Engine(MODEL, MATES), prompts)
    num_programs = steps.decode_block._cache_size()
    prompts[1] = dataclasses.replace(prompts[1], grammar=Grammar("regex", ".*"))
    engine = Engine(MODEL, MATES)
    rows = [engine.submit(Request(prompt)) for prompt in prompts]
    rows[1].text._matcher = AllowedTokens(five)
    _, answers = run(engine)
    assert steps.decode_block._cache_size() == num_programs
    masked = [answers[row] for row in rows]
    assert [masked[row] for row in (0, 2)] == [free[row] for row in (0, 2)]
    drawn = masked[1].completion.ids
    assert len(drawn) == 8
    assert all(token in allowed for token, allowed in zip(drawn, five[:8], strict=True))
    raw = np.log(oracle.softmax(logits_before(PROMPTS[1], drawn)))[np.arange(8), drawn]
    np.testing.assert_allclose(masked[1].completion.log_probs, raw, rtol=1e-4, atol=1e-5)


def test_padding_rows_of_the_vocabulary_are_never_drawn():
    """Weights under which the last ids are by far the likeliest.

    The tokenizer does not have them.
    """
    params = WEIGHTS | {"lm_head": WEIGHTS["lm_head"].copy()}
    params["lm_head"][:, 50:] *= 50
    params = on_device(LAYOUT(params, CONFIG))

    def drawn(tokenizer):
        sampling = [GREEDY, *seeded(2)]
        rows = generated([[1, 2], [3], [4]], sampling, 40, params=params, tokenizer=tokenizer)
        return np.array(rows)

    assert drawn(None).max() >= 50
    assert 0 <= drawn(FiftyTokens()).min() <= drawn(FiftyTokens()).max() < 50
