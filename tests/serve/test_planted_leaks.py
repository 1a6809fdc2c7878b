"""Where a row of the engine leaks into another, the comparison of answers alone and in company sees
it."""

import dataclasses
import hashlib

import numpy as np
import pytest
from helpers_serve import alone, in_company, random_request, request_of, started
from models import served

from jllama.generation import engine as engine_module
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.grammar import Grammar
from jllama.serve.engine import CHUNK


@pytest.fixture
def engine():
    with started({"small": served(), "other": served(1)}) as engine:
        yield engine


def plain():
    return [random_request(served(), number) for number in range(10)]


def behind_others():
    texts = [first * (CHUNK - 1) + "abc" * 100 for first in "xyz"]
    return [request_of(text, 12, temperature=0.0) for text in texts] * 3


def of_two_models():
    first, *_ = behind_others()
    return [dataclasses.replace(first, model=name) for name in ("small", "other")] * 3


def with_grammars():
    grammars = [None, *(Grammar("regex", regex) for regex in REGEXES)]
    return [request_of("abc", 12, grammar, temperature=0.0) for grammar in grammars] * 3


REGEXES = ["[ab]{4,12}", "([0-9]+ )*", "yes|no"]


def neighbors_mask(monkeypatch):
    """The tokens that may come are those of the row behind."""
    set_allowed = engine_module.set_allowed

    def leaking(batch, masks):
        others = [*masks.values()]
        return set_allowed(batch, dict(zip(masks, [*others[1:], others[0]], strict=True)))

    monkeypatch.setattr(engine_module, "set_allowed", leaking)


def stale_rows(monkeypatch):
    """The end of a prompt is not written over what the slot's last request left there."""
    join = steps.join

    def leaking(batch, one, computed_row, row):
        whole = one.cache.lengths // CHUNK * CHUNK
        joined = join(
            batch, one._replace(cache=one.cache._replace(lengths=whole)), computed_row, row
        )
        lengths = joined.cache.lengths.at[row].set(one.cache.lengths[computed_row])
        return joined._replace(cache=joined.cache._replace(lengths=lengths))

    monkeypatch.setattr(steps, "join", leaking)


def stale_prompts(monkeypatch):
    """What the last prompt left where prompts are computed is taken for this one's beginning."""
    begin = Engine._begin

    def leaking(self, row):
        owner = engine_module._owner(row.request)
        self._staged = engine_module.Staged(owner, [*row.request.prompt.ids[:-1]])
        begin(self, row)

    monkeypatch.setattr(Engine, "_begin", leaking)


def key_of_the_slot(monkeypatch):
    """What is drawn depends on the slot."""
    join = steps.join

    def leaking(batch, one, computed_row, row):
        seed = one.sampling.settings["seed"] ^ np.uint32(row)
        state = one.sampling
        state = state._replace(settings=state.settings | {"seed": seed})
        return join(batch, one._replace(sampling=state), computed_row, row)

    monkeypatch.setattr(steps, "join", leaking)


def chunks_by_themselves(monkeypatch):
    """A kept chunk is found by its own tokens, whatever stands before them."""

    def leaking(owner, ids, size):
        starts = range(0, len(ids) - size + 1, size)
        chunks = {start: np.array(ids[start : start + size], np.uint32) for start in starts}
        return {start: hashlib.sha256(ids.tobytes()).digest() for start, ids in chunks.items()}

    monkeypatch.setattr(engine_module, "chunk_keys", leaking)


def chunks_of_any_model(monkeypatch):
    """A kept chunk is found by its tokens, whichever model computed it."""
    chunk_keys = engine_module.chunk_keys
    monkeypatch.setattr(
        engine_module, "chunk_keys", lambda owner, ids, size: chunk_keys("", ids, size)
    )


LEAKS = [
    (neighbors_mask, with_grammars),
    (stale_rows, plain),
    (stale_prompts, behind_others),
    (key_of_the_slot, plain),
    (chunks_by_themselves, behind_others),
    (chunks_of_any_model, of_two_models),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "requests"), LEAKS, ids=[plant.__name__ for plant, _ in LEAKS])
def test_a_planted_leak_is_seen(engine, plant, requests, monkeypatch):
    """A leaking server compared with itself, as one that does not leak is."""
    requests = requests()
    uncached = [dataclasses.replace(request, caches=False) for request in requests]
    assert in_company(engine, requests, seed=0) == alone(engine, uncached)
    plant(monkeypatch)
    assert in_company(engine, requests, seed=0) != alone(engine, uncached)
