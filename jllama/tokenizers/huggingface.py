"""Hugging Face's ``tokenizer.json``, through the ``tokenizers`` library."""

import copy
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import tokenizers

from jllama.core import JllamaError
from jllama.core.config import MAX_SIZES
from jllama.system.errors import silent_stderr
from jllama.system.files import Json, errors_as, read_optional_json, write_json
from jllama.tokenizers.added_tokens import (
    CONFIG_NAME,
    check_added_tokens,
    read_added_tokens,
)
from jllama.tokenizers.base import (
    BYTE_PIECES,
    SPACE,
    Ids,
    Tokenizer,
    TokenType,
    Vocabulary,
    check_text,
    piece_bytes,
    special_bytes,
)
from jllama.tokenizers.tiktoken import PATTERNS

_CONFIG_NAMES = (CONFIG_NAME, "generation_config.json", "config.json")
_NOT_LLAMAS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _split(pattern: str) -> Json:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {
        "type": "Sequence",
        "pretokenizers": [split | {"invert": False}, _BYTE_LEVEL | {"use_regex": False}],
    }


PRE_TOKENIZERS: dict[str, Json] = {
    **{name: _split(pattern) for name, pattern in PATTERNS.items()},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
    "gpt-2": _BYTE_LEVEL,
}
"""The known ways to split text: llama.cpp's names, and how Hugging Face's library is configured."""

_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}  # of transformers 5

_FORMS: dict[str | bool, tuple[Json | None, Json | None, bool, bool]]
_FORMS = {
    # With ignore_merges, a part of the text that is a token is not merged.
    **{
        name: (None, split, name in ("llama-bpe", "llama4", "tekken"), False)
        for name, split in PRE_TOKENIZERS.items()
    },
    "qwen2": ({"type": "NFC"}, PRE_TOKENIZERS["qwen2"], False, False),
    False: ({"type": "Sequence", "normalizers": [_REPLACE]}, None, False, True),
    True: ({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None, False, True),
}
"""Normalizer, pre-tokenizer, ``ignore_merges`` and ``byte_fallback`` by ``pre`` (byte-level BPE) or
``add_space_prefix`` (SentencePiece)."""


def _form_key(form: Any) -> str:
    """Return settings as one text.

    No ids depend on ``trim_offsets``, nor on how a regular expression splits that matches any text.
    """
    text = json.dumps(form, sort_keys=True).replace('"trim_offsets": false', '"trim_offsets": true')
    return text.replace('"Removed", "invert": true', '"Isolated", "invert": false')


_NAMES = {_form_key(form): name for name, form in _FORMS.items()}
_NAMES[_form_key((_REPLACE, None, False, True))] = False
_NAMES |= {
    _form_key((None, _METASPACE | {"prepend_scheme": scheme}, False, True)): has_prefix
    for scheme, has_prefix in {"never": False, "first": True, "always": True}.items()
}
"""The key in ``_FORMS`` of each form, and of other forms that give the same ids."""


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``: byte-level BPE (Llama 3, SmolLM2), or BPE with byte fallback (Llama 2).

    A text is encoded whole and alone, whatever the file says of truncation and padding.

    Args:
        text: the file's content.
        bos_id: the id of BOS, by ``tokenizer_config.json`` or the model's configuration.
        eos_id: the id of EOS.
        add_bos: whether a prompt begins with BOS. If it is None, the file's post-processor decides,
            else the post-processor is changed accordingly.
        source: what errors call the file.
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
        # 1. Read the file. The library raises plain Exceptions; its first encoding may panic.
        with errors_as(f"{source} is not a tokenizer.json", Exception), silent_stderr():
            library = tokenizers.Tokenizer.from_str(text)
            library.no_truncation()
            library.no_padding()
            begins_with_bos = library.encode("").ids[:1] == [bos_id]
        self._library = library
        self.vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.bos_id = bos_id
        self.eos_id = eos_id

        # 2. Check that a Llama may have such a tokenizer.
        model = library.model
        if not isinstance(model, tokenizers.models.BPE):
            raise JllamaError(f"{source} is a {type(model).__name__} tokenizer; a Llama's is a BPE")
        for name in _NOT_LLAMAS:
            if getattr(model, name):
                raise JllamaError(
                    f"{source} is a BPE with {name} {getattr(model, name)!r}, which no Llama has"
                )
        if self.vocab_size > MAX_SIZES["vocab_size"]:
            raise JllamaError(
                f"{source} has the token id {self.vocab_size - 1}, which no Llama has: "
                "it is damaged"
            )
        if not 0 <= min(bos_id, eos_id) <= max(bos_id, eos_id) < self.vocab_size:
            raise JllamaError(
                f"{source} has {self.vocab_size} tokens, but BOS and EOS are {bos_id} and {eos_id}"
            )
        self.texts = [library.id_to_token(id) or "" for id in range(self.vocab_size)]

        # 3. Make the post-processor agree with add_bos, since other readers of the file use it.
        self.add_bos = begins_with_bos if add_bos is None else add_bos
        if self.add_bos != begins_with_bos:
            content = json.loads(text)
            begin = _begin_with(bos_id, self.texts[bos_id]) if self.add_bos else None
            content["post_processor"] = begin
            text = json.dumps(content, ensure_ascii=False)
        self.content = text.encode()

        # 4. Find the special tokens. In the library's encode they are text like any other.
        library.encode_special_tokens = True
        library.add_special_tokens([self.texts[bos_id], self.texts[eos_id]])
        self.added = library.get_added_tokens_decoder()
        split = library.pre_tokenizer
        self.is_byte_level = split is not None and b"ByteLevel" in split.__getstate__()
        self.pieces = [piece_bytes(text, self.is_byte_level) for text in self.texts]
        for id, token in self.added.items():
            text = token.content
            self.pieces[id] = special_bytes(text) if token.special else text.encode()
        self.special_tokens = {self.texts[id]: id for id in (*self.added, bos_id, eos_id)}

    @functools.cached_property
    def json(self) -> Json:
        """Return the file's content with every default filled in."""
        return json.loads(self._library.to_str())

    def _encode(self, text: str, *, with_special_tokens: bool = False) -> list[int]:
        with errors_as(f"the tokenizer.json cannot split a text of {len(text)} characters"):
            library = self._with_special_tokens if with_special_tokens else self._library
            # Other threads can run during a call for a batch.
            (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it become their ids."""
        check_text(text)
        return self._encode(text, with_special_tokens=True)

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        """Return a copy that recognizes special tokens; ``encode`` has no argument for that."""
        return copy.deepcopy(self._library)  # a copy does not have encode_special_tokens set

    def _decode(self, ids: Ids) -> str:
        with errors_as(f"the tokenizer.json cannot turn {len(ids)} tokens into text"):
            return self._library.decode(ids.tolist(), skip_special_tokens=False)

    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer as data.

        One of Llama 2's kind becomes SentencePiece, with scores from the order of the merges. A
        json with Metaspace (transformers 5 writes it) drops the space before a text that begins
        with one; SentencePiece, which such a model was trained with, does not.

        Raises:
            JllamaError: no other format gives the same ids.
        """
        # 1. Name the way that it splits and changes text.
        model = self.json["model"]
        form = (
            self.json["normalizer"],
            self.json["pre_tokenizer"],
            model["ignore_merges"],
            model["byte_fallback"],
        )
        name = _NAMES.get(_form_key(form))
        if name is None:
            raise JllamaError(
                "other formats have no name for how this tokenizer splits text or changes it (its "
                "normalizer, pre_tokenizer, ignore_merges and byte_fallback: "
                f"{json.dumps(form)})"
            )
        # 2. Collect the tokens and their types.
        kind_of = {"": TokenType.UNUSED}
        if not self.is_byte_level:
            kind_of |= dict.fromkeys(BYTE_PIECES, TokenType.BYTE)
        kinds: list[int] = [kind_of.get(text, TokenType.NORMAL) for text in self.texts]
        for id, token in self.added.items():
            kinds[id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        tokens = [text or f"[PAD{id}]" for id, text in enumerate(self.texts)]
        merges = [(left, right) for left, right in model["merges"]]
        strips = any(token.rstrip for token in self.added.values())
        vocabulary = Vocabulary(tokens, kinds, self.bos_id, self.eos_id, self.add_bos)
        vocabulary = vocabulary._replace(strips_spaces=strips)
        if self.is_byte_level:
            return vocabulary._replace(merges=merges, pre=name)

        # 3. Turn merges into scores, and check that these give the same merges.
        ids = {text: id for id, text in enumerate(self.texts)}
        unknown_id = ids.get(model["unk_token"])
        if unknown_id is not None:
            kinds[unknown_id] = TokenType.UNKNOWN
        scores = [-1e9 if kind == TokenType.NORMAL else 0.0 for kind in kinds]
        for rank, (left, right) in enumerate(merges):
            scores[ids[left + right]] = -float(rank)
        vocabulary = vocabulary._replace(
            scores=scores, unknown_token_id=unknown_id, add_space_prefix=name
        )
        vocabulary.check_pieces("the tokenizer")
        missing = set(vocabulary.piece_merges()) - set(merges)
        if missing:
            left, right = min(missing)
            raise JllamaError(
                f"the tokenizer does not join {left!r} and {right!r} to a token that it has, as "
                "SentencePiece would: in a SentencePiece file it would give other ids"
            )
        return vocabulary

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Vocabulary, source: str = "the tokenizer"
    ) -> "HuggingFaceTokenizer":
        """Return the ``tokenizer.json`` of the same ids.

        A space after a user-defined piece is the exception; there it does as llama.cpp.
        """
        # The merges, and how text is split before them and joined after them.
        tokens, kinds, bos_id, eos_id, add_bos, scores, unknown_id, prefix, merges, pre, _ = (
            vocabulary
        )
        decoder: Json = _BYTE_LEVEL
        if scores is not None:
            merges = vocabulary.piece_merges()
            spaces = _REPLACE | {"pattern": {"String": SPACE}, "content": " "}
            decoders: list[Json] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
            if prefix:
                decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
            decoder = {"type": "Sequence", "decoders": decoders}
        normalizer, split, ignore_merges, byte_fallback = _FORMS[pre if scores is None else prefix]

        # Unknown, control and user-defined tokens are added ones. The model's vocabulary needs the
        # other ones and the unknown token, and all ids before these.
        only_added = (TokenType.CONTROL, TokenType.USER_DEFINED)
        flags = {"single_word": False, "lstrip": False, "normalized": False}
        added = []
        vocab_size = 0
        for id, kind in enumerate(kinds):
            if kind in (TokenType.UNKNOWN, *only_added):
                strips = vocabulary.strips_spaces and id not in (bos_id, eos_id, unknown_id)
                is_special = kind != TokenType.USER_DEFINED
                token = {"id": id, "content": tokens[id], "special": is_special, **flags}
                added.append(token | {"rstrip": strips})
            if kind not in only_added:
                vocab_size = id + 1

        # The file.
        content = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": split,
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "unk_token": None if unknown_id is None else tokens[unknown_id],
                **dict.fromkeys(_NOT_LLAMAS),
                "fuse_unk": byte_fallback,
                "byte_fallback": byte_fallback,
                "ignore_merges": ignore_merges,
                "vocab": {text: id for id, text in enumerate(tokens[:vocab_size])},
                "merges": merges,
            },
            "post_processor": _begin_with(bos_id, tokens[bos_id]) if add_bos else None,
        }
        return cls(json.dumps(content, ensure_ascii=False), bos_id, eos_id, add_bos, source)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``; create a missing ``folder``."""
        super().save(folder)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.texts[self.bos_id],
            "eos_token": self.texts[self.eos_id],
            "add_bos_token": self.add_bos,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / CONFIG_NAME, config)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the content, BOS, EOS and ``add_bos``, in hexadecimal."""
        ends = f"{self.bos_id} {self.eos_id} {self.add_bos} "
        return hashlib.sha256(ends.encode() + self.content).hexdigest()


def load_huggingface_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read a ``tokenizer.json``.

    The files beside it say which tokens are BOS and EOS, and whether BOS is added.

    Raises:
        JllamaError: a file is damaged, or none says which token is EOS.
    """
    # 1) Read the file, and add tokens that only the files beside it have.
    with errors_as(
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
        added = read_added_tokens(path.parent)
        missing = {id: token for id, token in added.items() if token.text not in ids_by_text}
        if missing:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            content["added_tokens"] += [
                {"id": id, "content": token.text, **flags, "special": token.is_special}
                for id, token in missing.items()
            ]
            ids_by_text |= {token.text: id for id, token in missing.items()}
            text = json.dumps(content, ensure_ascii=False)

    # 2) Find BOS and EOS, and whether BOS is added.
    files = [path.with_name(name) for name in _CONFIG_NAMES]
    contents = [*map(read_optional_json, files)]
    eos_id = _special_id("eos", ids_by_text, files, contents)
    bos_id = _special_id("bos", ids_by_text, files, contents)
    if eos_id is None:
        raise JllamaError(
            f"neither {path} nor the files beside it say which token is EOS: "
            f"add it to {CONFIG_NAME}"
        )
    add_bos = contents[0].get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise JllamaError(f"{files[0]} has add_bos_token {add_bos!r}; it must be true or false")
    if bos_id is None:
        bos_id = eos_id  # GPT-2's kind has one token for both

    # 3) Build the tokenizer, and check the added tokens.
    tokenizer = HuggingFaceTokenizer(text, bos_id, eos_id, add_bos, str(path))
    check_added_tokens(tokenizer.texts, missing, path)
    return tokenizer


def _special_id(
    name: str, ids_by_text: dict[Any, int], files: list[Path], contents: list[Json]
) -> int | None:
    """Return the id of ``bos`` or ``eos``, or None if no file of ``_CONFIG_NAMES`` names it.

    The first file has the token's text, the others have its id. The first one that names it counts.
    """
    config, *others = contents
    token = config.get(f"{name}_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str | None):
        raise JllamaError(f"{files[0]} has {name}_token {str(token)[:100]}; it must be a text")
    ids: list[Any] = [ids_by_text.get(token)]
    for other in others:
        id = other.get(f"{name}_token_id")
        ids.append(id[0] if isinstance(id, list) and id else id)
    id = next((id for id in ids if isinstance(id, int)), None)
    if isinstance(id, bool):
        raise JllamaError(
            f"{files[1]} or {files[2]} has {name}_token_id {id}; it must be the id of a token"
        )
    return id


def _begin_with(id: int, text: str) -> Json:
    """Return the post-processor that puts a token before a text, or before each of two."""
    pair = [
        {"SpecialToken": {"id": text, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": text, "type_id": 1}},
        {"Sequence": {"id": "B", "type_id": 1}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": pair[:2],
        "pair": pair,
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    }
