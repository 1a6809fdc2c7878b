"""llama2.c's ``tokenizer.bin``: the pieces of a SentencePiece model, with their scores, as ``run.c`` reads them.

After an int32 (bytes of the longest token) each token is a float32 score, an int32 length and its bytes. A space is
written as one, and ``<s>`` and ``</s>`` stand between newlines. Source: llama2.c, ``tokenizer.py``.
"""

import struct
from pathlib import Path

from jllama.errors import JllamaError
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.pieces import SPACE, Pieces, TokenType, byte_of
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer


def load_llama2c_tokenizer(path: Path) -> SentencePieceTokenizer:
    """Read a ``tokenizer.bin``. A file that is cut short or is something else raises JllamaError."""
    data = path.read_bytes()
    tokens, scores = [], []
    longest, offset = int.from_bytes(data[:4], "little", signed=True), 4
    while offset < len(data):
        said = f"{path} says at byte {offset + 4} that token {len(tokens)} has"
        if offset + 8 > len(data):
            raise JllamaError(f"{path} is cut short at byte {len(data)}, within the head of token {len(tokens)}")
        (score, length), offset = struct.unpack_from("<fi", data, offset), offset + 8
        if length < 0 or offset + length > len(data):
            raise JllamaError(f"{said} {length} bytes, but {len(data) - offset} are left: it is cut short")
        if length > longest:
            raise JllamaError(f"{said} {length} bytes, but at byte 0 that none has more than {longest}: it is damaged")
        tokens.append(data[offset : offset + length])
        scores.append(score)
        offset += length
    try:
        texts = [token.decode() for token in tokens]
    except UnicodeDecodeError as error:
        raise JllamaError(f"{path} has the token {error.object!r}, not UTF-8: it is no tokenizer.bin") from error
    if not _has_bytes(texts):
        raise JllamaError(f"{path} has {len(texts)} tokens, and 3 to 258 are not the 256 bytes: run.c needs them")
    texts[:3] = "<unk>", "<s>", "</s>"
    texts = [text.replace(" ", SPACE) for text in texts]
    model = Pieces(texts, scores, _types(len(texts)), 0, 1, 2, add_dummy_prefix=True).to_model()
    return SentencePieceTokenizer(model, str(path))


def save_llama2c_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write llama2.c's ``tokenizer.bin``; a tokenizer that ``run.c`` would take for another raises JllamaError."""
    pieces = tokenizer.to_pieces()
    in_place = (pieces.unk_id, pieces.bos_id, pieces.eos_id) == (0, 1, 2) and _has_bytes(pieces.texts)
    prefix = tokenizer.add_bos and pieces.add_dummy_prefix
    if not (in_place and prefix and pieces.types == _types(len(pieces.texts))):
        needs = "unknown, BOS and EOS, then the 256 bytes, and no other special tokens"
        said = f"run.c begins every prompt with BOS, puts a space before every text, and needs {needs}"
        raise JllamaError(f"llama2.c's tokenizer.bin cannot hold this tokenizer: {said}")
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *(text.replace(SPACE, " ") for text in pieces.texts[3:])]
    tokens = [text.encode() for text in texts]
    rows = [struct.pack("<fi", score, len(token)) + token for score, token in zip(pieces.scores, tokens, strict=True)]
    path.write_bytes(struct.pack("<i", max(map(len, tokens))) + b"".join(rows))


def _types(count: int) -> list[int]:
    start = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    return [*start, *[TokenType.NORMAL] * (count - len(start))]


def _has_bytes(texts: list[str]) -> bool:
    """Whether tokens 3 to 258 are the 256 bytes, where ``run.c`` looks for them."""
    return [byte_of(text) for text in texts[3:259]] == list(range(256))
