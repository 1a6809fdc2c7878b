"""What every tokenizer can do, and the simplest one: a token for each UTF-8 byte."""

import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int32

from jllama.errors import JllamaError
from jllama.tokenizers.vocabulary import BYTE_CHARS, TokenType, Vocabulary


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
    is_byte_level: bool = True  # whether tokens are made of bytes, not of characters as SentencePiece's
    special_tokens: dict[str, int]  # texts that stand for a token in ``encode_with_special_tokens``, with BOS and EOS
    file_name: str  # of the file that holds it
    content: bytes
    _token_bytes: np.ndarray

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
        ids = (self.encode(part) if i % 2 == 0 else [self.special_tokens[part]] for i, part in enumerate(parts))
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
    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str: ...


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
    _token_bytes = (np.arange(vocab_size) >= 3).astype(np.int32)

    def _encode(self, text: str) -> list[int]:
        return (np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 3).tolist()

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return bytes((ids - 3).tolist()).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """A byte-level BPE without merges."""
        kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 256
        return Vocabulary([*self.special_tokens, *BYTE_CHARS], kinds, self.bos_id, self.eos_id, merges=[], pre="gpt-2")
