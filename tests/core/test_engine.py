"""The engine of the core against the oracle: texts join and leave, and know of no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import SMALL, weights

from jllama.core.engine import STEPS, Engine, Row, Sampling
from jllama.generation.engine import Engine as RequestEngine
from jllama.generation.requests import Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.models import oracle
from jllama.models.language_model import LanguageModel

CONFIG = dataclasses.replace(SMALL, num_layers=2, max_seq_len=64)
WEIGHTS = weights(CONFIG)
LAYERS = {
    str(index): {name: stack[index] for name, stack in WEIGHTS["layers"].items()}
    for index in range(CONFIG.num_layers)
}
PARAMS = {**WEIGHTS, "layers": LAYERS}
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in (3, 20, 1, 11, 7)]


def engine():
    return Engine(CONFIG, PARAMS, num_slots=2, max_len=CONFIG.max_seq_len)


def run(engine, rows):
    """The tokens of rows, as events bring them."""
    found = {row: [] for row in map(engine.submit, rows)}
    while engine.busy:
        for row, ids in engine.step():
            assert not row.ended or row.is_complete
            found[row] += ids
    assert all(row.ended and row.tokens == found[row] for row in rows)
    return [found[row] for row in rows]


def likeliest(prompt, ids):
    """What the oracle finds likeliest after each token of a text but the prompt's."""
    logits = oracle.forward(WEIGHTS, np.array([[*prompt, *ids]]), CONFIG)[0]
    return logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist()


def test_tokens_are_the_oracles_whoever_joins_and_leaves():
    """Five texts of different lengths take turns in two slots."""
    lengths = [5, STEPS + 3, 2 * STEPS, 1, 30]
    found = run(engine(), [Row(*pair) for pair in zip(PROMPTS, lengths, strict=True)])
    assert [len(ids) for ids in found] == lengths
    assert found == [likeliest(*pair) for pair in zip(PROMPTS, found, strict=True)]


def test_a_stop_ends_a_text_and_nothing_is_asked_for():
    (free,) = run(engine(), [Row(PROMPTS[0], 30)])
    stop = free[9]
    stopped, other, none = run(
        engine(), [Row(PROMPTS[0], 30, [stop]), Row(PROMPTS[1], 4), Row(PROMPTS[2], 0)]
    )
    assert stopped == free[: free.index(stop) + 1]
    assert len(other) == 4
    assert none == []


def test_a_cancelled_text_makes_room():
    one = engine()
    rows = [one.submit(Row(prompt, 40)) for prompt in PROMPTS[:3]]
    while not rows[0].tokens:
        one.step()
    one.cancel(rows[0])
    while one.busy:
        assert rows[0] not in [row for row, _ in one.step()]
    assert rows[2].tokens == likeliest(PROMPTS[2], rows[2].tokens)


def test_a_fault_drops_all_rows_and_the_next_text_is_served(monkeypatch):
    one = engine()
    (expected,) = run(one, [Row(PROMPTS[0], 20)])
    with monkeypatch.context() as patch:
        patch.setattr(one, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(one, [Row(PROMPTS[0], 20)])
    assert not one.busy
    assert run(one, [Row(PROMPTS[0], 20)]) == [expected]


def test_draws_are_those_of_the_engine_of_requests():
    """By seed, temperature and length alone, whatever else is in the batch."""
    settings = [Sampling(0.8, seed) for seed in range(5)]
    rows = [Row(prompt, 20, (), value) for prompt, value in zip(PROMPTS, settings, strict=True)]
    found = run(engine(), rows)
    params = jax.tree.map(jnp.asarray, WEIGHTS)
    other = RequestEngine(LanguageModel(CONFIG, params), num_slots=3)
    prompts = [
        Prompt(prompt, SamplingParams(value.temperature, seed=value.seed), 20, stop_ids=())
        for prompt, value in zip(PROMPTS, settings, strict=True)
    ]
    asked = [other.submit(Request(prompt)) for prompt in prompts]
    while other.busy:
        other.step()
    assert [[token.id for token in row.tokens] for row in asked] == found
    assert len({*map(tuple, found)}) == 5
