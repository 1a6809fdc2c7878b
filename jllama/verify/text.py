"""The text that a user's checkpoint is tried on, and what its tokenizer makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from jllama import oracle
from jllama.tokenizers import Tokenizer

PROSE = (
    "Once there was an old woman who lived in a small house at the edge of the village, close to the trees. Every"
    " morning she got up before the sun, lit the fire, and went out to feed her hens. One cold day in winter she "
    "found that the door of the hen house was open, and that all the hens were gone. There was snow on the "
    "ground, and in the snow she could see the marks of many little feet. She put on her coat and her boots, took"
    " a stick in her hand, and followed the marks across the field, over the bridge, and up the hill. At the top "
    "of the hill stood a boy with a basket of corn. The hens were all around him, eating as fast as they could. "
    '"I am sorry," said the boy. "I was taking this corn to my father, but the basket has a hole in it. I did not'
    ' know that they were behind me until I stopped to rest." The old woman looked at the boy, and at the hens, '
    'and at the long yellow line of corn that went all the way down the hill. Then she began to laugh. "Come home'
    ' with me," she said. "I will mend your basket, and you can help me to carry the hens. When we are done, '
    'there will be hot soup for both of us, and some bread." So they went down together, and the boy never forgot'
    " that day."
)
"""In plain words, so that a model trained on nothing but children's stories, too, should find it easy."""

HARD = "Füße, naïve — 北京で、안녕 мир 👩‍👩‍👧 x²\tdef f(x):\n    return  {x: [1,  23]}\r\n\n   <s> e\u0301 \u00a0 end  "
"""What tokenizers get wrong: accents, scripts, emoji, code, runs of spaces, the names of control tokens."""


KNOWN = 0.5
"""Of a text whose kind it learnt, a model needs less than this share of the bits that byte frequencies need.

Measured on SmolLM2-135M: 0.22 on the text above, 0.20 to 0.36 on a licence, Python and Markdown, 0.41 to 0.43 on
French, Russian and Chinese, of which it saw little. With its first layer zeroed or swapped with the second or the
sixteenth, with layers 5 and 25 or 15 and 29 swapped, or with another model's tokenizer: 0.71 and more. What does little
harm does not show: with two neighbours in the middle swapped it is 0.22 to 0.23.
"""
EASY = 0.35
"""The same for the text above. With layers 1 and 2, 10 and 20 or 28 and 29 swapped, SmolLM2 needs 0.38 to 0.47."""
ENOUGH_BYTES = 100
"""Of a shorter text, too much depends on its first words: SmolLM2 needs up to 0.51 of 50 bytes, 0.41 of 100."""
FEW_BITS = 1.0
"""Per byte: no model that predicts a text so well is damaged, however repetitive the text."""


class Fit(NamedTuple):
    """How well a model predicts a text.

    Args:
        perplexity: of each token, given those before it.
        bits_per_byte: the same per byte of UTF-8.
        baseline_bits_per_byte: ``byte_entropy`` of the text.
        text_bytes: how many bytes were predicted.
    """

    perplexity: float
    bits_per_byte: float
    baseline_bits_per_byte: float
    text_bytes: int


def measure_fit(logits: Float64[np.ndarray, "seq vocab"], tokens: Sequence[int], tokenizer: Tokenizer) -> Fit | None:
    """How well logits predict the tokens they were computed from, each but the first; None if those spell no byte."""
    targets = np.asarray(tokens[1:], np.int64)
    text_bytes = int(tokenizer.token_bytes()[targets].sum())
    if not text_bytes:
        return None
    nats, count = oracle.cross_entropy(logits[:-1], targets, np.ones(len(targets), bool))
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(nats / count))
    return Fit(perplexity, nats / math.log(2) / text_bytes, byte_entropy(tokenizer.decode(tokens)), text_bytes)


def judge_fit(fit: Fit, *, built_in: bool, consistent: bool) -> tuple[list[str], list[str]]:
    """Findings and problems: whether a model predicts a text as one does that learnt its kind.

    Args:
        fit: what was measured.
        built_in: whether the text was ``PROSE``.
        consistent: whether jllama's layers equal the oracle's.
    """
    if fit.text_bytes < ENOUGH_BYTES:
        return [
            f"{fit.text_bytes} bytes of text are too few to judge the model by its perplexity: give at least "
            f"{ENOUGH_BYTES} with --text"
        ], []
    limit, easy = (max(share * fit.baseline_bits_per_byte, FEW_BITS) for share in (KNOWN, EASY))
    found = f"perplexity {fit.perplexity:,.1f} ({fit.bits_per_byte:.2f} bits per byte)"
    other_text = "if the model was trained on another kind of text, give some of that with --text"
    if fit.bits_per_byte <= (easy if built_in else limit):
        return [], []
    if fit.bits_per_byte <= limit:
        return [
            f"{found} is high for plain English prose, of which a model trained on such text gives under {easy:.2f} "
            f"bits per byte; {other_text}"
        ], []
    loaded = (
        "the loaded model is self-consistent (its layers equal the float64 oracle's), but its " if consistent else ""
    )
    return [], [
        f"{loaded}{found} is out of line with the text, for which byte frequencies alone give "
        f"{fit.baseline_bits_per_byte:.2f} bits per byte and a model that learnt its kind under {limit:.2f}: weights "
        f"may be damaged or untrained, layers in the wrong order, or the tokenizer another model's; {other_text}"
    ]


def tokenizer_findings(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Findings and problems: whether texts come back from the tokenizer as they were.

    A tokenizer that cannot give back plain English is broken; one that normalises hard text may be meant to.
    """
    plain, hard = (_round_trip_difference(tokenizer, text) for text in (PROSE, HARD))
    findings = [f"the tokenizer changes some text: {hard}"] if hard else []
    problems = [f"the tokenizer does not give back plain English: {plain}"] if plain else []
    return findings, problems


def _round_trip_difference(tokenizer: Tokenizer, text: str) -> str:
    """Where ``decode(encode(text))`` first differs from ``text``, in words; empty if it does not."""
    found = tokenizer.decode(tokenizer.encode(text))
    if found == text:
        return ""
    start = next((i for i, (one, two) in enumerate(zip(found, text, strict=False)) if one != two), len(found))
    return f"{text[start : start + 12]!r} came back as {found[start : start + 12]!r}"


def byte_entropy(text: str) -> float:
    """Bits per byte of the best code that knows nothing of a text but how often each of its UTF-8 bytes occurs.

    Shannon 1948, section 6; about 4.2 for English prose.
    """
    counts = np.bincount(np.frombuffer(text.encode(), np.uint8))
    shares = counts[counts > 0] / counts.sum()
    return math.fsum(-shares * np.log2(shares))
