"""A tokenizer as each checkpoint format holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jllama.errors import JllamaError
from jllama.tokenizers import Tokenizer
from jllama.tokenizers.base import FIRST_BYTE, BytesTokenizer
from jllama.tokenizers.byte_level import BYTE_CHARS, CHAR_BYTES, byte_level_json, merges_of_ranks, pre_tokenizer_name
from jllama.tokenizers.gguf import byte_level_metadata, pieces_metadata
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.llama2c import write_llama2c_tokenizer
from jllama.tokenizers.pieces import Pieces, json_pieces, pieces_json, read_pieces, write_pieces
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.tiktoken import SPECIAL_TOKENS, STOP_TOKENS, TiktokenTokenizer, write_ranks


def save_huggingface(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; of a SentencePiece model also the model itself.

    Raises:
        JllamaError: a ``tokenizer.json`` cannot give this tokenizer's ids.
    """
    as_huggingface(tokenizer).save(folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.save(folder)


def save_meta(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.model`` as Meta has it, if the tokenizer is of Llama 2's or 3's kind, or else its own file.

    The latter is no use to Meta's own code, but jllama reads it. So is a tokenizer kept that adds no BOS: Meta's do.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.add_bos:
        model = _as_llama3(tokenizer)
        if model is None and not tokenizer.is_byte_level:
            model = write_pieces(json_pieces(tokenizer))
        if model is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SentencePieceTokenizer.file_name).write_bytes(model)
            return
    tokenizer.save(folder)


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata that holds a tokenizer in a GGUF file, padded with unused tokens to ``vocab_size``.

    Raises:
        JllamaError: GGUF cannot hold this tokenizer; the message says what of it.
    """
    found = as_huggingface(tokenizer) if not isinstance(tokenizer, SentencePieceTokenizer) else tokenizer
    if isinstance(found, HuggingFaceTokenizer) and found.is_byte_level:
        return byte_level_metadata(found, vocab_size)
    return pieces_metadata(as_pieces(found), found.add_bos, vocab_size)


def save_llama2c_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write llama2.c's ``tokenizer.bin``; a tokenizer that it cannot hold raises JllamaError."""
    pieces = as_pieces(tokenizer)
    if not tokenizer.add_bos:
        raise JllamaError("llama2.c's tokenizer.bin cannot hold this tokenizer: run.c begins every prompt with BOS")
    write_llama2c_tokenizer(pieces, path)


def as_pieces(tokenizer: Tokenizer) -> Pieces:
    """A tokenizer as a SentencePiece model; JllamaError if it is of another kind."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return read_pieces(tokenizer.content)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return json_pieces(tokenizer)
    raise JllamaError(
        f"a {type(tokenizer).__name__} cannot be written as a SentencePiece model, which this format needs"
    )


def as_huggingface(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """A tokenizer of any kind as a ``tokenizer.json`` that gives the same ids."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    if isinstance(tokenizer, SentencePieceTokenizer):
        text = pieces_json(read_pieces(tokenizer.content))
    elif isinstance(tokenizer, TiktokenTokenizer):
        text = tokenizer.to_json()
    elif isinstance(tokenizer, BytesTokenizer):
        tokens = ["<unk>", "<s>", "</s>", *BYTE_CHARS]
        controls = [(id, token, True) for id, token in enumerate(tokens[:FIRST_BYTE])]
        text = byte_level_json({token: id for id, token in enumerate(tokens)}, [], controls, "gpt-2", (1, "<s>"))
    else:
        raise JllamaError(f"a {type(tokenizer).__name__} cannot be written as a tokenizer.json")
    return HuggingFaceTokenizer(text, tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos)


def _as_llama3(tokenizer: HuggingFaceTokenizer) -> bytes | None:
    """The tiktoken file of a ``tokenizer.json`` that is Llama 3's to the last merge; None for any other.

    Of the special tokens those held in reserve may have any of the names that Meta gave them over time.
    """
    count = tokenizer.vocab_size - len(SPECIAL_TOKENS)
    texts = [tokenizer.text_of(id) for id in range(tokenizer.vocab_size)]
    if pre_tokenizer_name(tokenizer.json) != "llama-bpe" or tokenizer.json["normalizer"] is not None or count < 256:
        return None
    names = zip(texts[count:], SPECIAL_TOKENS, strict=True)
    if any(name != known and not name.startswith("<|reserved_special_token_") for name, known in names):
        return None
    if tokenizer.bos_id != count or tokenizer.text_of(tokenizer.eos_id) not in STOP_TOKENS:
        return None
    if any(id < count for id in tokenizer.added) or tokenizer.merges != merges_of_ranks(texts[:count]):
        return None
    return write_ranks([bytes(CHAR_BYTES[char] for char in text) for text in texts[:count]])
