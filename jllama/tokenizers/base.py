"""The base class of tokenizers, the simplest tokenizer, and the data that all formats share.

SentencePiece: a piece has a score; of the neighbors that join to a piece, those with the highest
score join first. Byte-level BPE: a regular expression splits the text, and the UTF-8 bytes of each
part are merged pair by pair; files write each byte as one printable character.

Sources: Kudo and Richardson 2018 (arXiv:1808.06226); Radford et al. 2019 (GPT-2), section 2.2; the
GGUF specification (ggml, ``docs/gguf.md``).
"""

import enum
import functools
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jllama.core import JllamaError

SPACE = "\u2581"  # how SentencePiece writes a space in a piece
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""The pieces of bytes for which SentencePiece has no other piece."""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The character for each byte: itself if it is printable, else the next one from U+0100 on."""
_BYTE_OF_CHAR = dict.fromkeys(range(256), SPACE) | {
    ord(char): chr(byte) for byte, char in enumerate(BYTE_CHARS)
}
"""The inverse, for ``str.translate``. Other Latin-1 characters become one that Latin-1 lacks."""

SHOWN = ("[TOOL_CALLS]", "<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>")
"""Special tokens that are text of an answer nevertheless: they mark calls of tools."""

Ids = Int[np.ndarray, "tokens"]


class TokenType(enum.IntEnum):
    """The type of a token, as SentencePiece and GGUF number it."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Vocabulary(NamedTuple):
    """A tokenizer as data: the tokens by id, and the rules that turn text into them.

    SentencePiece has ``scores``, byte-level BPE has ``merges``; the other one is None.
    """

    tokens: list[str]  # the text of each token, as files write it
    token_type: Sequence[int]  # the ``TokenType`` of each token
    bos_token_id: int
    eos_token_id: int
    add_bos_token: bool = True  # whether a prompt begins with BOS
    # SentencePiece
    scores: list[float] | None = None
    unknown_token_id: int | None = None
    add_space_prefix: bool = False  # whether a space is put before a text
    # Byte-level BPE
    merges: list[tuple[str, str]] | None = None  # pairs of tokens, in the order of merging
    pre: str = "default"  # the name of the way that its text is split

    strips_spaces: bool = False  # white space behind special tokens is dropped, as in Phi-3

    def check_pieces(self, source: str) -> None:
        """Raise ``JllamaError`` unless a SentencePiece model has the special pieces of Llama's."""
        unknown_ids = [id for id, kind in enumerate(self.token_type) if kind == TokenType.UNKNOWN]
        if self.unknown_token_id not in unknown_ids:
            raise JllamaError(
                f"{source} lacks an unknown token, which a Llama's SentencePiece model has"
            )
        num_missing = 256 - self.token_type.count(TokenType.BYTE)
        if num_missing:
            raise JllamaError(
                f"{source} lacks {num_missing} of the 256 byte tokens of a Llama's "
                "SentencePiece model"
            )

    def piece_merges(self) -> list[tuple[str, str]]:
        """Return each way to split a piece in two, the ways of higher-scored pieces first."""
        kinds = enumerate(self.token_type)
        ids = {self.tokens[id]: id for id, kind in kinds if kind == TokenType.NORMAL}
        scores = self.scores or []
        return merges_of_ranks(sorted(ids, key=lambda text: -scores[ids[text]]), ids)


def merges_of_ranks(texts: Iterable[str], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that join to a token, in the order of ``texts``, then of ``ids``.

    If the texts are sorted by rank, this is tiktoken's encoding, which always joins the pair of the
    lowest rank, written as merges.
    """
    merges = []
    for text in texts:
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        pairs = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def piece_bytes(piece: str, is_byte_level: bool = False) -> bytes:
    """Return the bytes of a token from its text in a file.

    A byte-level token with characters that are not ``BYTE_CHARS`` stands for its UTF-8 bytes.
    """
    if is_byte_level:
        try:
            return piece.translate(_BYTE_OF_CHAR).encode("latin-1")
        except UnicodeEncodeError:
            return piece.encode()
    if piece in BYTE_PIECES:
        return bytes([BYTE_PIECES[piece]])
    return piece.replace(SPACE, " ").encode()


def special_bytes(text: str) -> bytes:
    """Return the bytes that a special token stands for: none, except for those in ``SHOWN``."""
    return text.encode() if text in SHOWN else b""


class Tokenizer(ABC):
    """Text to token ids and back.

    ``decode(encode(text)) == text`` for every text whose bytes the vocabulary has. Llama's have
    every byte. SmolLM2's lacks bytes of six control characters and of U+40000 to U+BFFFF, and drops
    these characters. Qwen's gives text in Unicode's form NFC.

    Examples:
        >>> tokenizer = BytesTokenizer()
        >>> tokenizer.encode("Hi")
        [75, 108]
        >>> tokenizer.decode([75, 108])
        'Hi'
    """

    vocab_size: int  # ids run from 0 to ``vocab_size - 1``
    bos_id: int  # the token that begins every document
    eos_id: int  # the token that ends every document
    add_bos: bool = True  # whether a prompt begins with BOS, as the model was trained
    is_byte_level: bool = True  # whether tokens are made of bytes; SentencePiece's of characters
    special_tokens: dict[str, int]  # the ids of special tokens by their texts, BOS and EOS too
    file_name: str  # the name of its file, which holds ``content``
    content: bytes
    pieces: list[bytes]  # the bytes that each token stands for, by ``special_bytes`` if special

    @functools.cached_property
    def _token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        return np.array([*map(len, self.pieces)], np.int32)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are encoded as text.

        Raises:
            JllamaError: the text has a lone surrogate.
        """
        check_text(text)
        return self._encode(text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of text from a chat template; special tokens in it become their ids.

        Of several special tokens that match, the longest counts. The text between two of them is
        encoded on its own.
        """
        names = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        ids = []
        for number, part in enumerate(re.split(f"({names})", text)):
            is_special = number % 2 == 1
            ids += [self.special_tokens[part]] if is_special else self.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Special tokens are left out, invalid UTF-8 becomes U+FFFD.

        Special tokens in ``SHOWN`` are not left out.

        Raises:
            JllamaError: an id is outside the vocabulary.
        """
        array = np.asarray(ids, np.int64)
        is_outside = (array < 0) | (array >= self.vocab_size)
        if is_outside.any():
            raise JllamaError(
                f"token {array[is_outside][0]} is outside the tokenizer's vocabulary of "
                f"{self.vocab_size}: give the tokenizer the model was trained with"
            )
        has_bytes = self._token_bytes[array] > 0
        return self._decode(array[has_bytes])

    def token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        """Return the number of UTF-8 bytes of each token, to turn a loss into bits per byte.

        Special tokens have 0.
        """
        return self._token_bytes.copy()

    def save(self, folder: Path) -> None:
        """Write the file that ``load_tokenizer`` reads; create ``folder`` if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_bytes(self.content)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file's content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def stops_or_eos(self, stop_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end a text: ``stop_ids``, or EOS if there are none."""
        return tuple(stop_ids) or (self.eos_id,)

    @abstractmethod
    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer as data; raise ``JllamaError`` if no other format gives its ids."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: Ids) -> str: ...


def check_text(text: str) -> None:
    """Raise ``JllamaError`` if a text has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        char = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise JllamaError(
            f"the text has the lone surrogate {char}, which is not text in UTF-8: remove it"
        ) from None


class BytesTokenizer(Tokenizer):
    """A tokenizer of bytes, with ids in Llama 2's order.

    0 is unknown, 1 is BOS, 2 is EOS, and ``3 + b`` is byte ``b``.
    """

    vocab_size = 259
    bos_id = 1
    eos_id = 2
    special_tokens = {"<unk>": 0, "<s>": 1, "</s>": 2}  # noqa: RUF012
    file_name = "tokenizer.bytes.json"
    content = b'{"type": "bytes", "vocab_size": 259}'
    pieces = [b""] * 3 + [bytes([byte]) for byte in range(256)]

    def _encode(self, text: str) -> list[int]:
        return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3).tolist()

    def _decode(self, ids: Ids) -> str:
        return bytes((ids - 3).tolist()).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """Return a byte-level BPE without merges."""
        kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256
        return Vocabulary(
            [*self.special_tokens, *BYTE_CHARS],
            kinds,
            self.bos_id,
            self.eos_id,
            merges=[],
            pre="gpt-2",
        )
