"""OpenAI's Responses, asked with its own client: the chat that a request means, and every event of
its stream."""

import dataclasses
import json
from typing import Literal

import jsonschema
import openai
import pydantic
import pytest
from models import served
from starlette.testclient import TestClient

from jllama.serve.app import make_app
from jllama.serve.config import EngineConfig, HttpConfig
from jllama.serve.engine import EngineThread
from jllama.serve.protocol import render_conversation
from jllama.serve.responses import Respond, make_chat

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALLING = (
    '{{ tools }}<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments.a }}]{% endfor %}|"
    "{% endfor %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [3, 4]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("left", "right")]


@pytest.fixture(scope="module")
def engine():
    models = {"small": served(), "caller": dataclasses.replace(served(), chat_template=CALLING)}
    engine = EngineThread(models, EngineConfig(slots=3, queue=16))
    engine.start()
    yield engine
    assert engine.close() == 0


def connected(engine, **options):
    return TestClient(make_app(engine, HttpConfig(**options)), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def http(engine):
    with connected(engine) as http:
        yield http


@pytest.fixture(scope="module")
def client(http):
    with openai.OpenAI(base_url="http://x/v1", api_key="none", http_client=http) as client:
        yield client


def refused(reply):
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["message"]


def chat(http, **fields):
    """What a chat answers."""
    reply = http.post(
        CHAT, json={"messages": [{"role": "user", "content": "hello"}], "seed": 5, **fields}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_response_is_the_answer_to_a_chat(client, http):
    settings = {"temperature": 0.8, "top_p": 0.9}
    response = client.responses.create(
        model="small",
        input="hello",
        instructions="Be kind.",
        max_output_tokens=8,
        extra_body={"seed": 5},
        **settings,
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    expected = chat(http, messages=messages, max_tokens=8, **settings)
    (choice,) = expected["choices"]
    assert response.output_text == choice["message"]["content"] != ""
    (item,) = response.output
    assert (item.type, item.role, item.status, item.content[0].annotations) == (
        "message",
        "assistant",
        "incomplete",
        [],
    )
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert (response.object, response.model, response.error) == ("response", "small", None)
    assert (response.instructions, response.max_output_tokens, response.temperature) == (
        "Be kind.",
        8,
        0.8,
    )
    assert response.store is False
    usage = expected["usage"]
    assert response.usage.to_dict() == {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def without_ids(value):
    """A response or an event, without what is new each time."""
    if isinstance(value, dict):
        volatile = ("id", "created_at", "call_id", "cached_tokens")
        return {name: without_ids(each) for name, each in value.items() if name not in volatile}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["text", "calls", "empty"])
def test_a_stream_ends_with_the_response(kind, client):
    given = {"model": "caller", "input": "hello", "extra_body": {"seed": 3}}
    if kind == "calls":
        given |= {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 600}
    else:
        given |= {"max_output_tokens": 7 if kind == "text" else 0}
    whole = client.responses.create(**given)
    events = [*client.responses.create(**given, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[0].response.status, events[0].response.output, events[0].response.usage) == (
        "in_progress",
        [],
        None,
    )
    last = events[-1].response
    assert (
        events[-1].type
        == f"response.{last.status}"
        == ("response.completed" if kind == "calls" else "response.incomplete")
    )
    assert without_ids(last.to_dict()) == without_ids(whole.to_dict())
    assert len(last.output) == (0 if kind == "empty" else len(whole.output) or -1)
    middle = events[2:-1]
    for index, item in enumerate(last.output):
        own = [event for event in middle if event.output_index == index]
        kinds = list(dict.fromkeys(event.type.removeprefix("response.") for event in own))
        assert {event.item_id for event in own} == {item.id}
        assert own[0].item.status == "in_progress"
        assert own[-1].item == item
        if item.type == "message":
            assert kinds == [
                *(
                    "output_item.added",
                    "content_part.added",
                    "output_text.delta",
                    "output_text.done",
                ),
                *("content_part.done", "output_item.done"),
            ]
            assert own[0].item.content == []
            assert own[1].part.text == ""
            assert {event.content_index for event in own} == {0}
            deltas = [event.delta for event in own if event.type == "response.output_text.delta"]
            assert "".join(deltas) == item.content[0].text == own[-3].text == own[-2].part.text
        else:
            assert kinds == [
                *(
                    "output_item.added",
                    "function_call_arguments.delta",
                    "function_call_arguments.done",
                ),
                "output_item.done",
            ]
            assert (own[0].item.arguments, own[0].item.name, own[0].item.call_id) == (
                "",
                item.name,
                item.call_id,
            )
            assert own[1].delta == own[2].arguments == item.arguments


def test_the_clients_helper_puts_a_stream_together(client):
    with client.responses.stream(
        model="small", input="hello", max_output_tokens=6, extra_body={"seed": 1}
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    plain = client.responses.create(
        model="small", input="hello", max_output_tokens=6, extra_body={"seed": 1}
    )
    assert "".join(texts) == plain.output_text


def test_a_stream_has_named_events(http):
    reply = http.post(RESPONSES, json={"input": "x", "max_output_tokens": 1, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    for event in reply.text.rstrip("\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


# Structured output and tools


class Answer(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    yes: Literal[True, False]


def test_structured_output(client, http):
    response = client.responses.parse(
        model="small", input="Really?", text_format=Answer, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Answer)
    with client.responses.stream(
        model="small", input="Really?", text_format=Answer, max_output_tokens=100
    ) as stream:
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Answer)
    plain = client.responses.create(
        model="small", input="x", text={"format": {"type": "text"}}, max_output_tokens=1
    )
    assert plain.text.format.type == "text"
    anything = client.responses.create(
        model="small", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=1
    )
    assert anything.output_text in ("{", "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "right"}])
def test_tools_are_called_and_answered(choice, client, http):
    given = {
        "model": "caller",
        "input": "hello",
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    response = client.responses.create(**given, max_output_tokens=300, extra_body={"seed": 1})
    (call,) = response.output
    assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
    assert call.name in (("left", "right") if choice == "required" else ("right",))
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    history = [{"role": "user", "content": "hello"}, call.to_dict(), result]
    said = client.responses.create(
        model="caller", input=history, tools=TOOLS, max_output_tokens=3, extra_body={"seed": 1}
    )
    nested = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in TOOLS
    ]
    calls = [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
    ]
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    expected = chat(http, model="caller", messages=messages, tools=nested, max_tokens=3, seed=1)
    assert said.output_text == expected["choices"][0]["message"]["content"]
    assert said.usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_items_become_messages():
    """Calls join the assistant's message before them.

    Parts are text; ids and states do not matter.
    """
    call = {
        "type": "function_call",
        "call_id": "a",
        "name": "left",
        "arguments": '{"a": 1}',
        "id": "fc_1",
    }
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        call,
        call | {"call_id": "b"},
        {
            "type": "function_call_output",
            "call_id": "a",
            "output": [{"type": "input_text", "text": "one"}],
        },
        {"type": "function_call_output", "call_id": "b", "output": "two"},
        {"role": "user", "content": "and?"},
    ]
    model = dataclasses.replace(served(), chat_template=CALLING.partition("</tool_call>")[2])
    text, _ = render_conversation(model, make_chat(Respond(input=items)))
    assert (
        text == "system:Be brief.|user:x|assistant:I look.[a left 1][b left 1]|"
        "tool:one|tool:two|user:and?|"
    )


# What is refused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is not served here, where nothing is kept: send the",
        ),
        (
            {"conversation": "conv_1"},
            "conversation is not served here, where nothing is kept: send the whole",
        ),
        ({"background": True}, "background is not served here: leave it out"),
        ({"reasoning": {"effort": "low"}}, "reasoning is not served here: leave it out"),
        ({"text": {"verbosity": "low"}}, "verbosity is not served here: leave it out"),
        ({"include": ["reasoning.encrypted_content"]}, "include is not served here: leave it out"),
        ({"truncation": "auto"}, "truncation is not served here: leave it out"),
        (
            {"max_output_tokens": -1},
            "max_output_tokens is -1; it must be 0 or more: leave it out to go on",
        ),
        ({"max_output_tokens": 5000}, "exceed the context"),
        ({"max_tokens": 5}, "there is no field max_tokens; did you mean max_output_tokens?"),
        ({"text": {"format": {"type": "xml"}}}, 'response_format must be {"type": "text"}'),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strikt": True}}},
            "there is no response_format.json_schema field strikt; did you mean strict?",
        ),
        (
            {"text": {"format": {"type": "text", "schema": SCHEMA}}},
            "there is no response_format field schema",
        ),
        ({"text": 1}, "the body must be a JSON object"),
        ({"model": "caller", "tools": [TOOLS[0] | {"more": 1}]}, "there is no tools field more"),
        (
            {"model": "caller", "tools": TOOLS, "tool_choice": {"type": "function", "nam": "left"}},
            "there is no tool_choice field nam; did you mean name?",
        ),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "there is no input field mood"),
        (
            {"input": [{"type": "message", "role": "user", "content": "x", "output": "y"}]},
            "there is no input field output",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}]}]},
            "there is no messages.content field a;",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "result": "x"}]},
            "there is no input field result",
        ),
        ({"tools": TOOLS}, "the model's chat template takes no tools"),
        ({"model": "caller", "tools": [{"type": "web_search"}]}, "tool 0 must be"),
        (
            {"model": "caller", "tools": TOOLS, "tool_choice": {"type": "function", "name": "up"}},
            "tool_choice must be",
        ),
        ({"input": []}, "input: "),
        ({"input": None}, "input: Field required"),
        ({"input": [1]}, "input: "),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "an item of the input is {'type': 'item_reference'",
        ),
        (
            {"input": [{"type": "reasoning", "summary": []}]},
            "an item of the input is {'type': 'reasoning'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "a"}]},
            "message 0 has tool_calls that are none",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "message 0 answers no call",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "message 0 has a part that is not text",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, "message 0 has the role 'king'"),
    ],
)
def test_what_is_not_served(fields, said, http):
    for stream in (False, True):
        message = refused(
            http.post(
                RESPONSES, json={"input": "x", "max_output_tokens": 1, "stream": stream} | fields
            )
        )
        assert said in message
        assert len(message) < 1000


def test_what_changes_nothing_is_served(http):
    given = {
        "store": True,
        "truncation": "disabled",
        "background": False,
        "include": [],
        "user": "me",
        "metadata": {},
    }
    reply = http.post(RESPONSES, json={"input": "x", "max_output_tokens": 1} | given)
    assert reply.status_code == 200
    assert reply.json()["store"] is False


def test_fields_are_ignored_where_that_is_asked_for(engine):
    http = connected(engine, ignore_unknown=True)
    items = [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}]
    given = {
        "input": items,
        "max_output_tokens": 1,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
    }
    reply = http.post(RESPONSES, json=given)
    assert reply.status_code == 200
    assert reply.headers["x-jllama-ignored"] == "input.reasoning, reasoning, verbosity"
    for name in ("previous_response_id", "conversation"):
        assert f"{name} is not served here" in refused(
            http.post(RESPONSES, json=given | {name: "x"})
        )
