"""Tool calls: how the models of a chat template write them, a grammar for them, and a parser."""

import enum
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jllama.core import UsageError
from jllama.generation.sampling_params import Grammar
from jllama.generation.text import overlap
from jllama.system.files import Json
from jllama.templates.messages import with_tools

# The fields of a function.
_FIELDS = {
    "name": str,
    "description": str | None,
    "strict": bool | None,
    "parameters": dict | None,
}
# The white space of json.dumps, for llguidance.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_CALLS = 128


class Dialect(NamedTuple):
    """How a template's models write calls: JSON objects with a name and arguments between texts."""

    template: str  # to use in place of the model's; the same if it was written for tools
    before: str
    after: str
    between: str = ""  # between two calls; empty if the template takes only one
    arguments: str = "arguments"  # the key of the arguments that the template shows
    thinks: bool = False  # whether the prompt ends inside thoughts

    @property
    def mark(self) -> str:
        """The text that only calls begin with; empty if they are the whole answer."""
        return self.before.rstrip("[ \n")

    @property
    def end(self) -> str:
        """The text that ends calls; empty if their JSON ends them."""
        return self.after.lstrip("] \n")


_LISTS = {
    "<tool_call>[": "]</tool_call>",
    "<|tool_call|>[": "]",
    "[TOOL_CALLS] [": "]",
    "[TOOL_CALLS][": "]",
}
"""Lists of calls: the text before one, as templates spell it, and the text behind."""


def find_dialect(template: str) -> Dialect | None:
    """Return how models with this chat template write calls.

    Return None if they write none, or in another way.

    Llama 3.1 and 3.2 write a call as the whole answer. Hermes, Qwen, SmolLM3 and others put each
    call in ``<tool_call>`` tags. SmolLM2 puts a list of calls there; Mistral, Granite 3 and
    Phi-4-mini write a list behind a token. ``with_tools`` adds what a template lacks.
    """
    template = with_tools(template)
    if "tools" not in template:
        return None
    for before, after in _LISTS.items():
        if before in template:
            closing = "<|/tool_call|>"
            after += closing if closing in template else ""
            return Dialect(template, before, after, ", ")
    if "<tool_call>" in template and re.search(r'"arguments\\?": ', template):
        return Dialect(template, "<tool_call>\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n")
    if '"parameters": ' in template:
        return Dialect(template, "", "", "", "parameters")
    return None


def _function(tool: Any) -> Mapping[str, Any]:
    """Return the function that a tool or a tool choice names; empty if it names none."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return {}
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def check_tools(tools: Any, choice: Any = None) -> None:
    """Raise ``UsageError`` unless ``tools`` and ``tool_choice`` follow OpenAI's API."""
    if not isinstance(tools, list) or not 1 <= len(tools) <= 128:
        raise UsageError(
            "tools must be a list of 1 to 128 functions; leave it out if there are none"
        )
    names = [_function(tool).get("name") for tool in tools]
    for number, (tool, name) in enumerate(zip(tools, names, strict=True)):
        is_valid_name = isinstance(name, str) and re.fullmatch("[A-Za-z0-9_-]{1,64}", name)
        if not is_valid_name or names.count(name) > 1:
            raise UsageError(
                f'tool {number} must be {{"type": "function", "function": {{"name": ...}}}} with a '
                "name of its own, 1 to 64 letters, digits, underscores and hyphens"
            )
        function = _function(tool)
        wrong = [
            key for key, value in function.items() if not isinstance(value, _FIELDS.get(key, ()))
        ]
        if not wrong and (function.get("parameters") or {}).get("type", "object") != "object":
            wrong = ["parameters"]
        if wrong:
            raise UsageError(
                f"the tool {name} has a wrong {wrong[0]!r}: its fields are {', '.join(_FIELDS)}, "
                "the schema of an object"
            )
    is_word = choice in (None, "auto", "none", "required")
    if not is_word and _function(choice).get("name") not in names:
        raise UsageError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": '
            '{"name": ...}} with the name of one of the tools'
        )


def call_grammar(
    tools: Sequence[Any], choice: Any, dialect: Dialect, parallel: bool = True
) -> Grammar | None:
    """Return what an answer must match: calls of these tools with valid arguments.

    Call ``check_tools`` first.

    Args:
        tools: as in OpenAI's API.
        choice: "required"; a tool, whose calls alone are allowed; or "auto", which also allows text
            without calls if a tool is ``strict``, and else everything.
        dialect: how calls are written.
        parallel: allow up to eight calls (small models do not stop by themselves), else one.

    Returns:
        The grammar; None if everything is allowed, and for "none", when the template should not
        show the tools either.
    """
    name = _function(choice).get("name")
    is_free = choice in (None, "auto")
    functions = [tool["function"] for tool in tools]
    if choice == "none" or (is_free and not any(function.get("strict") for function in functions)):
        return None
    rules = []
    calls = []
    for function in functions:
        if name not in (None, function["name"]):
            continue
        schema = function.get("parameters") or {"additionalProperties": False}
        schema = {"type": "object"} | schema | {"x-guidance": _SPACING}
        opening = json.dumps(f'{{"name": "{function["name"]}", "{dialect.arguments}": ')
        call = f"call{len(calls)}"
        calls.append(call)
        rules.append(f'{call}: {opening} {call}_arguments "}}"')
        rules.append(f"{call}_arguments: %json {json.dumps(schema)}")
    before = json.dumps(dialect.before)
    after = json.dumps(dialect.after)
    more = ""
    if parallel and dialect.between and name is None:
        more = f"({json.dumps(dialect.between)} call){{0,7}}"
    text = r"/([^{\s](?s:.*))?/"
    if dialect.mark:
        text = rf"/(?s:.*)/ & ~/(?s:.*){re.escape(dialect.mark)}(?s:.*)/"
    start = "start: calls | TEXT" if is_free else "start: calls"
    rules += [f"call: {' | '.join(calls)}", f"calls: {before} call {more} {after}"]
    return Grammar("lark", "\n".join([start, *rules, f"TEXT: {text}"]))


class _State(enum.Enum):
    TEXT = enum.auto()  # in text, up to the mark of a call
    THOUGHTS = enum.auto()  # in thoughts, where calls are drafts
    CALL = enum.auto()  # behind a mark, or at the start of an answer in a dialect without marks
    REST = enum.auto()  # in text that no call can follow


class ToolParser:
    """Splits an answer, as it comes, into text and complete calls.

    Calls are as OpenAI streams them. What only looks like a call becomes text, as do calls between
    ``<think>`` and ``</think>``; white space around calls is dropped. The result does not depend on
    how the answer was cut into pieces.

    ======== ============================= ======
    state    event                         next
    ======== ============================= ======
    TEXT     a mark                        CALL
    TEXT     <think>                       THOUGHTS
    THOUGHTS </think>                      TEXT, or CALL in a dialect without marks
    CALL     calls, or something else      TEXT, or REST in a dialect without marks
    CALL     an incomplete call            CALL, until more of the answer comes
    ======== ============================= ======

    Args:
        dialect: how calls are written.
        names: of the tools.
        key: determines the ids of the calls.
        parallel: whether there may be more than one call.
    """

    def __init__(
        self, dialect: Dialect, names: Sequence[str], key: str, parallel: bool = True
    ) -> None:
        self.calls: list[Json] = []  # all so far
        self._names = names
        self._key = key
        self._mark = dialect.mark
        self._end = dialect.end
        self._max_calls = _MAX_CALLS if parallel and dialect.between else 1
        begin = _State.TEXT if self._mark else _State.CALL
        self._state = _State.THOUGHTS if dialect.thinks else begin
        # The texts that end a state, and the next state.
        self._ends = {
            _State.TEXT: {self._mark: _State.CALL, "<think>": _State.THOUGHTS},
            _State.THOUGHTS: {"</think>": begin},
            _State.REST: {},
        }
        self._before = ""  # text before the mark
        self._pending = ""  # behind that, what is not decided yet

    def push(self, text: str, is_end: bool = False) -> list[str | Json]:
        """Add more of the answer.

        Return the texts and calls that are certain, at its end all of them.
        """
        self._pending += text
        pieces: list[str | Json] = []
        state = None
        while state is not self._state:
            state = self._state
            pieces += self._read_call(is_end) if state is _State.CALL else [self._read_text(is_end)]
        return [piece for piece in pieces if piece]

    def _read_text(self, is_end: bool) -> str:
        """TEXT, THOUGHTS, REST: return the text that is certain, without a mark at its end."""
        pending = self._pending
        ends = self._ends[self._state]
        places = [(pending.index(end), end) for end in ends if end in pending]
        if places:
            start, end = min(places)
            text = pending[: start + len(end)]
            self._pending = pending[len(text) :]
            self._state = ends[end]
            if end != self._mark:
                return text
            self._before = pending[:start]
            return ""
        if is_end:
            self._pending = ""
            return "" if self.calls and pending.isspace() else pending
        # Hold back what may be the beginning of an end, and the white space before it.
        num_held = max((overlap(pending, end) for end in ends), default=0)
        text = pending[: len(pending) - num_held].rstrip()
        self._pending = pending[len(text) :]
        return text

    def _read_call(self, is_end: bool) -> list[str | Json]:
        """CALL: return the text before it and the calls, or all of it as text if it is no call."""
        before = self._before
        text = before.rstrip()
        result = self._parse_calls(self._pending, is_end)
        if result is None:
            self._before = before[len(text) :]
            return [text]
        calls, rest = result
        used = self._pending[: len(self._pending) - len(rest)]
        self.calls += calls
        self._before = ""
        self._pending = rest
        self._state = _State.TEXT if self._mark else _State.REST
        return [text, *calls] if calls else [before + self._mark + used]

    def _parse_calls(self, text: str, is_end: bool) -> tuple[list[Json], str] | None:
        """Return the calls that a text begins with, perhaps none, and the rest.

        Return None if the text does not decide it yet.
        """
        no_call = list[Json](), text
        body = text.lstrip()
        if body[:1] not in ("", "{", "["):
            return no_call
        try:
            value, size = json.JSONDecoder(strict=False).raw_decode(body)
            values = value if isinstance(value, list) else [value]
            calls = [self._call(*item) for item in enumerate(values, len(self.calls))]
        except json.JSONDecodeError as error:
            # JSON that breaks off in a string, a literal or an escape.
            is_cut = error.msg.startswith("Unterminated string") or error.pos > len(body) - 8
            is_whole = is_end or error.doc != body  # it is that of the arguments
            return None if is_cut and not is_whole else no_call
        except (LookupError, TypeError, ValueError, RecursionError):
            return no_call  # JSON, but no call of these tools
        rest = body[size:]
        if self._end:
            rest = rest.lstrip()
        if rest.startswith(self._end) or (is_end and self._end.startswith(rest)):
            return calls[: self._max_calls - len(self.calls)], rest[len(self._end) :]
        return None if self._end.startswith(rest) else no_call

    def _call(self, index: int, value: Any) -> Json:
        """Return a call as OpenAI's API has it; raise an error if it is none."""
        arguments = value["arguments" if "arguments" in value else "parameters"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}", strict=False)
        arguments = json.dumps({**arguments}, allow_nan=False)
        name = self._names[self._names.index(value["name"])]
        digest = hashlib.sha256(f"{self._key} {index}".encode()).hexdigest()
        function = {"name": name, "arguments": arguments}
        return {
            "index": index,
            "id": f"call_{digest[:24]}",
            "type": "function",
            "function": function,
        }
