"""Structured output: which tokens may come next so that a text matches a JSON schema, an expression or a grammar."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
from jaxtyping import Int32

from jllama.config import Grammar as Grammar
from jllama.config import GrammarKind
from jllama.errors import JllamaError, UsageError, unknown_name
from jllama.tokenizers import Tokenizer

MAX_CHARACTERS = 2**17
"""How long a grammar may be: compiled, one takes up to 160 bytes a character, and a part of that for each text."""
MAX_KEPT = 2**18
"""How many characters the grammars have together whose compiled forms are kept, which then take up to 40 MiB."""
_kept: dict[tuple[Grammar, Tokenizer], Any] = {}
_kept_lock = threading.Lock()
_WHITESPACE = (
    r" |\n {0,40}"  # between JSON's signs: without a bound, a small model may go on with it forever
)
_TRIAL = """
import contextlib, sys
sys.path += sys.argv[1:]
from _lib import LLMatcher, LLTokenizer
with contextlib.suppress(ImportError, ValueError, OSError):  # not every system has these limits
    import resource
    for name, most in (("CORE", 0), ("CPU", 2), ("STACK", 2**21), ("AS", 2**30)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
LLMatcher(LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0).compute_bitmask()
"""
"""Compiles a grammar in a process of its own, with limits: some nest too deep for any stack, or would take hours."""


class Matcher:
    """A text under way that must match a grammar: ``allowed`` says what may come next, ``accept`` what came.

    Special tokens are never part of the text; one that can neither go on nor end may end, and has ``failed``. Raises
    ``UsageError`` if the grammar cannot be compiled or there are no stop ids, ``JllamaError`` without llguidance.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise UsageError(
                "a text that must match a grammar ends with a stop id, and there is none: give stop_ids"
            )
        self._matcher, self._ended = _compiled(grammar, tokenizer).deep_copy(), False
        size, self._stop_ids = tokenizer.vocab_size, frozenset(stop_ids)
        flags = np.zeros(
            (2, -(-size // 32) * 32), bool
        )  # what may be within the text, and what may end it
        flags[0, :size] = tokenizer.token_bytes() > 0
        flags[:, list(stop_ids)] = [[False], [True]]
        self._inside, self._ends = np.packbits(flags, axis=1, bitorder="little").view(np.int32)

    def allowed(self) -> Int32[np.ndarray, "words"]:
        """A bit for each token of the vocabulary, 32 to a word, lowest first; a stop id's where the text may end."""
        if self._ended:
            return self._ends
        words = (
            np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._inside)]
            & self._inside
        )
        return words | self._ends if self._matcher.is_accepting() or not words.any() else words

    def accept(self, token: int) -> None:
        """Go on behind a token; behind a stop id there is nothing but it."""
        self._ended = self._ended or token in self._stop_ids
        if not self._ended:
            self._matcher.consume_token(token)

    failed = property(
        lambda self: self._matcher.is_error(),
        doc="Whether it broke off: at a limit, or a wrong token.",
    )


def _compiled(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    """The matcher of llguidance at the beginning of a text: to be copied, as one that goes on changes.

    Those used last are kept, as many as have ``MAX_KEPT`` characters together.
    """
    key = grammar, tokenizer
    with _kept_lock:
        matcher = _kept.get(key)
    if matcher is None:
        matcher = _compile(grammar, tokenizer)
    with _kept_lock:
        _kept.pop(key, None)
        _kept[key] = matcher  # as the last one
        while sum(len(kept.text) for kept, _ in _kept) > MAX_KEPT:
            del _kept[next(iter(_kept))]
    return matcher


def _compile(grammar: Grammar, tokenizer: Tokenizer) -> Any:
    kind, text = grammar
    if kind not in get_args(GrammarKind):
        raise unknown_name("kind of grammar", kind, get_args(GrammarKind))
    vocabulary = _vocabulary(tokenizer)
    from llguidance import LLMatcher, LLParserLimits, _lib

    try:
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are served"
            )
        if kind == "json_schema":
            made = LLMatcher.grammar_from_json_schema(
                text, {"whitespace_pattern": _WHITESPACE}, {"lenient": False}
            )
            json.loads(text, object_hook=_check_properties, parse_int=_check_integer)
            text = f"start: %json {json.dumps(json.loads(made)['grammars'][0]['json_schema'])}"
        elif kind == "regex":
            text = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        program = [sys.executable, "-I", "-S", "-c", _TRIAL, str(Path(_lib.__file__).parent)]
        subprocess.run(program, input=text.encode(), check=True, capture_output=True, timeout=20)
        text += '\n%llguidance {"no_forcing": true}'  # a text may be cut into tokens in all ways, not in one alone
        limits = LLParserLimits(
            max_items_in_row=20_000, verbose_errors=False
        )  # 2,000 are 500 optional properties
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        matcher.compute_bitmask()
        if not (error := matcher.get_error()):
            return matcher
    except ValueError as fault:
        error = str(fault)
    except subprocess.SubprocessError:
        error = "it takes over 2 s or 1 GiB, or is nested too deep"
    lines = error.splitlines()
    reason = next((line[7:] for line in lines if line.startswith("error: ")), lines[0]).rpartition(
        "JSON schema: "
    )[2]
    reason = "no text matches it" if reason == "NoExtensionBias" else reason[:200]
    raise UsageError(
        f"the grammar ({kind}) cannot be compiled, give one that llguidance can serve: {reason}"
    )


def _check_integer(digits: str) -> int:
    """Raise ValueError for what llguidance would round."""
    if abs(number := int(digits)) > 2**53:
        raise ValueError(f"{number} is beyond 2**53, where not every whole number is a double")
    return number


def _check_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Raise ValueError for what llguidance counts wrongly: properties of which one may come twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int | float) and least > max(
        1, len(required) if isinstance(required, list) else 0
    ):
        raise ValueError(f"minProperties is {least}, and not as many are required")
    return schema


@functools.lru_cache(4)
def _vocabulary(tokenizer: Tokenizer) -> Any:
    """The tokens as llguidance has them: large. It is never asked to cut a text into them."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise JllamaError(
            "a grammar needs the package llguidance: pip install 'jllama[grammar]'"
        ) from None
    pieces, ends = (
        tokenizer.pieces,
        {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id},
    )
    special_ids = [id for id, piece in enumerate(pieces) if not piece]
    return LLTokenizer(
        TokenizerWrapper(SimpleNamespace(tokens=pieces, special_token_ids=special_ids, **ends))
    )
