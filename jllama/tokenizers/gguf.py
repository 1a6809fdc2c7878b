"""The tokenizer in a GGUF file's metadata, under ``tokenizer.ggml``.

Model ``llama`` is SentencePiece, ``gpt2`` is byte-level BPE with a named way to split text (``pre``). Source: the GGUF
specification (ggml, ``docs/gguf.md``) and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jllama.errors import JllamaError
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.byte_level import WHOLE_WORDS_FIRST, byte_level_json, pre_tokenizer_name
from jllama.tokenizers.convert import as_huggingface
from jllama.tokenizers.huggingface import HuggingFaceTokenizer
from jllama.tokenizers.pieces import Pieces, TokenType, added_tokens
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer

_PREFIX = "tokenizer.ggml."
_PRE = {name: name for name in ("llama-bpe", "smollm", "gpt-2")}
_PRE |= {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2"}


def from_gguf(metadata: Mapping[str, Any], source: str) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """The tokenizer that a GGUF file's metadata describes; JllamaError if that is not one of a Llama."""

    def check(ok: bool, said: str) -> None:
        if not ok:
            raise JllamaError(f"{source} has {said}")

    def value(name: str, kind: type, default: Any = None) -> Any:
        field = metadata.get(_PREFIX + name, default)
        check(isinstance(field, kind), f"{'no' if field is None else 'an odd'} {_PREFIX}{name}")
        return field

    model, tokens = value("model", str), value("tokens", list)
    types = value("token_type", list, [TokenType.NORMAL] * len(tokens))
    bos_id, eos_id = value("bos_token_id", int, 1), value("eos_token_id", int, 2)
    check(len(types) == len(tokens), f"{len(tokens)} tokens but {len(types)} types of tokens")
    check(set(types) <= set(TokenType), "types of tokens other than 1 to 6")
    try:
        "".join(tokens).encode()
    except (TypeError, UnicodeEncodeError):
        raise JllamaError(f"{source} has tokens that are not text in UTF-8") from None
    count = max((id + 1 for id, kind in enumerate(types) if kind != TokenType.UNUSED), default=0)  # without padding
    ids_are_right = min(bos_id, eos_id) >= 0 and max(bos_id, eos_id) < count
    check(ids_are_right, f"{count} tokens, but BOS and EOS are {bos_id} and {eos_id}")
    tokens, types = tokens[:count], types[:count]
    token, times = Counter(tokens).most_common(1)[0]
    check(times == 1, f"the token {token!r} twice")
    types[bos_id] = types[eos_id] = TokenType.CONTROL  # some files say otherwise of a chat model's
    if model == "llama":
        scores = value("scores", list)[:count]
        are_numbers = all(isinstance(score, (int, float)) for score in scores)
        check(are_numbers and len(scores) == count, f"{count} tokens but {len(scores)} scores")
        unk_id, add_dummy_prefix = value("unknown_token_id", int, 0), value("add_space_prefix", bool, True)
        if not (0 <= unk_id < count and types[unk_id] == TokenType.UNKNOWN and types.count(TokenType.BYTE) == 256):
            raise JllamaError(f"{source} lacks an unknown token or the 256 byte tokens, which a Llama's tokenizer has")
        pieces = Pieces(tokens, scores, types, unk_id, bos_id, eos_id, add_dummy_prefix)
        if value("add_bos_token", bool, True):
            return SentencePieceTokenizer(pieces.to_model(), source)
        return HuggingFaceTokenizer(pieces.to_json(), bos_id, eos_id, False, source)
    pre = value("pre", str, "default")
    said = f"a tokenizer of model {model!r} and pre {pre!r}; jllama knows llama, and gpt2 with {', '.join(_PRE)}"
    check(model == "gpt2" and pre in _PRE, said)
    merges = [str(merge).split(" ") for merge in value("merges", list)]
    vocab = {token: id for id, token in enumerate(tokens)}
    if wrong := [merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys()]:
        raise JllamaError(f"{source} merges {' '.join(wrong[0])!r}, which are no tokens")
    pairs = [(left, right) for left, right in merges]
    add_bos = value("add_bos_token", bool, _PRE[pre] == "llama-bpe")
    bos = (bos_id, tokens[bos_id]) if add_bos else None
    text = byte_level_json(vocab, pairs, added_tokens(tokens, types), _PRE[pre], bos)
    return HuggingFaceTokenizer(text, bos_id, eos_id, add_bos, source)


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata of a tokenizer in a GGUF file, padded with unused tokens to ``vocab_size``, or a JllamaError."""
    scores = merges = unk_id = None
    json = None if isinstance(tokenizer, SentencePieceTokenizer) else as_huggingface(tokenizer)
    if json is not None and json.is_byte_level:
        pre, prefix, normalizer = pre_tokenizer_name(json.json), False, json.json["normalizer"]
        if pre is None or normalizer is not None:
            split = f"{json.json['pre_tokenizer']}, normalizer {normalizer}"
            raise JllamaError(f"GGUF has no name for how this tokenizer splits text ({split})")
        if json.json["model"]["ignore_merges"] != (expected := pre == WHOLE_WORDS_FIRST):
            raise JllamaError(f"GGUF's {pre} tokenizer has ignore_merges {expected}, this one has not")
        merges = [" ".join(merge) for merge in json.merges]
        texts = [text or f"[PAD{id}]" for id, text in enumerate(json.texts)]
        types = [kind if text else TokenType.UNUSED for kind, text in zip(json.token_types(), json.texts, strict=True)]
    else:
        pre = "default"
        texts, scores, types, unk_id, _, _, prefix = (json or tokenizer).to_pieces()
    padding = range(len(texts), vocab_size)
    fields = {"model": "gpt2" if scores is None else "llama", "pre": pre}
    fields |= {"tokens": texts + [f"[PAD{id}]" for id in padding], "scores": scores and scores + [-1e4] * len(padding)}
    fields |= {"token_type": types + [TokenType.UNUSED] * len(padding), "merges": merges}
    fields |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "unknown_token_id": unk_id}
    fields |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": None if scores is None else False}
    fields |= {"add_space_prefix": prefix}
    return {_PREFIX + name: value for name, value in fields.items() if value is not None}
