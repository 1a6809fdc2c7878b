"""What clients send as they are: defaults of the server, fields to ignore, answers to go on with.

And clients together,
who take turns, hold nobody else up, and learn nothing of each other's prompts.
"""

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest
from helpers_serve import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PREFIX,
    Asked,
    connected,
    listening,
    refused,
    request_of,
)
from models import served
from transformers.utils.chat_template_utils import render_jinja_template

from jllama.core import UsageError
from jllama.generation.sampling_params import SamplingParams
from jllama.serve.config import EngineConfig
from jllama.serve.engine import CHUNK, EngineThread
from jllama.serve.protocol import Conversation, render_conversation
from jllama.serve.requests import Busy
from jllama.system.errors import ContextError
from jllama.tokenizers.base import BytesTokenizer

STOCK = {
    path.stem: path.read_text()
    for path in (Path(__file__).parent.parent / "templates/stock").glob("*.jinja")
}
PREFILLED = [*MESSAGES, {"role": "assistant", "content": "Well, "}]


def ask(http, path=CHAT, **fields):
    given = {"messages": MESSAGES} if path == CHAT else {}
    return http.post(path, json=given | {"max_tokens": 4} | fields)


# Defaults


def test_the_defaults_of_a_server(engine, http):
    """They hold where a request says nothing, stand in its receipt; a null says nothing."""
    default = SamplingParams(temperature=0, top_k=3, logit_bias={75: 2.0}, seed=9)
    with_defaults = connected(engine, default=default)
    explicit = {"temperature": 0, "top_k": 3, "logit_bias": {"75": 2.0}, "seed": 9}
    own = {"temperature": 1.0, "top_k": 0, "logit_bias": {}, "seed": 1}
    for path, prompt in ((CHAT, {}), (COMPLETIONS, {"prompt": "x"})):
        expected = ask(http, path, receipt=True, **prompt, **explicit).json()
        for fields in ({}, {"temperature": None}):
            answer = ask(with_defaults, path, receipt=True, **prompt, **fields).json()
            assert answer["choices"] == expected["choices"]
            assert answer["receipt"] == expected["receipt"]
        answers = [ask(client, path, **prompt, **own).json() for client in (with_defaults, http)]
        assert answers[0]["choices"] == answers[1]["choices"]
    fields = http.get("/openapi.json").json()["components"]["schemas"]["Chat"]["properties"]
    assert "default" not in fields["temperature"]  # which each server has its own of
    assert with_defaults.post("/tokenize", json={"prompt": "x"}).status_code == 200


# Fields to ignore


def test_fields_are_ignored_where_that_is_asked_for(engine, http):
    lenient = connected(engine, ignore_unknown=True)

    def ignored(**fields):
        reply = ask(lenient, **fields)
        assert reply.status_code == 200
        return reply.headers.get("x-jllama-ignored")

    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *MESSAGES]
    thoughts = {"reasoning_content": "hm", "refusal": None, "annotations": []}
    odd = [history[0] | {"mood": "good"}, history[1] | thoughts, history[2]]
    unknown = {"reasoning_effort": "low", "verbosity": "high", "best_of": 2, "é\n": 1}
    reply = ask(lenient, messages=odd, seed=1, user="me", store=True, **unknown)
    names = "best_of, messages.mood, reasoning_effort, verbosity, %C3%A9%0A"
    assert reply.headers["x-jllama-ignored"] == names
    assert reply.json()["choices"] == ask(http, messages=history, seed=1).json()["choices"]
    assert ignored(stream=True, verbosity="low") == "verbosity"
    assert ignored(user="me") is None
    assert len(ignored(**{f"{number:03}" + "x" * 1000: 1 for number in range(100)})) < 2000
    tokens = lenient.post("/tokenize", json={"prompt": "a", "lang": "en"})
    assert tokens.headers["x-jllama-ignored"] == "lang"


def test_what_is_part_of_the_question_is_never_ignored(engine):
    lenient = connected(engine, ignore_unknown=True)
    for name in ("functions", "audio", "suffix"):
        message = refused(ask(lenient, **{name: {"some": "thing"}}))
        assert message == f"{name} is not served here: leave it out"
    assert "temperature: Input should be" in refused(ask(lenient, temperature="warm"))
    for message, said in (
        ({"role": "king", "content": "x"}, "message 0 has the role 'king'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "message 0 has a part that is not"),
    ):
        assert said in refused(ask(lenient, messages=[message]))


# Going on with an answer


def test_an_answer_is_continued(client, http, engine):
    own = {"continue_final_message": True}
    fields = {"model": "small", "messages": PREFILLED, "seed": 4, "max_tokens": 6}
    prompt = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell, "
    ids = served().tokenizer.encode_with_special_tokens(prompt)
    expected = Asked(engine, request_of(ids, 6, seed=4)).answer().completion.text
    answer = client.chat.completions.create(**fields, extra_body=own)
    assert answer.choices[0].message.content == expected
    own_for_stream = own | {"add_generation_prompt": False}
    chunks = client.chat.completions.create(**fields, extra_body=own_for_stream, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    shown = http.post("/apply-template", json={"messages": PREFILLED, **own}).json()
    assert shown == {"prompt": prompt, "tokens": list(ids)}


@pytest.mark.parametrize("name", STOCK)
def test_a_continued_answer_is_that_of_transformers(name):
    model = dataclasses.replace(served(), chat_template=STOCK[name])
    variables = {"date_string": "26 Jul 2024"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    for content in ("Well, ", "Well", "", " \n", "</s> <|im_end|> [/INST]", "im_end"):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        conversation = Conversation(
            messages=messages, continue_final_message=True, chat_template_kwargs=variables
        )
        text, _ = render_conversation(model, conversation)
        (expected,), _ = render_jinja_template(
            [messages],
            chat_template=STOCK[name],
            continue_final_message=True,
            **variables,
            **tokens,
        )
        assert text == expected


def test_what_cannot_be_continued(http):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "x", "tool_calls": [call]}
    for messages, more in (
        (MESSAGES, {}),
        ([*MESSAGES, calling], {}),
        (PREFILLED, {"add_generation_prompt": True}),
    ):
        reply = ask(http, messages=messages, continue_final_message=True, **more)
        assert refused(reply).startswith(
            "continue_final_message goes on with the messages: the last one must be text"
        )
    deaf = dataclasses.replace(served(), chat_template="{{ messages[0].content }}")
    with pytest.raises(UsageError, match="leaves the last message out"):
        render_conversation(deaf, Conversation(messages=PREFILLED, continue_final_message=True))


# Clients take turns


@contextlib.contextmanager
def reached(engine, *keys):
    """Clients of a real server by their keys; without keys a single one."""
    options = {"timeout": 60, "limits": httpx.Limits(max_connections=None), "verify": False}
    with listening(engine, keys) as (url, _), contextlib.ExitStack() as stack:
        clients = [
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, **options)
            for key in keys or ["none"]
        ]
        yield [stack.enter_context(client) for client in clients]


def request_by(client, new_tokens=20):
    return request_of("abc", new_tokens, options={"client": client}, banned_ids=(2,))


class InOrder(Asked):
    """Notes its client in ``order`` when its answer has ended."""

    def __init__(self, engine, client, order):
        self._client, self._order = client, order
        super().__init__(engine, request_by(client))

    def _deliver(self, event):
        super()._deliver(event)
        if self.ended.is_set():
            self._order.append(self._client)


def test_clients_take_turns(engine):
    """Sixteen answers for one client, then one for each of two others: they come after at most one
    answer more. Two clients with many requests get slots alternately."""

    def order_of_answers(clients):
        order = []
        for request in [InOrder(engine, client, order) for client in clients]:
            request.end()
        return order

    order = order_of_answers([*["many"] * 16, "few", "fewer"])
    assert order[-8:] == ["many"] * 8
    assert sorted(order) == ["few", "fewer", *["many"] * 16]
    middle = order_of_answers(["one"] * 9 + ["two"] * 9)[4:-4]
    assert 3 <= middle.count("one") <= 7


def test_one_client_does_not_fill_the_queue_for_others(engine):
    running = [Asked(engine, request_by("many", 200)) for _ in range(18)]
    with pytest.raises(Busy, match=r"requests are waiting already, 1[6-9] of them yours"):
        [engine.submit(request_by("many"), lambda event: None) for _ in range(99)]
    Asked(engine, request_by("other")).answer()
    for request in running:
        request.cancel()


def test_all_clients_together_do_not_wait_without_a_limit():
    engine = EngineThread({"small": served()}, EngineConfig(slots=1, queue=2))  # is never started
    for number in range(12):
        engine.submit(request_by(f"client {number}"), print)
    with pytest.raises(Busy, match="12 requests are waiting already, 0 of them yours, the most"):
        engine.submit(request_by("another"), print)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_by_key_comes_before_the_many_of_another(stream, engine):
    fields = {"prompt": "x", "max_tokens": 30, "banned_ids": [2], "seed": 1}
    with reached(engine, "alpha", "beta") as (one, other), ThreadPoolExecutor(1) as pool:
        many = pool.submit(one.post, COMPLETIONS, json=fields | {"n": 16})
        while len(engine._queue) < 10:
            time.sleep(0.001)
        short = fields | {"max_tokens": 4, "stream": stream}
        assert other.post(COMPLETIONS, json=short).status_code == 200
        assert not many.done()
        assert len(many.result().json()["choices"]) == 16


# What one client makes others wait for


@pytest.fixture
def blocked(monkeypatch):
    """Tokenizing a text that begins with "wait" takes until the event is set."""
    encode, event = BytesTokenizer._encode, Event()

    def slow(self, text):
        assert "wait" not in text or event.wait(60)
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "_encode", slow)
    yield event
    event.set()


WAITING = [{"role": "user", "content": "wait"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "wait", "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "wait", "max_tokens": 0, "echo": True, "stream": True}),
        (CHAT, {"messages": WAITING, "max_tokens": 1}),
        ("/tokenize", {"prompt": "wait"}),
        ("/apply-template", {"messages": WAITING}),
    ],
)
def test_the_server_answers_while_a_text_is_tokenized(path, body, engine, blocked):
    with reached(engine) as (client,), ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.post, path, json=body)
        for _ in range(5):
            assert client.get("/health").status_code == 200
        assert not slow.done()
        blocked.set()
        assert slow.result().status_code == 200


@pytest.mark.parametrize(("path", "more"), [("/tokenize", {}), (COMPLETIONS, {"max_tokens": 1})])
def test_a_client_whose_prompts_take_long_does_not_hold_up_another(path, more, engine, blocked):
    """More slow prompts than the server has threads for; the other client's is made meanwhile."""
    with reached(engine, "alpha", "beta") as (one, other), ThreadPoolExecutor(45) as pool:
        body = {"prompt": "wait"} | more
        slow = [pool.submit(one.post, path, json=body) for _ in range(45)]
        for _ in range(5):
            assert other.post(path, json={"prompt": "x"} | more).status_code == 200
        assert not any(future.done() for future in slow)
        blocked.set()
        assert {future.result().status_code for future in slow} <= {200, 503}


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(http, blocked):
    text = "wait" * 200_000
    said = "1024 tokens, the context that this server has, hold at most 5120: shorten the prompt"
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
    ):
        reply = http.post(path, json=body)
        assert said in refused(reply, code="context_length_exceeded")


def test_what_may_fit_is_tokenized(engine):
    """As many characters as the longest tokens have.

    A special token is one token however long it is written.
    """
    model = served()
    longest = max(map(len, model.tokenizer.special_tokens))
    engine.check_text(model, "<unk>" * engine.context)
    with pytest.raises(ContextError):
        engine.check_text(model, "a" * (longest * engine.context + 1))


# What one client learns of another


def cached_tokens(cases):
    """How many tokens of a prompt are cached for each case of a client and a salt."""
    numbers, answers = [], []
    for client, salt in cases:
        fields = {"prompt": PREFIX[:300] + "!", "max_tokens": 1, "seed": 1, "cache_salt": salt}
        reply = client.post(COMPLETIONS, json=fields).json()
        numbers.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        answers.append(reply["choices"])
    assert all(answer == answers[0] for answer in answers)
    return numbers


def test_a_key_is_not_told_what_another_has_asked(engine):
    with reached(engine, "alpha", "beta") as (one, other):
        assert cached_tokens([(one, ""), (other, "")] * 2) == [0, 0, CHUNK, CHUNK]


def test_prefixes_are_shared_by_requests_of_the_same_salt(http):
    cases = [(http, salt) for salt in ("a", "b", "a", "", "")]
    assert cached_tokens(cases) == [0, 0, CHUNK, 0, CHUNK]


def test_without_keys_clients_share_prefixes(engine):
    """They are told apart by address for their turns alone."""
    numbers = [
        Asked(engine, request_of(PREFIX[1:400], 1, options={"client": name})).end().cached_tokens
        for name in ("1.2.3.4", "1.2.3.5")
    ]
    assert numbers == [0, CHUNK]
