"""Where a row of the engine leaks into another, the comparison of answers alone and in company sees
it."""

import dataclasses
import hashlib

import numpy as np
import pytest
from engine_load import alone, in_company, random_request
from models import served

from jllama.generation import engine as engine_module
from jllama.generation import steps
from jllama.generation.engine import Engine
from jllama.generation.requests import Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.grammar import Grammar
from jllama.serve.config import EngineConfig
from jllama.serve.engine import CHUNK, EngineThread


@pytest.fixture
def engine():
    serving = EngineThread({"small": served(), "other": served(1)}, EngineConfig(slots=3))
    serving.start()
    yield serving
    serving.close()


def request_of(text, **settings):
    return Request(
        encode_prompt(served(), Prompt(text, SamplingParams(0.0), 12, **settings)), "small"
    )


PLAIN = [random_request(served(), number) for number in range(10)]
BEHIND_OTHERS = [request_of(first * (CHUNK - 1) + "abc" * 100) for first in "xyz"] * 3
GRAMMARS = [
    None,
    Grammar("regex", "[ab]{4,12}"),
    Grammar("regex", "([0-9]+ )*"),
    Grammar("regex", "yes|no"),
]
OF_TWO_MODELS = [
    dataclasses.replace(BEHIND_OTHERS[0], model=name) for name in ("small", "other") * 3
]
WITH_GRAMMARS = [request_of("abc", grammar=grammar) for grammar in GRAMMARS * 3]


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
        self._staged = engine_module._owner(row.request), [*row.request.prompt.ids[:-1]]
        begin(self, row)

    monkeypatch.setattr(Engine, "_begin", leaking)


def key_of_the_slot(monkeypatch):
    """What is drawn depends on the slot."""
    join = steps.join

    def leaking(batch, one, computed_row, row):
        seed = one.settings["seed"] ^ np.uint32(row)
        return join(batch, one._replace(settings=one.settings | {"seed": seed}), computed_row, row)

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
    (neighbors_mask, WITH_GRAMMARS),
    (stale_rows, PLAIN),
    (stale_prompts, BEHIND_OTHERS),
    (key_of_the_slot, PLAIN),
    (chunks_by_themselves, BEHIND_OTHERS),
    (chunks_of_any_model, OF_TWO_MODELS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "requests"), LEAKS, ids=[plant.__name__ for plant, _ in LEAKS])
def test_a_planted_leak_is_seen(engine, plant, requests, monkeypatch):
    """A leaking server compared with itself, as one that does not leak is."""
    uncached = [dataclasses.replace(request, caches=False) for request in requests]
    assert in_company(engine, requests, seed=0) == alone(engine, uncached)
    plant(monkeypatch)
    assert in_company(engine, requests, seed=0) != alone(engine, uncached)
