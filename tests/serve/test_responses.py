"""OpenAI's Responses, asked with its own client: the chat that a request means, and every event of
its stream."""

import dataclasses
import json
from typing import Literal
from unittest.mock import ANY

import jsonschema
import pydantic
import pytest
from helpers_serve import CHAT, RESPONSES, SCHEMA, connected, refused
from helpers_serve import TOOLS as CHAT_TOOLS
from models import served

from jllama.serve.protocol import render_conversation
from jllama.serve.responses import Respond, make_chat

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments.a }}]{% endfor %}|"
    "{% endfor %}"
)
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]


def chat(http, **fields):
    """What a chat answers."""
    reply = http.post(CHAT, json={"seed": 5, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_response_is_the_answer_to_a_chat(client, http):
    sampling = {"temperature": 0.8, "top_p": 0.9}
    response = client.responses.create(
        model="small",
        input="hello",
        instructions="Be kind.",
        max_output_tokens=8,
        extra_body={"seed": 5},
        **sampling,
    )
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    answer = chat(http, messages=messages, max_tokens=8, **sampling)
    (choice,) = answer["choices"]
    assert response.output_text == choice["message"]["content"] != ""
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert item.content[0].annotations == []
    usage = answer["usage"]
    expected = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "object": "response",
        "model": "small",
        "error": None,
        "instructions": "Be kind.",
        "max_output_tokens": 8,
        "temperature": 0.8,
        "store": False,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    actual = response.to_dict()
    assert {name: actual[name] for name in expected} == expected


def without_ids(value):
    """A response, without what is new each time."""
    if isinstance(value, dict):
        volatile = ("id", "created_at", "call_id", "cached_tokens")
        return {name: without_ids(item) for name, item in value.items() if name not in volatile}
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    return value


MESSAGE_EVENTS = """output_item.added content_part.added output_text.delta output_text.done
content_part.done output_item.done"""
CALL_EVENTS = """output_item.added function_call_arguments.delta function_call_arguments.done
output_item.done"""


@pytest.mark.parametrize("kind", ["text", "calls", "empty"])
def test_a_stream_ends_with_the_response(kind, client):
    fields = {"model": "caller", "input": "hello", "extra_body": {"seed": 5}}
    if kind == "calls":
        fields |= {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 400}
    else:
        fields["max_output_tokens"] = 7 if kind == "text" else 0
    whole = client.responses.create(**fields)
    created, in_progress, *middle, end = client.responses.create(**fields, stream=True)
    events = [created, in_progress, *middle, end]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert created.type == "response.created"
    assert in_progress.type == "response.in_progress"
    assert (created.response.status, created.response.output) == ("in_progress", [])
    assert created.response.usage is None
    last = end.response
    assert last.status == ("completed" if kind == "calls" else "incomplete")
    assert end.type == f"response.{last.status}"
    assert without_ids(last.to_dict()) == without_ids(whole.to_dict())
    assert len(last.output) == {"text": 1, "calls": 2, "empty": 0}[kind]
    for index, item in enumerate(last.output):
        own = [event for event in middle if event.output_index == index]
        kinds = [*dict.fromkeys(event.type.removeprefix("response.") for event in own)]
        assert {event.item_id for event in own} == {item.id}
        assert own[0].item.status == "in_progress"
        assert own[-1].item == item
        if item.type == "message":
            assert kinds == MESSAGE_EVENTS.split()
            assert own[0].item.content == []
            assert own[1].part.text == ""
            assert {event.content_index for event in own} == {0}
            deltas = [event.delta for event in own if event.type == "response.output_text.delta"]
            assert "".join(deltas) == item.content[0].text == own[-3].text == own[-2].part.text
        else:
            assert kinds == CALL_EVENTS.split()
            assert (own[0].item.arguments, own[0].item.name) == ("", item.name)
            assert own[0].item.call_id == item.call_id
            assert own[1].delta == own[2].arguments == item.arguments


def test_a_stream_has_named_events(http):
    # With this seed there is text; without, a comment would stand in place of its event.
    body = {"input": "x", "max_output_tokens": 1, "stream": True, "seed": 1}
    reply = http.post(RESPONSES, json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "event: response.output_text.delta" in reply.text
    for event in reply.text.rstrip("\n").split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


# Structured output and tools


class Answer(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    yes: Literal[True, False]


def test_structured_output(client):
    common = {"model": "small", "input": "Really?"}
    parsed = common | {"text_format": Answer, "max_output_tokens": 100}
    assert isinstance(client.responses.parse(**parsed).output_parsed, Answer)
    with client.responses.stream(**parsed) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)
    texts = []
    for kind in ("text", "json_object"):
        response = client.responses.create(
            **common, text={"format": {"type": kind}}, max_output_tokens=1
        )
        assert response.text.format.type == kind
        texts.append(response.output_text)
    assert texts[1] in ("{", "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "right"}])
def test_tools_are_called_and_answered(choice, client, http):
    common = {"model": "caller", "tools": TOOLS, "extra_body": {"seed": 1}}
    response = client.responses.create(
        input="hello",
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=300,
        **common,
    )
    (call,) = response.output
    assert (call.type, call.status, response.status) == ("function_call", "completed", "completed")
    assert call.name in (("left", "right") if choice == "required" else ("right",))
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    question = {"role": "user", "content": "hello"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    next_response = client.responses.create(
        input=[question, call.to_dict(), result], max_output_tokens=3, **common
    )
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [
        question,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]
    expected = chat(http, model="caller", messages=messages, tools=CHAT_TOOLS, max_tokens=3, seed=1)
    assert next_response.output_text == expected["choices"][0]["message"]["content"]
    assert next_response.usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_items_become_messages():
    """Calls join the assistant's message before them.

    Parts are text; ids and states do not matter.
    """
    call = {"type": "function_call", "call_id": "a", "name": "left", "arguments": '{"a": 1}'}
    result = {"type": "function_call_output", "call_id": "a"}
    one, two = ({"type": "input_text", "text": text} for text in ("x", "one"))
    looking = {"type": "output_text", "text": "I look.", "annotations": []}
    message = {"type": "message", "id": "msg_1", "status": "completed"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [one]},
        message | {"role": "assistant", "content": [looking]},
        call | {"id": "fc_1"},
        call | {"call_id": "b"},
        result | {"output": [two]},
        result | {"call_id": "b", "output": "two"},
        {"role": "user", "content": "and?"},
    ]
    model = dataclasses.replace(served(), chat_template=TEMPLATE)
    text, _ = render_conversation(model, make_chat(Respond(input=items)))
    assert (
        text == "system:Be brief.|user:x|assistant:I look.[a left 1][b left 1]|"
        "tool:one|tool:two|user:and?|"
    )


# What is refused


def asking(**item):
    return {"input": [{"role": "user", "content": "x"} | item]}


def with_tools(**fields):
    return {"model": "caller", "tools": TOOLS} | fields


def with_format(**format):
    return {"text": {"format": format}}


NOT_KEPT = "is not served here, where nothing is kept: send the"
LEFT_OUT = "is not served here: leave it out"
PART = {"type": "input_text", "text": "x"}
CALL = {"type": "function_call", "call_id": "a"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, f"previous_response_id {NOT_KEPT}"),
        ({"conversation": "conv_1"}, f"conversation {NOT_KEPT}"),
        ({"background": True}, f"background {LEFT_OUT}"),
        ({"reasoning": {"effort": "low"}}, f"reasoning {LEFT_OUT}"),
        ({"text": {"verbosity": "low"}}, f"verbosity {LEFT_OUT}"),
        ({"include": ["reasoning.encrypted_content"]}, f"include {LEFT_OUT}"),
        ({"truncation": "auto"}, f"truncation {LEFT_OUT}"),
        ({"max_output_tokens": -1}, "max_output_tokens is -1; it must be 0 or more: leave it"),
        ({"max_output_tokens": 5000}, "exceed the context"),
        ({"max_tokens": 5}, "there is no field max_tokens; did you mean max_output_tokens?"),
        (with_format(type="xml"), 'response_format must be {"type": "text"}'),
        (
            with_format(type="json_schema", schema=SCHEMA, strikt=True),
            "there is no response_format.json_schema field strikt; did you mean strict?",
        ),
        (with_format(type="text", schema=SCHEMA), "there is no response_format field schema"),
        ({"text": 1}, "the body must be a JSON object"),
        (with_tools(tools=[TOOLS[0] | {"more": 1}]), "there is no tools field more"),
        (with_tools(tools=[{"type": "web_search"}]), "tool 0 must be"),
        (
            with_tools(tool_choice={"type": "function", "nam": "left"}),
            "there is no tool_choice field nam; did you mean name?",
        ),
        (with_tools(tool_choice={"type": "function", "name": "up"}), "tool_choice must be"),
        (with_tools(model="small"), "the model's chat template takes no tools"),
        (asking(mood=1), "there is no input field mood"),
        (asking(type="message", output="y"), "there is no input field output"),
        (asking(content=[PART | {"a": 1}]), "there is no messages.content field a;"),
        (asking(content=[{"type": "input_image"}]), "message 0 has a part that is not text"),
        (asking(role="king"), "message 0 has the role 'king'"),
        ({"input": []}, "input: "),
        ({"input": None}, "input: Field required"),
        ({"input": [1]}, "input: "),
        ({"input": [CALL | {"name": "f", "result": "x"}]}, "there is no input field result"),
        ({"input": [CALL]}, "message 0 has tool_calls that are none"),
        *(
            ({"input": [{"type": name}]}, f"an item of the input is {{'type': '{name}'")
            for name in ("item_reference", "reasoning")
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]},
            "message 0 answers no call",
        ),
    ],
)
def test_what_is_not_served(fields, said, http):
    body = {"input": "x", "max_output_tokens": 1} | fields
    for stream in (False, True):
        message = refused(http.post(RESPONSES, json=body | {"stream": stream}), code=ANY)
        assert said in message
        assert len(message) < 1000


def test_what_changes_nothing_is_served(http):
    off = {"truncation": "disabled", "background": False, "include": []}
    ignored = {"store": True, "user": "me", "metadata": {}}
    body = {"input": "x", "max_output_tokens": 1}
    assert http.post(RESPONSES, json=body | off | ignored).json()["store"] is False


def test_fields_are_ignored_where_that_is_asked_for(engine):
    http = connected(engine, ignore_unknown=True)
    fields = {
        "input": [{"type": "reasoning", "summary": []}, {"role": "user", "content": "x"}],
        "max_output_tokens": 1,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "low"},
    }
    reply = http.post(RESPONSES, json=fields)
    assert reply.status_code == 200
    assert reply.headers["x-jllama-ignored"] == "input.reasoning, reasoning, verbosity"
    for name in ("previous_response_id", "conversation"):
        reply = http.post(RESPONSES, json=fields | {name: "x"})
        assert f"{name} {NOT_KEPT}" in refused(reply)
