"""Text to token ids and back: one small protocol, and the tokenizers that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jllama.errors import JllamaError
from jllama.tokenizers import bytes as _bytes
from jllama.tokenizers import sentencepiece as _sentencepiece
from jllama.tokenizers.bytes import BytesTokenizer, load_bytes_tokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece

__all__ = ["BytesTokenizer", "SentencePieceTokenizer", "Tokenizer", "load_tokenizer", "train_sentencepiece"]


@runtime_checkable
class Tokenizer(Protocol):
    """What jllama needs of a tokenizer. ``decode(encode(text)) == text`` for every text."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: they run from 0 to ``vocab_size - 1``."""
        ...

    @property
    def bos_id(self) -> int:
        """The token that begins every document."""
        ...

    @property
    def eos_id(self) -> int:
        """The token that ends every document."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without BOS and EOS; a lone surrogate raises JllamaError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; control tokens give nothing, invalid UTF-8 gives U+FFFD.

        An id outside the vocabulary raises JllamaError.
        """
        ...

    def token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        """UTF-8 bytes that each token stands for, to turn a loss into bits per byte; control tokens 0."""
        ...

    def save(self, folder: Path) -> None:
        """Write the one file that ``load_tokenizer`` reads back from ``folder``."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 of the model's content, in hexadecimal."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a SentencePiece ``.model`` file, a ``tokenizer.bytes.json``, or a folder that holds one of them."""
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in (_sentencepiece.FILE_NAME, _bytes.FILE_NAME) if (path / name).is_file()]
        if not files:
            raise JllamaError(f"{path} holds no {_sentencepiece.FILE_NAME} and no {_bytes.FILE_NAME}: give one of them")
        path = files[0]
    if not path.is_file():
        raise JllamaError(f"there is no tokenizer at {path}: give a .model file or the folder that holds it")
    if path.suffix == ".json":
        return load_bytes_tokenizer(path)
    return SentencePieceTokenizer(path.read_bytes(), str(path))
