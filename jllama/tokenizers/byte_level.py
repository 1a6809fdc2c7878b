"""Hugging Face's ``tokenizer.json``, above all of byte-level BPE, the kind of Llama 3 and SmolLM2.

Text is split by a regular expression, and the UTF-8 bytes of each part are merged pair by pair. In files each byte is
written as one printable character (``BYTE_CHARS``). Source: Radford et al. 2019 (GPT-2), section 2.2.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Vocab = Mapping[str, int]  # ids of the tokens that merges produce, as files write them
Merges = Sequence[tuple[str, str]]  # pairs of tokens, first the one to merge first
Added = Sequence[tuple[int, str, bool]]  # id, text and whether it is special, of tokens that no merge produces
Bos = tuple[int, str] | None  # id and text of the token that begins a text; None if none is added
Fields = Mapping[str, Any]

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text; from Meta's reference tokenizer."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The character that stands for each byte: itself where it is printable, else the next one from U+0100."""

CHAR_BYTES = {char: byte for byte, char in enumerate(BYTE_CHARS)}

_SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama-bpe": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTE_LEVEL | {"use_regex": False}]},
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
}
"""llama.cpp's name of each known way to split text, and how it is configured in Hugging Face's library."""

WHOLE_WORDS_FIRST = "llama-bpe"
"""With this one alone, a part of the text that is a token is taken as it is, unmerged."""


def pre_tokenizer_name(tokenizer: Fields) -> str | None:
    """The name in ``PRE_TOKENIZERS`` of a ``tokenizer.json``'s way to split text; None if it is another."""

    def essence(part: Any) -> Any:
        """All fields but ``trim_offsets``, which does not decide ids."""
        return json.loads(json.dumps(part), object_hook=lambda fields: fields | {"trim_offsets": None})

    actual = essence(tokenizer["pre_tokenizer"])
    return next((name for name, part in PRE_TOKENIZERS.items() if essence(part) == actual), None)


def merges_of_ranks(texts: Sequence[str], ids: Vocab | None = None) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, by the rank (the index in ``texts``) of what they join to.

    This is tiktoken's encoding, which always joins the pair of the lowest rank, as a list of merges. Pairs that join to
    the same token are in the order of ``ids``, or else of their ranks.
    """
    ids = ids or {text: rank for rank, text in enumerate(texts)}
    merges = []
    for text in texts:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def byte_level_json(vocab: Vocab, merges: Merges, added: Added, pre: str, bos: Bos) -> str:
    """The ``tokenizer.json`` of a byte-level BPE, which splits text as ``PRE_TOKENIZERS[pre]`` says."""
    parts = {"pre_tokenizer": PRE_TOKENIZERS[pre], "decoder": _BYTE_LEVEL}
    return tokenizer_json(vocab, merges, added, bos, parts, {"ignore_merges": pre == WHOLE_WORDS_FIRST})


def tokenizer_json(vocab: Vocab, merges: Merges, added: Added, bos: Bos, parts: Fields, model: Fields) -> str:
    """The ``tokenizer.json`` of a BPE: ``parts`` and ``model`` are what differs from a bare one."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": id, "content": text} | flags | {"special": special} for id, text, special in added]
    bare = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    bare |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None}
    content |= {"pre_tokenizer": None, "post_processor": post_processor(bos), "decoder": None}
    model = bare | {**model, "vocab": vocab, "merges": merges}
    return json.dumps(content | {**parts, "model": model}, ensure_ascii=False)


def post_processor(bos: Bos) -> dict[str, Any]:
    """The part of a ``tokenizer.json`` that begins a text with ``bos``, or with nothing."""
    first, second = ([{"Sequence": {"id": name, "type_id": n}}] for n, name in enumerate("AB"))
    special = {}
    if bos is not None:
        id, text = bos
        first.insert(0, {"SpecialToken": {"id": text, "type_id": 0}})
        second.insert(0, {"SpecialToken": {"id": text, "type_id": 1}})
        special = {text: {"id": text, "ids": [id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": first, "pair": first + second, "special_tokens": special}
