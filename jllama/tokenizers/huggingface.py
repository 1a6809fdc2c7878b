"""Hugging Face's ``tokenizer.json``, through the ``tokenizers`` library."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int

from jllama.config import MAX_SIZES
from jllama.errors import JllamaError
from jllama.files import read_json_object, write_json
from jllama.tokenizers.base import Tokenizer, check_text
from jllama.tokenizers.byte_level import post_processor
from jllama.tokenizers.pieces import PREPEND, REPLACE, SPACE, Pieces, TokenType, byte_of, piece_bytes

CONFIG_NAME = "tokenizer_config.json"
_NOT_LLAMAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``: a byte-level BPE (Llama 3, SmolLM2), or one with byte fallback (Llama 2's kind).

    Whatever the file says of truncation and padding, a text is encoded whole and alone.

    Args:
        text: the file's content.
        bos_id, eos_id: as ``tokenizer_config.json`` or the model's configuration say.
        add_bos: whether a prompt begins with BOS; None asks the file's post-processor, else that is made to agree.
        source: what errors call it.
    """

    file_name = "tokenizer.json"

    def __init__(
        self, text: str, bos_id: int, eos_id: int, add_bos: bool | None = None, source: str = "the tokenizer"
    ) -> None:
        try:
            self._library = _library(text)
        except Exception as error:  # the library raises nothing more special
            raise JllamaError(f"{source} is not a tokenizer.json: {' '.join(str(error).split())}") from error
        self.json: dict[str, Any] = json.loads(self._library.to_str())  # with every default filled in
        model = self.json["model"]
        if model["type"] != "BPE":
            raise JllamaError(f"{source} is a {model['type']} tokenizer; a Llama's is a BPE")
        if odd := [name for name in _NOT_LLAMAS if model[name]]:
            raise JllamaError(f"{source} is a BPE with {odd[0]} {model[odd[0]]!r}, which no Llama has")
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=0) + 1
        if self.vocab_size > MAX_SIZES["vocab_size"]:
            raise JllamaError(f"{source} has the token id {self.vocab_size - 1}, which no Llama has: it is damaged")
        if not 0 <= min(bos_id, eos_id) <= max(bos_id, eos_id) < self.vocab_size:
            said = f"{self.vocab_size} tokens, but BOS and EOS are said to be {bos_id}, {eos_id}"
            raise JllamaError(f"{source} has {said}")
        self.bos_id, self.eos_id = bos_id, eos_id
        self.texts = [self._library.id_to_token(id) or "" for id in range(self.vocab_size)]
        begins_with_bos = self._library.encode("").ids[:1] == [bos_id]
        self.add_bos = begins_with_bos if add_bos is None else add_bos
        if self.add_bos != begins_with_bos:  # other readers of the saved file ask the post-processor
            processor = post_processor((bos_id, self.texts[bos_id]) if self.add_bos else None)
            text = json.dumps(json.loads(text) | {"post_processor": processor}, ensure_ascii=False)
        self.content = text.encode()
        self._library.encode_special_tokens = True  # the text of a special token is text like any other
        self.added = self._library.get_added_tokens_decoder()
        self.is_byte_level = "ByteLevel" in json.dumps(self.json["pre_tokenizer"])
        num_bytes = len if self.is_byte_level else piece_bytes  # there, a character stands for a byte
        self._token_bytes = np.array([*map(num_bytes, self.texts)], np.int32)
        for id, token in self.added.items():
            self._token_bytes[id] = 0 if token.special else len(token.content.encode())
        self.special_tokens = {self.texts[id]: id for id in (*self.added, bos_id, eos_id)}

    def _encode(self, text: str) -> list[int]:
        return _encoded(self._library, text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids of a text, in which special tokens spelled out become their ids."""
        check_text(text)
        return _encoded(self._with_special_tokens, text)

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        """A second one, as the setting that differs is not an argument of the library's ``encode``."""
        tokenizer = _library(self.content.decode())
        tokenizer.add_special_tokens([self.texts[self.bos_id], self.texts[self.eos_id]])
        return tokenizer

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return self._library.decode(ids.tolist(), skip_special_tokens=True)

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens that are joined, first the one to join first."""
        return [(left, right) for left, right in self.json["model"]["merges"]]

    def to_json(self) -> str:
        """The file's content."""
        return self.content.decode()

    def to_pieces(self) -> Pieces:
        """A file of Llama 2's kind as SentencePiece has it: scores from the order of the merges. Others: JllamaError.

        A json with Metaspace (transformers 5 writes it) drops the space before a text that begins with one;
        SentencePiece, which such a model was trained with, does not.
        """
        model = self.json["model"]
        if self.is_byte_level or not model["byte_fallback"]:
            raise JllamaError("the tokenizer is a byte-level BPE, which a SentencePiece file cannot hold")
        ids = {text: id for id, text in enumerate(self.texts)}
        unk_id = ids.get(model["unk_token"] or "", -1)
        if unk_id < 0:
            raise JllamaError("the tokenizer has no unknown token, which a SentencePiece file must have")
        types = self.token_types()
        types[unk_id], types[self.bos_id], types[self.eos_id] = TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL
        if missing := 256 - types.count(TokenType.BYTE):
            raise JllamaError(f"the tokenizer lacks {missing} of the 256 byte tokens of every SentencePiece file")
        scores = [-1e9 if kind == TokenType.NORMAL else 0.0 for kind in types]
        for rank, (left, right) in enumerate(self.merges):
            scores[ids[left + right]] = -float(rank)
        pieces = Pieces(self.texts, scores, types, unk_id, self.bos_id, self.eos_id, self._adds_dummy_prefix())
        if absent := set(pieces.merges()) - set(self.merges):
            left, right = min(absent)
            said = f"the tokenizer does not join {left!r} and {right!r} to a token that it has, as SentencePiece would"
            raise JllamaError(f"{said}: in a SentencePiece file it would give other ids")
        return pieces

    def token_types(self) -> list[int]:
        """Which ``TokenType`` each token has."""
        byte = TokenType.NORMAL if self.is_byte_level else TokenType.BYTE  # what <0x0A> is
        types: list[int] = [TokenType.NORMAL if byte_of(text) is None else byte for text in self.texts]
        for id, token in self.added.items():
            types[id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        return types

    def _adds_dummy_prefix(self) -> bool:
        """Whether a space is put before a text; any other change of the text is refused."""
        normalizer, pre = self.json["normalizer"], self.json["pre_tokenizer"]
        steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
        if pre is None and steps in ([REPLACE], [PREPEND, REPLACE]):
            return PREPEND in steps
        if not steps and pre and pre["type"] == "Metaspace" and pre["replacement"] == SPACE and pre["split"] is False:
            return pre["prepend_scheme"] != "never"
        kinds = ", ".join([step["type"] for step in steps] + ([pre["type"]] if pre else []))
        raise JllamaError(f"the tokenizer changes text in a way that SentencePiece does not ({kinds or 'spaces stay'})")

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which is created if missing."""
        super().save(folder)
        ends = {"bos_token": self.texts[self.bos_id], "eos_token": self.texts[self.eos_id]}
        flags = {"add_bos_token": self.add_bos, "clean_up_tokenization_spaces": False}
        write_json(folder / CONFIG_NAME, {"tokenizer_class": "PreTrainedTokenizerFast"} | ends | flags)

    def fingerprint(self) -> str:
        """SHA-256 of the file's content and of what else decides the ids, in hexadecimal."""
        return hashlib.sha256(f"{self.bos_id} {self.eos_id} {self.add_bos} ".encode() + self.content).hexdigest()


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read a ``tokenizer.json``, and from the files beside it what it does not say: BOS, EOS, whether BOS is added.

    ``tokenizer_config.json`` comes first, then ``generation_config.json`` and ``config.json``. What is not a tokenizer,
    or one without BOS or EOS, raises JllamaError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        ids_by_text = dict(content["model"]["vocab"])
        ids_by_text |= {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JllamaError(f"{path} is not a tokenizer.json: {' '.join(str(error).split())}") from error
    config, *others = (
        read_json_object(file) if (file := path.with_name(name)).is_file() else {}
        for name in (CONFIG_NAME, "generation_config.json", "config.json")
    )

    def special_id(name: str) -> int | None:
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise JllamaError(f"{path.with_name(CONFIG_NAME)} has {name}_token {str(token)[:100]}; it must be a text")
        values = [other.get(f"{name}_token_id") for other in others]
        ids = [ids_by_text.get(token), *(value[0] if isinstance(value, list) and value else value for value in values)]
        return next((id for id in ids if isinstance(id, int)), None)

    eos_id, bos_id, add_bos = special_id("eos"), special_id("bos"), config.get("add_bos_token")
    if eos_id is None:
        raise JllamaError(f"neither {path} nor the files beside it say which token is EOS: add it to {CONFIG_NAME}")
    if not isinstance(add_bos, bool | None):
        raise JllamaError(f"{path.with_name(CONFIG_NAME)} has add_bos_token {add_bos!r}; it must be true or false")
    bos_id = eos_id if bos_id is None else bos_id  # GPT-2's kind has one token for both
    return HuggingFaceTokenizer(text, bos_id, eos_id, add_bos, str(path))


def _library(text: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, and not an Exception
            raise
        raise JllamaError(f"the tokenizer.json cannot split a text of {len(text)} characters: {error}") from error
