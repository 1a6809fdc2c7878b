"""Hugging Face's ``tokenizer.json``, through the ``tokenizers`` library."""

import copy
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers

from jllama.config import MAX_SIZES
from jllama.errors import JllamaError, silent_stderr
from jllama.files import Json, fault_of, has_file, read_json_object, write_json
from jllama.tokenizers.base import (
    BYTE_PIECES,
    SPACE,
    Ids,
    Tokenizer,
    TokenType,
    Vocabulary,
    check_text,
    piece_bytes,
)
from jllama.tokenizers.tiktoken import PATTERN

CONFIG_NAME = "tokenizer_config.json"
_NOT_LLAMAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")

_SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
PRE_TOKENIZERS: dict[str, Json] = {
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [_SPLIT, _BYTE_LEVEL | {"use_regex": False}],
    },
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
    "gpt-2": _BYTE_LEVEL,
}  # llama.cpp's name of each known way to split text, and how it is configured in Hugging Face's library

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}  # of transformers 5

# A part of the text that is a token is taken as it is, unmerged, where ``ignore_merges``: by Llama 3's alone.
_FORMS: dict[str | bool, tuple[Any, Any, bool, bool]]
_FORMS = {name: (None, split, name == "llama-bpe", False) for name, split in PRE_TOKENIZERS.items()}
_FORMS[False] = {"type": "Sequence", "normalizers": [_REPLACE]}, None, False, True
_FORMS[True] = (
    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, _REPLACE]},
    None,
    False,
    True,
)
"""Normalizer, pre-tokenizer, ``ignore_merges`` and ``byte_fallback`` of each ``pre`` or else ``add_space_prefix``."""

_SCHEMES = {"never": False, "first": True, "always": True}
_OTHER_FORMS = [
    (name, (None, _METASPACE | {"prepend_scheme": key}, False, True))
    for key, name in _SCHEMES.items()
]
_OTHER_FORMS += [(False, (_REPLACE, None, False, True))]


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
        self,
        text: str,
        bos_id: int,
        eos_id: int,
        add_bos: bool | None = None,
        source: str = "the tokenizer",
    ) -> None:
        # The library raises nothing more special. Encoding a text, as is done once here, can make it panic.
        with fault_of(f"{source} is not a tokenizer.json", Exception), silent_stderr():
            self._library = tokenizers.Tokenizer.from_str(text)
            self._library.no_truncation()
            self._library.no_padding()
            begins_with_bos = self._library.encode("").ids[:1] == [bos_id]
        model = self._library.model
        if not isinstance(model, tokenizers.models.BPE):
            raise JllamaError(f"{source} is a {type(model).__name__} tokenizer; a Llama's is a BPE")
        if odd := [name for name in _NOT_LLAMAS if getattr(model, name)]:
            raise JllamaError(
                f"{source} is a BPE with {odd[0]} {getattr(model, odd[0])!r}, which no Llama has"
            )
        self.vocab_size = (
            max(self._library.get_vocab(with_added_tokens=True).values(), default=0) + 1
        )
        if self.vocab_size > MAX_SIZES["vocab_size"]:
            raise JllamaError(
                f"{source} has the token id {self.vocab_size - 1}, which no Llama has: it is damaged"
            )
        if not 0 <= min(bos_id, eos_id) <= max(bos_id, eos_id) < self.vocab_size:
            raise JllamaError(
                f"{source} has {self.vocab_size} tokens, but BOS and EOS are {bos_id} and {eos_id}"
            )
        self.bos_id, self.eos_id = bos_id, eos_id
        self.texts = [self._library.id_to_token(id) or "" for id in range(self.vocab_size)]
        self.add_bos = begins_with_bos if add_bos is None else add_bos
        if (
            self.add_bos != begins_with_bos
        ):  # other readers of the saved file ask the post-processor
            processor = {
                "post_processor": _begin_with(bos_id, self.texts[bos_id]) if self.add_bos else None
            }
            text = json.dumps(json.loads(text) | processor, ensure_ascii=False)
        self.content = text.encode()
        self._library.encode_special_tokens = (
            True  # the text of a special token is text like any other
        )
        self._library.add_special_tokens([self.texts[bos_id], self.texts[eos_id]])
        self.added = self._library.get_added_tokens_decoder()
        split = self._library.pre_tokenizer
        self.is_byte_level = split is not None and b"ByteLevel" in split.__getstate__()
        self.pieces = [piece_bytes(text, self.is_byte_level) for text in self.texts]
        for id, token in self.added.items():
            self.pieces[id] = b"" if token.special else token.content.encode()
        self.special_tokens = {self.texts[id]: id for id in (*self.added, bos_id, eos_id)}

    @functools.cached_property
    def json(self) -> Json:
        """The file's content with every default filled in."""
        return json.loads(self._library.to_str())

    def _encode(self, text: str, *, with_special_tokens: bool = False) -> list[int]:
        with fault_of(f"the tokenizer.json cannot split a text of {len(text)} characters"):
            library = self._with_special_tokens if with_special_tokens else self._library
            (encoding,) = library.encode_batch_fast(
                [text], add_special_tokens=False
            )  # other threads may run meanwhile
            return encoding.ids

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids of a text, in which special tokens spelled out become their ids."""
        check_text(text)
        return self._encode(text, with_special_tokens=True)

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        """A second one, as the setting that differs is not an argument of the library's ``encode``."""
        return copy.deepcopy(self._library)  # files do not hold that setting, nor copies

    def _decode(self, ids: Ids) -> str:
        with fault_of(f"the tokenizer.json cannot turn {len(ids)} tokens into text"):
            return self._library.decode(ids.tolist())

    def vocabulary(self) -> Vocabulary:
        """The tokenizer as data; of Llama 2's kind as SentencePiece has it, with scores from the order of the merges.

        A json with Metaspace (transformers 5 writes it) drops the space before a text that begins with one;
        SentencePiece, which such a model was trained with, does not.
        """
        model, ids = self.json["model"], {text: id for id, text in enumerate(self.texts)}
        form = (
            self.json["normalizer"],
            self.json["pre_tokenizer"],
            model["ignore_merges"],
            model["byte_fallback"],
        )
        names = [
            name
            for name, other in [*_FORMS.items(), *_OTHER_FORMS]
            if _comparable(other) == _comparable(form)
        ]
        if not names:
            said = "other formats have no name for how this tokenizer splits text or changes it (its normalizer, "
            raise JllamaError(
                f"{said}pre_tokenizer, ignore_merges and byte_fallback: {json.dumps(form)})"
            )
        kind_of = {"": TokenType.UNUSED} | dict.fromkeys(
            () if self.is_byte_level else BYTE_PIECES, TokenType.BYTE
        )
        kinds: list[int] = [kind_of.get(text, TokenType.NORMAL) for text in self.texts]
        for id, token in self.added.items():
            kinds[id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        tokens = [text or f"[PAD{id}]" for id, text in enumerate(self.texts)]
        merges = [(left, right) for left, right in model["merges"]]
        vocabulary = Vocabulary(tokens, kinds, self.bos_id, self.eos_id, self.add_bos)
        if self.is_byte_level:
            return vocabulary._replace(merges=merges, pre=names[0])

        unk_id = ids.get(model["unk_token"])
        if unk_id is not None:
            kinds[unk_id] = TokenType.UNKNOWN
        scores = [-1e9 if kind == TokenType.NORMAL else 0.0 for kind in kinds]
        for rank, (left, right) in enumerate(merges):
            scores[ids[left + right]] = -float(rank)
        vocabulary = vocabulary._replace(
            scores=scores, unknown_token_id=unk_id, add_space_prefix=names[0]
        )
        vocabulary.check_pieces("the tokenizer")
        if absent := set(vocabulary.piece_merges()) - set(merges):
            left, right = min(absent)
            said = f"the tokenizer does not join {left!r} and {right!r} to a token that it has, as SentencePiece would"
            raise JllamaError(f"{said}: in a SentencePiece file it would give other ids")
        return vocabulary

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Vocabulary, source: str = "the tokenizer"
    ) -> "HuggingFaceTokenizer":
        """The ``tokenizer.json`` of the same ids, but for a space after user-defined pieces, as llama.cpp has it."""
        tokens, kinds, bos_id, eos_id, add_bos, scores, unk_id, prefix, merges, pre = vocabulary
        normalizer, split, ignore_merges, byte_fallback = _FORMS[pre if scores is None else prefix]
        decoder: Json = _BYTE_LEVEL
        if scores is not None:
            spaces = _REPLACE | {"pattern": {"String": SPACE}, "content": " "}
            strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *[strip] * prefix]
            decoder, merges = {"type": "Sequence", "decoders": decoders}, vocabulary.piece_merges()

        special = {TokenType.UNKNOWN: True, TokenType.CONTROL: True, TokenType.USER_DEFINED: False}
        added = [
            (id, special[kind]) for id, kind in enumerate(map(TokenType, kinds)) if kind in special
        ]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        last = max(
            id
            for id, kind in enumerate(kinds)
            if kind not in (TokenType.CONTROL, TokenType.USER_DEFINED)
        )
        model = {
            "type": "BPE",
            "unk_token": None if unk_id is None else tokens[unk_id],
            **dict.fromkeys(_NOT_LLAMAS),
            "fuse_unk": byte_fallback,
            "byte_fallback": byte_fallback,
            "ignore_merges": ignore_merges,
            "vocab": {text: id for id, text in enumerate(tokens[: last + 1])},
            "merges": merges,
        }
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": id, "content": tokens[id], "special": flag} | flags for id, flag in added
            ],
            "normalizer": normalizer,
            "pre_tokenizer": split,
            "decoder": decoder,
            "model": model,
            "post_processor": _begin_with(bos_id, tokens[bos_id]) if add_bos else None,
        }
        return cls(json.dumps(content, ensure_ascii=False), bos_id, eos_id, add_bos, source)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which is created if missing."""
        super().save(folder)
        ends = {"bos_token": self.texts[self.bos_id], "eos_token": self.texts[self.eos_id]}
        flags = {"add_bos_token": self.add_bos, "clean_up_tokenization_spaces": False}
        write_json(
            folder / CONFIG_NAME, {"tokenizer_class": "PreTrainedTokenizerFast"} | ends | flags
        )

    def fingerprint(self) -> str:
        """SHA-256 of the file's content and of what else decides the ids, in hexadecimal."""
        return hashlib.sha256(
            f"{self.bos_id} {self.eos_id} {self.add_bos} ".encode() + self.content
        ).hexdigest()


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read a ``tokenizer.json``, and from the files beside it which tokens are BOS and EOS and whether BOS is added."""
    with fault_of(
        f"{path} is not a tokenizer.json",
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        ids_by_text = dict(content["model"]["vocab"])
        ids_by_text |= {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    files = [
        path.with_name(name) for name in (CONFIG_NAME, "generation_config.json", "config.json")
    ]
    config, *others = [read_json_object(file) if has_file(file) else {} for file in files]

    def special_id(name: str) -> int | None:
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise JllamaError(f"{files[0]} has {name}_token {str(token)[:100]}; it must be a text")
        values = [other.get(f"{name}_token_id") for other in others]
        ids = [
            ids_by_text.get(token),
            *(value[0] if isinstance(value, list) and value else value for value in values),
        ]
        id = next((id for id in ids if isinstance(id, int)), None)
        if isinstance(id, bool):
            raise JllamaError(
                f"{files[1]} or {files[2]} has {name}_token_id {id}; it must be the id of a token"
            )
        return id

    eos_id, bos_id, add_bos = special_id("eos"), special_id("bos"), config.get("add_bos_token")
    if eos_id is None:
        raise JllamaError(
            f"neither {path} nor the files beside it say which token is EOS: add it to {CONFIG_NAME}"
        )
    if not isinstance(add_bos, bool | None):
        raise JllamaError(f"{files[0]} has add_bos_token {add_bos!r}; it must be true or false")
    bos_id = eos_id if bos_id is None else bos_id  # GPT-2's kind has one token for both
    return HuggingFaceTokenizer(text, bos_id, eos_id, add_bos, str(path))


def _comparable(form: Any) -> str:
    """Settings as one text, but for ``trim_offsets``, which decides no ids."""
    return json.dumps(form, sort_keys=True).replace('"trim_offsets": false', '"trim_offsets": true')


def _begin_with(id: int, text: str) -> Json:
    """The post-processor that puts a token before a text, or before each of two."""
    names = [{"SpecialToken": text, "Sequence": name} for name in "AB"]
    pair = [
        {kind: {"id": each[kind], "type_id": number}}
        for number, each in enumerate(names)
        for kind in each
    ]
    special = {text: {"id": text, "ids": [id], "tokens": [text]}}
    return {
        "type": "TemplateProcessing",
        "single": pair[:2],
        "pair": pair,
        "special_tokens": special,
    }
