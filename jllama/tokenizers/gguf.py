"""The tokenizer in a GGUF file's metadata: a ``Vocabulary``, field by field.

The fields begin with ``tokenizer.ggml``. Model ``llama`` is SentencePiece, ``gpt2`` is byte-level
BPE whose way to split text has a name (``pre``). Source: the GGUF specification (ggml,
``docs/gguf.md``) and llama.cpp's ``convert_hf_to_gguf.py``.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jllama.core import JllamaError
from jllama.system.files import errors_as
from jllama.tokenizers.base import Tokenizer, TokenType, Vocabulary
from jllama.tokenizers.huggingface import PRE_TOKENIZERS, HuggingFaceTokenizer
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer

_PREFIX = "tokenizer.ggml."
_PRE = {name: name for name in PRE_TOKENIZERS} | {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "refact": "smollm",
    "starcoder": "smollm",
    "default": "gpt-2",
}
"""The pre-tokenizer of each name in files; SmolLM3's is ``smaug-bpe``, Granite's ``refact``."""
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""The names whose prompts begin with BOS if ``add_bos_token`` is missing."""


class _Fields(NamedTuple):
    """The tokenizer's fields in a file's metadata, which errors call ``source``."""

    metadata: Mapping[str, Any]
    source: str

    def read(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a field; ``JllamaError`` if it is missing or not of type ``kind``."""
        field = self.metadata.get(_PREFIX + name, default)
        problem = "no" if field is None else "a wrong type of"
        self.check(type(field) is kind, f"{problem} {_PREFIX}{name}")
        return field

    def check(self, is_right: bool, problem: str) -> None:
        """Raise ``JllamaError`` unless the fields are right."""
        if not is_right:
            raise JllamaError(f"{self.source} has {problem}")


def from_gguf(
    metadata: Mapping[str, Any], source: str
) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    Raises:
        JllamaError: the metadata, called ``source``, is not that of a Llama's tokenizer.
    """
    # 1. Read the fields that both models have.
    fields = _Fields(metadata, source)
    model = fields.read("model", str)
    is_pieces = model == "llama"
    tokens = fields.read("tokens", list)
    pre = fields.read("pre", str, "")
    kinds = fields.read("token_type", list, [TokenType.NORMAL] * len(tokens))
    eos_id = fields.read("eos_token_id", int, 2)
    bos_id = fields.read("bos_token_id", int, 1 if is_pieces else eos_id)
    add_bos = fields.read("add_bos_token", bool, is_pieces or pre in _WITH_BOS)
    unknown_id = fields.read("unknown_token_id", int, 0)
    fields.check(
        len(kinds) == len(tokens), f"{len(tokens)} tokens but {len(kinds)} types of tokens"
    )
    fields.check(set(kinds) <= set(TokenType), "types of tokens other than 1 to 6")
    with errors_as(
        f"{source} has tokens that are not text in UTF-8", TypeError, UnicodeEncodeError
    ):
        "".join(tokens).encode()

    # 2. Leave out the unused tokens at the end, which are padding.
    if is_pieces and kinds[unknown_id : unknown_id + 1] == [TokenType.CONTROL]:
        # In Phi-3's files the padding has the type of the unknown token.
        kinds = [TokenType.UNUSED if kind == TokenType.UNKNOWN else kind for kind in kinds]
        kinds[unknown_id] = TokenType.UNKNOWN
    used = [id for id, kind in enumerate(kinds) if kind != TokenType.UNUSED]
    count = max(used, default=-1) + 1
    are_ids = bos_id in range(count) and eos_id in range(count)
    fields.check(are_ids, f"{count} tokens, but BOS and EOS are {bos_id} and {eos_id}")
    tokens = tokens[:count]
    kinds = kinds[:count]
    token, times = Counter(tokens).most_common(1)[0]
    fields.check(times == 1, f"the token {token!r} twice")
    # Some files of chat models give BOS or EOS another type.
    kinds[bos_id] = kinds[eos_id] = TokenType.CONTROL

    # 3. Read the fields of the model.
    vocabulary = Vocabulary(tokens, kinds, bos_id, eos_id, add_bos)
    if is_pieces:
        return _piece_tokenizer(fields, vocabulary._replace(unknown_token_id=unknown_id))
    is_known = model == "gpt2" and pre in _PRE
    fields.check(
        is_known,
        f"a tokenizer of model {model!r} and {_PREFIX}pre {pre!r}, which says how text is split; "
        f"jllama knows llama, and gpt2 with {', '.join(_PRE)}",
    )
    return _byte_tokenizer(fields, vocabulary._replace(pre=_PRE[pre]))


def _piece_tokenizer(
    fields: _Fields, vocabulary: Vocabulary
) -> SentencePieceTokenizer | HuggingFaceTokenizer:
    """Return the tokenizer of the model ``llama``, whose pieces have scores."""
    count = len(vocabulary.tokens)
    scores = fields.read("scores", list)[:count]
    are_numbers = all(type(score) in (int, float) for score in scores)
    is_right = are_numbers and len(scores) == count
    fields.check(is_right, f"{count} tokens but {len(scores)} scores")
    strips_spaces = fields.metadata.get("general.architecture") == "phi3"
    vocabulary = vocabulary._replace(
        scores=scores,
        strips_spaces=strips_spaces,
        add_space_prefix=fields.read("add_space_prefix", bool, True),
    )
    vocabulary.check_pieces(fields.source)
    is_model = vocabulary.add_bos_token and not strips_spaces
    kind = SentencePieceTokenizer if is_model else HuggingFaceTokenizer
    return kind.from_vocabulary(vocabulary, fields.source)


def _byte_tokenizer(fields: _Fields, vocabulary: Vocabulary) -> HuggingFaceTokenizer:
    """Return the tokenizer of the model ``gpt2``, whose tokens are merged from bytes."""
    merges = [tuple(str(merge).split(" ")) for merge in fields.read("merges", list)]
    existing = set(vocabulary.tokens)
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= existing:
            raise JllamaError(f"{fields.source} merges {' '.join(merge)!r}, which are not tokens")
    return HuggingFaceTokenizer.from_vocabulary(vocabulary._replace(merges=merges), fields.source)


def to_gguf(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return a tokenizer as metadata of a GGUF file, padded with unused tokens to ``vocab_size``.

    Raises:
        JllamaError: GGUF cannot hold the tokenizer.
    """
    vocabulary = tokenizer.vocabulary()
    padding = range(len(vocabulary.tokens), vocab_size)
    fields = {"model": "gpt2" if vocabulary.scores is None else "llama", **vocabulary._asdict()}
    del fields["strips_spaces"]  # the architecture says so
    fields["tokens"] = [*vocabulary.tokens, *(f"[PAD{id}]" for id in padding)]
    fields["token_type"] = [*vocabulary.token_type, *[TokenType.UNUSED] * len(padding)]
    if vocabulary.merges is not None:
        fields["merges"] = [" ".join(merge) for merge in vocabulary.merges]
    if vocabulary.scores is not None:
        fields["scores"] = vocabulary.scores + [-1e4] * len(padding)
        fields["add_eos_token"] = False
    return {_PREFIX + name: value for name, value in fields.items() if value is not None}
