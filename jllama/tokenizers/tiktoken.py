"""tiktoken's ranks, the ``tokenizer.model`` of Llama 3: lines of a token in base64 and its rank."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tiktoken
from jaxtyping import Int

from jllama.errors import JllamaError
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.byte_level import BYTE_CHARS, LLAMA3_PATTERN, byte_level_json, merges_of_ranks

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
_NAMED = (
    BOS,
    EOS,
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
)
SPECIAL_TOKENS = (*_NAMED, *(f"<|reserved_special_token_{number}|>" for number in range(2, 258 - len(_NAMED))))
"""Llama 3's 256 special tokens, which follow the ranks; from Meta's reference tokenizer."""

STOP_TOKENS = (EOS, "<|eom_id|>", "<|eot_id|>")
"""Those that end a text, a message or a turn."""

_LONGEST_TEXT = 400_000  # characters that tiktoken takes at once
_LONGEST_RUN = 25_000  # characters, of spaces or of others: longer ones overflow its stack


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer.

    Args:
        model: the file's content.
        source: what errors call it.
    """

    file_name = "tokenizer.model"

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        self.content = model
        self.tokens = _read_ranks(model, source)
        self.special_tokens = {name: len(self.tokens) + number for number, name in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            "llama3",
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens=self.special_tokens,
        )
        self.vocab_size = len(self.tokens) + len(SPECIAL_TOKENS)
        self.bos_id, self.eos_id = self.special_tokens[BOS], self.special_tokens[EOS]
        self._token_bytes = np.array([*map(len, self.tokens), *[0] * len(SPECIAL_TOKENS)], np.int32)

    def _encode(self, text: str) -> list[int]:
        return [id for part in _parts(text) for id in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return b"".join(self.tokens[id] for id in ids).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The ``tokenizer.json`` that gives the same ids."""
        texts = ["".join(BYTE_CHARS[byte] for byte in token) for token in self.tokens]
        vocab = {text: rank for rank, text in enumerate(texts)}
        added = [(id, name, True) for name, id in self.special_tokens.items()]
        return byte_level_json(vocab, merges_of_ranks(texts), added, "llama-bpe", (self.bos_id, BOS))


def is_tiktoken(model: bytes) -> bool:
    """Whether a ``tokenizer.model`` is a list of ranks, and not a SentencePiece model."""
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\s", model[:1000]) is not None


def write_ranks(tokens: Sequence[bytes]) -> bytes:
    """A ``tokenizer.model`` of these tokens, each at its rank."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


def _read_ranks(model: bytes, source: str) -> list[bytes]:
    tokens = []
    for number, line in enumerate(model.splitlines()):
        token, _, rank = line.partition(b" ")
        try:
            tokens.append(base64.b64decode(token, validate=True))
            in_order = int(rank) == number
        except (binascii.Error, ValueError):
            in_order = False
        if not in_order:
            raise JllamaError(
                f"{source} has {line[:40]!r} in line {number + 1}; expected a token in base64 and {number}"
            )
    if len(set(tokens)) != len(tokens):
        raise JllamaError(f"{source} has a token twice")
    if missing := [byte for byte in range(256) if bytes([byte]) not in set(tokens)]:
        raise JllamaError(f"{source} has no token for the byte {missing[0]}: every single byte needs one")
    return tokens


def _parts(text: str) -> Iterator[str]:
    """The text in parts that tiktoken can take: as Meta cuts it, which ids of very long texts depend on."""
    for start in range(0, len(text), _LONGEST_TEXT):
        part, cut = text[start : start + _LONGEST_TEXT], 0
        position = 0
        for _, run in itertools.groupby(part, str.isspace) if len(part) > _LONGEST_RUN else ():
            length = sum(1 for _ in run)
            for place in range(position + _LONGEST_RUN, position + length, _LONGEST_RUN):
                yield part[cut:place]
                cut = place
            position += length
        yield part[cut:]
