"""The tokenizer that needs no training: one token for each UTF-8 byte."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jllama.errors import JllamaError

FILE_NAME = "tokenizer.bytes.json"
FIRST_BYTE = 3
MODEL = {"type": "bytes", "vocab_size": FIRST_BYTE + 256}


class BytesTokenizer:
    """Ids in Llama 2's order: 0 unknown, 1 BOS, 2 EOS, and byte ``b`` is token ``3 + b``."""

    vocab_size = FIRST_BYTE + 256
    bos_id = 1
    eos_id = 2
    add_bos = True

    def encode(self, text: str) -> list[int]:
        """One id for each UTF-8 byte of ``text``."""
        return (np.frombuffer(utf8(text), np.uint8).astype(np.int32) + FIRST_BYTE).tolist()

    @property
    def special_tokens(self) -> dict[str, int]:
        """The three control tokens, named as in Llama 2."""
        return {"<unk>": 0, "<s>": self.bos_id, "</s>": self.eos_id}

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """As ``encode``, but control tokens spelled out in the text become their ids."""
        return encode_between(self.special_tokens, self.encode, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; control tokens give nothing, and invalid UTF-8 gives U+FFFD."""
        checked = checked_ids(ids, self.vocab_size)
        return bytes((checked[checked >= FIRST_BYTE] - FIRST_BYTE).tolist()).decode("utf-8", "replace")

    def token_bytes(self) -> Int32[np.ndarray, "vocab"]:
        """1 for each byte token, 0 for the three control tokens."""
        return (np.arange(self.vocab_size) >= FIRST_BYTE).astype(np.int32)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.bytes.json`` into ``folder``, which is made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE_NAME).write_text(json.dumps(MODEL) + "\n")

    def fingerprint(self) -> str:
        """SHA-256 of what ``save`` writes, in hexadecimal."""
        return hashlib.sha256(json.dumps(MODEL).encode()).hexdigest()


def load_bytes_tokenizer(path: Path) -> BytesTokenizer:
    """Read a ``tokenizer.bytes.json``; any other content raises JllamaError."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if found != MODEL:
        raise JllamaError(f"{path} is not a bytes tokenizer: it should hold {json.dumps(MODEL)}")
    return BytesTokenizer()


def encode_between(special_tokens: Mapping[str, int], encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of a text in which special tokens (the longest that fits) stand for themselves; ``encode`` does the rest."""
    names = "|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True)))
    parts = re.split(f"({names})", text)  # every other part is a special token
    return [id for place, part in enumerate(parts) for id in ([special_tokens[part]] if place % 2 else encode(part))]


def utf8(text: str) -> bytes:
    """``text`` in UTF-8; a lone surrogate, which is not text, raises JllamaError."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise JllamaError(
            f"the text has the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            f"which is not text in UTF-8: remove it"
        ) from None


def checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """``ids`` as an int64 array; one outside the vocabulary raises JllamaError."""
    array = np.asarray(ids, np.int64)
    if outside := array[(array < 0) | (array >= vocab_size)].tolist():
        raise JllamaError(
            f"token {outside[0]} is outside the tokenizer's vocabulary of {vocab_size}: "
            f"give the tokenizer the model was trained with"
        )
    return array
