"""OpenAI's Responses API: a request becomes a chat, and its answer a response and events."""

import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from jllama.core import UsageError
from jllama.serve.answers import stream_event
from jllama.serve.protocol import IGNORED_HERE, Chat, Fields, Settings, Tools
from jllama.system.files import Json

_NONE = {"reasoning_tokens": 0}


class Text(Fields):
    """The format of the text."""

    format: Json = Field(default={"type": "text"}, description="text, json_object or json_schema")


class Respond(Tools, Settings):
    """A text or the items of a conversation to answer. Nothing is stored between requests."""

    nested: ClassVar = {
        "input None": "role content phase",
        "input message": "type id status role content phase",
        "input function_call": "type id status call_id name arguments",
        "input function_call_output": "type id status call_id output",
        "tools function": "type name description strict parameters",
        "tool_choice function": "type name",
    }
    input: str | Annotated[list[Json], Field(min_length=1)]
    instructions: str = Field("", description="a system message before the input")
    max_output_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    text: Text = Text()


def make_chat(body: Respond) -> Chat:
    """Convert a request to a chat."""
    common = body.model_dump(include={*Chat.model_fields})
    format = body.text.format
    if format.get("type") == "json_schema":
        format = _nest(format, "json_schema")
    choice = body.tool_choice
    own = {
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "response_format": format,
        "tools": [_nest(tool, "function") for tool in body.tools],
        "tool_choice": choice if isinstance(choice, str) else _nest(choice, "function"),
        "stream_options": {"include_usage": True} if body.stream else None,
    }
    return Chat(**common | own)


def _nest(fields: Json, name: str) -> Json:
    """Convert a function, the choice of one or a schema to the form of chats."""
    nested = {**fields}
    return {"type": nested.pop("type", None), name: nested}


def _messages(body: Respond) -> list[Json]:
    """Convert the input's items to messages.

    Calls belong to the assistant's message before them.
    """
    messages = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = body.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    ignored = IGNORED_HERE.get()
    for item in items:
        match item:
            case {"role": role, "content": content}:
                messages.append({"role": role, "content": content})
            case {"type": "function_call", "call_id": id}:
                function = {name: item.get(name) for name in ("name", "arguments")}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append({"id": id, "function": function})
            case {"type": "function_call_output", "call_id": id, "output": output}:
                messages.append({"role": "tool", "tool_call_id": id, "content": output})
            case {"type": "reasoning"} if ignored is not None:
                ignored.add("input.reasoning")
            case _:
                raise UsageError(
                    f"an item of the input is {str(item)[:50]}; it must be a whole message, "
                    "function_call or function_call_output: no other items are kept"
                )
    return messages


class ResponseStream:
    """Converts a chat's answer to a response, and its chunks to the response's events."""

    def __init__(self, body: Respond) -> None:
        self._numbers = itertools.count()
        self._response = body.model_dump(exclude={"input", "stream"}) | {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "store": False,
        }

    def whole(self, answer: Json) -> Json:
        """Convert a chat's complete answer."""
        (choice,) = answer["choices"]
        self.events(answer | {"choices": [choice | {"delta": choice["message"]}]})
        self.events(answer | {"choices": []})
        return self._response

    def events(self, chunk: Json) -> str:
        """Convert a chunk to server-sent events, perhaps none; the last chunk has no choices."""
        text = ""
        items = self._response["output"]
        for name, fields in _events(self._response, chunk):
            event = {"type": f"response.{name}", "sequence_number": next(self._numbers)}
            if items:
                event["output_index"] = len(items) - 1
                event |= {"item_id": items[-1]["id"], "content_index": 0}
            text += f"event: {event['type']}\n{stream_event(event | fields)}"
        return text


def _events(response: Json, chunk: Json) -> Iterator[tuple[str, Json]]:
    """Update a response by a chunk; yield the name and the fields of each event."""
    items = response["output"]
    item: Json = items[-1] if items else {}
    is_open = item.get("status") == "in_progress"
    part = item["content"][0] if is_open else {}
    for choice in chunk["choices"]:
        delta = choice["delta"]
        reason = choice["finish_reason"]
        text = delta.get("content")
        calls = delta.get("tool_calls", [])
        if "role" in delta:
            response["model"] = chunk["model"]
            yield "created", {"response": response}
            yield "in_progress", {"response": response}
        if reason:
            response["status"] = "incomplete" if reason == "length" else "completed"
        # 1) Text begins a message, or continues the last one
        if text and not is_open:
            is_open = True
            id = f"msg_{response['id'][5:]}_{len(items)}"
            item = {
                "id": id,
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            items.append(item)
            yield "output_item.added", {"item": item}
            part = {"type": "output_text", "text": "", "annotations": []}
            yield "content_part.added", {"part": part}
            item["content"].append(part)
        if text:
            part["text"] += text
            yield "output_text.delta", {"delta": text, "logprobs": []}
        # 2) A call or the end of the answer ends the message
        if (calls or reason) and is_open:
            item["status"] = "completed" if calls else response["status"]
            yield "output_text.done", {"text": part["text"], "logprobs": []}
            yield "content_part.done", {"part": part}
            yield "output_item.done", {"item": item}
        # 3) A call comes in one piece, as an item of its own
        for call in calls:
            function = call["function"]
            item = {
                "type": "function_call",
                "status": "in_progress",
                "call_id": call["id"],
                "id": f"fc_{call['id']}",
            }
            items.append(item | function | {"arguments": ""})
            yield "output_item.added", {"item": items[-1]}
            yield "function_call_arguments.delta", {"delta": function["arguments"]}
            yield "function_call_arguments.done", function
            items[-1] |= function | {"status": "completed"}
            yield "output_item.done", {"item": items[-1]}
    # 4) The last chunk has the token counts; those of the prompt are called those of the input
    if not chunk["choices"]:
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counts = {name.replace("prompt", "input"): count for name, count in chunk["usage"].items()}
        response["usage"] = counts | {
            "output_tokens": counts.pop("completion_tokens"),
            "output_tokens_details": _NONE,
        }
        yield response["status"], {"response": response}
