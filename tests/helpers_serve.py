"""What tests of the server share: requests of all kinds, their answers alone or in company, and a
server that listens."""

import contextlib
import random
import socket
import threading
import time

from models import served
from starlette.testclient import TestClient

from jllama.generation.requests import Answer, Piece, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.connections import make_server
from jllama.serve.engine import EngineThread
from jllama.serve.requests import Failure

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "hello"}]
PREFIX = "All llamas that ever were, are or will be say: " * 12  # longer than two chunks of bytes
WAIT_S = 600
CALLING = """{% if tools %}{{ tools | tojson }}<tool_call>{"name": "f", "arguments": {}}</tool_call>{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}
<tool_call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{% endfor %}
{% endfor %}"""  # noqa: E501
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "description": "a tool"}}
    for name in ("left", "right")
]


@contextlib.contextmanager
def started(models=None, **config):
    """An engine that serves: three slots and the model "small" if nothing else is said."""
    engine = EngineThread(models or {"small": served()}, EngineConfig(**{"slots": 3} | config))
    engine.start()
    yield engine
    assert engine.close() == 0


@contextlib.contextmanager
def serving(app, config=None):
    """The URL of a server of an application, and the server itself."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = make_server(app, config or HttpConfig())
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join()


def listening(engine, keys=(), **config):
    """The URL of a server of an engine, and the server itself."""
    config = HttpConfig(**config)
    return serving(make_app(engine, config, keys), config)


def connected(engine, keys=(), **config):
    """A client of the application, without a server."""
    return TestClient(make_app(engine, HttpConfig(**config), keys), raise_server_exceptions=False)


def connection_to(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def refused(reply, status=400, code=None):
    """The message of an error in OpenAI's shape: one sentence."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "\n" not in error["message"]
    return error["message"]


def wait_for(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def request_of(text, max_new_tokens=10, grammar=None, options=None, **sampling):
    """The request of a text or ids, to the model "small"; ``options`` are fields of a request."""
    prompt = Prompt(text, SamplingParams(**sampling), max_new_tokens, grammar=grammar)
    return Request(encode_prompt(served(), prompt), "small", **options or {})


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
