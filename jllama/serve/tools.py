"""Calls of tools: how the models of a chat template write them, what lets only calls through, and reading them."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jllama.config import Grammar
from jllama.errors import UsageError
from jllama.files import Json
from jllama.templates.messages import SMOLLM2_TOOLS, with_tools

_FIELDS = {
    "name": str,
    "description": str | None,
    "strict": bool | None,
    "parameters": dict | None,
}  # of a function
_SPACING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}  # json.dumps', for llguidance


class Dialect(NamedTuple):
    """How a template's models write calls: objects with a ``name`` and arguments, as JSON, between two texts."""

    template: str  # to use in place of the model's; the same where there are no tools
    before: str
    after: str
    between: str = ""  # two calls; empty if the template takes one only
    arguments: str = "arguments"  # the name of the arguments


def dialect(template: str) -> Dialect | None:
    """How models with this chat template write calls; None if it takes no tools, or writes calls in another way.

    Llama 3.1's and 3.2's are an answer of their own; those of Hermes, Qwen and others each stand in ``<tool_call>``
    tags. SmolLM2's stand there as a list, in the template that takes its own's place (``with_tools``).
    """
    template = with_tools(template)
    if template == SMOLLM2_TOOLS:
        return Dialect(template, "<tool_call>[", "]</tool_call>", ", ")
    if (
        "tools" in template
        and "<tool_call>" in template
        and re.search(r'"arguments\\?": ', template)
    ):
        return Dialect(template, "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
    return (
        Dialect(template, "", "", "", "parameters")
        if "tools" in template and '"parameters": ' in template
        else None
    )


def _function(tool: Any) -> Mapping[str, Any]:
    """The function that a tool is, or that a choice of one names; empty if it is neither."""
    function = (
        tool.get("function")
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else None
    )
    return function if isinstance(function, Mapping) else {}


def check_tools(tools: Any, choice: Any = None) -> None:
    """Raise ``UsageError`` unless the ``tools`` and the ``tool_choice`` of a request are as OpenAI has them."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= 128:
        raise UsageError(
            "tools must be a list of 1 to 128 functions; leave it out if there are none"
        )
    names = [_function(tool).get("name") for tool in tools]
    for number, (tool, name) in enumerate(zip(tools, names, strict=True)):
        function = _function(tool)
        if (
            not isinstance(name, str)
            or not re.fullmatch("[A-Za-z0-9_-]{1,64}", name)
            or names.count(name) > 1
        ):
            wrong = f'tool {number} must be {{"type": "function", "function": {{"name": ...}}}}'
            raise UsageError(
                f"{wrong} with a name of its own, 1 to 64 letters, digits, underscores and hyphens"
            )
        bad = [
            key for key, value in function.items() if not isinstance(value, _FIELDS.get(key, ()))
        ]
        if bad or (function.get("parameters") or {}).get("type", "object") != "object":
            wrong = f"the tool {name} has a wrong {(bad or ['parameters'])[0]!r}"
            raise UsageError(
                f"{wrong}: its fields are {', '.join(_FIELDS)}, the schema of an object"
            )
    if (
        choice not in (None, "auto", "none", "required")
        and _function(choice).get("name") not in names
    ):
        words = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise UsageError(f"tool_choice must be {words} with the name of one of the tools")


def grammar(
    tools: Sequence[Any], choice: Any, dialect: Dialect, parallel: bool = True
) -> Grammar | None:
    """What an answer must match: calls of these tools, or one of the tool that ``choice`` names, with valid arguments.

    Where the model may choose, calls or a text without any, if a tool is ``strict``; else None, as for ``"none"``, with
    which the tools should not be shown to the template either. Without ``parallel`` there is one call, else
    at most eight, as small models do not stop. What ``check_tools`` refuses must not come here.
    """
    name, is_free = _function(choice).get("name"), choice in (None, "auto")
    if choice == "none" or (is_free and not any(tool["function"].get("strict") for tool in tools)):
        return None
    rules, calls = [], []
    for function in (
        tool["function"] for tool in tools if name in (None, tool["function"]["name"])
    ):
        schema = {"type": "object"} | (
            function.get("parameters") or {"additionalProperties": False}
        )
        opening = json.dumps(f'{{"name": "{function["name"]}", "{dialect.arguments}": ')
        calls.append(f"call{len(calls)}")
        rules.append(f'{calls[-1]}: {opening} {calls[-1]}_arguments "}}"')
        rules.append(
            f"{calls[-1]}_arguments: %json {json.dumps(schema | {'x-guidance': _SPACING})}"
        )
    before, between, after = (
        json.dumps(each) for each in (dialect.before, dialect.between, dialect.after)
    )
    more = f"({between} call){{0,7}}" if parallel and dialect.between and name is None else ""
    text = r"/(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/" if dialect.before else r"/([^{\s](?s:.*))?/"
    rules += [f"call: {' | '.join(calls)}", f"calls: {before} call {more} {after}"]
    return Grammar(
        "lark",
        "\n".join(["start: calls | TEXT" if is_free else "start: calls", *rules, f"TEXT: {text}"]),
    )


class ToolParser:
    """Reads an answer as it comes: text, and calls of the tools ``names`` as OpenAI streams them, each when complete.

    What only looks like a call comes out as text; white space around calls does not. Nothing depends on how the answer
    was cut into pieces. ``key`` decides the ids of ``calls``, all so far; without ``parallel`` there is at most one.
    """

    def __init__(
        self, dialect: Dialect, names: Sequence[str], key: str, parallel: bool = True
    ) -> None:
        self.calls: list[Json] = []
        self._names, self._key, self._arguments = names, key, dialect.arguments
        self._mark, self._end = ("<tool_call>", "</tool_call>") if dialect.before else ("", "")
        self._most = 128 if parallel and dialect.between else 1
        self._held, self._is_start = "", True

    def push(self, text: str, is_end: bool = False) -> list[str | Json]:
        """What is certain with more of the answer; with its end, all the rest."""
        held, mark, found = self._held + text, self._mark, []
        while held:
            place = held.find(mark) if mark or self._is_start else -1
            read = self._calls_in(held[place + len(mark) :], is_end) if place >= 0 else None
            if read is None:  # text, but for what may begin a call and the white space before it
                part = next(size for size in range(len(mark), -1, -1) if held.endswith(mark[:size]))
                certain = held[: len(held) - part if place < 0 else place].rstrip()
                found.append(held if is_end and not (self.calls and held.isspace()) else certain)
                held = "" if is_end else held[len(certain) :]
                break
            calls, rest = read
            found += [held[:place].rstrip(), *calls] if calls else [held[: len(held) - len(rest)]]
            self.calls += calls
            held, self._is_start = rest, False
        self._held = held
        return [each for each in found if each]

    def _calls_in(self, text: str, is_end: bool) -> tuple[list[Json], str] | None:
        """The calls that a text begins with, perhaps none, and what follows them; None if that is not certain yet."""
        body, found = text.lstrip(), []
        if body[:1] not in ("", "{", "["):
            return [], text
        try:
            value, size = json.JSONDecoder(strict=False).raw_decode(body)
            for index, call in enumerate(
                value if isinstance(value, list) else [value], len(self.calls)
            ):
                id = f"call_{hashlib.sha256(f'{self._key} {index}'.encode()).hexdigest()[:24]}"
                arguments = json.dumps({**call[self._arguments]}, allow_nan=False)  # an object
                function = {
                    "name": self._names[self._names.index(call["name"])],
                    "arguments": arguments,
                }
                found.append({"index": index, "id": id, "type": "function", "function": function})
        except json.JSONDecodeError as error:
            is_cut = (
                error.msg.startswith("Unterminated string") or error.pos > len(body) - 8
            )  # a literal, an escape
            return None if is_cut and not is_end else ([], text)
        except (
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ):  # JSON, but no call of these tools
            return [], text
        rest = body[size:].lstrip()
        if rest.startswith(self._end) or (is_end and self._end.startswith(rest)):
            return found[: self._most - len(self.calls)], rest[len(self._end) :]
        return None if self._end.startswith(rest) else ([], text)
