"""Text to token ids and back: one base class, the tokenizers of it, and their files."""

import contextlib
import json
import re
from pathlib import Path

from jllama.errors import JllamaError
from jllama.files import has_file, read_json_object
from jllama.tokenizers.base import BytesTokenizer
from jllama.tokenizers.base import Tokenizer as Tokenizer
from jllama.tokenizers.huggingface import HuggingFaceTokenizer, load_huggingface_tokenizer
from jllama.tokenizers.llama2c import load_llama2c_tokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.sentencepiece import train_sentencepiece as train_sentencepiece
from jllama.tokenizers.tiktoken import TiktokenTokenizer

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes.json", "tokenizer.bin")


def has_tokenizer(folder: Path) -> bool:
    """Whether ``load_tokenizer`` finds a file to read in a folder."""
    return any(has_file(folder / name) for name in FILE_NAMES)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer of any kind; if there is none, or it cannot be used, a JllamaError says why.

    ``path`` is a ``tokenizer.json`` (Hugging Face), a ``.model`` (SentencePiece or Llama 3's tiktoken), a
    ``tokenizer.bytes.json`` or a llama2.c ``tokenizer.bin``; or a folder that holds one. Of a ``tokenizer.json`` and a
    SentencePiece model with just the same tokens, BOS and EOS the model is read: the json was made from it.
    """
    path = Path(path)
    paths = [path / name for name in FILE_NAMES] if path.is_dir() else [path]
    files = [file for file in paths if has_file(file)]
    if not files and path.is_dir():
        raise JllamaError(
            f"{path} holds no tokenizer: give a folder with one of {', '.join(FILE_NAMES)}"
        )
    if not files:
        raise JllamaError(
            f"there is no tokenizer at {path}: give its file or the folder that holds it"
        )
    tokenizer, *models = [
        _read(file) for file in files if file in (files[0], path / "tokenizer.model")
    ]
    if (
        models
        and isinstance(tokenizer, HuggingFaceTokenizer)
        and isinstance(models[0], SentencePieceTokenizer)
    ):
        json, model = (
            (each.texts, each.bos_id, each.eos_id, each.add_bos) for each in (tokenizer, models[0])
        )
        return models[0] if json == model else tokenizer
    return tokenizer


def _read(file: Path) -> Tokenizer:
    if file.name == BytesTokenizer.file_name:
        if read_json_object(file) != json.loads(BytesTokenizer.content):
            raise JllamaError(
                f"{file} is not a bytes tokenizer: it should hold {BytesTokenizer.content.decode()}"
            )
        return BytesTokenizer()
    if read := {".json": load_huggingface_tokenizer, ".bin": load_llama2c_tokenizer}.get(
        file.suffix
    ):
        return read(file)
    model = file.read_bytes()
    is_list_of_ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", model)
    return (TiktokenTokenizer if is_list_of_ranks else SentencePieceTokenizer)(model, str(file))


def as_huggingface(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """A tokenizer of any kind as a ``tokenizer.json`` that gives the same ids; JllamaError if there is none."""
    is_one = isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer if is_one else HuggingFaceTokenizer.from_vocabulary(tokenizer.vocabulary())


def save_huggingface(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and a SentencePiece model's own file; errors as above."""
    as_huggingface(tokenizer).save(folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)


def save_meta(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.model`` as Meta has it, if the tokenizer is of Llama 2's or 3's kind, or else its own file.

    The latter is no use to Meta's own code, but jllama reads it. So is a tokenizer kept that adds no BOS: Meta's do.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.add_bos:
        if not tokenizer.is_byte_level:
            tokenizer = SentencePieceTokenizer.from_vocabulary(tokenizer.vocabulary())
        else:
            with contextlib.suppress(JllamaError):
                tokenizer = TiktokenTokenizer.from_vocabulary(tokenizer.vocabulary())
    tokenizer.save(folder)
