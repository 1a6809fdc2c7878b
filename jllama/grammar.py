"""Structured output: which tokens may come next so that a text matches a JSON schema, an expression or a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from jllama.tokenizers import Tokenizer


class Grammar(NamedTuple):
    """What a text must match, from its first character to its end."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str  # the schema as JSON, the regular expression, or the grammar in llguidance's dialect of Lark


class Matcher:
    """A text under way that must match a grammar: ``allowed`` says what may come next, ``accept`` what came.

    Raises ``UsageError`` if the grammar cannot be compiled, ``JllamaError`` without the package llguidance.
    """

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, stop_ids: Sequence[int]) -> None: ...

    def allowed(self) -> Int32[np.ndarray, "words"]:
        """A bit for each token of the vocabulary, 32 to a word, lowest first; a stop id's where the text may end."""
        raise NotImplementedError

    def accept(self, token: int) -> None:
        """Go on behind a token."""
