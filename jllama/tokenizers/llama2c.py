"""llama2.c's ``tokenizer.bin``: the pieces of a SentencePiece model, with their scores, as ``run.c`` reads them.

After an int32 (bytes of the longest token) each token is a float32 score, an int32 length and its bytes. A space is
written as one, and ``<s>`` and ``</s>`` stand between newlines. Source: llama2.c, ``tokenizer.py``.
"""

import struct
from pathlib import Path

from jllama.errors import JllamaError
from jllama.files import fault_of
from jllama.tokenizers.base import BYTE_PIECES, SPACE, Tokenizer, TokenType, Vocabulary
from jllama.tokenizers.sentencepiece import SentencePieceTokenizer


def load_llama2c_tokenizer(path: Path) -> SentencePieceTokenizer:
    """Read a ``tokenizer.bin``. A file that is cut short or is something else raises JllamaError."""
    data = path.read_bytes()
    tokens, scores = [], []
    longest, offset = int.from_bytes(data[:4], "little", signed=True), 4
    while offset < len(data):
        head, offset = data[offset : offset + 8], offset + 8
        if len(head) < 8:
            raise JllamaError(
                f"{path} is cut short at byte {len(data)}, within the head of token {len(tokens)}"
            )
        (score, length), remaining = struct.unpack("<fi", head), len(data) - offset
        if not 0 <= length <= min(longest, remaining):
            said = f"at byte 0 that none has more than {longest}: it is damaged"
            said = said if 0 <= length <= remaining else f"{remaining} are left: it is cut short"
            at = f"{path} says at byte {offset - 4} that token {len(tokens)} has {length} bytes"
            raise JllamaError(f"{at}, but {said}")
        tokens.append(data[offset : offset + length])
        scores.append(score)
        offset += length
    with fault_of(
        f"{path} has tokens that are not UTF-8, so it is no tokenizer.bin", UnicodeDecodeError
    ):
        texts = [token.decode() for token in tokens]
    if texts[3:259] != list(BYTE_PIECES):
        raise JllamaError(
            f"{path} has {len(texts)} tokens, and 3 to 258 are not the 256 bytes: run.c needs them"
        )
    texts[:3] = "<unk>", "<s>", "</s>"
    texts = [text.replace(" ", SPACE) for text in texts]
    return SentencePieceTokenizer.from_vocabulary(_vocabulary(texts, scores), str(path))


def save_llama2c_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write llama2.c's ``tokenizer.bin``; a tokenizer that ``run.c`` would take for another raises JllamaError."""
    vocabulary = tokenizer.vocabulary()
    texts, scores = vocabulary.tokens, vocabulary.scores or []
    if texts[3:259] != list(BYTE_PIECES) or vocabulary != _vocabulary(texts, scores):
        needs = "a SentencePiece model with unknown, BOS and EOS, then the 256 bytes, and no other special tokens"
        said = (
            f"run.c begins every prompt with BOS, puts a space before every text, and needs {needs}"
        )
        raise JllamaError(f"llama2.c's tokenizer.bin cannot hold this tokenizer: {said}")
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *(text.replace(SPACE, " ") for text in texts[3:])]
    tokens = [text.encode() for text in texts]
    rows = [
        struct.pack("<fi", score, len(token)) + token
        for score, token in zip(scores, tokens, strict=True)
    ]
    path.write_bytes(struct.pack("<i", max(map(len, tokens))) + b"".join(rows))


def _vocabulary(texts: list[str], scores: list[float]) -> Vocabulary:
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(texts) - len(kinds))
    return Vocabulary(texts, kinds, 1, 2, True, scores, 0, add_space_prefix=True)
