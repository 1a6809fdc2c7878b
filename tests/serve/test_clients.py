"""What clients send as they are: defaults of the server, fields to ignore, answers to go on with.

And clients together,
who take turns, hold nobody else up, and learn nothing of each other's prompts.
"""

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from engine_load import PREFIX, Asked
from models import served
from starlette.testclient import TestClient
from transformers.utils.chat_template_utils import render_jinja_template

import jllama
from jllama.errors import ContextError, UsageError
from jllama.generation.requests import Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.connections import make_server
from jllama.serve.engine import CHUNK, EngineThread
from jllama.serve.protocol import Conversation, render_conversation
from jllama.serve.requests import Busy
from jllama.tokenizers import BytesTokenizer

STOCK = {
    path.stem: path.read_text()
    for path in (Path(__file__).parent.parent / "templates/stock").glob("*.jinja")
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
PREFILLED = [*MESSAGES, {"role": "assistant", "content": "Well, "}]


@pytest.fixture(scope="module")
def client(engine):
    """OpenAI's own, of a server with the usual options."""
    with (
        connected(engine) as http,
        openai.OpenAI(base_url="http://x/v1", api_key="none", http_client=http) as client,
    ):
        yield client


def connected(engine, **options):
    return TestClient(make_app(engine, HttpConfig(**options)), raise_server_exceptions=False)


def message_of(reply, status=400):
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["message"]


def ask(http, path=CHAT, **fields):
    given = {"messages": MESSAGES} if path == CHAT else {}
    return http.post(path, json=given | {"max_tokens": 4} | fields)


# Defaults


def test_the_defaults_of_a_server(engine):
    """They hold where a request says nothing, stand in its receipt; a null says nothing."""
    http = connected(
        engine, default=SamplingParams(temperature=0, top_k=3, logit_bias={75: 2.0}, seed=9)
    )
    plain = connected(engine)
    given = {"temperature": 0, "top_k": 3, "logit_bias": {"75": 2.0}, "seed": 9, "receipt": True}
    for path, prompt in ((CHAT, {}), (COMPLETIONS, {"prompt": "x"})):
        expected = ask(plain, path, **prompt, **given).json()
        for fields in ({}, {"temperature": None}):
            answer = ask(http, path, receipt=True, **prompt, **fields).json()
            assert answer["choices"] == expected["choices"]
            assert answer["receipt"] == expected["receipt"]
        own = {"temperature": 1.0, "top_k": 0, "logit_bias": {}, "seed": 1}
        assert (
            ask(http, path, **prompt, **own).json()["choices"]
            == ask(plain, path, **prompt, **own).json()["choices"]
        )
    fields = plain.get("/openapi.json").json()["components"]["schemas"]["Chat"]["properties"]
    assert "default" not in fields["temperature"]  # which each server has its own of
    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200


# Fields to ignore


def test_fields_are_ignored_where_that_is_asked_for(engine):
    http, plain = connected(engine, ignore_unknown=True), connected(engine)
    history = [
        {"role": "user", "content": "a", "mood": "good"},
        {"role": "assistant", "content": "b"},
        *MESSAGES,
    ]
    thoughts = {"reasoning_content": "hm", "refusal": None, "annotations": []}
    odd = [history[0], history[1] | thoughts, history[2]]
    unknown = {
        "reasoning_effort": "low",
        "verbosity": "high",
        "best_of": 2,
        "é\n": 1,
        "user": "me",
        "store": True,
    }
    reply = ask(http, messages=odd, seed=1, **unknown)
    assert reply.status_code == 200
    names = "best_of, messages.mood, reasoning_effort, verbosity, %C3%A9%0A"
    assert reply.headers["x-jllama-ignored"] == names
    kept = [{name: each[name] for name in ("role", "content")} for each in history]
    assert reply.json()["choices"] == ask(plain, messages=kept, seed=1).json()["choices"]
    assert ask(http, stream=True, verbosity="low").headers["x-jllama-ignored"] == "verbosity"
    tokens = http.post("/tokenize", json={"prompt": "a", "lang": "en"})
    assert tokens.headers["x-jllama-ignored"] == "lang"
    assert "x-jllama-ignored" not in ask(http, user="me").headers
    many = ask(http, **{f"{number:03}" + "x" * 1000: 1 for number in range(100)})
    assert len(many.headers["x-jllama-ignored"]) < 2000


def test_what_is_part_of_the_question_is_never_ignored(engine):
    http = connected(engine, ignore_unknown=True)
    for name in ("functions", "audio", "suffix"):
        assert (
            message_of(ask(http, **{name: {"some": "thing"}}))
            == f"{name} is not served here: leave it out"
        )
    assert "temperature: Input should be" in message_of(ask(http, temperature="warm"))
    assert "message 0 has the role 'king'" in message_of(
        ask(http, messages=[{"role": "king", "content": "x"}])
    )
    assert "message 0 has a part that is not text" in message_of(
        ask(http, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    )


def test_nothing_is_ignored_unless_that_is_asked_for(engine):
    http = connected(engine)
    for fields in (
        {"verbosity": "low"},
        {"mood": 1},
        {"messages": [MESSAGES[0] | {"reasoning_content": "x"}]},
    ):
        reply = ask(http, **fields)
        assert "x-jllama-ignored" not in reply.headers
        message_of(reply)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "seed"])
def test_minus_one_is_refused_with_what_to_send(name, engine):
    fields = {"messages": MESSAGES, name: -1}
    message = message_of(connected(engine).post(CHAT, json=fields))
    assert message.startswith(f"{name} is -1; it must be ")
    assert "leave it out to " in message


# Going on with an answer


def test_an_answer_is_continued(client, engine):
    own = {"continue_final_message": True}
    given = {"model": "small", "messages": PREFILLED, "seed": 4, "max_tokens": 6}
    answer = client.chat.completions.create(**given, extra_body=own)
    prompt = "<s><|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nWell, "
    ids = served().tokenizer.encode_with_special_tokens(prompt)
    (expected,) = jllama.generate(served(), ids, max_new_tokens=6, seed=4)
    assert answer.choices[0].message.content == expected.text
    parts = client.chat.completions.create(
        **given, extra_body=own | {"add_generation_prompt": False}, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == expected.text
    shown = connected(engine).post("/apply-template", json={"messages": PREFILLED, **own}).json()
    assert shown == {"prompt": prompt, "tokens": list(ids)}


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize(
    "content", ["Well, ", "Well", "", " \n", "</s> <|im_end|> [/INST]", "im_end"]
)
def test_a_continued_answer_is_that_of_transformers(name, content):
    model = dataclasses.replace(served(), chat_template=STOCK[name])
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    asked = {"continue_final_message": True, "chat_template_kwargs": {"date_string": "26 Jul 2024"}}
    text, _ = render_conversation(model, Conversation(messages=messages, **asked))
    given = {"bos_token": "<s>", "eos_token": "</s>", "continue_final_message": True} | asked[
        "chat_template_kwargs"
    ]
    theirs, _ = render_jinja_template([messages], chat_template=STOCK[name], **given)
    assert [text] == theirs


def test_what_cannot_be_continued(engine):
    http = connected(engine)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "x", "tool_calls": [call]}
    for messages, more in (
        (MESSAGES, {}),
        ([*MESSAGES, calling], {}),
        (PREFILLED, {"add_generation_prompt": True}),
    ):
        said = message_of(ask(http, messages=messages, continue_final_message=True, **more))
        assert said.startswith(
            "continue_final_message goes on with the messages: the last one must be text"
        )
    deaf = dataclasses.replace(served(), chat_template="{{ messages[0].content }}")
    with pytest.raises(UsageError, match="leaves the last message out"):
        render_conversation(deaf, Conversation(messages=PREFILLED, continue_final_message=True))


# Models


def test_when_a_model_was_loaded(client):
    assert 0 <= time.time() - client.models.retrieve("small").created < 10_000


# Clients take turns


@contextlib.contextmanager
def reached(engine, keys=()):
    """Clients of a real server by their keys; without keys one, named ``""``."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = HttpConfig()
    server = make_server(make_app(engine, config, keys), config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    try:
        with contextlib.ExitStack() as stack:
            clients = {}
            for key in keys or [""]:
                headers = {"Authorization": f"Bearer {key or None}"}
                client = httpx.Client(base_url=url, headers=headers, timeout=60, limits=limits)
                clients[key] = stack.enter_context(client)
            yield clients
    finally:
        server.should_exit = True
        thread.join()


def request_of(client, new_tokens=20):
    prompt = Prompt("abc", SamplingParams(banned_ids=(2,)), new_tokens)
    return Request(encode_prompt(served(), prompt), "small", client=client)


class InOrder(Asked):
    """Notes its client in ``order`` when its answer has ended."""

    def __init__(self, engine, client, order, **given):
        self._client, self._order = client, order
        super().__init__(engine, request_of(client, **given))

    def _deliver(self, event):
        super()._deliver(event)
        if self.ended.is_set():
            self._order.append(self._client)


def test_clients_take_turns(engine):
    """Sixteen answers for one client, then one for each of two others: they come after at most one
    answer more."""
    order = []
    asked = [InOrder(engine, "many", order) for _ in range(16)]
    asked += [InOrder(engine, name, order) for name in ("few", "fewer")]
    for each in asked:
        each.end()
    assert order[-8:] == ["many"] * 8
    assert sorted(order) == ["few", "fewer", *["many"] * 16]


def test_two_clients_with_many_requests_get_slots_alternately(engine):
    order = []
    asked = [InOrder(engine, name, order) for name in ("one", "two") for _ in range(9)]
    for each in asked:
        each.end()
    middle = order[4:-4]
    assert 3 <= middle.count("one") <= 7


def test_one_client_does_not_fill_the_queue_for_others(engine):
    running = [Asked(engine, request_of("many", 200)) for _ in range(18)]
    with pytest.raises(Busy, match=r"requests are waiting already, 1[6-9] of them yours"):
        [engine.submit(request_of("many"), lambda event: None) for _ in range(99)]
    other = Asked(engine, request_of("other"))
    other.answer()
    for each in running:
        each.cancel()


def test_all_clients_together_do_not_wait_without_a_limit():
    engine = EngineThread({"small": served()}, EngineConfig(slots=1, queue=2))  # is never started
    for number in range(12):
        engine.submit(request_of(f"client {number}"), lambda event: None)
    with pytest.raises(Busy, match="12 requests are waiting already, 0 of them yours, the most"):
        engine.submit(request_of("another"), print)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_by_key_comes_before_the_many_of_another(stream, engine):
    given = {"prompt": "x", "max_tokens": 60, "banned_ids": [2], "seed": 1}
    with reached(engine, ["alpha", "beta"]) as clients, ThreadPoolExecutor(1) as pool:
        many = pool.submit(clients["alpha"].post, COMPLETIONS, json=given | {"n": 16})
        while len(engine._queue) < 10:
            time.sleep(0.001)
        reply = clients["beta"].post(COMPLETIONS, json=given | {"max_tokens": 4, "stream": stream})
        assert reply.status_code == 200
        assert not many.done()
        assert len(many.result().json()["choices"]) == 16


# What one client makes others wait for


@pytest.fixture
def blocked(monkeypatch):
    """Tokenizing a text that begins with "wait" takes until the event is set."""
    encode, event = BytesTokenizer._encode, threading.Event()

    def slow(self, text):
        assert "wait" not in text or event.wait(60)
        return encode(self, text)

    monkeypatch.setattr(BytesTokenizer, "_encode", slow)
    yield event
    event.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "wait", "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "wait", "max_tokens": 0, "echo": True, "stream": True}),
        (CHAT, {"messages": [{"role": "user", "content": "wait"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "wait"}),
        ("/apply-template", {"messages": [{"role": "user", "content": "wait"}]}),
    ],
)
def test_the_server_answers_while_a_text_is_tokenized(path, body, engine, blocked):
    with reached(engine) as clients, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(clients[""].post, path, json=body)
        for _ in range(20):
            assert clients[""].get("/health").status_code == 200
        assert not slow.done()
        blocked.set()
        assert slow.result().status_code == 200


@pytest.mark.parametrize(("path", "more"), [("/tokenize", {}), (COMPLETIONS, {"max_tokens": 1})])
def test_a_client_whose_prompts_take_long_does_not_hold_up_another(path, more, engine, blocked):
    """More slow prompts than the server has threads for; the other client's is made meanwhile."""
    with reached(engine, ["alpha", "beta"]) as clients, ThreadPoolExecutor(45) as pool:
        slow = [
            pool.submit(clients["alpha"].post, path, json={"prompt": "wait"} | more)
            for _ in range(45)
        ]
        for _ in range(5):
            assert clients["beta"].post(path, json={"prompt": "x"} | more).status_code == 200
        assert not any(each.done() for each in slow)
        blocked.set()
        assert {each.result().status_code for each in slow} <= {200, 503}


def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenized(engine, blocked):
    text = "wait" * 200_000
    with reached(engine) as clients:
        for path, body in (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ):
            reply = clients[""].post(path, json=body)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert (
                "1024 tokens, the context that this server has, hold at most 5120: shorten the "
                "prompt" in error["message"]
            )


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


def cached_tokens(client, **fields):
    given = {"prompt": PREFIX[:300] + "!", "max_tokens": 1, "seed": 1}
    reply = client.post(COMPLETIONS, json=given | fields).json()
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["choices"]


def test_a_key_is_not_told_what_another_has_asked(engine):
    with reached(engine, ["alpha", "beta"]) as clients:
        found = [cached_tokens(clients[name]) for name in ("alpha", "beta", "alpha", "beta")]
    assert [number for number, _ in found] == [0, 0, CHUNK, CHUNK]
    assert all(choices == found[0][1] for _, choices in found)


def test_prefixes_are_shared_by_requests_of_the_same_salt(engine):
    with reached(engine) as clients:
        found = [cached_tokens(clients[""], cache_salt=salt) for salt in ("a", "b", "a", "", "")]
    assert [number for number, _ in found] == [0, 0, CHUNK, 0, CHUNK]
    assert all(choices == found[0][1] for _, choices in found)


def test_without_keys_clients_share_prefixes(engine):
    """They are told apart by address for their turns alone."""
    text = Prompt(PREFIX[:400], SamplingParams(), 1)
    request = Request(encode_prompt(served(), text), "small")
    answers = [
        Asked(engine, dataclasses.replace(request, client=name)).end()
        for name in ("1.2.3.4", "1.2.3.5")
    ]
    assert [answer.cached_tokens for answer in answers] == [0, CHUNK]
