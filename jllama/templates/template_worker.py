"""The program that ``jllama.templates.template`` renders with, in a process of its own.

It is run by its path, with the bytes of memory it may take and the folders that jinja2 is in, and ends with its stdin.
Requests and replies are lines of JSON. What a template may use: transformers, ``utils/chat_template_utils.py``.
"""

import contextlib
import datetime
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[2:]

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class _Arguments(dict[str, Any]):
    """The arguments of a call: an object, and its JSON for templates that add it to a text."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _with_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(fields.get("arguments"), dict):
        fields["arguments"] = _Arguments(fields["arguments"])
    return fields


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks an answer for training: its place in the text, as transformers has it."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it
    position = 0
    spans: list[tuple[int, int]] = []  # noqa: RUF012 - of the rendering under way

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(lineno)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        _Generation.spans.append((_Generation.position, _Generation.position + len(text)))
        return text


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


_environment = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
)
_environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
_environment.globals["raise_exception"] = _raise_exception
_environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
_compiled = functools.lru_cache(maxsize=8)(_environment.from_string)


def _render(template: str, variables: dict[str, Any]) -> str:
    _Generation.position, _Generation.spans, parts = 0, [], []
    for part in _compiled(template).generate(variables):
        parts.append(part)
        _Generation.position += len(part)
    return "".join(parts)


def _attempt(template: str, variables: dict[str, Any], **others: Any) -> str:
    """The text with other variables, or none where the template refuses them."""
    with contextlib.suppress(
        jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError
    ):
        return _render(template, variables | others)
    return ""


def _answer_spans(
    text: str, mark: str, messages: list[Any], answers: list[int], attempt: Callable[..., str]
) -> Iterator[Any]:
    """Find where each of the messages ``answers`` stands in the text, and what the template writes before it.

    That is what changes with the answer, and white space before that; nowhere if it is no part of its own. ``mark`` is
    a character that is not in the text.
    """
    for index in answers:
        earlier, (answer, *later) = messages[:index], messages[index:]
        other = {"role": answer["role"], "content": mark}
        before, found, after = attempt(messages=[*earlier, other, *later]).partition(mark)
        is_apart = found and text.startswith(before) and text[len(before) :].endswith(after)
        is_open = not is_apart and "tool_calls" in answer
        if is_open:
            # A result may be refused where its call is gone: find the beginning without the results, and the end by
            # what stays the same when all calls are others. More of the template's own text may stand before the end.
            rest = later
            while rest and rest[0]["role"] != "user":
                rest = rest[1:]
            before, begins, _ = attempt(messages=[*earlier, other, *rest]).partition(mark)
            common = os.path.commonprefix([before, text])  # noqa: RUF071 - of texts
            before = before if before[len(common) :].strip() else common
            calls = [
                call | {"function": {"name": mark, "arguments": {mark: 0}}}
                for call in answer["tool_calls"]
            ]
            changed = attempt(messages=[*earlier, answer | {"tool_calls": calls}, *later])
            after = os.path.commonprefix([changed[::-1], text[::-1]])[::-1]  # noqa: RUF071
            is_apart = begins and mark in changed and text.startswith(before)
        asked = attempt(messages=earlier, add_generation_prompt=True)
        written = before[len(asked) :].strip() if before.startswith(asked) else ""
        start = asked if before.startswith(asked) and not written else before
        if is_apart:
            yield len(start), len(text) - len(after), written, is_open
        else:
            yield len(text), len(text), "", False


def _left_out(
    text: str, mark: str, variables: dict[str, Any], answers: list[int], attempt: Callable[..., str]
) -> Iterator[str]:
    """Name the parts of a conversation that make no difference to the text; ``answers`` are looked at elsewhere."""
    messages = variables["messages"]
    if variables["tools"] and attempt(tools=None) == text:
        yield "the tools"
    for number, message in enumerate(messages):
        part = f"message {number}"
        other = message | {"content": mark}
        if message.get("tool_calls"):
            part = f"the tool_calls of message {number}"
            other = {name: value for name, value in message.items() if name != "tool_calls"}
        elif number in answers:
            continue
        if attempt(messages=[*messages[:number], other, *messages[number + 1 :]]) == text:
            yield part


def _reply(template: str, variables: dict[str, Any], answers: list[int]) -> dict[str, Any]:
    """The ``text`` and its ``spans``, of tags or of ``answers``; or ``refused`` or ``error``, why there is none.

    With ``answers``, ``left_out`` names the parts of the conversation that are not in the text.
    """
    try:
        text, tagged = _render(template, variables), _Generation.spans
        left_out = []
        if answers and len(answers) < sum(
            message["role"] == "assistant" for message in variables["messages"]
        ):
            tagged = []  # nothing tells whose they are
        spans = [(*span, "", False) for span in tagged]
        if answers:
            attempt = functools.partial(_attempt, template, variables)
            mark = next(
                char for char in map(chr, range(0x2600, sys.maxunicode)) if char not in text
            )
            spans = spans or [*_answer_spans(text, mark, variables["messages"], answers, attempt)]
            left_out = [*_left_out(text, mark, variables, answers, attempt)]
        return {"text": text, "spans": spans, "is_tagged": bool(tagged), "left_out": left_out}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is not Jinja: {error.message} in line {error.lineno}"}
    except SecurityError as error:
        return {"error": f"was stopped: {error}"}
    except RecursionError:
        return {"error": "was stopped: it is nested too deep, or calls itself without end"}
    except MemoryError:
        raise
    except Exception as error:  # whatever someone's program may raise
        refused = type(error) is jinja2.TemplateError  # others are of its subclasses
        return (
            {"refused": str(error)}
            if refused
            else {"error": f"failed: {error or type(error).__name__}"}
        )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it means the parent
    set_timer = getattr(signal, "setitimer", lambda which, seconds: None)  # Windows has none
    with contextlib.suppress(ImportError, ValueError, OSError):  # nor has every system these
        import resource

        signal.signal(
            signal.SIGPROF, signal.SIG_DFL
        )  # what the timer sends: the end of the process
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    for line in sys.stdin.buffer:
        template, variables, answers, seconds = json.loads(line, object_hook=_with_arguments)
        set_timer(getattr(signal, "ITIMER_PROF", 0), seconds)  # of processor time
        reply = json.dumps(_reply(template, variables, answers), ensure_ascii=False)
        set_timer(getattr(signal, "ITIMER_PROF", 0), 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
