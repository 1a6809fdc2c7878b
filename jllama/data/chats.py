"""Files of chats, and their tokens on disk: which tokens are learned, and the split."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jllama.core import JllamaError
from jllama.data.batches import ChatTokens
from jllama.data.config import DataConfig
from jllama.data.corpus import (
    FAIL_FAST,
    Files,
    Findings,
    corpus_files,
    encode_rest,
    has_rows,
    hash_fraction,
    read_rows,
    write_cached,
)
from jllama.data.datasets import ChatDataset
from jllama.data.tokens import (
    cache_dir,
    file_stats,
    held_out_limit,
    sha256,
)
from jllama.system.files import errors_as
from jllama.system.places import Place
from jllama.system.progress import progress
from jllama.templates.messages import conversation_tokens, openai_messages
from jllama.tokenizers.base import Tokenizer

Form = tuple[str, ...]
"""The fields that a record has."""

CACHE_VERSION = 3  # raise it when the files below, or the tokens that count, change
PAIR = ("chosen", "rejected")
MESSAGES = ("messages",)
COMPLETION = ("prompt", "completion")
TEXT = ("text",)
SHAREGPT = ("conversations",)
ALPACA = ("instruction", "output")
FORMS = (PAIR, MESSAGES, COMPLETION, SHAREGPT, ALPACA, TEXT)
"""The fields that make a record a pair or a chat; if several match, the first one counts."""
_ASKS = ("prompt", "question", "instruction", "query", "conversations")
"""Fields that may ask for the answers of a pair."""
_MEANINGFUL = ("system", "history", "input", *_ASKS)
"""Fields that trainers read. Where a form does not, they must not say anything that it lacks."""
_FIELDS = {"tools", *_MEANINGFUL}.union(*FORMS)
TOO_LONG_NOTE = "left out, as no token to learn is among the first training.seq_len + 1"
"""The note on a record that is too long."""
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

_Side = tuple[list[int], list[bool]]
"""The token ids of a conversation, and which of them count."""


class Record(NamedTuple):
    """A line or row of a file of chats."""

    where: str  # the file and the line, row or element
    form: Form  # one of ``FORMS``
    fields: dict[str, Any]  # its known fields that are not null


def data_task(config: DataConfig) -> str:
    """Return ``text``, ``chat`` or ``preference``.

    It is ``config.task``, or, if that is ``auto``, what the fields of the first file's first record
    say.
    """
    if config.task != "auto":
        return config.task
    corpus = next(iter(config.mixture), config.path)
    path = next(iter(corpus_files(corpus, cache_dir(config), config.follow_links).values()))
    types: dict[str, str] = {}
    if has_rows(path) or path.suffix == ".json":
        findings = Findings("skip")
        next(
            read_rows(path, [], lambda _, names: types.update(names), findings, config.fields), None
        )
    is_mixture = bool(config.mixture) and not config.stream
    if config.text_field in types and not is_mixture:
        return "text"
    if types.keys() >= set(PAIR):
        return "preference"
    is_chat = any(types.keys() >= set(form) for form in FORMS[1:-1])
    return "chat" if is_mixture or is_chat else "text"


def read_records(
    files: Iterable[Place],
    forms: Sequence[Form] = FORMS,
    findings: Findings = FAIL_FAST,
    new_names: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Record]:
    """Yield the records of these forms in files of JSON Lines, a JSON array or Parquet.

    ``new_names`` is for ``read_rows``. ``findings`` counts fields that are not read.

    Raises:
        JllamaError: a line or file has none of the forms; or ``findings`` collects this.
    """

    def check(where: str, fields: dict[str, Any]) -> None:
        form = _form_of(forms, where, fields)
        kind = "files" if where == str(path) else "records"
        read = TEXT if form == TEXT else _FIELDS
        for name in fields.keys() - read:
            findings.notes[f"{kind} with a field {name!r}, which is not read"] += 1

    for path in files:
        for where, fields in read_rows(path, _FIELDS, check, findings, new_names):
            known = {
                name: value
                for name, value in fields.items()
                if name in _FIELDS and value is not None
            }
            with findings.collect():
                yield Record(where, _form_of(forms, where, known), known)


def _form_of(forms: Sequence[Form], where: str, fields: dict[str, Any]) -> Form:
    """Return the form of a record with these fields; raise ``JllamaError`` if there is none."""
    for form in forms:
        if fields.keys() >= set(form):
            return form
    names = ", ".join(fields) or "no field"
    expected = ", or ".join(map(" and ".join, forms))
    raise JllamaError(f"{where} has {names}, where {expected} should be")


def record_tokens(
    record: Record,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    notes: Counter[str] | None = None,
) -> list[_Side]:
    """Return the token ids of a record, and which of them count: one side, or two of a pair.

    Fields that are texts are messages of a user and an assistant. Without a template, and in the
    form ``TEXT``, they are encoded between BOS and EOS. A prompt does not count, and neither do the
    messages that both sides of a pair begin with. ``notes`` counts what may be a mistake.

    Raises:
        JllamaError: it is not a conversation, or the template refuses it; the message begins with
            the record's place.
    """
    with errors_as(record.where, JllamaError, json.JSONDecodeError, RecursionError):
        # 1) Split the record into a prompt and answers.
        tools = record.fields.get("tools")
        if isinstance(tools, str):
            with errors_as("tools is not JSON", ValueError, RecursionError):
                tools = json.loads(tools)
        prompt, answers = _prompt_and_answers(record)
        if record.form != TEXT:
            refuse_lost_fields(record.fields, _MEANINGFUL, [prompt, *answers])

        # 2) Check that something asks for the answers.
        asks = _messages(prompt, "user")
        answers_are_texts = all(isinstance(answer, str) for answer in answers)
        has_question = any(message.get("role") != "system" for message in asks)
        if record.form in (PAIR, COMPLETION) and answers_are_texts and not has_question:
            raise JllamaError(f"nothing asks for {record.form[-1]}: it needs a prompt")

        # 3) Encode texts between BOS and EOS, and messages by the template.
        are_texts = all(isinstance(text, str) for text in (prompt, *answers))
        if are_texts and (template is None or record.form == TEXT):
            for text in (prompt, *answers):
                note_special_tokens(text, tokenizer, notes)
            sides = [_text_tokens(tokenizer, prompt, answer) for answer in answers]
        elif template is None:
            raise JllamaError(
                "the model has no chat template: give a prompt and an answer that are texts, "
                "or a template"
            )
        else:
            sides = [
                conversation_tokens(
                    tokenizer, template, messages, stop_ids, tools, learned=learned, notes=notes
                )
                for messages, learned in _conversations(prompt, answers)
            ]
    if notes is not None and len(sides) == 2 and sides[0] == sides[1]:
        notes["pairs of two equal answers"] += 1
    return sides


def _prompt_and_answers(record: Record) -> tuple[Any, list[Any]]:
    """Return what is only context, and what is learned: one answer or conversation, or a pair's."""
    fields = {name: _parsed(name, value) for name, value in record.fields.items()}
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    if record.form in (MESSAGES, SHAREGPT):
        return system, [fields[record.form[0]]]
    if record.form == TEXT:
        return "", [fields["text"]]
    answers = [fields[name] for name in record.form if name not in _ASKS]
    if record.form == ALPACA:
        question = fields["instruction"]
        if fields.get("input"):
            question = f"{question}\n{fields['input']}"
        return [*system, {"role": "user", "content": question}], answers
    asks = _ASKS if record.form == PAIR else COMPLETION
    prompt = next((fields[name] for name in asks if name in fields), "")
    if system:
        prompt = [*system, *_messages(prompt, "user")]
    return prompt, answers


def _parsed(name: str, value: Any) -> Any:
    """Return the list of messages that a text is as JSON, and anything else unchanged."""
    if name in TEXT or not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return value
    are_messages = all(isinstance(item, dict) and item.keys() & {"role", "from"} for item in items)
    return items if items and are_messages else value


def refuse_lost_fields(fields: dict[str, Any], names: Iterable[str], rendered: Any) -> None:
    """Raise ``JllamaError`` if a field of these names says what the rendered messages do not."""
    conversation = "\n".join(_texts(rendered))
    for name in names:
        if any(text not in conversation for text in _texts(_parsed(name, fields.get(name)))):
            raise JllamaError(
                f"{name} is not read here: put what it says into the messages or the prompt, or "
                "remove it"
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of messages, of lists of them, and of a text."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, dict):
        yield from _texts(value.get("content", value.get("value")))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def note_special_tokens(text: str, tokenizer: Tokenizer, notes: Counter[str] | None) -> None:
    """Count a text in ``notes`` for each special token that it spells, as it gets the characters.

    Only a chat template writes special tokens.
    """
    for name in tokenizer.special_tokens:
        if notes is not None and name in text:
            notes[f"texts that spell {name}, which become characters and no special token"] += 1


def _text_tokens(tokenizer: Tokenizer, prompt: str, answer: str) -> _Side:
    """Encode a prompt and an answer between BOS and EOS; the answer and EOS count."""
    begin = [tokenizer.bos_id]
    if prompt:
        begin += tokenizer.encode(prompt)
        end = encode_rest(tokenizer, answer)
    else:
        end = tokenizer.encode(answer)
    end = [*end, tokenizer.eos_id]
    return begin + end, [False] * len(begin) + [True] * len(end)


def _conversations(prompt: Any, answers: list[Any]) -> Iterator[tuple[list[Any], set[int]]]:
    """Yield the messages of each side, and the indices of those that are learned."""
    context = _messages(prompt, "user")
    sides = [_joined(context, _messages(answer, "assistant")) for answer in answers]
    num_context = len(context)
    if len(sides) == 2:
        # The messages that both sides begin with, except the last of a side, are context, too.
        pairs = zip(sides[0][:-1], sides[1][:-1], strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        num_context = max(num_context, len([*same]))
    for side in sides:
        learned = {
            index for index in range(num_context, len(side)) if side[index].get("weight") != 0
        }
        for message in side:
            # Another weight stays, and is refused as a field that messages do not have.
            if message.get("weight") in (0, 1):
                del message["weight"]
        yield openai_messages(side, is_request=False), learned


def _joined(context: list[dict[str, Any]], side: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a context and an answer as one conversation, without any message twice.

    An answer that begins with a question is the whole conversation, unless the context ends with
    an answer.

    Raises:
        JllamaError: such an answer begins with another context.
    """
    system, turns = _split_system(context)
    own_system, own_turns = _split_system(side)
    is_continued = turns and turns[-1].get("role") == "assistant"
    repeats = own_turns[: len(turns)] == turns
    is_whole = own_turns and own_turns[0].get("role") == "user"
    if not is_whole or (is_continued and not repeats):
        return context + side
    if not repeats or (system and own_system and system != own_system):
        raise JllamaError(
            "an answer begins with a question, but with another one than the prompt, or with "
            "another system message: leave one of them out"
        )
    return (own_system or system) + own_turns


def _split_system(messages: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the system messages that a conversation begins with, and the others."""
    system = [*itertools.takewhile(lambda message: message.get("role") == "system", messages)]
    return system, messages[len(system) :]


def _messages(value: Any, role: str) -> list[dict[str, Any]]:
    """Return a list of messages with ShareGPT's fields renamed.

    A text is one message of ``role``, an empty text is none.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value else []
    messages = []
    items = value if isinstance(value, list) else [value]
    for item in items:
        message = {**item} if isinstance(item, dict) else {}
        if "from" in message and "role" not in message:
            speaker = message.pop("from")
            renamed = {
                "role": _ROLES.get(str(speaker), speaker),
                "content": message.pop("value", None),
            }
            message = renamed | message
        messages.append(message)
    return messages


def prepare_chats(
    config: DataConfig,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    seq_len: int,
) -> ChatDataset:
    """Tokenize chats, or open the tokens in the cache.

    The key of the cache is the files' names, sizes and modification times, and everything else that
    changes the tokens. A conversation of more than ``seq_len + 1`` tokens is cut or dropped by
    ``config.too_long``; it is dropped as well if no token that counts is left. A record is held out
    if its SHA-256, as a number in [0, 1), is at most ``config.validation_fraction``. At least the
    lowest one is held out, and at least the highest one is not.

    Raises:
        JllamaError: a record cannot be learned from, or there are too few.
    """
    # 1. Find the files, and the folder that their tokens are cached in.
    cache = cache_dir(config)
    window = seq_len + 1
    is_pairs = data_task(config) == "preference"
    sources = {
        path: corpus_files(path, cache, config.follow_links)
        for path in config.mixture or [config.path]
    }
    listings = [file_stats(files) for files in sources.values()]
    options = [is_pairs, config.too_long, window, config.bad_rows, config.fields]
    key = sha256(CACHE_VERSION, listings, options, tokenizer.fingerprint(), template, [*stop_ids])
    folder = cache / f"chats-{key[:16]}"

    # 2. Tokenize the records, unless they are in the cache.
    if not folder.exists():
        forms = FORMS[:1] if is_pairs else FORMS[1:]
        with write_cached(folder) as partial:
            _write_chats(partial, sources, forms, config, tokenizer, template, stop_ids, window)

    # 3. Open the cache.
    advice = f"{folder} must be deleted, since it does not hold what was written there"
    with errors_as(advice, OSError, ValueError):
        entries = np.load(folder / "entries.npy")
        fractions = np.unique(entries["fraction"][~entries["dropped"]])
        if len(fractions) < 2:
            raise JllamaError(
                f"{' and '.join(sources)}: {len(fractions)} different conversations can be learned "
                "from; give at least 2, one of them to hold out, or a larger training.seq_len"
            )
        report = json.loads((folder / "report.json").read_text())
        tokens = np.memmap(folder / "tokens.bin", _TOKEN, "r", shape=int(entries["tokens"].sum()))

    # 4. Split the conversations.
    is_held_out = entries["fraction"] <= held_out_limit(config, fractions)
    weights = tuple(config.mixture.values()) or (1.0,)
    splits = {}
    counts = {}
    for split, is_member in {"train": ~is_held_out, "validation": is_held_out}.items():
        chosen = entries[is_member & ~entries["dropped"]]
        sums = {name: int(chosen[name].sum()) for name in ("tokens", "counted_tokens", "cut")}
        num_dropped = int(is_member.sum()) - len(chosen)
        counts[split] = {"conversations": len(chosen), **sums, "dropped": num_dropped}
        splits[split] = ChatTokens(
            tokens["id"],
            tokens["counted"],
            chosen["start"],
            chosen["tokens"],
            chosen["source"],
            weights,
            rows_per_example=1 + is_pairs,
        )
    for source, path in enumerate(sources):
        if source not in splits["train"].sources:
            raise JllamaError(
                f"{path} has no conversation to train on; give more of it, or leave it out"
            )
    options = [config.validation_fraction, weights, config.packing]
    fingerprint = sha256(report["fingerprint"], *options)
    notes = tuple(report["notes"])
    return ChatDataset(tokenizer, **splits, fingerprint=fingerprint, counts=counts, notes=notes)


def _write_chats(
    folder: Path,
    sources: dict[str, Files],
    forms: Sequence[Form],
    config: DataConfig,
    tokenizer: Tokenizer,
    template: str | None,
    stop_ids: Sequence[int],
    window: int,
) -> None:
    """Write ``tokens.bin``, an entry for each side in ``entries.npy``, and ``report.json``.

    The report has the notes and, as ``fingerprint``, the SHA-256 of tokens and entries. Every side
    is cut to ``window`` tokens, also one that is dropped.
    """
    folder.mkdir()
    findings = Findings(config.bad_rows)
    entries = []
    digest = hashlib.sha256()
    start = 0
    with (
        progress("tokenizing conversations") as advance,
        (folder / "tokens.bin").open("wb") as file,
    ):
        for source, files in enumerate(sources.values()):
            for record in read_records(files.values(), forms, findings, config.fields):
                # 1) Tokenize the record, and compute the number that decides its split.
                sides = []
                with findings.collect():
                    sides = record_tokens(record, tokenizer, template, stop_ids, findings.notes)
                text = json.dumps(record.fields, sort_keys=True, default=str)
                fraction = hash_fraction([text])

                # 2) Cut each side to the window, and see whether the record is dropped.
                is_cut = [len(ids) > window for ids, _ in sides]
                # The first token is no target, because none before it predicts it.
                sides = [(ids[:window], [False, *counted[1:window]]) for ids, counted in sides]
                is_lost = not all(any(counted) for _, counted in sides)
                findings.notes[TOO_LONG_NOTE] += is_lost
                is_dropped = is_lost or (config.too_long == "drop" and any(is_cut))

                # 3) Write the sides.
                for (ids, counted), cut in zip(sides, is_cut, strict=True):
                    content = np.array([*zip(ids, counted, strict=True)], _TOKEN).tobytes()
                    file.write(content)
                    digest.update(content)
                    size = len(ids)
                    entries.append((fraction, source, start, size, sum(counted), cut, is_dropped))
                    start += size
                advance(1)

    # 4) Write the entries and the report.
    table = np.array(entries, _ENTRY)
    np.save(folder / "entries.npy", table)
    digest.update(table.tobytes())
    report = {"fingerprint": digest.hexdigest(), "notes": findings.finish()}
    (folder / "report.json").write_text(json.dumps(report))
