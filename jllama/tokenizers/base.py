"""What every tokenizer can do, the simplest one, and one as data: what every format is read into and written from.

SentencePiece: a piece has a score, and neighbors that join to the piece of the highest score join first. Byte-level
BPE: text is split by a regular expression, and the UTF-8 bytes of each part are merged pair by pair; in files each byte
is one printable character. Sources: Kudo and Richardson 2018 (arXiv:1808.06226); Radford et al. 2019 (GPT-2), section
2.2; the GGUF specification (ggml, ``docs/gguf.md``).
"""

import enum
import functools
import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jllama.errors import JllamaError

SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
BYTE_PIECES = {
    f"<0x{byte:02X}>": byte for byte in range(256)
}  # and a byte for which it has no other

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The character that stands for each byte: itself where it is printable, else the next one from U+0100."""
_BYTE_OF_CHAR = dict.fromkeys(range(256), SPACE) | {
    ord(char): chr(byte) for byte, char in enumerate(BYTE_CHARS)
}


Ids = Int[np.ndarray, "tokens"]


class TokenType(enum.IntEnum):
    """The type of a token, as SentencePiece and GGUF number it."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Vocabulary(NamedTuple):
    """The tokens by id, and how text becomes them: by ``scores`` (SentencePiece) or by ``merges`` (byte-level BPE)."""

    tokens: list[str]  # the text of each as files write it
    token_type: Sequence[int]  # the ``TokenType`` of each
    bos_token_id: int
    eos_token_id: int
    add_bos_token: bool = True  # whether a prompt begins with BOS
    scores: list[float] | None = None  # of SentencePiece, as are the next two
    unknown_token_id: int | None = None
    add_space_prefix: bool = False  # whether a space is put before a text
    merges: list[tuple[str, str]] | None = (
        None  # of byte-level BPE: pairs of tokens, first the one to merge first
    )
    pre: str = "default"  # and the name of how its text is split

    def check_pieces(self, source: str) -> None:
        """Raise JllamaError unless a SentencePiece model has what each of Llama's kind has."""
        if self.unknown_token_id not in [
            id for id, kind in enumerate(self.token_type) if kind == TokenType.UNKNOWN
        ]:
            raise JllamaError(
                f"{source} lacks an unknown token, which a Llama's SentencePiece model has"
            )
        if missing := 256 - self.token_type.count(TokenType.BYTE):
            raise JllamaError(
                f"{source} lacks {missing} of the 256 byte tokens of a Llama's SentencePiece model"
            )

    def piece_merges(self) -> list[tuple[str, str]]:
        """Each way to split a piece in two, the ways of higher-scored pieces first."""
        scores, kinds = self.scores or (), enumerate(self.token_type)
        ids = {self.tokens[id]: id for id, kind in kinds if kind == TokenType.NORMAL}
        return merges_of_ranks(sorted(ids, key=lambda text: -scores[ids[text]]), ids)


def merges_of_ranks(texts: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, in the order of ``texts`` and, of the same token, of ``ids``.

    With the texts by rank this is tiktoken's encoding, which always joins the pair of the lowest rank, as merges.
    """
    merges = []
    for text in texts:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def piece_bytes(piece: str, is_byte_level: bool = False) -> bytes:
    """The bytes that a token's text in a file stands for; of a byte-level one with other characters, those it has."""
    if is_byte_level:
        try:
            return piece.translate(_BYTE_OF_CHAR).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode()
    return (
        bytes([BYTE_PIECES[piece]]) if piece in BYTE_PIECES else piece.replace(SPACE, " ").encode()
    )


class Tokenizer(ABC):
    """Text to token ids and back. ``decode(encode(text)) == text`` for every text whose bytes the vocabulary has.

    Llama's have every byte; SmolLM2's drops six control characters and U+40000 to U+BFFFF, whose bytes it lacks.

    >>> tokenizer = BytesTokenizer()
    >>> tokenizer.encode("Hi")
    [75, 108]
    >>> tokenizer.decode([75, 108])
    'Hi'
    """

    vocab_size: int  # ids run from 0 to ``vocab_size - 1``
    bos_id: int  # the tokens that begin and end every document
    eos_id: int
    add_bos: bool = True  # whether a prompt begins with BOS, as the model was trained
    is_byte_level: bool = (
        True  # whether tokens are made of bytes, not of characters as SentencePiece's
    )
    special_tokens: dict[
        str, int
    ]  # texts that stand for a token in ``encode_with_special_tokens``, with BOS and EOS
    file_name: str  # of the file that holds it
    content: bytes
    pieces: list[bytes]  # the bytes that each token stands for; special tokens none
    _token_bytes = functools.cached_property(
        lambda self: np.array([*map(len, self.pieces)], np.int32)
    )

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, special tokens in it encoded as text; a lone surrogate raises JllamaError."""
        check_text(text)
        return self._encode(text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids of text from a chat template: special tokens (the longest that fits) spelled out become their ids.

        What is between two of them is encoded as a text of its own.
        """
        names = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        parts = re.split(f"({names})", text)  # every other part is a special token
        ids = (
            self.encode(part) if i % 2 == 0 else [self.special_tokens[part]]
            for i, part in enumerate(parts)
        )
        return list(itertools.chain.from_iterable(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens give nothing, invalid UTF-8 U+FFFD, an id that is none a JllamaError."""
        array = np.asarray(ids, np.int64)
        if outside := array[(array < 0) | (array >= self.vocab_size)].tolist():
            said = f"token {outside[0]} is outside the tokenizer's vocabulary of {self.vocab_size}"
            raise JllamaError(f"{said}: give the tokenizer the model was trained with")
        return self._decode(array[self._token_bytes[array] > 0])

    def token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        """UTF-8 bytes that each token stands for, to turn a loss into bits per byte; special tokens 0."""
        return self._token_bytes.copy()

    def save(self, folder: Path) -> None:
        """Write what ``load_tokenizer`` reads back from ``folder``, which is created if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_bytes(self.content)

    def fingerprint(self) -> str:
        """SHA-256 of the file's content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """The tokenizer as data; one that gives ids as no other format can raises JllamaError."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: Ids) -> str: ...


def check_text(text: str) -> None:
    """Raise ``JllamaError`` for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        said = f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        raise JllamaError(f"the text has {said}, which is not text in UTF-8: remove it") from None


class BytesTokenizer(Tokenizer):
    """Ids in Llama 2's order: 0 unknown, 1 BOS, 2 EOS, and byte ``b`` is token ``3 + b``."""

    vocab_size, bos_id, eos_id = 259, 1, 2
    special_tokens = {"<unk>": 0, "<s>": 1, "</s>": 2}  # noqa: RUF012
    file_name = "tokenizer.bytes.json"
    content = b'{"type": "bytes", "vocab_size": 259}'
    pieces = [b""] * 3 + [bytes([byte]) for byte in range(256)]

    def _encode(self, text: str) -> list[int]:
        return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3).tolist()

    def _decode(self, ids: Ids) -> str:
        return bytes((ids - 3).tolist()).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """A byte-level BPE without merges."""
        kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256
        return Vocabulary(
            [*self.special_tokens, *BYTE_CHARS],
            kinds,
            self.bos_id,
            self.eos_id,
            merges=[],
            pre="gpt-2",
        )
