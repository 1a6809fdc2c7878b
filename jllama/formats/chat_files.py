"""Files of chat models that several formats share: tokenizer, chat template and stop ids."""

import json
from pathlib import Path
from typing import Any

from jllama.core import JllamaError
from jllama.system.files import Json, errors_as, has_file, read_optional_json, write_json
from jllama.tokenizers.base import Tokenizer
from jllama.tokenizers.loading import has_tokenizer, load_tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"


def read_text_files(folder: Path) -> tuple[Tokenizer | None, str | None, tuple[int, ...]]:
    """Read the tokenizer, chat template and stop ids in a folder; None and no ids if absent."""
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    template = folder / CHAT_TEMPLATE
    with errors_as(f"{template} is not UTF-8 text", UnicodeDecodeError):
        text = template.read_text(encoding="utf-8") if has_file(template) else None
    generation = folder / GENERATION_CONFIG
    fields = read_optional_json(generation)
    stop_ids = parse_stop_ids(fields.get("eos_token_id"), generation)
    if tokenizer is not None and max(stop_ids, default=0) >= tokenizer.vocab_size:
        raise JllamaError(
            f"{generation} stops at the token {max(stop_ids)}, but the tokenizer of {folder} has "
            f"{tokenizer.vocab_size} tokens: put the tokenizer's other files there"
        )
    return tokenizer, text, stop_ids


def parse_stop_ids(value: Any, source: Path) -> tuple[int, ...]:
    """Return an ``eos_token_id`` of a JSON file as a tuple: absent, one id or a list of ids.

    Raises:
        JllamaError: It is anything else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise JllamaError(
            f"{source} has eos_token_id {json.dumps(value)[:100]}; it must be a token id or several"
        )
    return tuple(ids)


def write_chat_files(
    folder: Path, chat_template: str | None, stops: tuple[int, ...], **others: Any
) -> Json:
    """Write the chat template and ``generation_config.json``, whose fields are returned.

    The fields are the stop ids and ``others``. A file without content is not written.
    """
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    fields: Json = {}
    if stops:
        fields["eos_token_id"] = stops[0] if len(stops) == 1 else list(stops)
    fields |= others
    if fields:
        write_json(folder / GENERATION_CONFIG, fields)
    return fields
