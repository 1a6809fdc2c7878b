"""The tokenizer in a GGUF file's metadata, under ``tokenizer.ggml``: a ``Vocabulary``, field by field.

Model ``llama`` is SentencePiece, ``gpt2`` is byte-level BPE with a named way to split text (``pre``). Source: the GGUF
specification (ggml, ``docs/gguf.md``) and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from jllama.errors import JllamaError
from jllama.files import fault_of
from jllama.tokenizers.base import Tokenizer, TokenType, Vocabulary
from jllama.tokenizers.huggingface import PRE_TOKENIZERS, HuggingFaceTokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer

_PREFIX = "tokenizer.ggml."
_PRE = {name: name for name in PRE_TOKENIZERS} | {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "default": "gpt-2",
}


def from_gguf(
    metadata: Mapping[str, Any], source: str
) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """The tokenizer that a GGUF file's metadata describes; JllamaError if that is not one of a Llama."""

    def check(ok: bool, said: str) -> None:
        if not ok:
            raise JllamaError(f"{source} has {said}")

    def value(name: str, kind: type, default: Any = None) -> Any:
        field = metadata.get(_PREFIX + name, default)
        check(type(field) is kind, f"{'no' if field is None else 'an odd'} {_PREFIX}{name}")
        return field

    model, tokens, pre = value("model", str), value("tokens", list), value("pre", str, "default")
    kinds = value("token_type", list, [TokenType.NORMAL] * len(tokens))
    bos_id, eos_id = value("bos_token_id", int, 1), value("eos_token_id", int, 2)
    check(len(kinds) == len(tokens), f"{len(tokens)} tokens but {len(kinds)} types of tokens")
    check(set(kinds) <= set(TokenType), "types of tokens other than 1 to 6")
    with fault_of(f"{source} has tokens that are not text in UTF-8", TypeError, UnicodeEncodeError):
        "".join(tokens).encode()
    count = max(
        (id + 1 for id, kind in enumerate(kinds) if kind != TokenType.UNUSED), default=0
    )  # without padding
    ids = range(count)
    check(
        bos_id in ids and eos_id in ids,
        f"{count} tokens, but BOS and EOS are {bos_id} and {eos_id}",
    )
    tokens, kinds = tokens[:count], kinds[:count]
    token, times = Counter(tokens).most_common(1)[0]
    check(times == 1, f"the token {token!r} twice")
    kinds[bos_id] = kinds[eos_id] = TokenType.CONTROL  # some files say otherwise of a chat model's
    add_bos = value("add_bos_token", bool, model == "llama" or _PRE.get(pre) == "llama-bpe")
    vocabulary = Vocabulary(tokens, kinds, bos_id, eos_id, add_bos)
    if model == "llama":
        scores = value("scores", list)[:count]
        are_numbers = all(type(score) in (int, float) for score in scores)
        check(are_numbers and len(scores) == count, f"{count} tokens but {len(scores)} scores")
        unk_id, prefix = value("unknown_token_id", int, 0), value("add_space_prefix", bool, True)
        vocabulary = vocabulary._replace(
            scores=scores, unknown_token_id=unk_id, add_space_prefix=prefix
        )
        vocabulary.check_pieces(source)
        return (SentencePieceTokenizer if add_bos else HuggingFaceTokenizer).from_vocabulary(
            vocabulary, source
        )
    said = f"a tokenizer of model {model!r} and pre {pre!r}; jllama knows llama, and gpt2 with {', '.join(_PRE)}"
    check(model == "gpt2" and pre in _PRE, said)
    merges, existing = (
        [tuple(str(merge).split(" ")) for merge in value("merges", list)],
        set(tokens),
    )
    if wrong := [
        merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= existing
    ]:
        raise JllamaError(f"{source} merges {' '.join(wrong[0])!r}, which are no tokens")
    return HuggingFaceTokenizer.from_vocabulary(
        vocabulary._replace(merges=merges, pre=_PRE[pre]), source
    )


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """The metadata of a tokenizer in a GGUF file, padded with unused tokens to ``vocab_size``, or a JllamaError."""
    vocabulary = tokenizer.vocabulary()
    padding = range(len(vocabulary.tokens), vocab_size)
    fields: dict[str, Any] = {
        "model": "gpt2" if vocabulary.scores is None else "llama"
    } | vocabulary._asdict()
    fields["tokens"] = [*vocabulary.tokens, *(f"[PAD{id}]" for id in padding)]
    fields["token_type"] = [*vocabulary.token_type, *[TokenType.UNUSED] * len(padding)]
    if vocabulary.merges is not None:
        fields["merges"] = [" ".join(merge) for merge in vocabulary.merges]
    if vocabulary.scores is not None:
        fields |= {"scores": vocabulary.scores + [-1e4] * len(padding), "add_eos_token": False}
    return {_PREFIX + name: value for name, value in fields.items() if value is not None}
