"""SentencePiece models as data, and as Hugging Face's ``tokenizer.json`` of Llama 2's kind, both ways.

A piece has a score; of all neighbours that join to a piece, those with the highest score are joined first. Source:
Kudo and Richardson 2018 (arXiv:1808.06226), and the library's ``sentencepiece_model.proto``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jllama.errors import JllamaError
from jllama.tokenizers.byte_level import merges_of_ranks, tokenizer_json

if TYPE_CHECKING:
    from jllama.tokenizers.huggingface import HuggingFaceTokenizer

SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces, as the library and GGUF number them."""

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}


class Pieces(NamedTuple):
    """A SentencePiece model: its pieces by id, and the few numbers that a Llama's tokenizer needs besides."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    unk_id: int
    bos_id: int
    eos_id: int
    add_dummy_prefix: bool


def byte_of(piece: str) -> int | None:
    """The byte that a piece such as ``<0x0A>`` stands for."""
    found = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return int(found[1], 16) if found else None


def read_pieces(model: bytes) -> Pieces:
    """A serialised SentencePiece model as data. One whose normaliser changes text raises JllamaError."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    if trainer.model_type != trainer.BPE or not trainer.byte_fallback:
        raise JllamaError("only SentencePiece models of Llama's kind (BPE with byte fallback) can be converted")
    if spec.precompiled_charsmap or spec.remove_extra_whitespaces or not spec.escape_whitespaces:
        raise JllamaError(f"the SentencePiece model normalises text ({spec.name}), which other formats cannot hold")
    texts, scores, types = zip(*((piece.piece, piece.score, piece.type) for piece in proto.pieces), strict=True)
    ids = trainer.unk_id, trainer.bos_id, trainer.eos_id
    return Pieces(list(texts), list(scores), list(types), *ids, spec.add_dummy_prefix)


def write_pieces(pieces: Pieces) -> bytes:
    """A serialised SentencePiece model of these pieces, with the settings of Llama's."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        proto.pieces.add(piece=text, score=score, type=kind)
    trainer, spec = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = True
    trainer.vocab_size = len(pieces.texts)
    for name, id in (("unk", pieces.unk_id), ("bos", pieces.bos_id), ("eos", pieces.eos_id)):
        setattr(trainer, f"{name}_id", id)
        setattr(trainer, f"{name}_piece", pieces.texts[id])
    trainer.pad_id = -1
    spec.name = "identity"
    spec.add_dummy_prefix = pieces.add_dummy_prefix
    spec.remove_extra_whitespaces = False
    spec.escape_whitespaces = True
    return proto.SerializeToString()


def pieces_json(pieces: Pieces) -> str:
    """The ``tokenizer.json`` that gives the ids that SentencePiece gives.

    Only after a user-defined piece, which no Llama's own model has, does the json put a space that SentencePiece does
    not; llama.cpp does as the json.
    """
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    added = [(id, pieces.texts[id], special[kind]) for id, kind in enumerate(pieces.types) if kind in special]
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[Any] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if pieces.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return tokenizer_json(
        {text: id for id, text in enumerate(pieces.texts)},
        _merges(pieces),
        added,
        (pieces.bos_id, pieces.texts[pieces.bos_id]),
        {"type": "Sequence", "decoders": decoders},
        normalizer={"type": "Sequence", "normalizers": [_PREPEND, _REPLACE] if pieces.add_dummy_prefix else [_REPLACE]},
        unk_token=pieces.texts[pieces.unk_id],
    )


def json_pieces(tokenizer: HuggingFaceTokenizer) -> Pieces:
    """A ``tokenizer.json`` of Llama 2's kind as SentencePiece has it: scores from the order of the merges.

    A json with Metaspace (transformers 5 writes it) drops the space before a text that begins with one; SentencePiece,
    which such a model was trained with, does not.

    Raises:
        JllamaError: it is of another kind, and SentencePiece has no such thing; the message says what.
    """
    whole = tokenizer.json
    model = whole["model"]
    if tokenizer.is_byte_level or not model.get("byte_fallback"):
        raise JllamaError("the tokenizer is a byte-level BPE, which a SentencePiece file cannot hold")
    add_dummy_prefix = _dummy_prefix(whole)
    texts = [""] * tokenizer.vocab_size
    for text, id in model["vocab"].items():
        texts[id] = text
    types = [BYTE if byte_of(text) is not None else NORMAL for text in texts]
    for id, token in tokenizer.added.items():
        texts[id] = token.content
        types[id] = CONTROL if token.special else USER_DEFINED
    ids = {text: id for id, text in enumerate(texts)}
    unk_id = ids.get(model.get("unk_token") or "", -1)
    if unk_id < 0:
        raise JllamaError("the tokenizer has no unknown token, which a SentencePiece file must have")
    types[unk_id] = UNKNOWN
    for id in (tokenizer.bos_id, tokenizer.eos_id):
        types[id] = CONTROL
    if missing := 256 - types.count(BYTE):
        raise JllamaError(f"the tokenizer lacks {missing} of the 256 byte tokens, which a SentencePiece file must have")
    scores = [0.0 if kind != NORMAL else -1e9 for kind in types]
    merges = tokenizer.merges
    for rank, (left, right) in enumerate(merges):
        scores[ids[left + right]] = -float(rank)
    pieces = Pieces(texts, scores, types, unk_id, tokenizer.bos_id, tokenizer.eos_id, add_dummy_prefix)
    if absent := set(_merges(pieces)) - set(merges):
        left, right = min(absent)
        raise JllamaError(
            f"the tokenizer does not join {left!r} and {right!r} to a token that it has, as SentencePiece would: "
            f"in a SentencePiece file it would give other ids"
        )
    return pieces


def _merges(pieces: Pieces) -> list[tuple[str, str]]:
    """Each way to split a piece in two, the ways of higher-scored pieces first."""
    ids = {text: id for id, (text, kind) in enumerate(zip(pieces.texts, pieces.types, strict=True)) if kind == NORMAL}
    return merges_of_ranks(sorted(ids, key=lambda text: -pieces.scores[ids[text]]), ids)


def _dummy_prefix(whole: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json puts a space before a text; any other change of the text is refused."""
    normalizer, pre = whole["normalizer"], whole["pre_tokenizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if pre is None and steps in ([_REPLACE], [_PREPEND, _REPLACE]):
        return _PREPEND in steps
    if not steps and pre and pre["type"] == "Metaspace" and pre["replacement"] == SPACE and pre["split"] is False:
        return pre["prepend_scheme"] != "never"
    kinds = ", ".join([step["type"] for step in steps] + ([pre["type"]] if pre else []))
    raise JllamaError(f"the tokenizer changes text in a way that SentencePiece does not ({kinds or 'spaces stay'})")
