"""A tokenizer as Hugging Face's and Meta's formats hold it."""

from pathlib import Path

from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.byte_level import CHAR_BYTES, merges_of_ranks, pre_tokenizer_name
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer
from jllama.tokenizers.tiktoken import SPECIAL_TOKENS, STOP_TOKENS, TiktokenTokenizer, write_ranks


def as_huggingface(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """A tokenizer of any kind as a ``tokenizer.json`` that gives the same ids; JllamaError if there is none."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    return HuggingFaceTokenizer(tokenizer.to_json(), tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos)


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
            tokenizer = SentencePieceTokenizer(tokenizer.to_pieces().to_model())
        elif ranks := _llama3_ranks(tokenizer):
            tokenizer = TiktokenTokenizer(ranks)
    tokenizer.save(folder)


def _llama3_ranks(tokenizer: HuggingFaceTokenizer) -> bytes | None:
    """The tiktoken file of a ``tokenizer.json`` that is Llama 3's to the last merge; None for any other."""
    texts, count = tokenizer.texts, tokenizer.vocab_size - len(SPECIAL_TOKENS)
    reserved = "<|reserved_special_token_"  # Meta has numbered these otherwise over time
    is_llama3 = (
        count >= 256
        and pre_tokenizer_name(tokenizer.json) == "llama-bpe"
        and tokenizer.json["normalizer"] is None
        and all(text.startswith((name, reserved)) for text, name in zip(texts[count:], SPECIAL_TOKENS, strict=True))
        and (tokenizer.bos_id, min(tokenizer.added)) == (count, count)
        and texts[tokenizer.eos_id] in STOP_TOKENS
        and tokenizer.merges == merges_of_ranks(texts[:count])
    )
    return write_ranks([bytes(CHAR_BYTES[char] for char in text) for text in texts[:count]]) if is_llama3 else None
