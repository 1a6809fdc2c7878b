"""The program that ``jllama.conversation.template`` renders with, in a process of its own.

It is run by its path, with the bytes of memory it may take and the folders that jinja2 is in. Requests come on stdin,
replies go to stdout, each a line of JSON; it ends with its stdin. Source of what a template may use: transformers,
``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import signal
import sys
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[2:]

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class _RefusedError(Exception):
    """The template's own ``raise_exception``."""


class _Environment(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, which marks an answer for training: here its content, nothing else."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(Namespace):
    """jinja2's, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have a name called self
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"it sets {name!r} in a namespace")
        super().__setitem__(name, value)


def _raise_exception(message: Any) -> None:
    raise _RefusedError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the type, which leads to others
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    return environment.from_string(template)


def _reply(request: dict[str, Any]) -> dict[str, str]:
    """The ``text``, or why there is none: it was ``refused``, or an ``error``. Out of memory, this process ends."""
    try:
        return {"text": _compiled(request["template"]).render(request["variables"])}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"is not Jinja: {error.message} in line {error.lineno}"}
    except SecurityError as error:
        return {"error": f"was stopped: {error}"}
    except _RefusedError as error:
        return {"refused": str(error)}
    except RecursionError:
        return {"error": "was stopped: it is nested too deep, or calls itself without end"}
    except MemoryError:
        raise
    except Exception as error:  # whatever someone's program may raise
        return {"error": f"failed: {error or type(error).__name__}"}


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it means the parent
    set_timer = getattr(signal, "setitimer", lambda which, seconds: None)  # Windows has none
    with contextlib.suppress(ImportError, ValueError, OSError):  # nor has every system these
        import resource

        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # what the timer sends: the end of the process
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        set_timer(getattr(signal, "ITIMER_PROF", 0), request["seconds"])  # of processor time
        reply = json.dumps(_reply(request), ensure_ascii=False)
        set_timer(getattr(signal, "ITIMER_PROF", 0), 0)
        sys.stdout.buffer.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _main()
