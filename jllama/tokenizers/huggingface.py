"""Hugging Face's ``tokenizer.json``, through the ``tokenizers`` library."""

from __future__ import annotations

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
from jllama.tokenizers.byte_level import CHAR_BYTES, post_processor
from jllama.tokenizers.pieces import SPACE, byte_of

CONFIG_NAME = "tokenizer_config.json"
_NOT_LLAMAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``: a byte-level BPE (Llama 3, SmolLM2), or one with byte fallback (Llama 2's kind).

    Args:
        text: the file's content.
        bos_id, eos_id: as ``tokenizer_config.json`` or the model's configuration say.
        add_bos: whether a prompt begins with BOS; None asks the file's post-processor, else that is made to agree.
        source: what errors call it.

    Whatever the file says of truncation and padding, a text is encoded whole and alone.
    """

    file_name = "tokenizer.json"

    def __init__(
        self, text: str, bos_id: int, eos_id: int, add_bos: bool | None = None, source: str = "the tokenizer"
    ) -> None:
        try:
            self._tokenizer = _library(text)
            self.json: dict[str, Any] = {"normalizer": None, "pre_tokenizer": None} | json.loads(text)
        except Exception as error:  # the library raises nothing more special
            raise JllamaError(f"{source} is not a tokenizer.json: {' '.join(str(error).split())}") from error
        model = self.json["model"]
        if "merges" not in model:
            raise JllamaError(f"{source} is a {model.get('type', 'nameless')} tokenizer; a Llama's is a BPE")
        if odd := [name for name in _NOT_LLAMAS if model.get(name)]:
            raise JllamaError(f"{source} is a BPE with {odd[0]} {model[odd[0]]!r}, which no Llama has")
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=0) + 1
        if self.vocab_size > MAX_SIZES["vocab_size"]:
            raise JllamaError(f"{source} has the token id {self.vocab_size - 1}, which no Llama has: it is damaged")
        for name, token in (("BOS", bos_id), ("EOS", eos_id)):
            if not 0 <= token < self.vocab_size:
                raise JllamaError(f"{source} has {self.vocab_size} tokens, but {name} is said to be token {token}")
        self.bos_id, self.eos_id = bos_id, eos_id
        begins_with_bos = self._tokenizer.encode("").ids[:1] == [bos_id]
        self.add_bos = begins_with_bos if add_bos is None else add_bos
        if self.add_bos != begins_with_bos:  # other readers of the saved file ask the post-processor
            self.json["post_processor"] = post_processor((bos_id, self.text_of(bos_id)) if self.add_bos else None)
            text = json.dumps(self.json, ensure_ascii=False)
        self.content = text.encode()
        self._tokenizer.encode_special_tokens = True  # the text of a special token is text like any other
        self.added = self._tokenizer.get_added_tokens_decoder()
        self.is_byte_level = "ByteLevel" in json.dumps(self.json["pre_tokenizer"])
        self._token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, id in ids.items():
            self._token_bytes[id] = self._bytes_of(token, id)
        added = {token.content: id for id, token in self.added.items()}
        self.special_tokens = added | {self.text_of(id): id for id in (bos_id, eos_id)}

    def _bytes_of(self, token: str, id: int) -> int:
        if id in self.added:
            return 0 if self.added[id].special else len(token.encode())
        if self.is_byte_level:
            return sum(1 if char in CHAR_BYTES else len(char.encode()) for char in token)
        return 1 if byte_of(token) is not None else len(token.replace(SPACE, " ").encode())

    def _encode(self, text: str) -> list[int]:
        return _encoded(self._tokenizer, text)

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """As ``encode``, but special tokens spelled out in the text become their ids."""
        check_text(text)
        return _encoded(self._with_special_tokens, text)

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        """A second one, as the setting that differs is not an argument of the library's ``encode``."""
        tokenizer = _library(self.content.decode())
        tokenizer.add_special_tokens([self.text_of(self.bos_id), self.text_of(self.eos_id)])
        return tokenizer

    def _decode(self, ids: Int[np.ndarray, "tokens"]) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def text_of(self, id: int) -> str:
        """How the file writes a token."""
        return self._tokenizer.id_to_token(id) or ""

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens that are joined, first the one to join first."""
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in self.json["model"]["merges"])
        return [(left, right) for left, right in pairs]

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which is made if missing."""
        super().save(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.text_of(self.bos_id),
            "eos_token": self.text_of(self.eos_id),
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / CONFIG_NAME, config)

    def fingerprint(self) -> str:
        """SHA-256 of the file's content and of what else decides the ids, in hexadecimal."""
        return hashlib.sha256(f"{self.bos_id} {self.eos_id} {self.add_bos} ".encode() + self.content).hexdigest()


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


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read a ``tokenizer.json``, and from the files beside it what it does not say: BOS, EOS, whether BOS is added.

    ``tokenizer_config.json`` comes first, then ``generation_config.json`` and ``config.json``. What is not a tokenizer,
    or one without BOS or EOS, raises JllamaError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        whole = json.loads(text)
        added = {token["content"]: token["id"] for token in whole.get("added_tokens", ())}
        vocab = whole["model"]["vocab"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JllamaError(f"{path} is not a tokenizer.json: {' '.join(str(error).split())}") from error
    config, *others = (
        read_json_object(file) if (file := path.with_name(name)).is_file() else {}
        for name in (CONFIG_NAME, "generation_config.json", "config.json")
    )
    found = {}
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str | None):
            raise JllamaError(f"{path.with_name(CONFIG_NAME)} has {name}_token {str(token)[:100]}; it must be a text")
        ids = [added.get(content, vocab.get(content) if isinstance(vocab, dict) else None)]
        for other in others:
            value = other.get(f"{name}_token_id")
            ids.append(value[0] if isinstance(value, list) and value else value)
        found[name] = next((token for token in ids if isinstance(token, int)), None)
    if found["eos"] is None:
        raise JllamaError(f"neither {path} nor the files beside it say which token is EOS: add it to {CONFIG_NAME}")
    bos = found["eos"] if found["bos"] is None else found["bos"]  # as GPT-2's kind, which has one token for both
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise JllamaError(f"{path.with_name(CONFIG_NAME)} has add_bos_token {add_bos!r}; it must be true or false")
    return HuggingFaceTokenizer(text, bos, found["eos"], add_bos, str(path))
