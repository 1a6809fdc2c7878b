"""The tokenizer in a GGUF file's metadata, under ``tokenizer.ggml``.

Model ``llama`` is SentencePiece, ``gpt2`` is byte-level BPE with a named way to split text (``pre``). Source: the GGUF
specification (ggml, ``docs/gguf.md``) and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jllama.errors import JllamaError
from jllama.tokenizers.byte_level import WHOLE_WORDS_FIRST, byte_level_json, pre_tokenizer_name
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pieces,
    pieces_json,
    write_pieces,
)
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer

_PREFIX = "tokenizer.ggml."
_PADDING = "[PAD{}]"
_PRE = {
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smollm": "smollm",
    "gpt-2": "gpt-2",
    "default": "gpt-2",
}


def from_gguf(metadata: Mapping[str, Any], source: str) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    Raises:
        JllamaError: something is missing or does not fit together, or it is of a kind that no Llama has.
    """

    def value(name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        found = metadata.get(_PREFIX + name, default)
        if not isinstance(found, kinds):
            raise JllamaError(f"{source} has {'no' if found is None else 'an odd'} {_PREFIX}{name}")
        return found

    model, tokens = value("model", str), value("tokens", list)
    types = value("token_type", list, [NORMAL] * len(tokens))
    bos_id, eos_id = value("bos_token_id", int, 1), value("eos_token_id", int, 2)
    if len(types) != len(tokens):
        raise JllamaError(f"{source} has {len(tokens)} tokens but {len(types)} types of tokens")
    if not set(types) <= set(range(NORMAL, BYTE + 1)):
        raise JllamaError(f"{source} has types of tokens other than {NORMAL} to {BYTE}")
    try:
        "".join(tokens).encode()
    except (TypeError, UnicodeEncodeError):
        raise JllamaError(f"{source} has tokens that are not text in UTF-8") from None
    count = len(tokens)
    while count and types[count - 1] == UNUSED:  # padding up to the embedding's rows
        count -= 1
    if not (0 <= bos_id < count and 0 <= eos_id < count):
        raise JllamaError(f"{source} has {count} tokens, but BOS and EOS are {bos_id} and {eos_id}")
    tokens, types = tokens[:count], types[:count]
    if twice := [token for token, times in Counter(tokens).items() if times > 1]:
        raise JllamaError(f"{source} has the token {twice[0]!r} twice")
    for id in (bos_id, eos_id):
        types[id] = CONTROL  # some files say otherwise of a chat model's
    if model == "llama":
        scores = value("scores", list)[:count]
        if len(scores) != count or not all(isinstance(score, (int, float)) for score in scores):
            raise JllamaError(f"{source} has {count} tokens but {len(scores)} scores")
        unk_id, prefix = value("unknown_token_id", int, 0), value("add_space_prefix", bool, True)
        if not (0 <= unk_id < count and types[unk_id] == UNKNOWN and types.count(BYTE) == 256):
            raise JllamaError(f"{source} lacks an unknown token or the 256 byte tokens, which a Llama's tokenizer has")
        pieces = Pieces(tokens, scores, types, unk_id, bos_id, eos_id, prefix)
        if value("add_bos_token", bool, True):
            return SentencePieceTokenizer(write_pieces(pieces), source)
        return HuggingFaceTokenizer(pieces_json(pieces), bos_id, eos_id, False, source)
    pre = value("pre", str, "default")
    if model != "gpt2" or pre not in _PRE:
        raise JllamaError(
            f"{source} has a tokenizer of model {model!r} and pre {pre!r}; jllama knows llama, "
            f"and gpt2 with {', '.join(_PRE)}"
        )
    merges = [str(merge).split(" ") for merge in value("merges", list)]
    vocab = {token: id for id, token in enumerate(tokens)}
    if wrong := [merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys()]:
        raise JllamaError(f"{source} merges {' '.join(wrong[0])!r}, which are no tokens")
    added = [(id, tokens[id], kind == CONTROL) for id, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]
    add_bos = value("add_bos_token", bool, _PRE[pre] == "llama-bpe")
    bos = (bos_id, tokens[bos_id]) if add_bos else None
    text = byte_level_json(vocab, [(left, right) for left, right in merges], added, _PRE[pre], bos)
    return HuggingFaceTokenizer(text, bos_id, eos_id, add_bos, source)


def pieces_metadata(pieces: Pieces, add_bos: bool, vocab_size: int) -> dict[str, Any]:
    """GGUF's metadata of a SentencePiece model, padded to the embedding's rows."""
    padding = range(len(pieces.texts), vocab_size)
    return {
        _PREFIX + "model": "llama",
        _PREFIX + "pre": "default",
        _PREFIX + "tokens": [*pieces.texts, *map(_PADDING.format, padding)],
        _PREFIX + "scores": [*pieces.scores, *[-1e4] * len(padding)],
        _PREFIX + "token_type": [*pieces.types, *[UNUSED] * len(padding)],
        _PREFIX + "bos_token_id": pieces.bos_id,
        _PREFIX + "eos_token_id": pieces.eos_id,
        _PREFIX + "unknown_token_id": pieces.unk_id,
        _PREFIX + "add_bos_token": add_bos,
        _PREFIX + "add_eos_token": False,
        _PREFIX + "add_space_prefix": pieces.add_dummy_prefix,
    }


def byte_level_metadata(tokenizer: HuggingFaceTokenizer, vocab_size: int) -> dict[str, Any]:
    """GGUF's metadata of a byte-level ``tokenizer.json``, padded to the embedding's rows.

    Raises:
        JllamaError: it splits or normalises text in a way that has no name in GGUF.
    """
    whole = tokenizer.json
    pre = pre_tokenizer_name(whole)
    if pre is None or whole["normalizer"] is not None:
        raise JllamaError(
            f"GGUF has no name for how this tokenizer splits text ({whole['pre_tokenizer']}, "
            f"normalizer {whole['normalizer']})"
        )
    if bool(whole["model"].get("ignore_merges")) != (expected := pre == WHOLE_WORDS_FIRST):
        raise JllamaError(f"GGUF's {pre} tokenizer has ignore_merges {expected}, this one has not")
    tokens = [_PADDING.format(id) for id in range(max(tokenizer.vocab_size, vocab_size))]
    types = [UNUSED] * len(tokens)
    for token, id in whole["model"]["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for id, token in tokenizer.added.items():
        tokens[id], types[id] = token.content, CONTROL if token.special else USER_DEFINED
    return {
        _PREFIX + "model": "gpt2",
        _PREFIX + "pre": pre,
        _PREFIX + "tokens": tokens,
        _PREFIX + "token_type": types,
        _PREFIX + "merges": [" ".join(merge) for merge in tokenizer.merges],
        _PREFIX + "bos_token_id": tokenizer.bos_id,
        _PREFIX + "eos_token_id": tokenizer.eos_id,
        _PREFIX + "add_bos_token": tokenizer.add_bos,
        _PREFIX + "add_space_prefix": False,
    }
