"""A tokenizer as Hugging Face's and Meta's formats hold it."""

import contextlib
from pathlib import Path

from jllama.errors import JllamaError
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.tiktoken import TiktokenTokenizer


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
