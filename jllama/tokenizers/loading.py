"""Read a tokenizer of any kind, and write it in other kinds' files."""

import contextlib
import json
import operator
import re
from pathlib import Path

from jllama.core import JllamaError
from jllama.system.files import has_file, read_json_object, refuse_pointer
from jllama.tokenizers.added_tokens import (
    check_added_tokens,
    read_added_tokens,
    read_end_token,
)
from jllama.tokenizers.base import BytesTokenizer, Tokenizer
from jllama.tokenizers.huggingface import HuggingFaceTokenizer, load_huggingface_tokenizer
from jllama.tokenizers.llama2c import load_llama2c_tokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.tiktoken import TiktokenTokenizer

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bytes.json", "tokenizer.bin")

_tokens_of = operator.attrgetter("texts", "bos_id", "eos_id", "add_bos")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a file that ``load_tokenizer`` reads."""
    return any(has_file(folder / name) for name in FILE_NAMES)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer of any kind.

    If a folder holds a ``tokenizer.json`` and a SentencePiece model with exactly the same tokens,
    BOS and EOS, the model is read, because the json was made from it. The json is read if it puts
    no space behind special tokens, as Mistral's does, because the model cannot say so. Tokens that
    ``tokenizer_config.json`` or ``added_tokens.json`` adds are added.

    Args:
        path: a ``tokenizer.json`` (Hugging Face), a ``.model`` (SentencePiece, or Llama 3's
            tiktoken), a ``tokenizer.bytes.json`` or a llama2.c ``tokenizer.bin``; or a folder that
            holds one of them.

    Raises:
        JllamaError: there is no tokenizer, or it cannot be used.
    """
    # 1) Find the files.
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

    # 2) Read the first one, or the SentencePiece model that a tokenizer.json was made from.
    tokenizer = _read(files[0])
    is_json = isinstance(tokenizer, HuggingFaceTokenizer)
    if is_json and path / "tokenizer.model" in files[1:]:
        split = tokenizer.json["pre_tokenizer"] or {}
        if split.get("prepend_scheme") == "first":
            return tokenizer
        model = _read(path / "tokenizer.model")
        is_its_source = isinstance(model, SentencePieceTokenizer)
        if is_its_source and _tokens_of(model) == _tokens_of(tokenizer):
            return model

    # 3) Add the tokens that only other files of the folder have.
    if isinstance(tokenizer, SentencePieceTokenizer):
        folder = files[0].parent
        added = read_added_tokens(folder)
        end = read_end_token(folder)
        has_end = end in (None, tokenizer.texts[tokenizer.eos_id])
        if not has_end or any(id >= tokenizer.vocab_size for id in added):
            tokenizer = tokenizer.with_added_tokens(added, end)
        check_added_tokens(tokenizer.texts, added, files[0])
    return tokenizer


def _read(file: Path) -> Tokenizer:
    refuse_pointer(file)
    if file.name == BytesTokenizer.file_name:
        if read_json_object(file) != json.loads(BytesTokenizer.content):
            raise JllamaError(
                f"{file} is not a bytes tokenizer: it should hold {BytesTokenizer.content.decode()}"
            )
        return BytesTokenizer()
    if file.suffix == ".json":
        return load_huggingface_tokenizer(file)
    if file.suffix == ".bin":
        return load_llama2c_tokenizer(file)
    model = file.read_bytes()
    is_list_of_ranks = re.match(rb"[A-Za-z0-9+/]+=* \d+\s", model)
    kind = TiktokenTokenizer if is_list_of_ranks else SentencePieceTokenizer
    return kind(model, str(file))


def as_huggingface(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """Return a ``tokenizer.json`` that gives the same ids; raise ``JllamaError`` if none can."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    return HuggingFaceTokenizer.from_vocabulary(tokenizer.vocabulary())


def save_huggingface(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, and a SentencePiece model's own file.

    Raises:
        JllamaError: no ``tokenizer.json`` gives the same ids.
    """
    as_huggingface(tokenizer).save(folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)


def save_meta(tokenizer: Tokenizer, folder: Path) -> None:
    """Write Meta's ``tokenizer.model`` if the tokenizer is of Llama 2's or 3's kind.

    Any other tokenizer is saved in its own file, which jllama reads but Meta's code does not. So is
    one that adds no BOS, because Meta's do.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.add_bos:
        if not tokenizer.is_byte_level:
            tokenizer = SentencePieceTokenizer.from_vocabulary(tokenizer.vocabulary())
        else:
            with contextlib.suppress(JllamaError):
                tokenizer = TiktokenTokenizer.from_vocabulary(tokenizer.vocabulary())
    tokenizer.save(folder)
