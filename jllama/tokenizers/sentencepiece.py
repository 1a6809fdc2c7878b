"""SentencePiece, the tokenizer of Llama 1 and 2: reading a model, and training one."""

import io
import random
import re
from collections.abc import Iterable
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from jllama.errors import JllamaError
from jllama.tokenizers.base import BYTE_PIECES, SPACE, Ids, Tokenizer, Vocabulary, piece_bytes

SEGMENT = (
    1 << 16
)  # characters; the library needs 40 bytes of memory for each, and is 2 to 3 times slower on long texts
MAX_LINES = 400_000  # training samples this many lines at most: about 3 seconds
MAX_CHARACTERS = 1 << 26  # and so many characters
_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # pyright: ignore[reportAttributeAccessIssue]
LINE = re.compile(r"[^\n]{1,1000}")  # the library drops what is longer than 4192 bytes

_TOO_MANY = (
    "the text supports a vocabulary of {} tokens, not {}: lower vocab_size or give more text"
)
_TOO_FEW = "this text needs at least {} tokens for its characters and the 256 bytes, not {}: raise vocab_size"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. With byte fallback (every Llama has it) any text comes back unchanged.

    ``encode`` gives what the library gives, but for U+2581: the library would turn it into a space, here it becomes its
    three byte tokens, which decode to it. It puts a space, one token byte, in front of every text; in
    ``encode_with_special_tokens`` in front of each part: so it is in Meta's code, in the ``tokenizer.json`` of Llama 2
    and in transformers' ``LlamaTokenizer`` with ``legacy=True``, but not without that. A serialized ``model`` that no
    Llama could use raises JllamaError, which names ``source``.
    """

    file_name = "tokenizer.model"
    is_byte_level = False

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        self._processor = library = sentencepiece.SentencePieceProcessor()
        try:
            library.LoadFromSerializedProto(model)
            self.texts = [library.id_to_piece(id) for id in range(library.vocab_size())]
        except (RuntimeError, UnicodeDecodeError):
            said = f"{source} is not a SentencePiece model, nor Llama 3's list of ranks"
            raise JllamaError(f"{said}: give a Llama's tokenizer.model") from None
        self.content = model
        self.vocab_size, self.bos_id, self.eos_id = (
            len(self.texts),
            library.bos_id(),
            library.eos_id(),
        )
        if min(self.bos_id, self.eos_id) < 0:
            raise JllamaError(
                f"{source} has no BOS or no EOS token, and a Llama needs both: give a Llama's tokenizer"
            )
        self._byte_ids = library.piece_to_id(list(BYTE_PIECES))
        special = [
            id for id in range(self.vocab_size) if library.is_control(id) or library.is_unknown(id)
        ]
        self.special_tokens = {self.texts[id]: id for id in special}
        self.pieces = [
            b"" if text in self.special_tokens else piece_bytes(text) for text in self.texts
        ]
        newline = library.encode("\n")
        self._cut_at_newlines = (
            not any("\n" in text for text in self.texts)
            and newline[:1] == [library.piece_to_id(SPACE)]
            and library.encode("a \n") == library.encode("a ") + newline[1:]
        )

    def _encode(self, text: str) -> list[int]:
        if SPACE not in text or not self._processor.is_byte(self._byte_ids[0]):
            return self._library_ids(text)
        chars, unknown = map(chr, range(0xFDD0, 0xDFFF, -1)), self._processor.unk_id()
        stand_in = next(
            char
            for char in chars
            if self._processor.piece_to_id(char) == unknown and char not in text
        )
        ids = "".join(
            map(chr, self._library_ids(text.replace(SPACE, stand_in)))
        )  # a str only for its replace
        old, new = (
            "".join(chr(self._byte_ids[byte]) for byte in char.encode())
            for char in (stand_in, SPACE)
        )
        return [ord(char) for char in ids.replace(old, new)]

    def _library_ids(self, text: str) -> list[int]:
        """The library's ids. A long text is cut before newlines, which no piece crosses: the same ids, sooner."""
        if len(text) <= SEGMENT or not self._cut_at_newlines:
            return self._processor.encode(text)
        first, *others = self._processor.encode(
            re.findall(rf"(?s:.{{{SEGMENT}}})[^\n]*|(?s:.+)", text)
        )
        for ids in others:
            first += ids[1:]  # without the space that the library puts in front of every text
        return first

    def _decode(self, ids: Ids) -> str:
        return self._processor.decode(ids.tolist())

    def vocabulary(self) -> Vocabulary:
        """The model as data; one of another kind than Llama's, or that normalizes text, raises JllamaError."""
        model = _ModelProto.FromString(self.content)
        spec, trainer = model.normalizer_spec, model.trainer_spec
        if trainer.model_type != trainer.BPE or not trainer.byte_fallback:
            raise JllamaError(
                "only SentencePiece models of Llama's kind (BPE with byte fallback) can be converted"
            )
        if (
            spec.precompiled_charsmap
            or spec.remove_extra_whitespaces
            or not spec.escape_whitespaces
        ):
            raise JllamaError(
                f"the SentencePiece model normalizes text ({spec.name}), which other formats cannot hold"
            )
        scores, kinds = (
            [piece.score for piece in model.pieces],
            [piece.type for piece in model.pieces],
        )
        ends = self.bos_id, self.eos_id, self.add_bos
        return Vocabulary(self.texts, kinds, *ends, scores, trainer.unk_id, spec.add_dummy_prefix)

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Vocabulary, source: str = "the tokenizer"
    ) -> "SentencePieceTokenizer":
        """The model with the settings of Llama's; one that lacks what every Llama's has raises JllamaError."""
        vocabulary.check_pieces(source)
        tokens, kinds, bos_id, eos_id, _, scores, unk_id, *_ = vocabulary
        rows = zip(tokens, scores or (), kinds, strict=True)
        pieces = [{"piece": text, "score": score, "type": kind} for text, score, kind in rows]
        trainer = {
            "model_type": "BPE",
            "byte_fallback": True,
            "vocab_size": len(tokens),
            "pad_id": -1,
        }
        for name, id in (("unk", unk_id or 0), ("bos", bos_id), ("eos", eos_id)):
            trainer |= {f"{name}_id": id, f"{name}_piece": tokens[id]}
        normalizer = {
            "name": "identity",
            "escape_whitespaces": True,
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": vocabulary.add_space_prefix,
        }
        model = _ModelProto(pieces=pieces, trainer_spec=trainer, normalizer_spec=normalizer)
        return cls(model.SerializeToString(), source)


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a byte-pair encoding with Llama 2's settings; the same documents give the same model, byte for byte.

    It learns from lines, as Llama 2's did, so a newline is the byte token 13. At most ``MAX_LINES`` lines and
    ``MAX_CHARACTERS`` characters are used, drawn evenly. A vocabulary that the text cannot fill, or too small for its
    characters, raises JllamaError.

    >>> tokenizer = train_sentencepiece(["the cat sat on the mat"] * 9, vocab_size=270)
    >>> tokenizer.decode(tokenizer.encode("the cat"))
    'the cat'
    """
    lines, model = _sample_lines(documents), io.BytesIO()
    if not lines:
        raise JllamaError(
            "there is no text to train a tokenizer on: give documents that are not empty"
        )
    try:
        train = sentencepiece.SentencePieceTrainer.train  # pyright: ignore[reportAttributeAccessIssue]
        train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            model_type="bpe",
            character_coverage=0.99995,
            minloglevel=2,
            num_threads=2,  # stands in the model file, so it is a constant
        )
    except RuntimeError as error:
        for pattern, said in (
            (r"value <= (\d+)", _TOO_MANY),
            (r"required_chars. \d+ vs (\d+)", _TOO_FEW),
        ):
            if match := re.search(pattern, str(error)):
                raise JllamaError(said.format(match[1], vocab_size)) from None
        raise JllamaError(f"SentencePiece could not train on this text: {error}") from None
    return SentencePieceTokenizer(model.getvalue())


def _sample_lines(documents: Iterable[str]) -> list[str]:
    """Every line, or of too many a uniform sample of at least a quarter of the limits, the same in every process."""
    draw = random.Random(0)
    lines, characters, kept = [], 0, 1.0
    for document in documents:
        for line in LINE.finditer(document):
            if kept == 1 or draw.random() < kept:
                lines.append(line[0])
                characters += len(line[0])
            if len(lines) > MAX_LINES or characters > MAX_CHARACTERS:
                lines = [line for line in lines if draw.random() < 0.5]
                characters = sum(map(len, lines))
                kept /= 2
    return lines
