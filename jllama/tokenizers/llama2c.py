"""llama2.c's ``tokenizer.bin``: the pieces of a SentencePiece model and their scores.

The file is read by ``run.c``. An int32, the bytes of the longest token, is followed by the tokens:
each is a float32 score, an int32 length and its bytes. A space is written as a space, and ``<s>``
and ``</s>`` stand between newlines. Source: llama2.c, ``tokenizer.py``.
"""

import struct
from pathlib import Path

from jllama.core import JllamaError
from jllama.system.files import errors_as
from jllama.tokenizers.base import BYTE_PIECES, SPACE, Tokenizer, TokenType, Vocabulary
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer


def load_llama2c_tokenizer(path: Path) -> SentencePieceTokenizer:
    """Read a ``tokenizer.bin``; raise ``JllamaError`` if it is cut short or something else."""
    # The tokens: a score, a number of bytes, and the bytes.
    data = path.read_bytes()
    longest = int.from_bytes(data[:4], "little", signed=True)
    offset = 4
    tokens = []
    scores = []
    while offset < len(data):
        if len(data) < offset + 8:
            raise JllamaError(
                f"{path} is cut short at byte {len(data)}, within the head of token {len(tokens)}"
            )
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        num_left = len(data) - offset
        if not 0 <= length <= min(longest, num_left):
            problem = f"{num_left} are left: it is cut short"
            if 0 <= length <= num_left:
                problem = f"at byte 0 that none has more than {longest}: it is damaged"
            raise JllamaError(
                f"{path} says at byte {offset - 4} that token {len(tokens)} has {length} bytes, "
                f"but {problem}"
            )
        tokens.append(data[offset : offset + length])
        scores.append(score)
        offset += length

    # The pieces, in SentencePiece's spelling.
    problem = f"{path} has tokens that are not UTF-8, so it is not a tokenizer.bin"
    with errors_as(problem, UnicodeDecodeError):
        texts = [token.decode() for token in tokens]
    if texts[3:259] != list(BYTE_PIECES):
        raise JllamaError(
            f"{path} has {len(texts)} tokens, and 3 to 258 are not the 256 bytes: run.c needs them"
        )
    texts[:3] = "<unk>", "<s>", "</s>"
    texts = [text.replace(" ", SPACE) for text in texts]
    return SentencePieceTokenizer.from_vocabulary(_vocabulary(texts, scores), str(path))


def save_llama2c_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write ``tokenizer.bin``; raise ``JllamaError`` if ``run.c`` would give other ids."""
    vocabulary = tokenizer.vocabulary()
    texts = vocabulary.tokens
    scores = vocabulary.scores or []
    if texts[3:259] != list(BYTE_PIECES) or vocabulary != _vocabulary(texts, scores):
        raise JllamaError(
            "llama2.c's tokenizer.bin cannot hold this tokenizer: run.c begins every prompt with "
            "BOS, puts a space before every text, and needs a SentencePiece model with unknown, "
            "BOS and EOS, then the 256 bytes, and no other special tokens"
        )
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *(text.replace(SPACE, " ") for text in texts[3:])]
    tokens = [text.encode() for text in texts]
    content = bytearray(struct.pack("<i", max(map(len, tokens))))
    for score, token in zip(scores, tokens, strict=True):
        content += struct.pack("<fi", score, len(token)) + token
    path.write_bytes(content)


def _vocabulary(texts: list[str], scores: list[float]) -> Vocabulary:
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(texts) - len(kinds))
    return Vocabulary(texts, kinds, 1, 2, True, scores, 0, add_space_prefix=True)
