"""SentencePiece, the tokenizer of Llama 1 and 2: reading a model, and training one."""

import io
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from jllama.core import JllamaError
from jllama.tokenizers.added_tokens import AddedToken
from jllama.tokenizers.base import (
    BYTE_PIECES,
    SHOWN,
    SPACE,
    Ids,
    Tokenizer,
    Vocabulary,
    piece_bytes,
    special_bytes,
)

CHUNK = 1 << 16
"""Characters of a text that the library encodes at once. It needs 40 bytes of memory for each, and
is 2 to 3 times slower on longer texts."""
MAX_LINES = 400_000  # a larger text is sampled for training, which then takes about 3 seconds
MAX_CHARACTERS = 1 << 26  # the same limit in characters
_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # pyright: ignore[reportAttributeAccessIssue]
LINE = re.compile(r"[^\n]{1,1000}")  # the library drops lines of more than 4192 bytes

_TRAINING_ERRORS = {
    r"value <= (\d+)": (
        "the text supports a vocabulary of {} tokens, not {}: lower vocab_size or give more text"
    ),
    r"required_chars. \d+ vs (\d+)": (
        "this text needs at least {} tokens for its characters and the 256 bytes, not {}: "
        "raise vocab_size"
    ),
}
"""What the library's errors mean. The number that matches and ``vocab_size`` are filled in."""


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. With byte fallback (every Llama has it) any text comes back unchanged.

    ``encode`` gives the library's ids, except for U+2581. The library would turn it into a space;
    here it becomes its three byte tokens, which decode to it.

    The library puts a space, a byte of the first token, in front of every text, and
    ``encode_with_special_tokens`` does so in front of each part. Meta's code does the same, and so
    do Llama 2's ``tokenizer.json`` and transformers' ``LlamaTokenizer`` with ``legacy=True``, but
    not with ``legacy=False``.

    Args:
        model: the serialized model; ``JllamaError`` is raised if no Llama could use it.
        source: what errors call it.
    """

    file_name = "tokenizer.model"
    is_byte_level = False

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        # 1) Load the model, and check that it has BOS and EOS.
        library = sentencepiece.SentencePieceProcessor()
        self._processor = library
        try:
            library.LoadFromSerializedProto(model)
            self.texts = [library.id_to_piece(id) for id in range(library.vocab_size())]
        except (RuntimeError, UnicodeDecodeError):
            raise JllamaError(
                f"{source} is not a SentencePiece model, nor Llama 3's list of ranks: "
                "give a Llama's tokenizer.model"
            ) from None
        self.content = model
        self.vocab_size = len(self.texts)
        self.bos_id = library.bos_id()
        self.eos_id = library.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise JllamaError(
                f"{source} has no BOS or no EOS token, and a Llama needs both: "
                "give a Llama's tokenizer"
            )

        # 2) Collect the bytes of all tokens, and the special tokens.
        self._byte_ids = library.piece_to_id(list(BYTE_PIECES))
        self.special_tokens = {}
        self.pieces = []
        for id, text in enumerate(self.texts):
            is_special = library.is_control(id) or library.is_unknown(id)
            if is_special:
                self.special_tokens[text] = id
            self.pieces.append(special_bytes(text) if is_special else piece_bytes(text))
        self._shown_ids = [id for text, id in self.special_tokens.items() if text in SHOWN]

        # 3) See whether a text may be cut before newlines and still give the same ids.
        newline = library.encode("\n")
        self._cut_at_newlines = (
            not any("\n" in text for text in self.texts)
            and newline[:1] == [library.piece_to_id(SPACE)]
            and library.encode("a \n") == library.encode("a ") + newline[1:]
        )

    def _encode(self, text: str) -> list[int]:
        if SPACE not in text or not self._processor.is_byte(self._byte_ids[0]):
            return self._library_ids(text)
        # Put a character that has no piece in place of U+2581, encode, and exchange its bytes.
        stand_in = 0xFDD0
        unknown_id = self._processor.unk_id()
        while chr(stand_in) in text or self._processor.piece_to_id(chr(stand_in)) != unknown_id:
            stand_in -= 1
        ids = self._library_ids(text.replace(SPACE, chr(stand_in)))
        # The ids become characters of a str, which can replace sequences.
        chars = "".join(map(chr, ids))
        chars = chars.replace(self._byte_tokens(chr(stand_in)), self._byte_tokens(SPACE))
        return list(map(ord, chars))

    def _byte_tokens(self, char: str) -> str:
        return "".join(chr(self._byte_ids[byte]) for byte in char.encode())

    def _library_ids(self, text: str) -> list[int]:
        """Return the library's ids.

        A long text is cut before newlines, which no piece crosses: the ids are the same, and come
        sooner.
        """
        if len(text) <= CHUNK or not self._cut_at_newlines:
            return self._processor.encode(text)
        chunks = re.findall(rf"(?s:.{{{CHUNK}}})[^\n]*|(?s:.+)", text)
        first, *others = self._processor.encode(chunks)
        for ids in others:
            first += ids[1:]  # without the space that the library puts in front of every text
        return first

    def _decode(self, ids: Ids) -> str:
        # The library leaves out all special tokens.
        text = ""
        start = 0
        for place in np.flatnonzero(np.isin(ids, self._shown_ids)).tolist():
            text += self._processor.decode(ids[start:place].tolist()) + self.texts[ids[place]]
            start = place + 1
        return text + self._processor.decode(ids[start:].tolist())

    def with_added_tokens(
        self, added: Mapping[int, AddedToken], end: str | None
    ) -> "SentencePieceTokenizer":
        """Return the model with further tokens, and with the EOS ``end`` if it has this token.

        Special tokens become control pieces, which no text is encoded to. Ids between them are
        unused pieces.
        """
        model = _ModelProto.FromString(self.content)
        kinds = type(model.pieces[0])
        for id, token in added.items():
            while len(model.pieces) < id:
                piece = f"<unused_{len(model.pieces)}>"
                model.pieces.add(piece=piece, score=0.0, type=kinds.UNUSED)
            if id == len(model.pieces):
                kind = kinds.CONTROL if token.is_special else kinds.USER_DEFINED
                model.pieces.add(piece=token.text, score=0.0, type=kind)
        texts = [piece.piece for piece in model.pieces]
        if end in texts:
            model.trainer_spec.eos_id = texts.index(end)
            model.trainer_spec.eos_piece = end
        return SentencePieceTokenizer(model.SerializeToString())

    def vocabulary(self) -> Vocabulary:
        """Return the model as data.

        Raises:
            JllamaError: the model is of another kind than Llama's, or normalizes text.
        """
        model = _ModelProto.FromString(self.content)
        normalizer = model.normalizer_spec
        trainer = model.trainer_spec
        if trainer.model_type != trainer.BPE or not trainer.byte_fallback:
            raise JllamaError(
                "only SentencePiece models of Llama's kind (BPE with byte fallback) can be "
                "converted"
            )
        if (
            normalizer.precompiled_charsmap
            or normalizer.remove_extra_whitespaces
            or not normalizer.escape_whitespaces
        ):
            raise JllamaError(
                f"the SentencePiece model normalizes text ({normalizer.name}), "
                "which other formats cannot hold"
            )
        return Vocabulary(
            self.texts,
            [piece.type for piece in model.pieces],
            self.bos_id,
            self.eos_id,
            self.add_bos,
            [piece.score for piece in model.pieces],
            trainer.unk_id,
            normalizer.add_dummy_prefix,
        )

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Vocabulary, source: str = "the tokenizer"
    ) -> "SentencePieceTokenizer":
        """Return the model of the same tokens, with the settings of Llama's.

        Raises:
            JllamaError: ``vocabulary`` lacks special pieces that every Llama's has.
        """
        vocabulary.check_pieces(source)
        tokens = vocabulary.tokens
        rows = zip(tokens, vocabulary.scores or (), vocabulary.token_type, strict=True)
        pieces = [{"piece": text, "score": score, "type": kind} for text, score, kind in rows]
        unknown_id = vocabulary.unknown_token_id or 0
        trainer = {
            "model_type": "BPE",
            "byte_fallback": True,
            "vocab_size": len(tokens),
            "pad_id": -1,
            "unk_id": unknown_id,
            "unk_piece": tokens[unknown_id],
            "bos_id": vocabulary.bos_token_id,
            "bos_piece": tokens[vocabulary.bos_token_id],
            "eos_id": vocabulary.eos_token_id,
            "eos_piece": tokens[vocabulary.eos_token_id],
        }
        normalizer = {
            "name": "identity",
            "escape_whitespaces": True,
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": vocabulary.add_space_prefix,
        }
        model = _ModelProto(pieces=pieces, trainer_spec=trainer, normalizer_spec=normalizer)
        return cls(model.SerializeToString(), source)


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a byte-pair encoding with Llama 2's settings.

    It learns from lines, as Llama 2's did, so a newline is the byte token 13. A large text is
    sampled (``_sample_lines``). The same documents give the same model, byte for byte.

    Raises:
        JllamaError: there is no text, or the text cannot fill the vocabulary, or the vocabulary is
            too small for the characters of the text.

    Examples:
        >>> tokenizer = train_sentencepiece(["the cat sat on the mat"] * 9, vocab_size=270)
        >>> tokenizer.decode(tokenizer.encode("the cat"))
        'the cat'
    """
    # The lines to learn from.
    lines = _sample_lines(documents)
    if not lines:
        raise JllamaError(
            "there is no text to train a tokenizer on: give documents that are not empty"
        )

    # Training with Llama 2's settings. Errors of the library are explained.
    model = io.BytesIO()
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
            num_threads=2,  # a constant, because the model file holds it
        )
    except RuntimeError as error:
        for pattern, message in _TRAINING_ERRORS.items():
            match = re.search(pattern, str(error))
            if match:
                raise JllamaError(message.format(match[1], vocab_size)) from None
        raise JllamaError(f"SentencePiece could not train on this text: {error}") from None
    return SentencePieceTokenizer(model.getvalue())


def _sample_lines(documents: Iterable[str]) -> list[str]:
    """Return every line, or a uniform sample of the lines of a large text.

    At most ``MAX_LINES`` lines and ``MAX_CHARACTERS`` characters are returned. A sample has at
    least a quarter of these limits, and is the same in every process.
    """
    draw = random.Random(0)
    share = 1.0
    lines = []
    num_characters = 0
    for document in documents:
        for line in LINE.finditer(document):
            if share == 1 or draw.random() < share:
                lines.append(line[0])
                num_characters += len(line[0])
            if len(lines) > MAX_LINES or num_characters > MAX_CHARACTERS:
                lines = [line for line in lines if draw.random() < 0.5]
                num_characters = sum(map(len, lines))
                share /= 2
    return lines
