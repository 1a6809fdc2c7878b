"""SentencePiece, the tokenizer of Llama 1 and 2: reading a model, and training one."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator

import numpy as np
import sentencepiece
from jaxtyping import Int

from jllama.errors import JllamaError
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.pieces import SPACE

SEGMENT = 1 << 16  # characters; the library needs 40 bytes of memory for each, and is 2 to 3 times slower on long texts
MAX_LINES = 400_000  # training samples this many lines at most: about 3 seconds
MAX_CHARACTERS = 1 << 26  # and so many characters
LINE = re.compile(r"[^\n]{1,1000}")  # the library drops what is longer than 4192 bytes


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. With byte fallback (every Llama has it) any text comes back unchanged.

    ``encode`` gives what the library gives, but for U+2581: the library would turn it into a space, here it becomes its
    three byte tokens, which decode to it. It puts a space, one token byte, in front of every text; in
    ``encode_with_special_tokens`` in front of each part: so it is in Meta's code, in the ``tokenizer.json`` of Llama 2
    and in transformers' ``LlamaTokenizer`` with ``legacy=True``, but not without that.
    """

    file_name = "tokenizer.model"

    def __init__(self, model: bytes, source: str = "the tokenizer") -> None:
        """Load a serialised model; one that Llama could not use raises JllamaError naming ``source``."""
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            whole = bool(model) and self._processor.LoadFromSerializedProto(model)
            self.pieces = [self._processor.id_to_piece(token) for token in range(self._processor.vocab_size())]
        except (RuntimeError, UnicodeDecodeError):
            whole = False
        if not whole:
            raise JllamaError(
                f"{source} is not a SentencePiece model, nor Llama 3's list of ranks: give a Llama's tokenizer.model"
            )
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise JllamaError(f"{source} has no BOS or no EOS token, and a Llama needs both: give a Llama's tokenizer")
        self.content = model
        self._byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        self._byte_fallback = self._processor.is_byte(self._byte_ids[0])
        ids = range(self.vocab_size)
        special = [id for id in ids if self._processor.is_control(id) or self._processor.is_unknown(id)]
        self.special_tokens = {self.pieces[id]: id for id in special}
        self._token_bytes = np.array([self._bytes_of(id, piece) for id, piece in enumerate(self.pieces)], np.int32)
        newline = self._processor.encode("\n")
        self._cut_at_newlines = (
            not any("\n" in piece for piece in self.pieces)
            and newline[:1] == [self._processor.piece_to_id(SPACE)]
            and self._processor.encode("a \n") == self._processor.encode("a ") + newline[1:]
        )

    def _bytes_of(self, id: int, piece: str) -> int:
        if piece in self.special_tokens:
            return 0
        return 1 if self._processor.is_byte(id) else len(piece.replace(SPACE, " ").encode())

    def _encode(self, text: str) -> list[int]:
        if SPACE not in text or not self._byte_fallback:
            return self._library_ids(text)
        chars, unknown = map(chr, range(0xFDD0, 0xDFFF, -1)), self._processor.unk_id()
        stand_in = next(char for char in chars if self._processor.piece_to_id(char) == unknown and char not in text)
        ids = "".join(map(chr, self._library_ids(text.replace(SPACE, stand_in))))  # a str only for its replace
        old, new = ("".join(chr(self._byte_ids[byte]) for byte in char.encode()) for char in (stand_in, SPACE))
        return [ord(char) for char in ids.replace(old, new)]

    def _library_ids(self, text: str) -> list[int]:
        """The library's ids. A long text is cut before newlines, which no piece crosses: the same ids, sooner."""
        if len(text) <= SEGMENT or not self._cut_at_newlines:
            return self._processor.encode(text)
        first, *others = self._processor.encode(list(_segments(text)))
        for ids in others:
            first += ids[1:]  # without the space that the library puts in front of every text
        return first

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return self._processor.decode(ids.tolist())


def _segments(text: str) -> Iterator[str]:
    start = 0
    while (cut := text.find("\n", start + SEGMENT)) >= 0:
        yield text[start:cut]
        start = cut
    yield text[start:]


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Train a byte-pair encoding with Llama 2's settings; the same documents give the same model, byte for byte.

    It learns from lines, as Llama 2's did, so a newline is the byte token 13. At most ``MAX_LINES`` lines and
    ``MAX_CHARACTERS`` characters are used, drawn evenly. A vocabulary that the text cannot fill, or too small for its
    characters, raises JllamaError.
    """
    lines = _sample_lines(documents)
    if not lines:
        raise JllamaError("there is no text to train a tokenizer on: give documents that are not empty")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            character_coverage=0.99995,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=2,  # stands in the model file, so it is a constant
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _training_error(str(error), vocab_size) from None
    return SentencePieceTokenizer(model.getvalue())


def _sample_lines(documents: Iterable[str]) -> list[str]:
    """Every line if they are within MAX_LINES and MAX_CHARACTERS, else a uniform sample of at least a quarter of that.

    The library can sample too, but differently in every process.
    """
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


def _training_error(message: str, vocab_size: int) -> JllamaError:
    if too_high := re.search(r"value <= (\d+)", message):
        return JllamaError(
            f"the text supports a vocabulary of {too_high[1]} tokens, not {vocab_size}: "
            f"lower vocab_size or give more text"
        )
    if too_low := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return JllamaError(
            f"a vocabulary of {vocab_size} tokens is too small: this text needs at least {too_low[1]} "
            f"for its characters and the 256 bytes, so raise vocab_size"
        )
    return JllamaError(f"SentencePiece could not train on this text: {message}")
