"""Text to token ids and back: one small protocol, and the tokenizers that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jllama.errors import JllamaError
from jllama.files import refuse_special_files
from jllama.tokenizers.bytes import BytesTokenizer, load_bytes_tokenizer
from jllama.tokenizers.huggingface import HuggingFaceTokenizer, load_huggingface_tokenizer
from jllama.tokenizers.llama2c import load_llama2c_tokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from jllama.tokenizers.tiktoken import TiktokenTokenizer, is_tiktoken

__all__ = [
    "BytesTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "has_tokenizer",
    "load_tokenizer",
    "train_sentencepiece",
]

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes.json", "tokenizer.bin")


@runtime_checkable
class Tokenizer(Protocol):
    """What jllama needs of a tokenizer. ``decode(encode(text)) == text`` for every text whose bytes its vocabulary has.

    SmolLM2's lacks bytes of U+0004, U+0006, U+0013, U+0014, U+0016, U+001D and of the unassigned U+40000 to U+BFFFF,
    and drops them. Llama's own have every byte.
    """

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

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with BOS, as the model was trained."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without BOS and EOS; a lone surrogate raises JllamaError."""
        ...

    @property
    def special_tokens(self) -> dict[str, int]:
        """Texts that stand for one token each in ``encode_with_special_tokens``; BOS and EOS are among them."""
        ...

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """As ``encode``, but special tokens spelled out in the text become their ids.

        For text that a chat template has made. What is between two of them is encoded as a text of its own.
        """
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
        """Write what ``load_tokenizer`` reads back from ``folder``."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 of the model's content, in hexadecimal."""
        ...


def has_tokenizer(folder: Path) -> bool:
    """Whether ``load_tokenizer`` finds a file to read in a folder."""
    return any((folder / name).is_file() for name in FILE_NAMES)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer of any kind.

    Args:
        path: a ``tokenizer.json`` (Hugging Face), a ``.model`` (SentencePiece or Llama 3's tiktoken), a
            ``tokenizer.bytes.json`` or a llama2.c ``tokenizer.bin``; or a folder that holds one. Of a
            ``tokenizer.json`` and a SentencePiece model with just the same tokens, BOS and EOS the model is read: the
            json was made from it.

    Raises:
        JllamaError: there is none, or it cannot be used; the message says why.
    """
    path = Path(path)
    refuse_special_files(path, *map(path.joinpath, FILE_NAMES))
    if path.is_dir():
        files = [path / name for name in FILE_NAMES if (path / name).is_file()]
        if not files:
            raise JllamaError(f"{path} holds no tokenizer: give a folder with one of {', '.join(FILE_NAMES)}")
        if len(files) > 1 and files[1].name == "tokenizer.model":
            whole, model = load_tokenizer(files[0]), load_tokenizer(files[1])
            if isinstance(whole, HuggingFaceTokenizer) and isinstance(model, SentencePieceTokenizer):
                return model if _same_tokens(model, whole) else whole
            return whole
        path = files[0]
    if not path.is_file():
        raise JllamaError(f"there is no tokenizer at {path}: give its file or the folder that holds it")
    if path.name == "tokenizer.bytes.json":
        return load_bytes_tokenizer(path)
    if path.suffix == ".json":
        return load_huggingface_tokenizer(path)
    if path.suffix == ".bin":
        return load_llama2c_tokenizer(path)
    model = path.read_bytes()
    return TiktokenTokenizer(model, str(path)) if is_tiktoken(model) else SentencePieceTokenizer(model, str(path))


def _same_tokens(model: SentencePieceTokenizer, whole: HuggingFaceTokenizer) -> bool:
    """Whether both have the same tokens under the same ids, and agree on BOS and EOS."""
    described = [(one.vocab_size, one.bos_id, one.eos_id, one.add_bos) for one in (model, whole)]
    return described[0] == described[1] and model.pieces == [whole.text_of(id) for id in range(whole.vocab_size)]
