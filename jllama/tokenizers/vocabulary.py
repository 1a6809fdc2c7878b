"""A tokenizer as data, in the terms of GGUF: what every format is read into and written from.

SentencePiece: a piece has a score, and neighbors that join to the piece of the highest score join first. Byte-level
BPE: text is split by a regular expression, and the UTF-8 bytes of each part are merged pair by pair; in files each byte
is one printable character. Sources: Kudo and Richardson 2018 (arXiv:1808.06226); Radford et al. 2019 (GPT-2), section
2.2; the GGUF specification (ggml, ``docs/gguf.md``).
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jllama.errors import JllamaError

SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}  # and a byte for which it has no other

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
"""The character that stands for each byte: itself where it is printable, else the next one from U+0100."""


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
    merges: list[tuple[str, str]] | None = None  # of byte-level BPE: pairs of tokens, first the one to merge first
    pre: str = "default"  # and the name of how its text is split

    def check_pieces(self, source: str) -> None:
        """Raise JllamaError unless a SentencePiece model has what each of Llama's kind has."""
        unknown = [id for id, kind in enumerate(self.token_type) if kind == TokenType.UNKNOWN]
        if self.unknown_token_id not in unknown:
            raise JllamaError(f"{source} lacks an unknown token, which a Llama's SentencePiece model has")
        if missing := 256 - self.token_type.count(TokenType.BYTE):
            raise JllamaError(f"{source} lacks {missing} of the 256 byte tokens of a Llama's SentencePiece model")

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


def piece_bytes(piece: str) -> int:
    """How many bytes of text a piece stands for."""
    return 1 if piece in BYTE_PIECES else len(piece.replace(SPACE, " ").encode())
