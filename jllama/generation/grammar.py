"""Structured output: the tokens that may come next in a text that must match a grammar.

Grammars are JSON schemas, regular expressions and llguidance's dialect of Lark.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
from jaxtyping import Int32

from jllama.core import JllamaError, UsageError
from jllama.generation.sampling_params import Grammar as Grammar
from jllama.generation.sampling_params import GrammarKind
from jllama.system.errors import unknown_name
from jllama.tokenizers.base import Tokenizer

MAX_CHARACTERS = 2**17
"""Limit of a grammar's length: it takes up to 160 bytes a character, and more for each text."""
MAX_CACHED_CHARACTERS = 2**18
"""Limit of the length of all grammars whose compiled forms are cached, which take up to 40 MiB."""
_cache: dict[tuple[Grammar, Tokenizer], Any] = {}
_cache_lock = threading.Lock()
_WHITESPACE = r" |\n {0,40}"
"""Between JSON's tokens; without a limit, a small model may repeat it forever."""
_WITHOUT_EFFECT = {
    "propertyNames": [{}, True, {"type": "string"}],
    "uniqueItems": [False],
    "unevaluatedProperties": [{}, True],
}
"""Keywords that llguidance lacks, and the values of each that allow everything."""
_DATA = {"const", "enum", "default", "example", "examples"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"^(.{{5}}(0[13-9]|1.)-..|.{{5}}02-([01].|2[0-8])|{_LEAP_YEAR}-02-29)"
_FORMATS = {"date": _DATE, "time": "^.{6}[0-5]", "date-time": _DATE + ".{7}[0-5]"}
"""What llguidance's formats lack: a leap day is in a leap year, and seconds end at 59."""
_CLASS = re.compile(
    r"""(\\[pP](?:\{[^}]*\}|.)  # of Unicode
    | \[\^?+\]?+(?:\\.|[^\[\]\\]|\[(?:\\.|[^\[\]\\])*\])*\])  # in brackets, perhaps with others
    | \\.""",
    re.DOTALL | re.VERBOSE,
)
"""A character class of a regular expression, the group, or else an escaped character."""
_TRIAL = """
import contextlib, sys
sys.path += sys.argv[1:]
from _lib import LLMatcher, LLTokenizer
with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has these limits
    import resource
    for name, limit in (("CORE", 0), ("CPU", 2), ("STACK", 2**21), ("AS", 2**30)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0).compute_bitmask()
"""
"""Compiles a grammar under limits: some nest too deep for any stack, or would take hours."""


class Matcher:
    """A text in progress that must match a grammar.

    ``allowed`` returns the tokens that may come next, ``accept`` adds one. Special tokens are never
    part of the text. A text that can neither continue nor end may end, and has ``failed``.

    Raises:
        UsageError: the grammar cannot be compiled, or there are no stop ids.
        JllamaError: llguidance is not installed.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise UsageError(
                "a text that must match a grammar ends with a stop id, and there is none: "
                "give stop_ids"
            )
        self._matcher = _compiled(grammar, tokenizer).deep_copy()
        self._is_ended = False
        self._stop_ids = frozenset(stop_ids)
        size = tokenizer.vocab_size
        flags = np.zeros((2, -(-size // 32) * 32), bool)
        inside, ends = flags  # the tokens that may be in the text, and those that may end it
        inside[:size] = tokenizer.token_bytes() > 0
        inside[list(stop_ids)] = False
        ends[list(stop_ids)] = True
        self._inside, self._ends = np.packbits(flags, axis=1, bitorder="little").view(np.int32)

    def allowed(self) -> Int32[np.ndarray, "words"]:
        """Return a bit for each token of the vocabulary, 32 to a word, the lowest bit first.

        The bits of stop ids are set where the text may end.
        """
        if self._is_ended:
            return self._ends
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        words = mask[: len(self._inside)] & self._inside
        may_end = self._matcher.is_accepting() or not words.any()
        return words | self._ends if may_end else words

    def accept(self, token: int) -> None:
        """Add a token to the text; after a stop id, only that stop id is allowed."""
        self._is_ended = self._is_ended or token in self._stop_ids
        if not self._is_ended:
            self._matcher.consume_token(token)

    @property
    def failed(self) -> bool:
        """Whether the text broke off, at a limit or a wrong token."""
        return self._matcher.is_error()


def _compiled(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    """Return llguidance's matcher at the start of a text, to be copied.

    Matchers used last are cached, up to ``MAX_CACHED_CHARACTERS``.
    """
    key = grammar, tokenizer
    with _cache_lock:
        matcher = _cache.get(key)
    if matcher is None:
        matcher = _compile(grammar, tokenizer)
    with _cache_lock:
        _cache.pop(key, None)
        _cache[key] = matcher  # as the last one
        while sum(len(cached.text) for cached, _ in _cache) > MAX_CACHED_CHARACTERS:
            del _cache[next(iter(_cache))]
    return matcher


def _compile(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    """Compile a grammar, first in a process of its own under limits."""
    kind, text = grammar
    if kind not in get_args(GrammarKind):
        raise unknown_name("kind of grammar", kind, get_args(GrammarKind))
    vocabulary = _vocabulary(tokenizer)
    from llguidance import LLMatcher, LLParserLimits, _lib

    try:
        text = _to_lark(kind, text)
        program = [sys.executable, "-I", "-S", "-c", _TRIAL, str(Path(_lib.__file__).parent)]
        subprocess.run(program, input=text.encode(), check=True, capture_output=True, timeout=20)
        # All ways to cut a text into tokens are allowed, not only the tokenizer's.
        text += '\n%llguidance {"no_forcing": true}'
        # The default of 2,000 items allows 500 optional properties.
        limits = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
        error = matcher.get_error()
        if not error:
            return matcher
    except ValueError as problem:
        error = str(problem)
    except (subprocess.SubprocessError, RecursionError):
        error = "it takes over 2 s or 1 GiB, or is nested too deep"
    lines = error.splitlines()
    reason = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    reason = reason.rpartition("JSON schema: ")[2]
    if reason == "NoExtensionBias":
        reason = "no text matches it"
    raise UsageError(
        f"the grammar ({kind}) cannot be compiled, give one that llguidance can serve: "
        f"{reason[:200]}"
    )


def _to_lark(kind: str, text: str) -> str:
    """Return a grammar in llguidance's dialect of Lark, or raise ``ValueError``."""
    from llguidance import LLMatcher

    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are served")
    if kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
    if kind == "json_schema":
        compiled = LLMatcher.grammar_from_json_schema(
            text, {"whitespace_pattern": _WHITESPACE}, {"lenient": False}
        )
        json.loads(text, parse_int=_check_integer)
        schema = json.loads(compiled)["grammars"][0]["json_schema"]
        text = f"start: %json {json.dumps(schema)}"
    lark, *parts = text.split("%json")
    for part in parts:
        body = part.lstrip()
        schema, size = json.JSONDecoder(parse_int=_check_integer).raw_decode(body)
        lark += f"%json {json.dumps(_enforceable(schema))}{body[size:]}"
    return lark


def _check_integer(digits: str) -> int:
    """Return an integer, or raise ``ValueError`` if llguidance would round it."""
    number = int(digits)
    if abs(number) > 2**53:
        raise ValueError(f"{number} is beyond 2**53, where not every whole number is a double")
    return number


def _enforceable(value: Any, key: str = "") -> Any:
    """Return a schema as llguidance enforces it completely, or raise ``ValueError``.

    Keywords without an effect are left out; formats and patterns get what they lack.

    Args:
        value: a schema, or a part of one.
        key: the keyword that it belongs to.
    """
    if key == "pattern" and isinstance(value, str):
        return _exact_pattern(value)
    if key in _DATA or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [_enforceable(item) for item in value]
    if key == "patternProperties":
        value = {_exact_pattern(name): item for name, item in value.items()}
    if key in _NAMED:
        return {name: _enforceable(item) for name, item in value.items()}
    _check_properties(value)
    schema = {
        name: _enforceable(item, name)
        for name, item in value.items()
        if item not in _WITHOUT_EFFECT.get(name, [])
    }
    needed = _FORMATS.get(str(value.get("format")))
    if needed:
        schema["allOf"] = [{"allOf": schema.get("allOf", [{}])}, {"pattern": needed}]
    return schema


def _exact_pattern(pattern: str) -> str:
    """Return a pattern whose classes do not match U+0000, or raise ``ValueError``.

    In a string of JSON, llguidance lets a class of all control characters match every escape,
    also that of a quotation mark or a backslash which the class excludes.
    """
    if "[" in _CLASS.sub("", pattern):
        raise ValueError("a pattern has a class inside a class inside a class, or an open one")
    return _CLASS.sub(lambda match: rf"[{match[1]}&&[^\x00]]" if match[1] else match[0], pattern)


def _check_properties(schema: dict[str, Any]) -> None:
    """Raise ``ValueError`` if llguidance would count an object's properties wrongly.

    It counts a property that comes twice as two.
    """
    minimum = schema.get("minProperties")
    required = schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(minimum, int | float) and minimum > max(1, num_required):
        raise ValueError(f"minProperties is {minimum}, and fewer properties are required")


@functools.lru_cache(4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Return the tokens in llguidance's form, which is large; it is never asked to tokenize."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise JllamaError(
            "a grammar needs the package llguidance: pip install 'jllama[grammar]'"
        ) from None
    pieces = tokenizer.pieces
    tokens = SimpleNamespace(
        tokens=pieces,
        special_token_ids=[id for id, piece in enumerate(pieces) if not piece],
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
    )
    return LLTokenizer(TokenizerWrapper(tokens))
