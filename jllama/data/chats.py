"""Files of chats, and their tokens on disk: which of them are learned, and the split."""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jllama.data.batches import Conversations
from jllama.data.config import DataConfig
from jllama.data.corpus import cached, corpus_files, has_rows, read_rows
from jllama.data.tokens import Dataset, cache_of, encode_rest, listing_of, sha256
from jllama.errors import JllamaError
from jllama.files import fault_of
from jllama.progress import progress
from jllama.templates.messages import conversation_tokens
from jllama.tokenizers import Tokenizer

CACHE_VERSION = 1  # raise it when the files below, or the tokens that count, change
FORMS = ("chosen", "rejected"), ("messages",), ("prompt", "completion"), ("text",)
"""What makes a record, a pair or a chat; of several, the first that is there."""
_FIELDS = {name for form in FORMS for name in form} | {"tools"}
_ENTRY = [("fraction", "f8"), ("source", "i8"), ("start", "i8"), ("tokens", "i8"), ("counted_tokens", "i8")]
_ENTRY += [("cut", "?"), ("dropped", "?")]
_TOKEN = np.dtype([("id", "u4"), ("counted", "?")])


class Record(NamedTuple):
    """A line or row of a file of chats: where it stands, which of ``FORMS`` it has, and its fields, but for nulls."""

    where: str
    form: tuple[str, ...]
    fields: dict[str, Any]


def data_task(config: DataConfig) -> str:
    """``text``, ``chat`` or ``preference``: what ``config.task`` is, or the first file's first record says."""
    if config.task != "auto":
        return config.task
    kinds: dict[str, str] = {}
    path = next(iter(corpus_files(next(iter(config.mixture), config.path), cache_of(config)).values()))
    if has_rows(path):
        next(read_rows(path, [], lambda _, found: kinds.update(found)), None)
    if config.text_field in kinds and not config.mixture:
        return "text"
    is_chat = config.mixture or {"messages", "completion"} & kinds.keys()
    return "preference" if {*FORMS[0]} <= kinds.keys() else "chat" if is_chat else "text"


def read_records(files: Iterable[Path], forms: Sequence[tuple[str, ...]] = FORMS) -> Iterator[Record]:
    """The records of these forms in files of JSON Lines or Parquet; a line or file that has none raises JllamaError."""

    def form_of(where: str, names: Collection[str]) -> tuple[str, ...]:
        if found := [form for form in forms if {*form} <= {*names}]:
            return found[0]
        wanted = ", or ".join(" and ".join(form) for form in forms)
        raise JllamaError(f"{where} has {', '.join(names) or 'no field'}, where {wanted} should be")

    for path in files:
        for where, fields in read_rows(path, _FIELDS, form_of):
            kept = {name: value for name, value in fields.items() if name in _FIELDS and value is not None}
            yield Record(where, form_of(where, kept), kept)


def record_tokens(
    record: Record, tokenizer: Tokenizer, template: str | None, stop_ids: Sequence[int]
) -> list[tuple[list[int], list[bool]]]:
    """The ids of a record's conversation, or of its preferred and its rejected one, and which of them count.

    Texts are what a user and an assistant say or, without a template, between BOS and EOS. What is no conversation, or
    is refused by the template, raises JllamaError that says where it stands.
    """
    fields, found = record.fields, []
    prompt = fields.get("prompt", "") if len(record.form) == 2 else ""
    with fault_of(record.where, JllamaError, json.JSONDecodeError):
        tools = json.loads(tools) if isinstance(tools := fields.get("tools"), str) else tools
        for answer in [fields[name] for name in record.form if name != "prompt"]:
            if (template is None or record.form == ("text",)) and isinstance(answer, str) and isinstance(prompt, str):
                begin = [tokenizer.bos_id, *(tokenizer.encode(prompt) if prompt else [])]
                end = [*(encode_rest(tokenizer, answer) if prompt else tokenizer.encode(answer)), tokenizer.eos_id]
                found.append((begin + end, [False] * len(begin) + [True] * len(end)))
            elif template is None:
                raise JllamaError("the model has no chat template: give a prompt and an answer that are texts")
            else:
                asked, messages = _messages(prompt, "user"), _messages(answer, "assistant")
                messages = messages if all(each in messages for each in asked) else asked + messages
                found.append(conversation_tokens(tokenizer, template, messages, stop_ids, tools))
    return found


def _messages(value: Any, role: str) -> list[Any]:
    """A list of messages, without nulls but for contents, or the one message that a text is; of an empty text none."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    parts = [each.items() if isinstance(each, dict) else () for each in (value if isinstance(value, list) else [value])]
    return [{name: part for name, part in each if part is not None or name == "content"} for each in parts]


def prepare_chats(
    config: DataConfig, tokenizer: Tokenizer, template: str | None, stop_ids: Sequence[int], seq_len: int
) -> Dataset:
    """Tokenize chats, or find it done: the cache is keyed by the files' names, sizes and times, and all that has a say.

    What is longer than ``seq_len + 1`` tokens is cut, or dropped, also if nothing that counts is left. A record is held
    out if its SHA-256, as a number in [0, 1), is at most ``config.validation_fraction``, or the lowest. JllamaError:
    a record cannot be learned from, or there are too few.
    """
    cache, window, is_pairs = cache_of(config), seq_len + 1, data_task(config) == "preference"
    sources = {path: corpus_files(path, cache) for path in config.mixture or [config.path]}
    listings, options = [listing_of(files) for files in sources.values()], [is_pairs, config.too_long, window]
    key = sha256(CACHE_VERSION, listings, options, tokenizer.fingerprint(), template, [*stop_ids])
    folder = cache / f"chats-{key[:16]}"
    if not folder.exists():
        with cached(folder) as partial, progress("tokenizing conversations") as move:
            partial.mkdir()
            entries, start, forms = [], 0, FORMS[:1] if is_pairs else FORMS[1:]
            with (partial / "tokens.bin").open("wb") as file:
                for source, files in enumerate(sources.values()):
                    for record in read_records(files.values(), forms):
                        text = json.dumps(record.fields, sort_keys=True, default=str).encode()
                        fraction = int.from_bytes(hashlib.sha256(text).digest()[:8]) / 2**64
                        found = record_tokens(record, tokenizer, template, stop_ids)
                        is_long = [len(ids) > window for ids, _ in found]
                        found = [(ids[:window], [False, *mask[1:window]]) for ids, mask in found]
                        drops = not all(any(mask) for _, mask in found) or (config.too_long == "drop" and any(is_long))
                        for (ids, mask), cut in zip(found, is_long, strict=True):
                            file.write(np.array([*zip(ids, mask, strict=True)], _TOKEN).tobytes())
                            entries.append((fraction, source, start, len(ids), sum(mask), cut, drops))
                            start += len(ids)
                        move(1)
            np.save(partial / "entries.npy", np.array(entries, _ENTRY))
    with fault_of(f"{folder} must be deleted, since it does not hold what was written there", OSError, ValueError):
        entries = np.load(folder / "entries.npy")
        fractions = np.unique(entries["fraction"][~entries["dropped"]])
        if len(fractions) < 2:
            said = f"{' and '.join(sources)}: {len(fractions)} different conversations can be learned from"
            raise JllamaError(f"{said}; give at least 2, one of them to hold out, or a larger training.seq_len")
        tokens = np.memmap(folder / "tokens.bin", _TOKEN, "r", shape=int(entries["tokens"].sum()))
    is_held_out = entries["fraction"] <= np.clip(config.validation_fraction, fractions[0], fractions[-2])
    weights, splits, counts = tuple(config.mixture.values()) or (1.0,), {}, {}
    for split, each in {"train": entries[~is_held_out], "validation": entries[is_held_out]}.items():
        kept = each[~each["dropped"]]
        sums = {name: int(kept[name].sum()) for name in ("tokens", "counted_tokens", "cut")}
        counts[split] = {"conversations": len(kept), **sums, "dropped": len(each) - len(kept)}
        places = kept["start"], kept["tokens"], kept["source"]
        splits[split] = Conversations(tokens["id"], tokens["counted"], *places, weights, rows_each=1 + is_pairs)
    if missing := [path for source, path in enumerate(sources) if source not in splits["train"].sources]:
        raise JllamaError(f"{missing[0]} has no conversation to train on; give more of it, or leave it out")
    fingerprint = sha256(key, config.validation_fraction, weights, config.packing)
    return Dataset(tokenizer, **splits, fingerprint=fingerprint, counts=counts, preference=is_pairs)
