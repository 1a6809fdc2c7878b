"""Tokens that the files beside a tokenizer add to it, as transformers reads them.

``tokenizer_config.json`` has them by id in ``added_tokens_decoder``; ``added_tokens.json``, of
older versions, has ids by text.
"""

from pathlib import Path
from typing import NamedTuple

from jllama.core import JllamaError
from jllama.core.config import MAX_SIZES
from jllama.system.files import read_optional_json

CONFIG_NAME = "tokenizer_config.json"
_OLD_FILE = "added_tokens.json"


class AddedToken(NamedTuple):
    """A token that is not in the tokenizer's own file.

    Attributes:
        text: as it is written.
        is_special: whether it is no text, but a mark that only templates write.
    """

    text: str
    is_special: bool


def read_added_tokens(folder: Path) -> dict[int, AddedToken]:
    """Return the added tokens by id, lowest first.

    Raises:
        JllamaError: a file is damaged.
    """
    added = {}
    old = folder / _OLD_FILE
    for text, id in read_optional_json(old).items():
        added[_checked_id(id, old)] = AddedToken(text, True)
    config = folder / CONFIG_NAME
    entries = read_optional_json(config).get("added_tokens_decoder") or {}
    if not isinstance(entries, dict):
        raise JllamaError(f"{config} has an added_tokens_decoder that is no object")
    for id, entry in entries.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise JllamaError(f"{config} has the added token {id} without a text")
        number = int(id) if id.isdecimal() and len(id) < 9 else id
        added[_checked_id(number, config)] = AddedToken(text, bool(entry.get("special", True)))
    return dict(sorted(added.items()))


def read_end_token(folder: Path) -> str | None:
    """Return the text of EOS that ``tokenizer_config.json`` has, if any."""
    token = read_optional_json(folder / CONFIG_NAME).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def check_added_tokens(texts: list[str], added: dict[int, AddedToken], source: Path) -> None:
    """Raise ``JllamaError`` if a token of a file is another one in the tokenizer."""
    for id, token in added.items():
        if id >= len(texts) or texts[id] != token.text:
            actual = repr(texts[id]) if id < len(texts) else "none"
            raise JllamaError(
                f"the files beside {source} have the token {token.text!r} with the id {id}, where "
                f"it has {actual}: put the files there that belong together"
            )


def _checked_id(id: object, source: Path) -> int:
    if type(id) is not int or not 0 <= id < MAX_SIZES["vocab_size"]:
        raise JllamaError(f"{source} has an added token with the id {id!r}, which no model has")
    return id
