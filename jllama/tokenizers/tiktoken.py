"""tiktoken's ranks, the ``tokenizer.model`` of Llama 3: lines of a token in base64 and its rank."""

import base64
import binascii
import contextlib
import re
from collections.abc import Iterator, Sequence

import tiktoken

from jllama.errors import JllamaError
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
)  # how Llama 3 splits text; from Meta's reference tokenizer

_NAMED = (
    "finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag image"
)
_RESERVED = [f"reserved_special_token_{number}" for number in range(246)]
_NAMES = ("begin_of_text", "end_of_text", *_RESERVED[:2], *_NAMED.split(), *_RESERVED[2:])
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)
"""Llama 3's 256 special tokens, which follow the ranks, BOS and EOS first; from Meta's reference tokenizer."""

_LONGEST_TEXT = 400_000  # characters that tiktoken takes at once
_LONGEST_RUN = 25_000  # characters, of spaces or of others: longer ones overflow its stack


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer, from the content of its file, which errors call ``source``."""

    file_name = "tokenizer.model"

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        self.content = model
        self.tokens = _read_ranks(model, source)
        self.bos_id, self.eos_id = len(self.tokens), len(self.tokens) + 1
        self.vocab_size = len(self.tokens) + len(SPECIAL_TOKENS)
        self.special_tokens = special = {
            name: self.bos_id + number for number, name in enumerate(SPECIAL_TOKENS)
        }
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.pieces = self.tokens + [b""] * len(SPECIAL_TOKENS)

    def _encode(self, text: str) -> list[int]:
        return [id for part in _parts(text) for id in self._encoding.encode_ordinary(part)]

    def _decode(self, ids: Ids) -> str:
        return b"".join(self.tokens[id] for id in ids).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """A byte-level BPE in which every two tokens that join to a token merge, by the rank of what they join to."""
        ranks = {
            "".join(BYTE_CHARS[byte] for byte in token): rank
            for rank, token in enumerate(self.tokens)
        }
        kinds = [TokenType.NORMAL] * len(ranks) + [TokenType.CONTROL] * len(SPECIAL_TOKENS)
        merges, tokens = merges_of_ranks(ranks, ranks), [*ranks, *SPECIAL_TOKENS]
        return Vocabulary(tokens, kinds, self.bos_id, self.eos_id, merges=merges, pre="llama-bpe")

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> "TiktokenTokenizer":
        """Llama 3's to the last merge, with any of Meta's names for its reserved tokens; another raises JllamaError."""
        count = len(vocabulary.tokens) - len(SPECIAL_TOKENS)
        texts, special = vocabulary.tokens[:count], vocabulary.tokens[count:]
        tokenizer = cls(write_ranks([piece_bytes(text, is_byte_level=True) for text in texts]))
        expected, eos_id = tokenizer.vocabulary(), vocabulary.eos_token_id
        expected = expected._replace(
            tokens=[*expected.tokens[:count], *special], eos_token_id=eos_id
        )
        reserved = "<|reserved_special_token_"  # Meta has numbered these otherwise over time
        named = all(
            text.startswith((name, reserved))
            for text, name in zip(special, SPECIAL_TOKENS, strict=True)
        )
        ends = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"  # of a text, a message or a turn
        if not named or vocabulary != expected or vocabulary.tokens[eos_id] not in ends:
            raise JllamaError("the tokenizer is not Llama 3's, so Meta's file cannot hold it")
        return tokenizer


def write_ranks(tokens: Sequence[bytes]) -> bytes:
    """A ``tokenizer.model`` of these tokens, each at its rank."""
    return b"".join(
        b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)
    )


def _read_ranks(model: bytes, source: str) -> list[bytes]:
    tokens = []
    for number, line in enumerate(model.splitlines()):
        token, _, rank = line.partition(b" ")
        with contextlib.suppress(binascii.Error):
            tokens.append(base64.b64decode(token, validate=True))
        if len(tokens) != number + 1 or rank != b"%d" % number:
            said = f"{source} has {line[:40]!r} in line {number + 1}"
            raise JllamaError(f"{said}; expected a token in base64 and {number}")
    if len(set(tokens)) != len(tokens):
        raise JllamaError(f"{source} has a token twice")
    if missing := {bytes([byte]) for byte in range(256)}.difference(tokens):
        raise JllamaError(
            f"{source} has no token for the byte {min(missing)[0]}: every single byte needs one"
        )
    return tokens


def _parts(text: str) -> Iterator[str]:
    """The text in parts that tiktoken can take: as Meta cuts it, which ids of very long texts depend on."""
    for start in range(0, len(text), _LONGEST_TEXT):
        part, cut = text[start : start + _LONGEST_TEXT], 0
        for run in re.finditer(r"\s+|\S+", part) if len(part) > _LONGEST_RUN else ():
            for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield part[cut:end]
                cut = end
        yield part[cut:]
