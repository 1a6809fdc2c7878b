"""The program with which ``jllama.templates.template`` renders, in a process of its own.

It is started by its path. Its arguments are the bytes of memory that it may use and the folders
that jinja2 is in. It ends when its stdin ends. Requests and replies are lines of JSON. A template
may use the functions that transformers gives it, ``utils/chat_template_utils.py``.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import re
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
    """The arguments of a call: an object, which becomes JSON when a template adds it to a text."""

    def __radd__(self, text: str) -> str:
        return text + json.dumps(self, ensure_ascii=False)


def _with_arguments(fields: dict[str, Any]) -> dict[str, Any]:
    if isinstance(fields.get("arguments"), dict):
        fields["arguments"] = _Arguments(fields["arguments"])
    return fields


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks an answer, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it
    position = 0  # in the text so far
    spans: list[tuple[int, int]] = []  # noqa: RUF012 - of the text so far

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
_compiled = functools.lru_cache(maxsize=8)(_environment.from_string)


def _render(template: str, variables: dict[str, Any]) -> str:
    """Return the text, and set ``_Generation.spans`` to the places of the tags in it.

    The template's ``strftime_now`` takes the date from its comment ``{# date: 2026-11-27 #}``.
    """
    _Generation.position = 0
    _Generation.spans = []
    dated = re.search(r"\{# date: (\d+-\d+-\d+) #\}", template)
    now = datetime.datetime.fromisoformat(dated[1]) if dated else datetime.datetime.now()
    variables = variables | {"strftime_now": now.strftime}
    parts = []
    for part in _compiled(template).generate(variables):
        parts.append(part)
        _Generation.position += len(part)
    return "".join(parts)


def _attempt(template: str, variables: dict[str, Any], **others: Any) -> str:
    """Return the text with other variables, or an empty text if the template refuses them."""
    with contextlib.suppress(
        jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError
    ):
        return _render(template, variables | others)
    return ""


def _answer_spans(
    text: str, mark: str, messages: list[Any], answers: list[int], attempt: Callable[..., str]
) -> Iterator[Any]:
    """Yield the span of each of the messages ``answers`` in the text, see ``AnswerSpan``.

    A span is what changes when the answer is replaced by ``mark``, a character that is not in the
    text, and white space before that. Thoughts that the template writes are a part of it. It is
    empty if the answer is no part of its own.
    """
    for index in answers:
        # 1) Put the mark in the place of the answer, to find the text around it.
        earlier = messages[:index]
        answer, *later = messages[index:]
        other = {"role": answer["role"], "content": mark}
        before, match, after = attempt(messages=[*earlier, other, *later]).partition(mark)
        prompt = attempt(messages=earlier, add_generation_prompt=True)
        if not text.startswith(before):
            # The answer's thoughts stand where the template writes empty ones, or none.
            before = _common_start(before, text)
            if prompt and before.startswith(prompt):
                before = prompt
        is_apart = match and text.startswith(before) and text[len(before) :].endswith(after)

        # 2) If that fails for an answer with calls, compare with other calls.
        is_open = not is_apart and "tool_calls" in answer
        if is_open:
            # The template may refuse results without their call. So find the beginning without the
            # results, and the end by what stays the same when all calls are others. The end may
            # contain more of the template's own text.
            rest = itertools.dropwhile(lambda message: message["role"] != "user", later)
            before, match, _ = attempt(messages=[*earlier, other, *rest]).partition(mark)
            common = _common_start(before, text)
            if not before[len(common) :].strip():
                before = common
            function = {"name": mark, "arguments": {mark: 0}}
            calls = [call | {"function": function} for call in answer["tool_calls"]]
            changed = attempt(messages=[*earlier, answer | {"tool_calls": calls}, *later])
            after = _common_start(changed[::-1], text[::-1])[::-1]
            is_apart = match and mark in changed and text.startswith(before)

        # 3) Begin the span after the prompt, unless the template writes text between them.
        start = before
        written = ""
        if before.startswith(prompt):
            written = before[len(prompt) :].strip()
            if not written:
                start = prompt
        if is_apart:
            yield len(start), len(text) - len(after), written, is_open
        else:
            yield len(text), len(text), "", False


def _common_start(first: str, second: str) -> str:
    return os.path.commonprefix([first, second])  # noqa: RUF071 - of texts


def _left_out(
    text: str, mark: str, variables: dict[str, Any], answers: list[int], attempt: Callable[..., str]
) -> Iterator[str]:
    """Name the parts of a conversation that make no difference to the text.

    The contents of ``answers`` are not examined here.
    """
    messages = variables["messages"]
    if variables["tools"] and attempt(tools=None) == text:
        yield "the tools"
    for number, message in enumerate(messages):
        others = {}
        if message.get("reasoning_content"):
            others["the thoughts of "] = message | {"reasoning_content": mark}
        if message.get("tool_calls"):
            fields = {name: value for name, value in message.items() if name != "tool_calls"}
            others["the tool_calls of "] = fields
        elif number not in answers:
            others[""] = message | {"content": mark}
        for part, other in others.items():
            if attempt(messages=[*messages[:number], other, *messages[number + 1 :]]) == text:
                yield f"{part}message {number}"


def _answer(template: str, variables: dict[str, Any], answers: list[int]) -> dict[str, Any]:
    """Return the fields of ``Rendered``; without ``answers``, nothing is left out."""
    text = _render(template, variables)
    spans = [(*span, "", False) for span in _Generation.spans]
    is_tagged = bool(spans)
    left_out = []
    if answers:
        messages = variables["messages"]
        mark = next(char for char in map(chr, range(0x2600, sys.maxunicode)) if char not in text)
        attempt = functools.partial(_attempt, template, variables)
        if len(answers) < sum(message["role"] == "assistant" for message in messages):
            is_tagged = False  # tags do not tell which answer they belong to
        if not is_tagged:
            spans = [*_answer_spans(text, mark, messages, answers, attempt)]
        left_out = [*_left_out(text, mark, variables, answers, attempt)]
    return {"text": text, "spans": spans, "is_tagged": is_tagged, "left_out": left_out}


def _reply(template: str, variables: dict[str, Any], answers: list[int]) -> dict[str, Any]:
    """Return the fields of ``Rendered``, or why there is no text: ``refused`` or ``error``."""
    try:
        return _answer(template, variables, answers)
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is not Jinja: {error.message} in line {error.lineno}"}
    except SecurityError as error:
        return {"error": f"was stopped: {error}"}
    except RecursionError:
        return {"error": "was stopped: it is nested too deep, or calls itself without end"}
    except MemoryError:
        raise
    except Exception as error:  # any that the template's program may raise
        # raise_exception raises this class, jinja2 itself raises its subclasses.
        if type(error) is jinja2.TemplateError:
            return {"refused": str(error)}
        return {"error": f"failed: {error or type(error).__name__}"}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent
    # Windows has no timers, and some systems lack resource limits.
    set_timer = getattr(signal, "setitimer", lambda which, seconds: None)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the timer's signal ends the process
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    for line in sys.stdin.buffer:
        template, variables, answers, seconds = json.loads(line, object_hook=_with_arguments)
        set_timer(getattr(signal, "ITIMER_PROF", 0), seconds)  # of processor time
        reply = json.dumps(_reply(template, variables, answers), ensure_ascii=False)
        set_timer(getattr(signal, "ITIMER_PROF", 0), 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
