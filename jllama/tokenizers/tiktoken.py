"""tiktoken's ranks, the ``tokenizer.model`` of Llama 3: lines of a token in base64 and its rank."""

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

_NAMED = (
    "finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag image"
)
_RESERVED = [f"reserved_special_token_{number}" for number in range(246)]
_NAMES = ("begin_of_text", "end_of_text", *_RESERVED[:2], *_NAMED.split(), *_RESERVED[2:])
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES)
"""Llama 3's 256 special tokens, whose ids follow the ranks; from Meta's reference tokenizer. The
first two are BOS and EOS."""

_LONGEST_TEXT = 400_000  # characters that tiktoken takes at once
_LONGEST_RUN = 25_000  # characters, all spaces or none: longer runs overflow tiktoken's stack


class TiktokenTokenizer(Tokenizer):
    """Llama 3's tokenizer.

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
        self.vocab_size = self.bos_id + len(SPECIAL_TOKENS)
        self.special_tokens = {
            name: self.bos_id + number for number, name in enumerate(SPECIAL_TOKENS)
        }
        self._encoding = tiktoken.Encoding(
            "llama3",
            pat_str=PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(self.tokens)},
            special_tokens=self.special_tokens,
        )
        self.pieces = self.tokens + [b""] * len(SPECIAL_TOKENS)

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
        kinds = [TokenType.NORMAL] * len(texts) + [TokenType.CONTROL] * len(SPECIAL_TOKENS)
        tokens = [*texts, *SPECIAL_TOKENS]
        return Vocabulary(tokens, kinds, self.bos_id, self.eos_id, merges=merges, pre="llama-bpe")

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> "TiktokenTokenizer":
        """Return Llama 3's tokenizer of the same ids.

        Reserved special tokens may have any of the names that Meta has given them over time.

        Raises:
            JllamaError: it is another tokenizer, be it by one merge.
        """
        count = len(vocabulary.tokens) - len(SPECIAL_TOKENS)
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
            for text, name in zip(special, SPECIAL_TOKENS, strict=True)
        )
        ends = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"  # of a text, a message or a turn
        if not are_known or vocabulary != expected or vocabulary.tokens[eos_id] not in ends:
            raise JllamaError("the tokenizer is not Llama 3's, so Meta's file cannot hold it")
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
