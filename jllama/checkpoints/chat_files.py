"""The two files that say how a model converses, named and written as Hugging Face does, whatever the weights' format.

``chat_template.jinja`` turns messages into a prompt; ``generation_config.json`` says which tokens end an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jllama.errors import JllamaError
from jllama.files import read_json_object

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"


def read_chat_files(folder: Path) -> tuple[str | None, tuple[int, ...]]:
    """The chat template and the stop ids in a folder; None and no ids where the files are absent.

    Raises:
        JllamaError: a file is there but is not what its name says.
    """
    template, generation = folder / CHAT_TEMPLATE, folder / GENERATION_CONFIG
    try:
        text = template.read_text(encoding="utf-8") if template.is_file() else None
    except UnicodeDecodeError as error:
        raise JllamaError(f"{template} is not UTF-8 text: {error}") from error
    if not generation.is_file():
        return text, ()
    return text, stop_ids(read_json_object(generation).get("eos_token_id"), generation)


def stop_ids(value: Any, source: Path) -> tuple[int, ...]:
    """An ``eos_token_id`` of a JSON file (absent, one id or a list) as a tuple; anything else raises JllamaError."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise JllamaError(
            f"{source} has eos_token_id {json.dumps(value)[:100]}; it must be a token id or a list of them"
        )
    return tuple(ids)


def write_chat_files(folder: Path, chat_template: str | None, stops: tuple[int, ...], **others: Any) -> None:
    """Write what there is; ``others`` are further fields of ``generation_config.json``."""
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    if stops or others:
        fields = others | ({"eos_token_id": stops[0] if len(stops) == 1 else list(stops)} if stops else {})
        (folder / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
