"""What tests of the engine share: requests of all kinds, and their answers alone or in company."""

import random
import threading
import time

from jllama.generation.requests import Answer, Piece, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.serve.requests import Failure

PREFIX = "All llamas that ever were, are or will be say: " * 12  # longer than two chunks of bytes
WAIT_S = 600


def random_request(model, number, name="small"):
    """The request of a number: long and short, greedy and not, with penalties, stops, biases and
    likeliest tokens."""
    draws = random.Random(number)
    text = PREFIX[: draws.choice([0, 0, 300, 555])] + "".join(
        draws.choices("abc defg", k=draws.choice([0, 3, 20, 150]))
    )
    sampling = SamplingParams(
        temperature=draws.choice([0.0, 0.7, 1.5]),
        top_p=draws.choice([1.0, 0.8]),
        top_k=draws.choice([0, 0, 20]),
        repetition_penalty=draws.choice([1.0, 1.3]),
        frequency_penalty=draws.choice([0.0, 0.5]),
        logit_bias=draws.choice([{}, {70: 3.0}]),
        seed=number,
    )
    stop = draws.choice([(), (), ("e", "xyz")])
    prompt = encode_prompt(model, Prompt(text, sampling, draws.choice([1, 5, 20, 40]), stop))
    return Request(prompt, name, top=draws.choice([0, 0, 5]), prompt_log_probs=draws.random() < 0.1)


class Asked:
    """A request under way and what has come of it."""

    def __init__(self, engine, request, cancel_after=None):
        self.events, self.ended, self._cancel_after = [], threading.Event(), cancel_after
        self.ready, self.cancel = threading.Event(), lambda: None
        self.cancel = engine.submit(request, self._deliver)
        self.ready.set()

    def _deliver(self, event):
        self.events.append(event)
        if isinstance(event, Answer | Failure):
            self.ended.set()
        elif self._cancel_after is not None and len(self.events) >= self._cancel_after:
            self.ready.wait()
            self.cancel()
            self.ended.set()

    def end(self):
        """The last event, when it is there."""
        assert self.ended.wait(WAIT_S)
        return self.events[-1]

    def answer(self):
        """The answer, whose pieces are its text and tokens.

        How much came from the cache is not part of it.
        """
        end, pieces = self.end(), [event for event in self.events if isinstance(event, Piece)]
        assert isinstance(end, Answer), end
        assert "".join(piece.text for piece in pieces) == end.completion.text
        assert sum((piece.tokens for piece in pieces), ()) == end.tokens
        return end._replace(cached_tokens=0)


def alone(engine, requests):
    """The answers one after the other."""
    return [Asked(engine, request).answer() for request in requests]


def in_company(engine, requests, seed):
    """The answers of all at once, in another order, with others that are broken off beside them."""
    draws = random.Random(seed)
    order = draws.sample(range(len(requests)), len(requests))
    asked = {}
    for index in order:
        if draws.random() < 0.3:
            Asked(engine, draws.choice(requests), cancel_after=draws.choice([1, 3]))
        if draws.random() < 0.1:
            Asked(engine, draws.choice(requests)).cancel()
        asked[index] = Asked(engine, requests[index])
        time.sleep(draws.choice([0, 0, 0.002, 0.01]))
    return [asked[index].answer() for index in range(len(requests))]
