"""The program that ``jllama.templates.template`` renders with, in a process of its own.

It is run by its path, with the bytes of memory it may take and the folders that jinja2 is in, and ends with its stdin.
Requests and replies are lines of JSON. What a template may use: transformers, ``utils/chat_template_utils.py``.
"""

import contextlib
import datetime
import functools
import json
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


_environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
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


def _answer_spans(text: str, template: str, variables: dict[str, Any], answers: list[int]) -> Iterator[Any]:
    """Where each of the messages ``answers`` stands: what changes with it, and white space before that; or nowhere."""

    def attempt(messages: list[Any], prompt: bool) -> str:
        with contextlib.suppress(jinja2.TemplateError):
            return _render(template, variables | {"messages": messages, "add_generation_prompt": prompt})
        return ""

    mark = next(char for char in map(chr, range(0x2600, sys.maxunicode)) if char not in text)
    for index in answers:
        earlier, (answer, *later) = variables["messages"][:index], variables["messages"][index:]
        asked, other = attempt(earlier, True), {"role": answer["role"], "content": mark}
        before, found, after = attempt([*earlier, other, *later], False).partition(mark)
        is_apart = found and text.startswith(before) and text[len(before) :].endswith(after)
        start = asked if before.startswith(asked) and not before[len(asked) :].strip() else before
        yield (len(start), len(text) - len(after)) if is_apart else (len(text), len(text))


def _reply(template: str, variables: dict[str, Any], answers: list[int]) -> dict[str, Any]:
    """The ``text`` and its ``spans``, ``tagged`` or of ``answers``; or ``refused`` or ``error``, why there is none."""
    try:
        text, tagged = _render(template, variables), _Generation.spans
        spans = tagged or [*_answer_spans(text, template, variables, answers)]
        return {"text": text, "spans": spans, "tagged": bool(tagged)}
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
        return {"refused": str(error)} if refused else {"error": f"failed: {error or type(error).__name__}"}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it means the parent
    set_timer = getattr(signal, "setitimer", lambda which, seconds: None)  # Windows has none
    with contextlib.suppress(ImportError, ValueError, OSError):  # nor has every system these
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # what the timer sends: the end of the process
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    for line in sys.stdin.buffer:
        template, variables, answers, seconds = json.loads(line)
        set_timer(getattr(signal, "ITIMER_PROF", 0), seconds)  # of processor time
        reply = json.dumps(_reply(template, variables, answers), ensure_ascii=False)
        set_timer(getattr(signal, "ITIMER_PROF", 0), 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
