"""The server over HTTP: OpenAI's own client, streams, receipts, tools, and everything that can be
asked wrongly."""

import contextlib
import dataclasses
import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from helpers import trained_smollm
from hypothesis import given, settings
from hypothesis import strategies as st
from models import served
from starlette.testclient import TestClient

import jllama
from jllama.commands import cli
from jllama.conversation import chat_ids
from jllama.generation.requests import Answer, Piece, Token
from jllama.generation.text import Completion
from jllama.serve import app as app_module
from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.connections import make_server
from jllama.serve.engine import EngineThread
from jllama.serve.protocol import IGNORED, NOT_SERVED
from jllama.serve.requests import Busy, Failure

CALLING = """{% if tools %}{{ tools | tojson }}<tool_call>{"name": "f", "arguments": {}}</tool_call>{% endif %}
{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}
<tool_call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{% endfor %}
{% endfor %}"""  # noqa: E501
MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
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


@pytest.fixture(scope="module")
def engine():
    stock = Path(__file__).parent.parent / "templates/stock"
    special = ("[TOOL_CALLS]", "<s>", "</s>")
    tokenizer = trained_smollm([], 256, "tekken", special, (1, 2), add_bos=True)
    models = {"small": served(), "caller": dataclasses.replace(served(), chat_template=CALLING)}
    models["mistral"] = dataclasses.replace(
        served(),
        tokenizer=tokenizer,
        chat_template=(stock / "mistral_nemo.jinja").read_text(),
        stop_ids=(2,),
    )
    engine = EngineThread(models, EngineConfig(slots=3, queue=16))
    engine.start()
    yield engine
    assert engine.close() == 0


@contextlib.contextmanager
def listening(engine, **config):
    """The address of a real server."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = HttpConfig(**config)
    server = make_server(make_app(engine, config), config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url(engine):
    """A real server, for all tests."""
    with listening(engine, max_body_bytes=100_000, body_timeout_s=600) as url:
        yield url


@pytest.fixture(scope="module")
def ask(url):
    """Post a body, or bytes; gives the status and the JSON that came."""
    with httpx.Client(base_url=url, timeout=600) as client:

        def post(path, body, **headers):
            content = body if isinstance(body, bytes) else json.dumps(body)
            reply = client.post(
                path, content=content, headers={"Content-Type": "application/json"} | headers
            )
            return reply.status_code, reply.json()

        yield post


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def refused(reply, status=400, code=None):
    """The message of an error in OpenAI's shape: one sentence."""
    found, body = reply
    assert found == status, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]


# Answers


def test_a_chat_is_what_generate_gives(client):
    model, settings = (
        served(),
        {"seed": 5, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
    )
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=8, **settings
    )
    ids = chat_ids(model, MESSAGES)
    (expected,) = jllama.generate(
        model, ids, max_new_tokens=8, stop_ids=(model.tokenizer.eos_id,), **settings
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == {"stop_id": "stop", "length": "length"}[expected.finish_reason]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == expected.new_tokens
    assert answer.usage.total_tokens == len(ids) + expected.new_tokens
    assert (answer.model, answer.object, answer.system_fingerprint[:3]) == (
        "small",
        "chat.completion",
        "fp_",
    )


def test_further_settings_go_by_their_own_names(client):
    own = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "banned_ids": [80, 81]}
    given = {"seed": 1, "frequency_penalty": 0.1, "logit_bias": {"75": 4.0}, "max_tokens": 6}
    answer = client.completions.create(model="small", prompt=[1, 2, 3], extra_body=own, **given)
    model = served()
    bias = {"logit_bias": {75: 4.0}, "frequency_penalty": 0.1, "banned_ids": (80, 81)}
    (expected,) = jllama.generate(model, [1, 2, 3], max_new_tokens=6, seed=1, **own | bias)
    assert answer.choices[0].text == expected.text


def test_the_prompt_may_be_text_ids_or_several(client):
    def texts(prompt, **given):
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=4, seed=1, **given
        )
        assert [choice.index for choice in answer.choices] == [*range(len(answer.choices))]
        return [choice.text for choice in answer.choices]

    ids = [1, *served().tokenizer.encode("one")]
    assert texts("one") == texts(ids) == texts(["one"]) == texts([ids])
    assert texts(["one", "two"]) == [*texts("one"), *texts("two")]
    assert texts("one", echo=True) == ["one" + texts("one")[0]]
    assert texts([ids, [1]], echo=True)[0] == "one" + texts("one")[0]
    several = texts(["one", "two"], n=2)
    assert several[::2] == [*texts("one"), *texts("two")]
    again = client.completions.create(model="small", prompt="two", max_tokens=4, seed=2)
    assert several[3] == again.choices[0].text


def test_stop_strings_end_a_text(client):
    def text(**given):
        return client.completions.create(
            model="small", prompt="x", max_tokens=12, seed=3, **given
        ).choices[0]

    whole = text()
    cut = next(each for each in whole.text if whole.text.index(each) > 0)
    stopped = text(stop=cut)
    assert (stopped.text, stopped.finish_reason) == (whole.text[: whole.text.index(cut)], "stop")
    assert text(stop=["\n\n\n", cut]).text == stopped.text
    assert text(stop=["\n\n\n"]).text == whole.text


def test_a_stop_string_may_be_a_special_token(ask):
    """It has no text, so only its id can end one."""
    given = {"prompt": "x", "max_tokens": 6, "logit_bias": {"0": 100}}
    _, answer = ask(COMPLETIONS, given)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 6)
    for stop in ("<unk>", ["never", "<unk>"]):
        _, answer = ask(COMPLETIONS, given | {"stop": stop})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", ["chat", "completion"])
def test_a_stream_joins_to_the_answer(client, prompt):
    """Text, log-probabilities, reasons, usage; the role comes first and once, the reason in a part
    of its own."""
    common = {"model": "small", "max_tokens": 9, "seed": 7, "n": 2}
    if prompt == "chat":
        create, common = (
            client.chat.completions.create,
            common | {"messages": MESSAGES, "logprobs": True},
        )
        common["top_logprobs"] = 2
    else:
        create, common = client.completions.create, common | {"prompt": "some text", "logprobs": 2}
    whole = create(**common)
    chunks = [*create(**common, stream=True, stream_options={"include_usage": True})]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {
        "chat.completion.chunk" if prompt == "chat" else "text_completion"
    }
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index, expected in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == expected.finish_reason
        if prompt == "chat":
            assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
            assert "".join(part.delta.content or "" for part in parts) == expected.message.content
            assert parts[-1].delta.content is None
            joined = [token for part in parts if part.logprobs for token in part.logprobs.content]
            assert joined == expected.logprobs.content
        else:
            assert "".join(part.text for part in parts) == expected.text
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [
                    each for part in parts if part.logprobs for each in getattr(part.logprobs, name)
                ]
                assert joined == getattr(expected.logprobs, name)


def test_log_probabilities_of_a_chat(client):
    given = {"model": "small", "messages": MESSAGES, "max_tokens": 12, "seed": 2, "logprobs": True}
    (choice,) = client.chat.completions.create(**given, top_logprobs=3).choices
    tokens = choice.logprobs.content
    assert (
        bytes(byte for token in tokens for byte in token.bytes).decode("utf-8", "replace")
        == choice.message.content
    )
    for token in tokens:
        top = [each.logprob for each in token.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert top[0] >= token.logprob
    (plain,) = client.chat.completions.create(**given).choices
    assert [token.top_logprobs for token in plain.logprobs.content] == [[]] * len(tokens)
    assert [token.logprob for token in plain.logprobs.content] == [
        token.logprob for token in tokens
    ]


def test_log_probabilities_of_a_prompt(client):
    given = {"model": "small", "prompt": "hé!", "max_tokens": 0, "echo": True}
    (choice,) = client.completions.create(**given, logprobs=1).choices
    scores = choice.logprobs
    assert (choice.text, choice.finish_reason) == ("hé!", "length")
    assert scores.tokens == ["<s>", "h", r"bytes:\xc3", r"bytes:\xa9", "!"]
    assert scores.text_offset == [0, 0, 1, 1, 2]
    assert scores.token_logprobs[0] is None
    log_probs = jllama.score(served(), "hé!") if hasattr(jllama, "score") else None
    assert log_probs is None or scores.token_logprobs[1:] == pytest.approx(log_probs, abs=1e-5)
    assert (scores.top_logprobs[0], len(scores.top_logprobs[1])) == (None, 2)
    (without,) = client.completions.create(**given, logprobs=0).choices
    assert without.logprobs.token_logprobs == scores.token_logprobs
    assert without.logprobs.top_logprobs == [None] * 5


def test_parts_of_characters_are_kept_apart(client):
    """The likeliest token is the one whose name has the highest value, as lm-eval takes it."""
    given = {"model": "small", "prompt": "é世🙂" * 4, "max_tokens": 0, "echo": True, "logprobs": 5}
    scores = client.completions.create(**given).choices[0].logprobs
    assert scores.tokens[1:6] == [rf"bytes:\x{byte:02x}" for byte in "é世".encode()]
    for name, log_prob, top in [
        *zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True)
    ][1:]:
        assert top[name] == log_prob
        assert len(top) == (5 if name in [*top][:5] else 6)


def test_special_tokens_that_a_prompt_spells_out(ask):
    """They are tokens in raw prompts, unless they should not be."""

    def tokens(prompt, **more):
        _, found = ask("/tokenize", {"model": "mistral", "prompt": prompt} | more)
        given = {"model": "mistral", "prompt": prompt, "max_tokens": 1}
        more.pop("add_special_tokens", None)
        _, answer = ask(COMPLETIONS, given | more)
        assert answer["usage"]["prompt_tokens"] == found["count"] or found["tokens"][0] != 1
        return found["tokens"]

    (_, letter) = tokens("h")
    assert tokens("[TOOL_CALLS]h</s>") == [1, 0, letter, 2]
    assert tokens("h</s>", add_special_tokens=False) == [letter, 2]
    assert tokens("<s>h") == [1, letter]  # and no second one
    plain = tokens("<s>h</s>", parse_special=False)
    assert (plain[0], min(plain[1:]) > 2, len(plain)) == (1, True, 9)
    given = {"prompt": "</s>h", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = ask(COMPLETIONS, given)[1]["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], scores["tokens"]) == ("</s>h", ["<s>", "</s>", "h"])
    assert scores["text_offset"] == [0, 0, 4]


def test_a_seed_is_drawn_and_told(ask):
    seeds = []
    for _ in range(2):
        _, answer = ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "receipt": True})
        seeds.append(answer["receipt"]["request"]["seed"])
    assert seeds[0] != seeds[1]


# Receipts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_receipt_makes_the_answer_again(path, ask, url, tmp_path, capsys):
    prompt = (
        {"prompt": ["x", "yz"]} if path == COMPLETIONS else {"messages": MESSAGES, "stop": ["q"]}
    )
    status, answer = ask(
        path, prompt | {"n": 2, "max_tokens": 6, "top_k": 9, "receipt": True, "user": "me"}
    )
    assert status == 200
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(answer))
    assert cli.run("replay", [str(file), "--url", url]) == 0
    assert "the same answer, bit for bit" in capsys.readouterr().out
    changes = {"ids": lambda old: [[1], *old[1:]], "system_fingerprint": lambda old: "fp_0"}
    changes["log_probs"] = lambda old: [[old[0][0] + 1e-6, *old[0][1:]], *old[1:]]
    for name, change in changes.items():
        receipt = answer["receipt"] | {name: change(answer["receipt"][name])}
        file.write_text(json.dumps(answer | {"receipt": receipt}))
        assert cli.run("replay", [str(file), "--url", url]) == 1
        assert f"the repeated answer is not the same: {name} differ" in capsys.readouterr().err


def test_a_stream_ends_with_its_receipt(ask, url):
    given = {"messages": MESSAGES, "max_tokens": 5, "receipt": True, "seed": 4}
    _, whole = ask(CHAT, given)
    with httpx.stream("POST", url + CHAT, json=given | {"stream": True}) as reply:
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["receipt"] == whole["receipt"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "holds no receipt"),
        ("[]", "is not a JSON object"),
        ('{"receipt": {"ids": 1}}', "holds no receipt"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_replayed(content, said, url, tmp_path, capsys):
    if content is not None:
        (tmp_path / "answer.json").write_text(content)
    assert cli.run("replay", [str(tmp_path / "answer.json"), "--url", url]) == 1
    (error,) = [
        line for line in capsys.readouterr().err.splitlines() if " POST " not in line
    ]  # of the server's log
    assert said in error


def test_a_replay_without_a_server(tmp_path, capsys):
    receipt = {"path": CHAT, "request": {}, "system_fingerprint": "", "ids": [], "log_probs": []}
    (tmp_path / "answer.json").write_text(json.dumps({"receipt": receipt}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert (
        cli.run("replay", [str(tmp_path / "answer.json"), "--url", f"http://127.0.0.1:{port}"]) == 1
    )
    assert "gave no answer" in capsys.readouterr().err
    assert cli.run("replay", [str(tmp_path / "answer.json"), "--url", "nonsense"]) == 1
    assert "is no address of a server" in capsys.readouterr().err


# Structured output and tools


def test_the_text_is_what_was_asked_for(ask):
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        status, answer = ask(path, prompt | {"response_format": format, "max_tokens": 200})
        assert status == 200
        (choice,) = answer["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice["finish_reason"] == "stop"
    format = {"type": "json_object", "schema": SCHEMA}
    _, answer = ask(CHAT, body(response_format=format, max_tokens=200))
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
    _, answer = ask(COMPLETIONS, {"prompt": "x", "regex": "[ab]{3}c"})
    assert re.fullmatch("[ab]{3}c", answer["choices"][0]["text"])
    _, answer = ask(COMPLETIONS, {"prompt": "x", "grammar": 'start: "yes" | "no"'})
    assert answer["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize("name", ["caller", "mistral"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "right"}}]
)
def test_tools_are_called(client, name, choice):
    """Mistral's mark of a call is a special token, and its template takes ids of nine letters."""
    given = {
        "model": name,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "seed": 1,
    }
    given |= {"parallel_tool_calls": False, "max_tokens": 300}
    answer = client.chat.completions.create(**given)
    (only,) = answer.choices
    assert (only.finish_reason, only.message.content) == ("tool_calls", None)
    (call,) = only.message.tool_calls
    assert call.function.name in (("left", "right") if choice == "required" else ("right",))
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    deltas = [delta for part in parts for delta in part.delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].id, deltas[0].function.name) == (
        0,
        call.id,
        call.function.name,
    )
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    assert parts[-1].finish_reason == "tool_calls"
    history = [
        *MESSAGES,
        only.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    said = client.chat.completions.create(
        model=name, messages=history, tools=TOOLS, max_tokens=3, seed=1
    )
    assert said.choices[0].finish_reason == "length"


def test_tools_that_are_not_called(ask):
    text = {"model": "caller", "messages": MESSAGES, "seed": 1, "max_tokens": 5}
    _, plain = ask(CHAT, text)
    _, none = ask(CHAT, text | {"tools": TOOLS, "tool_choice": "none"})
    assert none["choices"] == plain["choices"]
    assert none["usage"] == plain["usage"]
    _, auto = ask(CHAT, text | {"tools": TOOLS})
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert "tool_calls" not in auto["choices"][0]["message"]


# The other paths


def test_tokens_and_templates(ask):
    tokenizer = served().tokenizer
    ids = tokenizer.encode("hé")
    assert ask("/tokenize", {"prompt": "hé"})[1] == {
        "tokens": [1, *ids],
        "count": len(ids) + 1,
        "max_model_len": 1024,
    }
    assert ask("/tokenize", {"prompt": "hé", "add_special_tokens": False})[1]["tokens"] == ids
    assert ask("/detokenize", {"tokens": [1, *ids]}) == (200, {"prompt": "hé"})
    assert "token 300 is outside the tokenizer's vocabulary of 259" in refused(
        ask("/detokenize", {"tokens": [300]})
    )
    assert refused(ask("/detokenize", {"tokens": [10**30]})).startswith(
        "tokens: Input should be less than"
    )
    _, found = ask("/apply-template", {"messages": MESSAGES})
    assert found["tokens"] == chat_ids(served(), MESSAGES)
    assert "hello" in found["prompt"]
    _, shown = ask("/apply-template", {"messages": MESSAGES, "model": "caller", "tools": TOOLS})
    assert '"left"' in shown["prompt"]


def test_models_health_metrics_and_the_page(client, url):
    assert [model.id for model in client.models.list()] == ["small", "caller", "mistral"]
    assert client.models.retrieve("caller") == [*client.models.list()][1]
    reply = httpx.get(f"{url}/v1/models/large/one")
    assert "there is no model large/one" in refused(
        (reply.status_code, reply.json()), 404, "model_not_found"
    )
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    metrics = httpx.get(f"{url}/metrics").text
    assert 'jllama_requests_total{path="/health",status="200"}' in metrics
    assert 'path="/nothing"' not in metrics
    page = httpx.get(url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-cache"
    assert httpx.get(f"{url}/openapi.json").json()["info"]["title"] == "jllama"


# Bad input


def body(**fields):
    return {"messages": MESSAGES, "max_tokens": 2} | fields


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temprature": 1}, "there is no field temprature; did you mean temperature?"),
        ({"temperature": "1"}, "temperature: Input should be a valid number"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or a positive number"),
        ({"top_p": 0}, "top_p is 0.0; it must be over 0 and at most 1"),
        ({"min_p": 2}, "min_p is 2.0; it must be between 0 (off) and 1"),
        ({"seed": -1}, "seed is -1; it must be between 0 and 2**32 - 1"),
        ({"seed": 10**400}, "seed is 1000"),
        ({"max_tokens": 1.0}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -2}, "max_tokens: Input should be greater than or equal to 0"),
        (
            {"max_completion_tokens": 3},
            "max_tokens and max_completion_tokens mean the same and differ",
        ),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 20}, "20 texts are asked for at once, and 19 fit here"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"stop": "x" * 1001}, "at most 1000 characters"),
        ({"stop": ["a"] * 17}, "stop: "),
        ({"stop": 1}, "stop: Input should be a valid string or Input should be a valid list"),
        ({"logit_bias": {"x": 1}}, "logit_bias: Input should be a valid integer"),
        ({"logit_bias": {"999": 1}}, "the logit_bias has token 999; the ids run from 0 to 258"),
        ({"top_logprobs": 1}, "top_logprobs are asked for without logprobs"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs: Input should be less than or equal to 20",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options are for a stream"),
        (
            {"stream": True, "stream_options": {"other": True}},
            "there is no stream_options field other",
        ),
        ({"response_format": {"type": "xml"}}, 'response_format must be {"type": "text"}'),
        ({"response_format": {"type": "json_schema"}}, 'response_format must be {"type": "text"}'),
        (
            {"response_format": {"type": "json_object", "schema": True}},
            'response_format must be {"type": "text"}',
        ),
        *(
            ({"response_format": format}, f"there is no response_format{said}")
            for format, said in (
                ({"type": "text", "schema": SCHEMA}, " field schema; there are type"),
                (
                    {"type": "json_object", "shema": {}},
                    " field shema; did you mean schema?",
                ),
                ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, " field json_schema"),
                (
                    {"type": "json_schema", "schema": SCHEMA},
                    " field schema; did you mean json_schema?",
                ),
                ({"type": "json_object", "metadata": {}}, " field metadata"),
                (
                    {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strikt": True}},
                    ".json_schema field strikt; did you mean strict?",
                ),
            )
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]}]},
            "there is no messages.content field more",
        ),
        ({"messages": [*MESSAGES, *MESSAGES, MESSAGES[0] | {"mood": 1}]}, "no messages field mood"),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [call]}]}, f"there is no {said}")
            for call, said in (
                (
                    {"id": "a", "function": {"name": "f", "arguments": "{}", "strict": True}},
                    "messages.tool_calls.function field strict",
                ),
                (
                    {"id": "a", "function": {"name": "f", "arguments": "{}"}, "more": 1},
                    "messages.tool_calls field more",
                ),
            )
        ),
        *(
            ({"model": "caller", "tools": [tool]}, f"there is no {said}")
            for tool, said in (
                (TOOLS[0] | {"strict": True}, "tools field strict; "),
                (
                    {"type": "function", "function": {"name": "f", "schema": {}}},
                    "tools.function field schema; ",
                ),
            )
        ),
        *(
            (
                {"model": "caller", "tools": TOOLS, "tool_choice": choice},
                f"there is no {said}",
            )
            for choice, said in (
                (
                    {"type": "function", "function": {"name": "left"}, "more": 1},
                    "tool_choice field more",
                ),
                ({"type": "function", "name": "left"}, "tool_choice field name"),
                (
                    {"type": "function", "function": {"name": "left", "strict": True}},
                    "tool_choice.function field strict",
                ),
            )
        ),
        ({"regex": "("}, "the grammar (regex) cannot be compiled"),
        ({"grammar": "start: nowhere"}, "the grammar (lark) cannot be compiled"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "a text can match one of"),
        ({"tools": TOOLS}, "the model's chat template takes no tools"),
        ({"tool_choice": "required"}, "tools must be a list of 1 to 128 functions"),
        ({"model": "caller", "tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": None}, "messages: Field required"),
        ({"messages": [1]}, "messages: Input should be a valid dictionary"),
        ({"messages": [{"role": "king", "content": "x"}]}, "message 0 has the role 'king'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 0 has a part that is not text",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "the body is not of text and finite numbers",
        ),
        ({"temperature": float("nan")}, "the body is not of text and finite numbers"),
        ({"x" * 50_000: 1}, "there is no field xxx"),
    ],
)
def test_a_field_that_is_wrong(fields, said, ask):
    message = refused(ask(CHAT, body(**fields)))
    assert said in message
    assert len(message) < 1000


def test_fields_of_openai(ask):
    """What is not served is refused unless its value is off; what cannot change an answer is
    ignored; null is off."""
    for name, off in NOT_SERVED.items():
        assert refused(ask(CHAT, body(**{name: {"some": "thing"}}))).startswith(
            f"{name} is not served"
        )
        for value in (*off, None):
            assert ask(CHAT, body(**{name: value}))[0] == 200
    nothing = dict.fromkeys(
        ["temperature", "stop", "stream", "tools", "response_format", "seed", "logit_bias"]
    )
    assert ask(CHAT, body(**nothing, **dict.fromkeys(IGNORED, "x")))[0] == 200


def test_every_field_of_a_mapping_that_openai_documents(ask):
    """Null counts as left out there, too."""
    function = {"name": "left", "description": "a tool", "strict": False, "parameters": SCHEMA}
    call = {"id": "a", "type": "function", "function": {"name": "left", "arguments": "{}"}}
    part = {"type": "text", "text": "hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    nothing = {"audio": None, "refusal": None, "function_call": None, "annotations": []}
    messages = [
        {"role": "system", "content": [part], "name": "a"},
        {"role": "user", "content": [part | {"more": None}], "name": "b"},
        {"role": "assistant", "content": None, "name": "c", "tool_calls": [call], **nothing},
        {"role": "tool", "content": [part], "tool_call_id": "a"},
    ]
    schema = {"name": "a", "description": "b", "strict": None, "schema": SCHEMA}
    given = {"model": "caller", "messages": messages, "max_tokens": 1}
    for more in (
        {"tools": [{"type": "function", "function": function}]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "left"}}},
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ):
        assert ask(CHAT, given | more)[0] == 200


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Field required"),
        (b"{", "the body is not JSON: Expecting property name"),
        (b"[1]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"messages": Infinity}', "the body is not of text and finite numbers"),
        (b'{"seed": 1e999}', "the body is not of text and finite numbers"),
        (b'{"messages": "\xff\xfe"}', "parsing the body"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "parsing the body"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "parsing the body"),
        (
            b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}",
            "message 0 has a part",
        ),
    ],
)
def test_a_body_that_is_wrong(content, said, ask):
    assert said in refused(ask(CHAT, content))


def test_a_body_of_another_type(ask):
    said = "the body must be a JSON object, sent with the header Content-Type: application/json"
    assert (
        refused(ask(CHAT, body(), **{"Content-Type": "application/x-www-form-urlencoded"})) == said
    )


def test_prompts_that_are_wrong(ask):
    for prompt, said in [
        ([], "prompt is an empty list"),
        ([[]], "a prompt has no tokens"),
        ([-1], "the prompt has token -1"),
        ([1, "a"], "prompt: Input should be"),
        (["a", [1]], "prompt: Input should be"),
        (7, "prompt: Input should be"),
    ]:
        assert said in refused(ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}))
    both = {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}
    assert "echo with logprobs is not served as a stream" in refused(ask(COMPLETIONS, both))


def test_a_prompt_over_the_context(ask):
    """The numbers are said; what just fits is served."""
    long = {"prompt": [5] * 1025}
    message = refused(ask(COMPLETIONS, long), 400, "context_length_exceeded")
    assert "the prompt's 1025 tokens and 1 new ones exceed the context of 1024: shorten" in message
    assert refused(
        ask(COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 25}), 400, "context_length_exceeded"
    )
    assert refused(ask(CHAT, body(max_tokens=10**30)), 400, "context_length_exceeded")
    status, answer = ask(COMPLETIONS, {"prompt": [5] * 1020})
    assert (status, answer["choices"][0]["finish_reason"]) in ((200, "length"), (200, "stop"))


def test_an_unknown_model(ask):
    said = "there is no model smal; did you mean small?"
    assert refused(ask(CHAT, body(model="smal")), 404, "model_not_found") == said


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1", 404),
        ("GET", "/..%2f..%2fetc/passwd", 404),
        ("GET", "/page.html", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
    ],
)
def test_a_path_that_is_not_there(method, path, status, url):
    reply = httpx.request(method, url + path)
    refused((reply.status_code, reply.json()), status)


def test_a_body_that_is_too_large(ask, url):
    def endless():
        for _ in range(100):
            yield b" " * 100_000

    assert "larger than 100000 bytes" in refused(ask(CHAT, b" " * 100_001), 413)
    reply = httpx.post(url + CHAT, content=endless(), timeout=600)
    assert "larger than 100000 bytes" in refused((reply.status_code, reply.json()), 413)


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)))


def test_a_client_that_sends_a_byte_a_minute(engine):
    with listening(engine, body_timeout_s=0.5) as url, connected(url) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 99\r\n\r\n"
        )
        connection.sendall(head.encode() + b"{")
        reply = b""
        while part := connection.recv(1000):  # until the server closes it
            reply += part
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"the body took over 0.5 seconds" in reply


@settings(max_examples=60)
@given(data=st.data())
def test_any_body_is_answered_in_a_sentence(data, ask):
    """Never a 5xx, whatever the JSON of a field is."""
    path = data.draw(
        st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/apply-template"])
    )
    names = (
        "messages prompt tokens tools tool_choice stop logit_bias seed n max_tokens model "
        "response_format regex echo"
    )
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
    values = st.recursive(
        scalars,
        lambda each: st.lists(each) | st.dictionaries(st.text(max_size=5), each),
        max_leaves=6,
    )
    fields = data.draw(
        st.dictionaries(st.sampled_from(names.split()) | st.text(max_size=5), values, max_size=4)
    )
    needed = {
        CHAT: "messages",
        COMPLETIONS: "prompt",
        "/tokenize": "prompt",
        "/detokenize": "tokens",
    }
    name = needed.get(path, "messages")
    fields = {name: {"messages": MESSAGES, "prompt": "a", "tokens": [5]}[name]} | fields
    fields |= {"max_tokens": 1} if path in (CHAT, COMPLETIONS) else {}
    status, answer = ask(path, fields)
    assert status in (200, 400, 404), answer


# Who may, who leaves, what fails


def quiet(engine, keys=(), **config):
    return TestClient(make_app(engine, HttpConfig(**config), keys), raise_server_exceptions=False)


def test_keys(engine):
    client = quiet(engine, ["first", "second"])
    for path in ("/health", "/", "/openapi.json"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/nothing"):
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Bearer "},
        ):
            reply = client.get(path, headers=header)
            assert "give a key" in refused(
                (reply.status_code, reply.json()), 401, "invalid_api_key"
            )
    for key in ("first", "second"):
        assert (
            client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        )
    assert client.post(CHAT, json=body()).status_code == 401
    reply = client.get("/v1/models", headers={"Authorization": b"Bearer \xff\xfe"})
    assert reply.status_code == 401


def test_other_origins(engine):
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert quiet(engine).options(CHAT, headers=asked).status_code == 405
    client = quiet(engine, ["key"], cors=["https://example.org"])
    allowed = client.options(CHAT, headers=asked)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (
        200,
        "https://example.org",
    )
    assert (
        client.options(CHAT, headers=asked | {"Origin": "https://example.com"}).status_code == 400
    )


def test_the_log_has_no_text_unless_asked(engine, capsys):
    quiet(engine).post(CHAT, json=body(seed=1))
    line = capsys.readouterr().err
    counts = r"status=200 prompt=56 new=[012] first_token=\d+\.\d+ seconds=\d+\.\d+"
    pattern = rf"\S+ \S+ POST /v1/chat/completions {counts}\n"
    assert re.fullmatch(pattern, line)
    quiet(engine, log_text=True).post(CHAT, json=body(seed=1))
    assert "hello" in capsys.readouterr().err
    quiet(engine).get("/a%0Ab%1b")
    assert " GET /a%0Ab%1B status=404 " in capsys.readouterr().err
    quiet(engine).get("/health")
    assert capsys.readouterr().err == ""


def test_before_the_model_is_there_and_when_the_server_stops(engine):
    client = quiet(None)
    for reply in (client.get("/health"), client.post(CHAT, json=body()), client.get("/v1/models")):
        assert "still loading" in refused((reply.status_code, reply.json()), 503, "unavailable")
        assert int(reply.headers["retry-after"]) > 0
    assert client.get("/").status_code == 200
    client = quiet(engine)
    client.app.state.is_closing = True
    assert client.get("/health").status_code == 503


def busy_slots(url):
    return float(
        re.search(r"^jllama_busy_slots (\S+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)[1]
    )


def wait_for(condition):
    end_s = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream, url):
    given = json.dumps({"prompt": "x", "stream": stream, "seed": 1, "n": 3, "regex": "(a|b){900}"})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        "application/json\r\nContent-Length: "
    )
    with connected(url) as connection:
        connection.sendall(f"{head}{len(given)}\r\n\r\n{given}".encode())
        wait_for(lambda: busy_slots(url))
    wait_for(lambda: not busy_slots(url))
    assert "jllama_cancelled_requests_total 0.0" not in httpx.get(f"{url}/metrics").text


class FakeEngine(EngineThread):
    """Gives each request the same events, each after a while."""

    def __init__(self, events, wait=lambda: None, takes=99):
        self.models, self.config, self.context = {"small": served()}, EngineConfig(), 1024
        self.events, self.wait, self.takes, self.cancelled = events, wait, takes, 0

    def check(self, request):
        pass

    def fingerprint(self, model):
        return "fp_fake"

    def submit(self, request, deliver):
        self.takes -= 1
        if self.takes < 0:
            raise Busy("16 requests wait already", 3)

        def run():
            for event in self.events:
                self.wait()
                deliver(event)

        threading.Thread(target=run).start()

        def cancel():
            self.cancelled += 1

        return cancel


PIECE = Piece("ab", (Token(100, -1.0), Token(101, -0.5)))
ANSWER = Answer(Completion("ab", [100, 101], "length", [-1.0, -0.5]), PIECE.tokens)


def test_a_call_that_was_drafted_in_thoughts_is_none():
    """Where the prompt begins the thoughts; a grammar that forces calls lets no thoughts be."""
    left, right = (
        f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        for name in ("left", "right")
    )
    for choice, text, expected in (
        ("auto", f"so {left}</think>ok{right}", (f"so {left}</think>ok", ["right"])),
        ("auto", left, (left, [])),
        ("required", left, (None, ["left"])),
    ):
        answer = Answer(Completion(text, [100], "stop_id", [-1.0]), ())
        engine = FakeEngine([answer])
        model = dataclasses.replace(served(), chat_template=CALLING + "<think>\n")
        engine.models = {"small": model}
        given = body(messages=[{"role": "user", "content": "What is </think>?"}], tools=TOOLS)
        reply = quiet(engine).post(CHAT, json=given | {"tool_choice": choice})
        message = reply.json()["choices"][0]["message"]
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        assert (message["content"], names) == expected


def test_what_fails_later_is_an_event():
    engine = FakeEngine([PIECE, Failure("the device is gone")])
    reply = quiet(engine).post(CHAT, json=body(stream=True))
    assert reply.status_code == 200
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]
    assert events[1]["choices"][0]["delta"] == {"content": "ab"}
    assert events[2]["error"]["message"] == "the device is gone"
    assert len(events) == 3
    reply = quiet(engine).post(CHAT, json=body())
    assert "the device is gone" in refused((reply.status_code, reply.json()), 503, "unavailable")
    assert engine.cancelled == 2


def test_a_full_queue():
    """All texts of a request or none; what was already queued is taken back."""
    for stream in (False, True):
        engine = FakeEngine([PIECE, ANSWER], takes=2)
        reply = quiet(engine).post(CHAT, json=body(n=3, stream=stream))
        assert "16 requests wait" in refused((reply.status_code, reply.json()), 503, "unavailable")
        assert reply.headers["retry-after"] == "3"
        assert engine.cancelled == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_pings_while_nothing_comes(path, monkeypatch):
    monkeypatch.setattr(app_module, "PING_S", 0.02)
    pinged = threading.Event()
    given = body(stream=True) if path == CHAT else {"input": "x", "stream": True}
    lines = []
    with (
        listening(FakeEngine([PIECE, ANSWER], pinged.wait)) as url,
        httpx.stream("POST", url + path, json=given, timeout=600) as reply,
    ):
        for line in reply.iter_lines():
            lines.append(line)
            if lines.count(": ping") >= 4:
                pinged.set()
    assert lines.count(": ping") >= 4
    if path == CHAT:
        assert lines[-2:] == ["data: [DONE]", ""]
    else:
        assert [line for line in lines if line.startswith("event: ")][
            -1
        ] == "event: response.incomplete"


def test_a_mistake_of_the_server(capsys):
    engine = FakeEngine([])
    engine.fingerprint = lambda model: {}["missing"]
    reply = quiet(engine).post(CHAT, json=body())
    assert "made a mistake" in refused((reply.status_code, reply.json()), 500)
    assert " status=500 " in capsys.readouterr().err


def test_a_response_that_fails_later():
    http = quiet(FakeEngine([PIECE, Failure("the device is gone")]))
    with openai.OpenAI(
        base_url="http://x/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        events = client.responses.create(model="small", input="x", stream=True)
        assert [next(events).type for _ in range(5)][-1] == "response.output_text.delta"
        with pytest.raises(openai.APIError, match="the device is gone"):
            next(events)
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.responses.create(model="small", input="x")
