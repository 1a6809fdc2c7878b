"""The server over HTTP: OpenAI's own client, streams, receipts, tools, and everything that can be
asked wrongly."""

import dataclasses
import itertools
import json
import re
import threading
import time

import httpx
import jsonschema
import openai
import pytest
from helpers_serve import (
    CALLING,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    TOOLS,
    Asked,
    connected,
    connection_to,
    listening,
    refused,
    request_of,
    wait_for,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from models import served

from jllama.commands import cli
from jllama.generation.conversation import chat_ids
from jllama.generation.requests import Answer, Piece, Token
from jllama.generation.text import Completion
from jllama.serve import app as app_module
from jllama.serve.config import EngineConfig
from jllama.serve.engine import EngineThread
from jllama.serve.protocol import IGNORED, NOT_SERVED
from jllama.serve.requests import Busy, Failure


@pytest.fixture(scope="module")
def url(engine):
    """A real server, for all tests."""
    with listening(engine, max_body_bytes=100_000, body_timeout_s=600) as (url, _):
        yield url


@pytest.fixture(scope="module")
def web(url):
    with httpx.Client(base_url=url, timeout=600) as web:
        yield web


@pytest.fixture(scope="module")
def ask(web):
    """Post a body, or bytes."""

    def post(path, body, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json"} | headers
        return web.post(path, content=content, headers=headers)

    return post


@pytest.fixture(scope="module")
def answer_to(ask):
    """Post a body, and return the JSON of the answer."""

    def post(path, body):
        reply = ask(path, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return post


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def body(**fields):
    return {"messages": MESSAGES, "max_tokens": 2} | fields


# Answers


def test_a_chat_is_what_the_engine_gives(client, engine):
    sampling = {"seed": 5, "temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}
    answer = client.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=8, **sampling
    )
    ids = chat_ids(served(), MESSAGES)
    expected = Asked(engine, request_of(ids, 8, **sampling)).answer().completion
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == {"stop_id": "stop", "length": "length"}[expected.finish_reason]
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == expected.new_tokens
    assert answer.usage.total_tokens == len(ids) + expected.new_tokens
    assert (answer.model, answer.object) == ("small", "chat.completion")
    assert answer.system_fingerprint.startswith("fp_")


def test_further_settings_go_by_their_own_names(client, engine):
    own = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "banned_ids": [80, 81]}
    common = {"seed": 1, "frequency_penalty": 0.1}
    answer = client.completions.create(
        model="small",
        prompt=[1, 2, 3],
        max_tokens=6,
        logit_bias={"75": 4.0},
        extra_body=own,
        **common,
    )
    sampling = common | own | {"logit_bias": {75: 4.0}, "banned_ids": (80, 81)}
    expected = Asked(engine, request_of([1, 2, 3], 6, **sampling)).answer().completion
    assert answer.choices[0].text == expected.text


def test_the_prompt_may_be_text_ids_or_several(client):
    def texts(prompt, seed=1, **fields):
        answer = client.completions.create(
            model="small", prompt=prompt, max_tokens=4, seed=seed, **fields
        )
        assert [choice.index for choice in answer.choices] == [*range(len(answer.choices))]
        return [choice.text for choice in answer.choices]

    ids = [1, *served().tokenizer.encode("one")]
    one, two = texts("one"), texts("two")
    assert one == texts(ids) == texts(["one"]) == texts([ids])
    assert texts(["one", "two"]) == [*one, *two]
    assert texts([ids, [1]], echo=True)[0] == texts("one", echo=True)[0] == "one" + one[0]
    assert texts(["one", "two"], n=2) == [*one, *texts("one", 2), *two, *texts("two", 2)]


def test_stop_strings_end_a_text(answer_to):
    def choice(**fields):
        common = {"prompt": "x", "max_tokens": 12, "seed": 3}
        (choice,) = answer_to(COMPLETIONS, common | fields)["choices"]
        return choice["text"], choice["finish_reason"]

    whole, _ = choice()
    stop = next(letter for letter in whole if whole.index(letter) > 0)
    assert choice(stop=stop) == (whole[: whole.index(stop)], "stop")
    assert choice(stop=["\n\n\n", stop]) == choice(stop=stop)
    assert choice(stop=["\n\n\n"]) == choice()


def test_a_stop_string_may_be_a_special_token(answer_to):
    """It has no text, so only its id can end one."""
    common = {"prompt": "x", "max_tokens": 6, "logit_bias": {"0": 100}}
    answer = answer_to(COMPLETIONS, common)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 6)
    for stop in ("<unk>", ["never", "<unk>"]):
        answer = answer_to(COMPLETIONS, common | {"stop": stop})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 0


def whole_and_chunks(create, **fields):
    """An answer, and its stream's parts without the last one, which has the usage."""
    fields |= {"model": "small", "max_tokens": 9, "seed": 2**32 - 1, "n": 2}  # then 0
    whole = create(**fields)
    *chunks, last = create(**fields, stream=True, stream_options={"include_usage": True})
    assert len({chunk.id for chunk in (*chunks, last)}) == 1
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        reasons = [part.finish_reason for part in parts]
        assert reasons == [*[None] * (len(parts) - 1), choice.finish_reason]
        yield choice, parts, chunks[0].object


def test_a_chats_stream_joins_to_the_answer(client):
    """The role comes first and once, the reason in a part of its own."""
    create = client.chat.completions.create
    for choice, parts, kind in whole_and_chunks(
        create, messages=MESSAGES, logprobs=True, top_logprobs=2
    ):
        assert kind == "chat.completion.chunk"
        assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].delta.content is None
        joined = [token for part in parts if part.logprobs for token in part.logprobs.content]
        assert joined == choice.logprobs.content


def test_a_completions_stream_joins_to_the_answer(client):
    for choice, parts, kind in whole_and_chunks(
        client.completions.create, prompt="some text", logprobs=2
    ):
        assert kind == "text_completion"
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            scores = (getattr(part.logprobs, name) for part in parts if part.logprobs)
            assert [*itertools.chain(*scores)] == getattr(choice.logprobs, name)


def test_log_probabilities_of_a_chat(client):
    def choice(**fields):
        answer = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=12, seed=2, logprobs=True, **fields
        )
        return answer.choices[0]

    with_top = choice(top_logprobs=3)
    tokens = with_top.logprobs.content
    whole = bytes(byte for token in tokens for byte in token.bytes)
    assert whole.decode("utf-8", "replace") == with_top.message.content
    for token in tokens:
        top = [likeliest.logprob for likeliest in token.top_logprobs]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert top[0] >= token.logprob
    plain = choice().logprobs.content
    assert [token.top_logprobs for token in plain] == [[]] * len(tokens)
    assert [token.logprob for token in plain] == [token.logprob for token in tokens]


def test_log_probabilities_of_a_prompt(answer_to, engine):
    common = {"prompt": "hé!", "max_tokens": 0, "echo": True}
    (choice,) = answer_to(COMPLETIONS, common | {"logprobs": 1})["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("hé!", "length")
    assert scores["tokens"] == ["<s>", "h", r"bytes:\xc3", r"bytes:\xa9", "!"]
    assert scores["text_offset"] == [0, 0, 1, 1, 2]
    expected = Asked(engine, request_of("hé!", 0, options={"prompt_log_probs": True})).answer()
    assert scores["token_logprobs"] == [token.log_prob for token in expected.prompt_tokens]
    assert (scores["top_logprobs"][0], len(scores["top_logprobs"][1])) == (None, 2)
    (without,) = answer_to(COMPLETIONS, common | {"logprobs": 0})["choices"]
    assert without["logprobs"] == scores | {"top_logprobs": [None] * 5}


def test_a_stop_after_an_echoed_prompt_has_its_log_probability(answer_to):
    """lm-eval leaves out the last one, which it takes for that of a new token."""
    fields = {"prompt": "hé!", "echo": True, "logprobs": 1, "max_tokens": 1}
    fields["logit_bias"] = {"2": 100}
    answer = answer_to(COMPLETIONS, fields)
    (choice,) = answer["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == ("hé!", "stop")
    assert scores["tokens"] == ["<s>", "h", r"bytes:\xc3", r"bytes:\xa9", "!", "</s>"]
    assert len(scores["token_logprobs"]) == len(scores["text_offset"]) == 6
    assert answer["usage"]["completion_tokens"] == 0


def test_parts_of_characters_are_kept_apart(answer_to):
    """The likeliest token is the one whose name has the highest value, as lm-eval takes it."""
    fields = {"prompt": "é世🙂" * 4, "max_tokens": 0, "echo": True, "logprobs": 5}
    scores = answer_to(COMPLETIONS, fields)["choices"][0]["logprobs"]
    assert scores["tokens"][1:6] == [rf"bytes:\x{byte:02x}" for byte in "é世".encode()]
    names = ("tokens", "token_logprobs", "top_logprobs")
    for name, log_prob, top in [*zip(*(scores[name] for name in names), strict=True)][1:]:
        assert top[name] == log_prob
        assert len(top) == (5 if name in [*top][:5] else 6)


def test_special_tokens_that_a_prompt_spells_out(answer_to):
    """They are tokens in raw prompts, unless they should not be."""

    def tokens(prompt, **more):
        fields = {"model": "mistral", "prompt": prompt} | more
        answer = answer_to("/tokenize", fields)
        if "add_special_tokens" not in more:
            usage = answer_to(COMPLETIONS, fields | {"max_tokens": 1})["usage"]
            assert usage["prompt_tokens"] == answer["count"]
        return answer["tokens"]

    (_, letter) = tokens("h")
    assert tokens("[TOOL_CALLS]h</s>") == [1, 0, letter, 2]
    assert tokens("h</s>", add_special_tokens=False) == [letter, 2]
    assert tokens("<s>h") == [1, letter]  # and no second one
    plain = tokens("<s>h</s>", parse_special=False)
    assert (plain[0], min(plain[1:]) > 2, len(plain)) == (1, True, 9)
    fields = {"prompt": "</s>h", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = answer_to(COMPLETIONS, fields)["choices"]
    scores = choice["logprobs"]
    assert (choice["text"], scores["tokens"]) == ("</s>h", ["<s>", "</s>", "h"])
    assert scores["text_offset"] == [0, 0, 4]


def test_a_seed_is_drawn_and_told(answer_to):
    def seed():
        fields = {"prompt": "a", "max_tokens": 1, "receipt": True}
        return answer_to(COMPLETIONS, fields)["receipt"]["request"]["seed"]

    assert seed() != seed()


# Receipts


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_receipt_makes_the_answer_again(path, answer_to, url, tmp_path, capsys):
    file = tmp_path / "answer.json"

    def replay(answer):
        file.write_text(json.dumps(answer))
        code = cli.run("replay", [str(file), "--url", url])
        out, err = capsys.readouterr()
        return code, out + err

    prompt = {"messages": MESSAGES, "stop": ["q"]}
    if path == COMPLETIONS:
        prompt = {"prompt": ["x", "yz"]}
    common = {"n": 2, "max_tokens": 6, "top_k": 9, "receipt": True, "user": "me"}
    answer = answer_to(path, prompt | common)
    code, output = replay(answer)
    assert code == 0
    assert "the same answer, bit for bit" in output
    receipt = answer["receipt"]
    ids, log_probs = receipt["ids"], receipt["log_probs"]
    for name, other in {
        "ids": [[1], *ids[1:]],
        "system_fingerprint": "fp_0",
        "log_probs": [[log_probs[0][0] + 1e-6, *log_probs[0][1:]], *log_probs[1:]],
    }.items():
        code, output = replay(answer | {"receipt": receipt | {name: other}})
        assert code == 1
        assert f"the repeated answer is not the same: {name} differ" in output


def test_a_stream_ends_with_its_receipt(ask, answer_to):
    fields = {"messages": MESSAGES, "max_tokens": 5, "receipt": True, "seed": 4}
    text = ask(CHAT, fields | {"stream": True}).text
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["receipt"] == answer_to(CHAT, fields)["receipt"]


RECEIPT = json.dumps(
    {"receipt": {"path": CHAT, "request": {}, "system_fingerprint": "", "ids": [], "log_probs": []}}
)


@pytest.mark.parametrize(
    ("content", "url", "said"),
    [
        ("{}", "http://x", "holds no receipt"),
        ("[]", "http://x", "is not a JSON object"),
        ('{"receipt": {"ids": 1}}', "http://x", "holds no receipt"),
        (None, "http://x", "cannot be read: No such file or directory"),
        (RECEIPT, "http://127.0.0.1:9", "gave no answer"),
        (RECEIPT, "nonsense", "is no address of a server"),
    ],
)
def test_what_cannot_be_replayed(content, url, said, tmp_path, capsys):
    if content is not None:
        (tmp_path / "answer.json").write_text(content)
    assert cli.run("replay", [str(tmp_path / "answer.json"), "--url", url]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert said in error


# Structured output and tools


def test_the_text_is_what_was_asked_for(answer_to):
    def text(path, **fields):
        prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
        (choice,) = answer_to(path, prompt | {"max_tokens": 200} | fields)["choices"]
        assert choice["finish_reason"] == "stop"
        return choice["message"]["content"] if path == CHAT else choice["text"]

    strict = {"name": "a", "schema": SCHEMA, "strict": True}
    for path, format in (
        (CHAT, {"type": "json_schema", "json_schema": strict}),
        (COMPLETIONS, {"type": "json_schema", "json_schema": strict}),
        (CHAT, {"type": "json_object", "schema": SCHEMA}),
    ):
        jsonschema.validate(json.loads(text(path, response_format=format)), SCHEMA)
    assert re.fullmatch("[ab]{3}c", text(COMPLETIONS, regex="[ab]{3}c"))
    assert text(COMPLETIONS, grammar='start: "yes" | "no"') in ("yes", "no")


NAMED = {"type": "function", "function": {"name": "right"}}


@pytest.mark.parametrize(("name", "choice"), [("caller", "required"), ("mistral", NAMED)])
def test_tools_are_called(client, name, choice):
    """Mistral's mark of a call is a special token, and its template takes ids of nine letters."""
    common = {"model": name, "tools": TOOLS, "seed": 1}
    fields = common | {"messages": MESSAGES, "tool_choice": choice, "max_tokens": 300}
    fields["parallel_tool_calls"] = False
    (only,) = client.chat.completions.create(**fields).choices
    assert (only.finish_reason, only.message.content) == ("tool_calls", None)
    (call,) = only.message.tool_calls
    assert call.function.name in (("left", "right") if choice == "required" else ("right",))
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    first, *others = (delta for part in parts for delta in part.delta.tool_calls or [])
    assert (first.index, first.id, first.function.name) == (0, call.id, call.function.name)
    arguments = "".join(delta.function.arguments for delta in (first, *others))
    assert arguments == call.function.arguments
    assert parts[-1].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    history = [*MESSAGES, only.message, result]
    next_answer = client.chat.completions.create(messages=history, max_tokens=3, **common)
    assert next_answer.choices[0].finish_reason == "length"


def test_tools_that_are_not_called(answer_to):
    fields = body(model="caller", seed=1)
    plain = answer_to(CHAT, fields)
    none = answer_to(CHAT, fields | {"tools": TOOLS, "tool_choice": "none"})
    assert (none["choices"], none["usage"]) == (plain["choices"], plain["usage"])
    auto = answer_to(CHAT, fields | {"tools": TOOLS})
    assert auto["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
    assert "tool_calls" not in auto["choices"][0]["message"]


# The other paths


def test_tokens_and_templates(ask, answer_to):
    ids = served().tokenizer.encode("hé")
    assert answer_to("/tokenize", {"prompt": "hé"}) == {
        "tokens": [1, *ids],
        "count": len(ids) + 1,
        "max_model_len": 1024,
    }
    plain = answer_to("/tokenize", {"prompt": "hé", "add_special_tokens": False})
    assert plain["tokens"] == ids
    assert answer_to("/detokenize", {"tokens": [1, *ids]}) == {"prompt": "hé"}
    for wrong, said in (
        (300, "token 300 is outside the tokenizer's vocabulary of 259"),
        (10**30, "tokens: Input should be less than"),
    ):
        assert said in refused(ask("/detokenize", {"tokens": [wrong]}))
    shown = answer_to("/apply-template", {"messages": MESSAGES})
    assert shown["tokens"] == chat_ids(served(), MESSAGES)
    assert "hello" in shown["prompt"]
    shown = answer_to("/apply-template", {"messages": MESSAGES, "model": "caller", "tools": TOOLS})
    assert '"left"' in shown["prompt"]


def test_models_health_metrics_and_the_page(client, web):
    assert [model.id for model in client.models.list()] == ["small", "caller", "mistral"]
    assert client.models.retrieve("caller") == [*client.models.list()][1]
    assert 0 <= time.time() - client.models.retrieve("small").created < 10_000
    message = refused(web.get("/v1/models/large/one"), 404, "model_not_found")
    assert "there is no model large/one" in message
    assert web.get("/health").json() == {"status": "ok"}
    metrics = web.get("/metrics").text
    assert 'jllama_requests_total{path="/health",status="200"}' in metrics
    assert 'path="/nothing"' not in metrics
    page = web.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["cache-control"] == "no-cache"
    assert web.get("/openapi.json").json()["info"]["title"] == "jllama"


# Bad input


def calling(call):
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def with_tool(**fields):
    return {"model": "caller", "tools": [{"type": "function"} | fields]}


def choosing(choice):
    return {"model": "caller", "tools": TOOLS, "tool_choice": choice}


def saying(content):
    return {"messages": [{"role": "user", "content": content}]}


FUNCTION = {"name": "f", "arguments": "{}"}
FORMAT = 'response_format must be {"type": "text"}'


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temprature": 1}, "there is no field temprature; did you mean temperature?"),
        ({"temperature": "1"}, "temperature: Input should be a valid number"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or a positive number"),
        ({"temperature": float("nan")}, "the body is not of text and finite numbers"),
        ({"top_p": 0}, "top_p is 0.0; it must be over 0 and at most 1"),
        ({"min_p": 2}, "min_p is 2.0; it must be between 0 (off) and 1"),
        ({"seed": 10**400}, "seed is 1000"),
        ({"seed": -1}, "seed is -1; it must be between 0 and 2**32 - 1: leave it out to "),
        ({"max_tokens": -1}, "max_tokens is -1; it must be 0 or more: leave it out to "),
        (
            {"max_tokens": None, "max_completion_tokens": -1},
            "max_completion_tokens is -1; it must be 0 or more: leave it out to ",
        ),
        ({"max_tokens": 1.0}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": -2}, "max_tokens: Input should be greater than or equal to 0"),
        ({"max_completion_tokens": 3}, "max_tokens and max_completion_tokens mean the same and"),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"n": 20}, "20 texts are asked for at once, and 19 fit here"),
        ({"stop": [""]}, "a stop string is empty"),
        ({"stop": "x" * 1001}, "at most 1000 characters"),
        ({"stop": ["a"] * 17}, "stop: "),
        ({"stop": 1}, "stop: Input should be a valid string or Input should be a valid list"),
        ({"logit_bias": {"x": 1}}, "logit_bias: Input should be a valid integer"),
        ({"logit_bias": {"999": 1}}, "the logit_bias has token 999; the ids run from 0 to 258"),
        ({"top_logprobs": 1}, "top_logprobs are asked for without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or"),
        ({"stream_options": {"include_usage": True}}, "stream_options are for a stream"),
        ({"stream": True, "stream_options": {"a": 1}}, "there is no stream_options field a"),
        ({"response_format": {"type": "xml"}}, FORMAT),
        ({"response_format": {"type": "json_schema"}}, FORMAT),
        ({"response_format": {"type": "json_object", "schema": True}}, FORMAT),
        ({"regex": "("}, "the grammar (regex) cannot be compiled"),
        ({"grammar": "start: nowhere"}, "the grammar (lark) cannot be compiled"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "a text can match one of"),
        ({"tools": TOOLS}, "the model's chat template takes no tools"),
        ({"tool_choice": "required"}, "tools must be a list of 1 to 128 functions"),
        (choosing("sometimes"), "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": None}, "messages: Field required"),
        ({"messages": [1]}, "messages: Input should be a valid dictionary"),
        ({"messages": [{"role": "king", "content": "x"}]}, "message 0 has the role 'king'"),
        (saying([{"type": "image_url"}]), "message 0 has a part that is not text"),
        (saying("\ud800"), "the body is not of text and finite numbers"),
        ({"x" * 50_000: 1}, "there is no field xxx"),
    ],
)
def test_a_field_that_is_wrong(fields, said, ask):
    message = refused(ask(CHAT, body(**fields)))
    assert said in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(
            ({"response_format": format}, f"response_format{said}")
            for format, said in (
                ({"type": "text", "schema": SCHEMA}, " field schema; there are type"),
                ({"type": "json_object", "shema": {}}, " field shema; did you mean schema?"),
                ({"type": "json_schema", "schema": {}}, " field schema; did you mean json_schema?"),
                (
                    {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strikt": True}},
                    ".json_schema field strikt; did you mean strict?",
                ),
            )
        ),
        (saying([{"type": "text", "text": "a", "more": 1}]), "messages.content field more"),
        ({"messages": [*MESSAGES, *MESSAGES, MESSAGES[0] | {"mood": 1}]}, "messages field mood"),
        (
            calling({"id": "a", "function": FUNCTION | {"strict": True}}),
            "messages.tool_calls.function field strict",
        ),
        (calling({"id": "a", "function": FUNCTION, "more": 1}), "messages.tool_calls field more"),
        (with_tool(function=TOOLS[0]["function"], strict=True), "tools field strict; "),
        (with_tool(function={"name": "f", "schema": {}}), "tools.function field schema; "),
        (choosing(NAMED | {"more": 1}), "tool_choice field more"),
        (choosing({"type": "function", "name": "left"}), "tool_choice field name"),
        (
            choosing({"type": "function", "function": {"name": "left", "strict": True}}),
            "tool_choice.function field strict",
        ),
    ],
)
def test_a_field_of_a_mapping_that_is_not_there(fields, said, ask):
    assert f"there is no {said}" in refused(ask(CHAT, body(**fields)))


def test_fields_of_openai(ask, answer_to):
    """What is not served is refused unless its value is off; what cannot change an answer is
    ignored; null is off."""
    for name in NOT_SERVED:
        message = refused(ask(CHAT, body(**{name: {"some": "thing"}})))
        assert message.startswith(f"{name} is not served")
    for off in itertools.zip_longest(*NOT_SERVED.values()):  # None is off, too
        answer_to(CHAT, body(**dict(zip(NOT_SERVED, off, strict=True))))
    names = "temperature stop stream tools response_format seed logit_bias"
    nothing = dict.fromkeys([*names.split(), *NOT_SERVED])
    answer_to(CHAT, body(**nothing, **dict.fromkeys(IGNORED, "x")))


def test_every_field_of_a_mapping_that_openai_documents(answer_to):
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
    for more in (
        {"tools": [{"type": "function", "function": function}]},
        choosing(NAMED),
        {"response_format": {"type": "json_schema", "json_schema": schema}},
    ):
        answer_to(CHAT, {"model": "caller", "messages": messages, "max_tokens": 1} | more)


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
        (json.dumps(saying([])).replace("[]", "[" * 900 + "]" * 900).encode(), "has a part"),
    ],
)
def test_a_body_that_is_wrong(content, said, ask):
    assert said in refused(ask(CHAT, content))


def test_a_body_of_another_type(ask):
    reply = ask(CHAT, body(), **{"Content-Type": "application/x-www-form-urlencoded"})
    assert refused(reply) == (
        "the body must be a JSON object, sent with the header Content-Type: application/json"
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


def test_a_prompt_over_the_context(ask, answer_to):
    """The numbers are said; what just fits is served."""
    for path, fields, said in (
        (COMPLETIONS, {"prompt": [5] * 1025}, "the prompt's 1025 tokens and 1 new ones exceed"),
        (COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 25}, "the context of 1024: shorten"),
        (CHAT, body(max_tokens=10**30), "exceed the context of 1024"),
    ):
        assert said in refused(ask(path, fields), code="context_length_exceeded")
    (choice,) = answer_to(COMPLETIONS, {"prompt": [5] * 1020})["choices"]
    assert choice["finish_reason"] in ("length", "stop")


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
def test_a_path_that_is_not_there(method, path, status, web):
    refused(web.request(method, path), status)


def test_a_body_that_is_too_large(ask, web):
    endless = (b" " * 100_000 for _ in range(100))
    for reply in (ask(CHAT, b" " * 100_001), web.post(CHAT, content=endless)):
        assert "larger than 100000 bytes" in refused(reply, 413)


def post_head(length):
    return (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def test_a_client_that_sends_a_byte_a_minute(engine):
    with listening(engine, body_timeout_s=0.5) as (url, _), connection_to(url) as connection:
        connection.sendall(post_head(99) + b"{")
        reply = b""
        while part := connection.recv(1000):  # until the server closes it
            reply += part
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"the body took over 0.5 seconds" in reply


NEEDED = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": MESSAGES},
}
NAMES = (
    "messages prompt tokens tools tool_choice stop logit_bias seed n max_tokens model regex echo"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda values: st.lists(values) | st.dictionaries(st.text(max_size=5), values),
    max_leaves=6,
)


@pytest.mark.parametrize("path", NEEDED)
@settings(max_examples=10)
@given(
    fields=st.dictionaries(
        st.sampled_from([*NAMES.split(), "response_format"]) | st.text(max_size=5), JSON, max_size=4
    )
)
def test_any_body_is_answered_in_a_sentence(path, fields, ask):
    """Never a 5xx, whatever the JSON of a field is."""
    limits = {"max_tokens": 1} if path in (CHAT, COMPLETIONS) else {}
    assert ask(path, NEEDED[path] | fields | limits).status_code in (200, 400, 404)


# Who may, who leaves, what fails


def test_keys(engine):
    client = connected(engine, ["first", "second"])

    def get(path, **headers):
        return client.get(path, headers=headers)

    for path in ("/health", "/", "/openapi.json"):
        assert get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/nothing"):
        assert "give a key" in refused(get(path), 401, "invalid_api_key")
        for wrong in ("Bearer wrong", "first", "Bearer ", b"Bearer \xff\xfe"):
            assert get(path, Authorization=wrong).status_code == 401
    for key in ("first", "second"):
        assert get("/v1/models", Authorization=f"Bearer {key}").status_code == 200
    assert client.post(CHAT, json=body()).status_code == 401


def test_other_origins(engine):
    def preflight(client, origin="https://example.org"):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return client.options(CHAT, headers=headers)

    assert preflight(connected(engine)).status_code == 405
    client = connected(engine, ["key"], cors=["https://example.org"])
    allowed = preflight(client)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    assert preflight(client, "https://example.com").status_code == 400


def test_the_log_has_no_text_unless_asked(engine, http, capsys):
    http.post(CHAT, json=body(seed=1))
    counts = r"status=200 prompt=56 new=[012] first_token=\d+\.\d+ seconds=\d+\.\d+"
    pattern = rf"\S+ \S+ POST /v1/chat/completions {counts}\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)
    connected(engine, log_text=True).post(CHAT, json=body(seed=1))
    assert "hello" in capsys.readouterr().err
    http.get("/a%0Ab%1b")
    assert " GET /a%0Ab%1B status=404 " in capsys.readouterr().err
    http.get("/health")
    assert capsys.readouterr().err == ""


def test_before_the_model_is_there_and_when_the_server_stops(engine):
    client = connected(None)
    for reply in (client.get("/health"), client.post(CHAT, json=body()), client.get("/v1/models")):
        assert "still loading" in refused(reply, 503, "unavailable")
        assert int(reply.headers["retry-after"]) > 0
    assert client.get("/").status_code == 200
    client = connected(engine)
    client.app.state.is_closing = True
    assert client.get("/health").status_code == 503


def metric(web, name):
    metrics = web.get("/metrics").text
    return float(re.search(rf"^{name} (\S+)", metrics, re.MULTILINE)[1])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream, url, web):
    fields = {"prompt": "x", "stream": stream, "seed": 1, "n": 3, "regex": "(a|b){900}"}
    content = json.dumps(fields).encode()
    before = metric(web, "jllama_cancelled_requests_total")
    with connection_to(url) as connection:
        connection.sendall(post_head(len(content)) + content)
        wait_for(lambda: metric(web, "jllama_busy_slots"))
    wait_for(lambda: not metric(web, "jllama_busy_slots"))
    assert metric(web, "jllama_cancelled_requests_total") == before + 3


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
    fields = body(tools=TOOLS, messages=[{"role": "user", "content": "What is </think>?"}])
    for choice, text, content, names in (
        ("auto", f"so {left}</think>ok{right}", f"so {left}</think>ok", ["right"]),
        ("auto", left, left, []),
        ("required", left, None, ["left"]),
    ):
        engine = FakeEngine([Answer(Completion(text, [100], "stop_id", [-1.0]), ())])
        engine.models["small"] = dataclasses.replace(served(), chat_template=CALLING + "<think>\n")
        reply = connected(engine).post(CHAT, json=fields | {"tool_choice": choice})
        message = reply.json()["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        assert message["content"] == content
        assert [call["function"]["name"] for call in calls] == names


FAILING = [PIECE, Failure("the device is gone")]


def test_what_fails_later_is_an_event():
    engine = FakeEngine(FAILING)
    reply = connected(engine).post(CHAT, json=body(stream=True))
    assert reply.status_code == 200
    _, piece, failure = (json.loads(line[6:]) for line in reply.text.split("\n\n") if line)
    assert piece["choices"][0]["delta"] == {"content": "ab"}
    assert failure["error"]["message"] == "the device is gone"
    reply = connected(engine).post(CHAT, json=body())
    assert "the device is gone" in refused(reply, 503, "unavailable")
    assert engine.cancelled == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(stream):
    """All texts of a request or none; what was already queued is taken back."""
    engine = FakeEngine([PIECE, ANSWER], takes=2)
    reply = connected(engine).post(CHAT, json=body(n=3, stream=stream))
    assert "16 requests wait" in refused(reply, 503, "unavailable")
    assert reply.headers["retry-after"] == "3"
    assert engine.cancelled == 2


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        (CHAT, {"messages": MESSAGES}, "data: [DONE]"),
        (RESPONSES, {"input": "x"}, "event: response.incomplete"),
    ],
)
def test_pings_while_nothing_comes(path, fields, end, monkeypatch):
    monkeypatch.setattr(app_module, "PING_S", 0.02)
    pinged = threading.Event()
    lines = []
    with (
        listening(FakeEngine([PIECE, ANSWER], pinged.wait)) as (url, _),
        httpx.stream("POST", url + path, json=fields | {"stream": True}, timeout=600) as reply,
    ):
        for line in reply.iter_lines():
            lines.append(line)
            if lines.count(": ping") >= 4:
                pinged.set()
    assert lines.count(": ping") >= 4
    assert end in lines[-3:]


def test_a_mistake_of_the_server(capsys):
    engine = FakeEngine([])
    engine.fingerprint = lambda model: {}["missing"]
    reply = connected(engine).post(CHAT, json=body())
    assert "made a mistake" in refused(reply, 500)
    assert " status=500 " in capsys.readouterr().err


def test_a_response_that_fails_later():
    http = connected(FakeEngine(FAILING))
    with openai.OpenAI(
        base_url="http://x/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        events = client.responses.create(model="small", input="x", stream=True)
        assert [next(events).type for _ in range(5)][-1] == "response.output_text.delta"
        with pytest.raises(openai.APIError, match="the device is gone"):
            next(events)
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.responses.create(model="small", input="x")
