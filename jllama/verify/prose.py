"""The text that a user's checkpoint is run on, and what its tokenizer makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from jllama.tokenizers import Tokenizer

PROSE = " ".join(Path(__file__).with_name("prose.txt").read_text(encoding="utf-8").split())
"""In plain words, so that a model trained on nothing but children's stories, too, should find it easy."""

HARD = "Füße, naïve — 北京で、안녕 мир 👩‍👩‍👧 x²\tdef f(x):\n    return  {x: [1,  23]}\r\n\n   <s> e\u0301 \u00a0 end  "
"""What tokenizers get wrong: accents, scripts, emoji, code, runs of spaces, the names of control tokens."""


def tokenizer_findings(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Findings and problems: whether texts come back from the tokenizer as they were.

    A tokenizer that cannot give back plain English is broken; one that normalizes hard text may be meant to.
    """
    problem, finding = "the tokenizer does not give back plain English: ", "the tokenizer changes some text: "
    problems, findings = (_differences(tokenizer, *pair) for pair in ((PROSE, problem), (HARD, finding)))
    return findings, problems


def _differences(tokenizer: Tokenizer, text: str, said: str) -> list[str]:
    """A sentence for where ``decode(encode(text))`` first differs from ``text``, if it does."""
    if (decoded := tokenizer.decode(tokenizer.encode(text))) == text:
        return []
    start = next((i for i, (one, two) in enumerate(zip(decoded, text, strict=False)) if one != two), len(decoded))
    return [f"{said}{text[start : start + 12]!r} came back as {decoded[start : start + 12]!r}"]


def byte_entropy(text: str) -> float:
    """Bits per byte of the best code that knows nothing of a text but how often each of its UTF-8 bytes occurs.

    Shannon 1948, section 6; about 4.2 for English prose.
    """
    counts = np.bincount(np.frombuffer(text.encode(), np.uint8))
    shares = counts[counts > 0] / counts.sum()
    return math.fsum(-shares * np.log2(shares))
