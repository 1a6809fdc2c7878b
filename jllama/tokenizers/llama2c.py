"""llama2.c's ``tokenizer.bin``: the pieces of a SentencePiece model, with their scores, as ``run.c`` reads them.

After an int32 (bytes of the longest token) each token is a float32 score, an int32 length and its bytes. A space is
written as one, and ``<s>`` and ``</s>`` stand between newlines. Source: llama2.c, ``tokenizer.py``.
"""

from __future__ import annotations

import struct
from pathlib import Path

from jllama.errors import JllamaError
from jllama.tokenizers.pieces import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, Pieces, byte_of, write_pieces
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer

_FIRST_BYTE = 3


def load_llama2c_tokenizer(path: Path) -> SentencePieceTokenizer:
    """Read a ``tokenizer.bin``. A file that is cut short or is something else raises JllamaError."""
    data = path.read_bytes()
    texts, scores = [], []
    longest = int.from_bytes(data[:4], "little", signed=True)
    offset = 4
    while offset < len(data):
        if offset + 8 > len(data):
            raise JllamaError(f"{path} is cut short at byte {len(data)}, within the head of token {len(texts)}")
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        problem = ""
        if length < 0 or offset + length > len(data):
            problem = f"but {len(data) - offset} are left: it is cut short"
        elif length > longest:
            problem = f"but at byte 0 that none has more than {longest}: it is damaged"
        if problem:
            said = f"{path} says at byte {offset - 4} that token {len(texts)} has {length} bytes"
            raise JllamaError(f"{said}, {problem}, or no tokenizer.bin")
        try:
            texts.append(data[offset : offset + length].decode())
        except UnicodeDecodeError as error:
            said = f"{path} has a token at byte {offset} that is not UTF-8"
            raise JllamaError(f"{said}: it is no tokenizer.bin") from error
        scores.append(score)
        offset += length
    if len(texts) < _FIRST_BYTE + 256 or [byte_of(text) for text in texts[3:259]] != list(range(256)):
        raise JllamaError(
            f"{path} has {len(texts)} tokens, and tokens 3 to 258 are not the 256 bytes: run.c needs them"
        )
    pieces = ["<unk>", "<s>", "</s>", *(text.replace(" ", SPACE) for text in texts[3:])]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(texts) - 259)]
    model = write_pieces(Pieces(pieces, scores, types, 0, 1, 2, add_dummy_prefix=True))
    return SentencePieceTokenizer(model, str(path))


def write_llama2c_tokenizer(pieces: Pieces, path: Path) -> None:
    """Write a ``tokenizer.bin``. Pieces in another order than Llama 2's, which ``run.c`` fixes, raise JllamaError."""
    bytes_in_place = [byte_of(text) for text in pieces.texts[3:259]] == list(range(256))
    if (pieces.unk_id, pieces.bos_id, pieces.eos_id) != (0, 1, 2) or not bytes_in_place or not pieces.add_dummy_prefix:
        raise JllamaError(
            "llama2.c's tokenizer.bin cannot hold this tokenizer: run.c needs unknown, BOS and EOS as tokens 0 to 2, "
            "the 256 bytes after them, and a space before every text"
        )
    if others := [text for text, kind in zip(pieces.texts[259:], pieces.types[259:], strict=True) if kind != NORMAL]:
        raise JllamaError(f"llama2.c's tokenizer.bin cannot hold the special token {others[0]!r}")
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *(text.replace(SPACE, " ") for text in pieces.texts[3:])]
    encoded = [text.encode() for text in texts]
    with path.open("wb") as file:
        file.write(struct.pack("<i", max(map(len, encoded))))
        for token, score in zip(encoded, pieces.scores, strict=True):
            file.write(struct.pack("<fi", score, len(token)) + token)
