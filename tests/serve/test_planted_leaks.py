"""Where a row of the engine leaks into another, the comparison of answers alone and in company sees it."""

import dataclasses
import hashlib

import numpy as np
import pytest
from engine_load import alone, in_company, random_request
from models import served

from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.grammar import Grammar
from jllama.serve import engine as engine_module
from jllama.serve import slots
from jllama.serve.config import EngineConfig
from jllama.serve.engine import Engine
from jllama.serve.requests import Request
from jllama.serve.slots import CHUNK


@pytest.fixture(scope="module")
def engine():
    serving = Engine({"small": served()}, EngineConfig(slots=3))
    serving.start()
    yield serving
    serving.close()


def request_of(text, **settings):
    return Request(encode_prompt(served(), Prompt(text, SamplingParams(0.0), 12, **settings)), "small")


PLAIN = [random_request(served(), number) for number in range(10)]
BEHIND_OTHERS = [request_of(first * (CHUNK - 1) + "abc" * 100) for first in "xyz"] * 3
GRAMMARS = [None, Grammar("regex", "[ab]{4,12}"), Grammar("regex", "([0-9]+ )*"), Grammar("regex", "yes|no")]
WITH_GRAMMARS = [request_of("abc", grammar=grammar) for grammar in GRAMMARS * 3]


def neighbors_mask(monkeypatch):
    """The tokens that may come are those of the row behind."""
    restricted = engine_module.restricted
    monkeypatch.setattr(engine_module, "restricted", lambda batch, masks: restricted(batch, [*masks[1:], masks[0]]))


def stale_rows(monkeypatch):
    """The end of a prompt is not written over what the slot's last request left there."""
    write_chunk = slots.write_chunk

    def leaking(batch, chunk, row, start):
        is_whole = np.any(chunk[0][0][:, :, -1])  # not padded
        return write_chunk(batch, chunk, row, start) if is_whole else batch

    monkeypatch.setattr(slots, "write_chunk", leaking)


def key_of_the_slot(monkeypatch):
    """What is drawn depends on the slot."""
    join = slots.join

    def leaking(batch, model, prompt, row):
        sampling = dataclasses.replace(prompt.sampling, seed=prompt.sampling.seed ^ row)
        return join(batch, model, dataclasses.replace(prompt, sampling=sampling), row)

    monkeypatch.setattr(slots, "join", leaking)


def chunks_by_themselves(monkeypatch):
    """A kept chunk is found by its own tokens, whatever stands before them."""

    def leaking(model, ids):
        for start in range(0, len(ids) - CHUNK + 1, CHUNK):
            yield hashlib.sha256(np.array(ids[start : start + CHUNK], np.uint32).tobytes()).digest()

    monkeypatch.setattr(engine_module, "chunk_keys", leaking)


LEAKS = [
    (neighbors_mask, WITH_GRAMMARS),
    (stale_rows, PLAIN),
    (key_of_the_slot, PLAIN),
    (chunks_by_themselves, BEHIND_OTHERS),
]


@pytest.mark.parametrize(("plant", "requests"), LEAKS, ids=[plant.__name__ for plant, _ in LEAKS])
def test_a_planted_leak_is_seen(engine, plant, requests, monkeypatch):
    """A leaking server compared with itself, as one that does not leak is."""
    uncached = [dataclasses.replace(request, caches=False) for request in requests]
    assert in_company(engine, requests, seed=0) == alone(engine, uncached)
    plant(monkeypatch)
    assert in_company(engine, requests, seed=0) != alone(engine, uncached)
