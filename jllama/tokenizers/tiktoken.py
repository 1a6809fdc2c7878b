"""tiktoken's ranks, the ``tokenizer.model`` of Llama 3 and 4.

Lines have a token in base64 and its rank.
"""

import base64
import binascii
import contextlib
import re
from collections.abc import Iterator, Sequence

import tiktoken

from jllama.core import JllamaError
from jllama.tokenizers.base import (
    BYTE_CHARS,
    Ids,
    Tokenizer,
    TokenType,
    Vocabulary,
    merges_of_ranks,
    piece_bytes,
)

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text; from Meta's reference tokenizer."""

_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = rf"{_PREFIX}{_UPPER}*{_LOWER}+{_SUFFIX}|{_PREFIX}{_UPPER}+{_LOWER}*{_SUFFIX}"
_O200K = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
PATTERNS = {
    "llama-bpe": PATTERN,
    "dbrx": PATTERN,
    "qwen2": PATTERN.replace("{1,3}", ""),
    "tekken": rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}",
    "gpt-4o": _O200K,
    "llama4": _O200K,
}
"""Regular expressions that split text: of Llama 3; cl100k (OLMo 2, Phi-4); Qwen2, whose digits
stand alone; Mistral's Tekken; o200k (Phi-4-mini, Llama 4). Source: the models'
``tokenizer.json``."""

_NAMED = (
    "finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag image"
)
_RESERVED = [f"reserved_special_token_{number}" for number in range(246)]
_NAMES = ("begin_of_text", "end_of_text", *_RESERVED[:2], *_NAMED.split(), *_RESERVED[2:])
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)
"""Llama 3's 256 special tokens, whose ids follow the ranks; from Meta's reference tokenizer. The
first two are BOS and EOS."""


def _reserved(name: str, start: int, stop: int) -> list[str]:
    return [f"{name}reserved_special_token_{number}" for number in range(start, stop)]


_LLAMA4_RANKS = 200_000
_LLAMA4_NAMES = [
    "begin_of_text",
    "end_of_text",
    "fim_prefix",
    "fim_middle",
    "fim_suffix",
    "header_start",
    "header_end",
    "eom",
    "eot",
    "step",
    *_reserved("text_post_train_", 0, 6),
    "python_start",
    "python_end",
    "finetune_right_pad",
    *_reserved("text_post_train_", 8, 69),
    "image_start",
    "image_end",
    *_reserved("vision_", 0, 2),
    "tile_x_separator",
    "tile_y_separator",
    *_reserved("vision_", 2, 6),
    "image",
    "vision_reserved_special_token_6",
    "patch",
    *_reserved("vision_", 7, 1048),
    *_reserved("reasoning_", 0, 8),
    "reasoning_thinking_start",
    "reasoning_thinking_end",
]
_LLAMA4_NAMES += _reserved("", 0, 2048 - len(_LLAMA4_NAMES))
LLAMA4_SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _LLAMA4_NAMES)
"""Llama 4's; from Meta's llama-models, ``llama4/tokenizer.py``."""

_LONGEST_TEXT = 400_000  # characters that tiktoken takes at once
_LONGEST_RUN = 25_000  # characters, all spaces or none: longer runs overflow tiktoken's stack


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer, or with 200,000 ranks Llama 4's.

    Args:
        model: the content of its file.
        source: what errors call it.
    """

    file_name = "tokenizer.model"

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        self.content = model
        self.tokens = _read_ranks(model, source)
        self.bos_id = len(self.tokens)
        self.eos_id = self.bos_id + 1
        special = SPECIAL_TOKENS
        self.pre = "llama-bpe"
        if len(self.tokens) == _LLAMA4_RANKS:
            special = LLAMA4_SPECIAL_TOKENS
            self.pre = "llama4"
        self.vocab_size = self.bos_id + len(special)
        self.special_tokens = {name: self.bos_id + number for number, name in enumerate(special)}
        self._encoding = tiktoken.Encoding(
            self.pre,
            pat_str=PATTERNS[self.pre],
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens=self.special_tokens,
        )
        self.pieces = self.tokens + [b""] * len(special)

    def _encode(self, text: str) -> list[int]:
        return [id for part in _parts(text) for id in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: Ids) -> str:
        return b"".join(self.tokens[id] for id in ids).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """Return a byte-level BPE whose merges are all pairs of tokens that join to a token.

        The pair that joins to the lowest rank comes first.
        """
        texts = ["".join(BYTE_CHARS[byte] for byte in token) for token in self.tokens]
        merges = merges_of_ranks(texts, {text: rank for rank, text in enumerate(texts)})
        kinds = [TokenType.NORMAL] * len(texts) + [TokenType.CONTROL] * len(self.special_tokens)
        tokens = [*texts, *self.special_tokens]
        return Vocabulary(tokens, kinds, self.bos_id, self.eos_id, merges=merges, pre=self.pre)

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> "TiktokenTokenizer":
        """Return Llama 3's or 4's tokenizer of the same ids.

        Reserved special tokens may have any of the names that Meta has given them over time.

        Raises:
            JllamaError: it is another tokenizer, be it by one merge.
        """
        names = SPECIAL_TOKENS
        if vocabulary.pre == "llama4":
            names = LLAMA4_SPECIAL_TOKENS
        count = len(vocabulary.tokens) - len(names)
        texts = vocabulary.tokens[:count]
        special = vocabulary.tokens[count:]
        tokenizer = cls(write_ranks([piece_bytes(text, is_byte_level=True) for text in texts]))
        eos_id = vocabulary.eos_token_id
        expected = tokenizer.vocabulary()
        expected = expected._replace(
            tokens=[*expected.tokens[:count], *special], eos_token_id=eos_id
        )
        are_known = all(
            text.startswith((name, "<|reserved_special_token_"))
            for text, name in zip(special, names, strict=True)
        )
        # Of a text, a message or a turn.
        ends = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>"
        if not are_known or vocabulary != expected or vocabulary.tokens[eos_id] not in ends:
            raise JllamaError(
                "the tokenizer is not Llama 3's or 4's, so Meta's file cannot hold it"
            )
        return tokenizer


def write_ranks(tokens: Sequence[bytes]) -> bytes:
    """Return the content of a ``tokenizer.model`` with these tokens, each at its rank."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    return b"".join(lines)


def _read_ranks(model: bytes, source: str) -> list[bytes]:
    tokens = []
    for number, line in enumerate(model.splitlines()):
        token, _, rank = line.partition(b" ")
        with contextlib.suppress(binascii.Error):
            tokens.append(base64.b64decode(token, validate=True))
        if len(tokens) != number + 1 or rank != b"%d" % number:
            raise JllamaError(
                f"{source} has {line[:40]!r} in line {number + 1}; "
                f"expected a token in base64 and {number}"
            )
    if len(set(tokens)) != len(tokens):
        raise JllamaError(f"{source} has a token twice")
    missing = {bytes([byte]) for byte in range(256)}.difference(tokens)
    if missing:
        raise JllamaError(
            f"{source} has no token for the byte {min(missing)[0]}: every single byte needs one"
        )
    return tokens


def _parts(text: str) -> Iterator[str]:
    """Yield the text in parts that tiktoken can take.

    The cuts are those of Meta's code, because the ids of very long texts depend on them.
    """
    for start in range(0, len(text), _LONGEST_TEXT):
        part = text[start : start + _LONGEST_TEXT]
        cut = 0
        if len(part) > _LONGEST_RUN:
            for run in re.finditer(r"\s+|\S+", part):
                for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                    yield part[cut:end]
                    cut = end
        yield part[cut:]
