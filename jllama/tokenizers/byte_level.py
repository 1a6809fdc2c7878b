"""Byte-level BPE, the kind of Llama 3 and SmolLM2, in the terms of Hugging Face's ``tokenizer.json``.

Text is split by a regular expression, and the UTF-8 bytes of each part are merged pair by pair. In files each byte is
written as one printable character (``BYTE_CHARS``). Source: Radford et al. 2019 (GPT-2), section 2.2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

LLAMA3_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Llama 3 splits text; from Meta's reference tokenizer."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The character that stands for each byte: itself where it is printable, else the next one from U+0100."""

CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
_DIGITS = {"type": "Digits", "individual_digits": True}

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama-bpe": {"type": "Sequence", "pretokenizers": [_SPLIT, _byte_level(use_regex=False)]},
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _byte_level(use_regex=True)]},
    "gpt-2": _byte_level(use_regex=True),
}
"""llama.cpp's name of each known way to split text, and what Hugging Face's library is told to do the same."""

WHOLE_WORDS_FIRST = "llama-bpe"
"""With this one alone, a part of the text that is a token is taken as it is, unmerged."""


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """Which of ``PRE_TOKENIZERS`` a ``tokenizer.json`` has; None if another."""

    def essence(part: Any) -> Any:
        if not isinstance(part, dict):
            return None
        if part["type"] == "Sequence":
            return [essence(each) for each in part["pretokenizers"]]
        defaults = {"use_regex": True} if part["type"] == "ByteLevel" else {}  # GPT-2's own file does not say it
        return defaults | {name: value for name, value in part.items() if name != "trim_offsets"}

    found = essence(tokenizer.get("pre_tokenizer"))
    return next((name for name, known in PRE_TOKENIZERS.items() if essence(known) == found), None)


def merges_of_ranks(texts: Sequence[str], ids: Mapping[str, int] | None = None) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, by the rank (the place in ``texts``) of what they join to.

    An encoding that always joins the pair of the lowest rank, tiktoken's, written as a list of merges. Pairs that join
    to the same token are in the order of ``ids``, or else of their ranks.
    """
    ids = ids or {text: rank for rank, text in enumerate(texts)}
    merges = []
    for text in texts:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def byte_level_json(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Sequence[tuple[int, str, bool]],
    pre: str,
    bos: tuple[int, str] | None,
) -> str:
    """A ``tokenizer.json``.

    Args:
        vocab: ids of the tokens that merges make, written with ``BYTE_CHARS``.
        merges: pairs of tokens, first the one to merge first.
        added: id, text and whether it is special of the tokens that no merge makes.
        pre: one of ``PRE_TOKENIZERS``.
        bos: id and text of the token that begins a text; None if none is added.
    """
    split, decoder = PRE_TOKENIZERS[pre], _byte_level(use_regex=True)
    return tokenizer_json(vocab, merges, added, bos, decoder, split, ignore_merges=pre == WHOLE_WORDS_FIRST)


def tokenizer_json(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Sequence[tuple[int, str, bool]],
    bos: tuple[int, str] | None,
    decoder: Mapping[str, Any],
    pre_tokenizer: Mapping[str, Any] | None = None,
    normalizer: Mapping[str, Any] | None = None,
    unk_token: str | None = None,
    ignore_merges: bool = False,
) -> str:
    """A ``tokenizer.json`` of any BPE: as in ``byte_level_json``, and with ``unk_token`` one with byte fallback."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text} | flags | {"special": special} for id, text, special in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(bos),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk_token,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": unk_token is not None,
            "byte_fallback": unk_token is not None,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    }
    return json.dumps(whole, ensure_ascii=False)


def post_processor(bos: tuple[int, str] | None) -> dict[str, Any]:
    """The part of a ``tokenizer.json`` that begins a text with the token ``bos``, an id and its text, or with none."""
    first: list[Any] = [{"Sequence": {"id": "A", "type_id": 0}}]
    second: list[Any] = [{"Sequence": {"id": "B", "type_id": 1}}]
    if bos is not None:
        first.insert(0, {"SpecialToken": {"id": bos[1], "type_id": 0}})
        second.insert(0, {"SpecialToken": {"id": bos[1], "type_id": 1}})
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {} if bos is None else {bos[1]: {"id": bos[1], "ids": [bos[0]], "tokens": [bos[1]]}},
    }
