"""What every tokenizer has, and the one that needs no training: a token for each UTF-8 byte."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from jllama.errors import JllamaError

FIRST_BYTE = 3
BYTES_MODEL = {"type": "bytes", "vocab_size": FIRST_BYTE + 256}


class Tokenizer(ABC):
    """Text to token ids and back. ``decode(encode(text)) == text`` for every text whose bytes the vocabulary has.

    SmolLM2's lacks bytes of U+0004, U+0006, U+0013, U+0014, U+0016, U+001D and of the unassigned U+40000 to U+BFFFF,
    and drops them. Llama's own have every byte.

    Attributes:
        vocab_size: number of ids: they run from 0 to ``vocab_size - 1``.
        bos_id, eos_id: the tokens that begin and end every document.
        add_bos: whether a prompt begins with BOS, as the model was trained.
        special_tokens: texts that stand for one token each in ``encode_with_special_tokens``, BOS and EOS among them.
        file_name, content: the file that holds it.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    add_bos: bool = True
    special_tokens: dict[str, int]
    file_name: str
    content: bytes
    _token_bytes: np.ndarray

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without BOS and EOS; special tokens spelled out in it are encoded as text.

        A lone surrogate raises JllamaError.
        """
        check_text(text)
        return self._encode(text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """As ``encode``, but special tokens (the longest that fits) spelled out in the text become their ids.

        For text that a chat template has made. What is between two of them is encoded as a text of its own.
        """
        names = "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        parts = re.split(f"({names})", text)  # every other part is a special token
        found = (self.encode(part) if i % 2 == 0 else [self.special_tokens[part]] for i, part in enumerate(parts))
        return list(itertools.chain.from_iterable(found))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; special tokens give nothing, invalid UTF-8 gives U+FFFD.

        An id outside the vocabulary raises JllamaError.
        """
        array = np.asarray(ids, np.int64)
        if outside := array[(array < 0) | (array >= self.vocab_size)].tolist():
            raise JllamaError(
                f"token {outside[0]} is outside the tokenizer's vocabulary of {self.vocab_size}: "
                f"give the tokenizer the model was trained with"
            )
        return self._decode(array[self._token_bytes[array] > 0])

    def token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        """UTF-8 bytes that each token stands for, to turn a loss into bits per byte; special tokens 0."""
        return self._token_bytes.copy()

    def save(self, folder: Path) -> None:
        """Write what ``load_tokenizer`` reads back from ``folder``, which is made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file_name).write_bytes(self.content)

    def fingerprint(self) -> str:
        """SHA-256 of the file's content, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str: ...


def check_text(text: str) -> None:
    """Raise ``JllamaError`` for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JllamaError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            f"which is not text in UTF-8: remove it"
        ) from None


class BytesTokenizer(Tokenizer):
    """Ids in Llama 2's order: 0 unknown, 1 BOS, 2 EOS, and byte ``b`` is token ``3 + b``."""

    vocab_size = FIRST_BYTE + 256
    bos_id = 1
    eos_id = 2
    special_tokens = {"<unk>": 0, "<s>": 1, "</s>": 2}  # noqa: RUF012
    file_name = "tokenizer.bytes.json"
    content = json.dumps(BYTES_MODEL).encode()
    _token_bytes = (np.arange(vocab_size) >= FIRST_BYTE).astype(np.int32)

    def _encode(self, text: str) -> list[int]:
        return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + FIRST_BYTE).tolist()

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return bytes((ids - FIRST_BYTE).tolist()).decode("utf-8", "replace")
