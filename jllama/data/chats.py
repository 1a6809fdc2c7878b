"""Files of chats, and their tokens on disk: which of them are learned, and the split."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jllama.data.batches import Conversations
from jllama.data.config import DataConfig
from jllama.data.corpus import AT_ONCE, Findings, cached, corpus_files, has_rows, read_rows
from jllama.data.datasets import ChatDataset
from jllama.data.tokens import cache_of, encode_rest, listing_of, sha256
from jllama.errors import JllamaError
from jllama.files import fault_of
from jllama.progress import progress
from jllama.templates.messages import conversation_tokens, openai_messages
from jllama.tokenizers import Tokenizer

CACHE_VERSION = 2  # raise it when the files below, or the tokens that count, change
FORMS = ("chosen", "rejected"), ("messages",), ("prompt", "completion"), ("text",)
"""What makes a record, a pair or a chat; of several, the first that is there."""
SHAREGPT, ALPACA = ("conversations",), ("instruction", "output")
"""Chats in the fields of others, which are taken as well. Alpaca's may have an ``input``, both a ``system``."""
LOST = "left out, as no token to learn is among the first training.seq_len + 1"
"""The note of a record that is too long."""
_FIELDS = {name for form in (*FORMS, SHAREGPT, ALPACA) for name in form} | {
    "tools",
    "system",
    "input",
}
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
_ENTRY = [
    ("fraction", "f8"),
    ("source", "i8"),
    ("start", "i8"),
    ("tokens", "i8"),
    ("counted_tokens", "i8"),
    ("cut", "?"),
    ("dropped", "?"),
]
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
    path = next(
        iter(
            corpus_files(
                next(iter(config.mixture), config.path), cache_of(config), config.follow_links
            ).values()
        )
    )
    if has_rows(path) or path.suffix == ".json":
        next(read_rows(path, [], lambda _, found: kinds.update(found), Findings("skip")), None)
    if config.text_field in kinds and not config.mixture:
        return "text"
    is_chat = any({*form} <= kinds.keys() for form in (*FORMS[1:3], SHAREGPT, ALPACA))
    if {*FORMS[0]} <= kinds.keys():
        return "preference"
    return "chat" if config.mixture or is_chat else "text"


def read_records(
    files: Iterable[Path], forms: Sequence[tuple[str, ...]] = FORMS, findings: Findings = AT_ONCE
) -> Iterator[Record]:
    """Yield the records of these forms in files of JSON Lines, a JSON array or Parquet.

    ``SHAREGPT`` and ``ALPACA`` are taken wherever ``messages`` are. A line or file that has none raises JllamaError,
    or is what ``findings`` make of it.
    """

    def form_of(where: str, names: Collection[str]) -> tuple[str, ...]:
        others = (SHAREGPT, ALPACA) if ("messages",) in forms else ()
        for form in (*forms[:-1], *others, forms[-1]):
            if {*form} <= {*names}:
                return form
        wanted = ", or ".join(" and ".join(form) for form in forms)
        raise JllamaError(f"{where} has {', '.join(names) or 'no field'}, where {wanted} should be")

    for path in files:
        for where, fields in read_rows(path, _FIELDS, form_of, findings):
            kept = {
                name: value
                for name, value in fields.items()
                if name in _FIELDS and value is not None
            }
            with findings.noted():
                yield Record(where, form_of(where, kept), kept)


def record_tokens(
    record: Record,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    notes: Counter[str] | None = None,
) -> list[tuple[list[int], list[bool]]]:
    """Return the ids of a record's conversation, or of its preferred and its rejected one, and which of them count.

    Texts are what a user and an assistant say or, without a template, between BOS and EOS. Answers in a prompt, and in
    what a pair's sides begin with alike, do not count. ``notes`` counts what may not be meant. What is no conversation,
    or is refused by the template, raises JllamaError that says where it stands.
    """
    found = []
    with fault_of(record.where, JllamaError, json.JSONDecodeError, RecursionError):
        tools = record.fields.get("tools")
        if isinstance(tools, str):
            tools = json.loads(tools)
        prompt, answers = _prompt_and_answers(record)
        are_texts = all(isinstance(text, str) for text in (prompt, *answers))
        if are_texts and (template is None or record.form == ("text",)):
            for answer in answers:
                begin = [tokenizer.bos_id, *(tokenizer.encode(prompt) if prompt else [])]
                end = [
                    *(encode_rest(tokenizer, answer) if prompt else tokenizer.encode(answer)),
                    tokenizer.eos_id,
                ]
                found.append((begin + end, [False] * len(begin) + [True] * len(end)))
        elif template is None:
            raise JllamaError(
                "the model has no chat template: give a prompt and an answer that are texts, or one"
            )
        else:
            asked = _messages(prompt, "user")
            sides = [_messages(answer, "assistant") for answer in answers]
            sides = [side if side[: len(asked)] == asked else asked + side for side in sides]
            first = max(len(asked), _shared(sides))
            for side in sides:
                learned = {
                    number for number in range(first, len(side)) if side[number].get("weight") != 0
                }
                # A weight that is not 0 or 1 is refused with the message.
                side = [
                    {k: value for k, value in each.items() if k != "weight" or value not in (0, 1)}
                    for each in side
                ]
                messages = openai_messages(side, is_request=False)
                found.append(
                    conversation_tokens(
                        tokenizer, template, messages, stop_ids, tools, learned=learned, notes=notes
                    )
                )
    if notes is not None and len(found) == 2 and found[0] == found[1]:
        notes["pairs of two equal answers"] += 1
    return found


def _prompt_and_answers(record: Record) -> tuple[Any, list[Any]]:
    """What is only context, and what is learned: one answer or conversation, or two of a pair."""
    fields = record.fields
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    if record.form == SHAREGPT:
        return system, [fields["conversations"]]
    if record.form == ALPACA:
        question = fields["instruction"]
        if fields.get("input"):
            question = f"{question}\n{fields['input']}"
        return [*system, {"role": "user", "content": question}], [fields["output"]]
    prompt = fields.get("prompt", fields.get("conversations", "")) if len(record.form) == 2 else ""
    return prompt, [fields[name] for name in record.form if name != "prompt"]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """A list of messages, ShareGPT's renamed, or the one message that a text is; of an empty text none."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    found = []
    for each in value if isinstance(value, list) else [value]:
        message = {**each} if isinstance(each, dict) else {}
        if "from" in message and "role" not in message:
            speaker = message.pop("from")
            message = {
                "role": _ROLES.get(str(speaker), speaker),
                "content": message.pop("value", None),
                **message,
            }
        found.append(message)
    return found


def _shared(sides: list[list[Any]]) -> int:
    """How many messages both sides of a pair begin with, which are their prompt; the last of a side never is."""
    same = itertools.takewhile(lambda both: both[0] == both[-1], zip(*sides, strict=False))
    return min(len([*same]), *(len(side) - 1 for side in sides)) if len(sides) > 1 else 0


def prepare_chats(
    config: DataConfig,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    seq_len: int,
) -> ChatDataset:
    """Tokenize chats, or find it done: the cache is keyed by the files' names, sizes and times, and all that has a say.

    What is longer than ``seq_len + 1`` tokens is cut, or dropped, also if nothing that counts is left. A record is held
    out if its SHA-256, as a number in [0, 1), is at most ``config.validation_fraction``, or the lowest. JllamaError:
    a record cannot be learned from, or there are too few.
    """
    cache = cache_of(config)
    window = seq_len + 1
    is_pairs = data_task(config) == "preference"
    sources = {
        path: corpus_files(path, cache, config.follow_links)
        for path in config.mixture or [config.path]
    }
    listings = [listing_of(files) for files in sources.values()]
    options = [is_pairs, config.too_long, window, config.bad_rows]
    key = sha256(CACHE_VERSION, listings, options, tokenizer.fingerprint(), template, [*stop_ids])
    folder = cache / f"chats-{key[:16]}"
    if not folder.exists():
        with cached(folder) as partial, progress("tokenizing conversations") as move:
            partial.mkdir()
            findings = Findings(config.bad_rows)
            entries, start = [], 0
            with (partial / "tokens.bin").open("wb") as file:
                for source, files in enumerate(sources.values()):
                    for record in read_records(
                        files.values(), FORMS[:1] if is_pairs else FORMS[1:], findings
                    ):
                        found = []
                        with findings.noted():
                            found = record_tokens(
                                record, tokenizer, template, stop_ids, findings.notes
                            )
                        text = json.dumps(record.fields, sort_keys=True, default=str).encode()
                        fraction = int.from_bytes(hashlib.sha256(text).digest()[:8]) / 2**64
                        is_long = [len(ids) > window for ids, _ in found]
                        found = [(ids[:window], [False, *mask[1:window]]) for ids, mask in found]
                        is_lost = not all(any(mask) for _, mask in found)
                        findings.notes[LOST] += is_lost
                        drops = is_lost or (config.too_long == "drop" and any(is_long))
                        for (ids, mask), cut in zip(found, is_long, strict=True):
                            file.write(np.array([*zip(ids, mask, strict=True)], _TOKEN).tobytes())
                            entries.append(
                                (fraction, source, start, len(ids), sum(mask), cut, drops)
                            )
                            start += len(ids)
                        move(1)
            np.save(partial / "entries.npy", np.array(entries, _ENTRY))
            (partial / "notes.json").write_text(json.dumps(findings.finish()))
    with fault_of(
        f"{folder} must be deleted, since it does not hold what was written there",
        OSError,
        ValueError,
    ):
        entries = np.load(folder / "entries.npy")
        fractions = np.unique(entries["fraction"][~entries["dropped"]])
        if len(fractions) < 2:
            said = f"{' and '.join(sources)}: {len(fractions)} different conversations can be learned from"
            raise JllamaError(
                f"{said}; give at least 2, one of them to hold out, or a larger training.seq_len"
            )
        notes = tuple(json.loads((folder / "notes.json").read_text()))
        tokens = np.memmap(folder / "tokens.bin", _TOKEN, "r", shape=int(entries["tokens"].sum()))
    is_held_out = entries["fraction"] <= np.clip(
        config.validation_fraction, fractions[0], fractions[-2]
    )
    weights, splits, counts = tuple(config.mixture.values()) or (1.0,), {}, {}
    for split, each in {"train": entries[~is_held_out], "validation": entries[is_held_out]}.items():
        kept = each[~each["dropped"]]
        sums = {name: int(kept[name].sum()) for name in ("tokens", "counted_tokens", "cut")}
        counts[split] = {"conversations": len(kept), **sums, "dropped": len(each) - len(kept)}
        places = kept["start"], kept["tokens"], kept["source"]
        splits[split] = Conversations(
            tokens["id"], tokens["counted"], *places, weights, rows_each=1 + is_pairs
        )
    if missing := [
        path for source, path in enumerate(sources) if source not in splits["train"].sources
    ]:
        raise JllamaError(
            f"{missing[0]} has no conversation to train on; give more of it, or leave it out"
        )
    fingerprint = sha256(key, config.validation_fraction, weights, config.packing)
    return ChatDataset(tokenizer, **splits, fingerprint=fingerprint, counts=counts, notes=notes)
