"""Text to token ids and back: one base class, and the tokenizers of it."""

from __future__ import annotations

import json
from pathlib import Path

from jllama.errors import JllamaError
from jllama.files import read_json_object, refuse_special_files
from jllama.tokenizers.base import BYTES_MODEL, BytesTokenizer
from jllama.tokenizers.base import Tokenizer as Tokenizer
from jllama.tokenizers.huggingface import HuggingFaceTokenizer, load_huggingface_tokenizer
from jllama.tokenizers.llama2c import load_llama2c_tokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece as train_sentencepiece
from jllama.tokenizers.tiktoken import TiktokenTokenizer, is_tiktoken

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes.json", "tokenizer.bin")


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
    if path.name == BytesTokenizer.file_name:
        if read_json_object(path) != BYTES_MODEL:
            raise JllamaError(f"{path} is not a bytes tokenizer: it should hold {json.dumps(BYTES_MODEL)}")
        return BytesTokenizer()
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
