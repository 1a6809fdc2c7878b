"""SentencePiece models as data. A piece has a score; neighbors that join to the piece of the highest score join first.

Source: Kudo and Richardson 2018 (arXiv:1808.06226), and the library's ``sentencepiece_model.proto``.
"""

import enum
import re
from typing import Any, NamedTuple

from sentencepiece import sentencepiece_model_pb2

from jllama.errors import JllamaError
from jllama.tokenizers.byte_level import merges_of_ranks, tokenizer_json

SPACE = "\u2581"  # how SentencePiece writes a space inside a piece
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
"""What a ``tokenizer.json`` does to a text first; the second stands for ``add_dummy_prefix``."""

_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # pyright: ignore[reportAttributeAccessIssue]


class TokenType(enum.IntEnum):
    """The type of a piece, as the library and GGUF number it."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class Pieces(NamedTuple):
    """A SentencePiece model: its pieces by id, and the few numbers that a Llama's tokenizer needs besides."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    unk_id: int
    bos_id: int
    eos_id: int
    add_dummy_prefix: bool

    @classmethod
    def from_model(cls, model: bytes) -> "Pieces":
        """Read a serialized model. One whose normalizer changes text raises JllamaError."""
        proto = _ModelProto.FromString(model)
        spec, trainer = proto.normalizer_spec, proto.trainer_spec
        if trainer.model_type != trainer.BPE or not trainer.byte_fallback:
            raise JllamaError("only SentencePiece models of Llama's kind (BPE with byte fallback) can be converted")
        if spec.precompiled_charsmap or spec.remove_extra_whitespaces or not spec.escape_whitespaces:
            raise JllamaError(f"the SentencePiece model normalizes text ({spec.name}), which other formats cannot hold")
        rows = ((piece.piece, piece.score, piece.type) for piece in proto.pieces)
        texts, scores, types = map(list, zip(*rows, strict=True))
        return cls(texts, scores, types, trainer.unk_id, trainer.bos_id, trainer.eos_id, spec.add_dummy_prefix)

    def to_model(self) -> bytes:
        """Serialize the model, with the settings of Llama's."""
        rows = zip(self.texts, self.scores, self.types, strict=True)
        trainer = {"model_type": "BPE", "byte_fallback": True, "vocab_size": len(self.texts), "pad_id": -1}
        for name, id in (("unk", self.unk_id), ("bos", self.bos_id), ("eos", self.eos_id)):
            trainer |= {f"{name}_id": id, f"{name}_piece": self.texts[id]}
        spaces = {"add_dummy_prefix": self.add_dummy_prefix, "remove_extra_whitespaces": False}
        return _ModelProto(
            pieces=[{"piece": text, "score": score, "type": kind} for text, score, kind in rows],
            trainer_spec=trainer,
            normalizer_spec={"name": "identity", "escape_whitespaces": True, **spaces},
        ).SerializeToString()

    def to_json(self) -> str:
        """The ``tokenizer.json`` that gives the ids that SentencePiece gives.

        But after a user-defined piece, which no Llama's own model has, the json puts a space, as llama.cpp does.
        """
        added = added_tokens(self.texts, self.types)
        spaces = REPLACE | {"pattern": {"String": SPACE}, "content": " "}
        decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        prefix = int(self.add_dummy_prefix)
        parts = {
            "normalizer": {"type": "Sequence", "normalizers": [PREPEND] * prefix + [REPLACE]},
            "decoder": {"type": "Sequence", "decoders": decoders + [strip] * prefix},
        }
        vocab, bos = {text: id for id, text in enumerate(self.texts)}, (self.bos_id, self.texts[self.bos_id])
        model = {"unk_token": self.texts[self.unk_id], "fuse_unk": True, "byte_fallback": True}
        return tokenizer_json(vocab, self.merges(), added, bos, parts, model)

    def merges(self) -> list[tuple[str, str]]:
        """Each way to split a piece in two, the ways of higher-scored pieces first."""
        rows = enumerate(zip(self.texts, self.types, strict=True))
        ids = {text: id for id, (text, kind) in rows if kind == TokenType.NORMAL}
        return merges_of_ranks(sorted(ids, key=lambda text: -self.scores[ids[text]]), ids)


def added_tokens(texts: list[str], types: list[int]) -> list[tuple[int, str, bool]]:
    """Id, text and whether it is special of the tokens that no merge produces."""
    special: dict[int, bool] = {TokenType.UNKNOWN: True, TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
    return [(id, texts[id], special[kind]) for id, kind in enumerate(types) if kind in special]


def byte_of(piece: str) -> int | None:
    """The byte that a piece such as ``<0x0A>`` stands for."""
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return int(match[1], 16) if match else None


def piece_bytes(piece: str) -> int:
    """How many bytes of text a piece stands for."""
    return 1 if byte_of(piece) is not None else len(piece.replace(SPACE, " ").encode())
