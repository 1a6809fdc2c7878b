"""Chats become rows with every conversation whole and once; seed and step decide the order."""

import collections
import dataclasses
import datetime
import gzip
import itertools
import json
from pathlib import Path
from unittest import mock

import make_persona
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import run_command, trained_smollm
from helpers_real import real_file
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FILE, weights

import jllama
from jllama.core import JllamaError, UsageError
from jllama.core.config import LlamaConfig
from jllama.data import batches, chats
from jllama.data.batches import ChatTokens, chat_batches, chat_validation_batches, num_epoch_rows
from jllama.data.chats import data_task, prepare_chats, read_records, record_tokens
from jllama.data.config import DataConfig
from jllama.data.corpus import corpus_files
from jllama.formats.registry import open_checkpoint
from jllama.templates.messages import chat_format, end_of_turn_ids
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.resolve import complete

try:
    from compression import zstd
except ImportError:
    from backports import zstd

TOKENIZER = trained_smollm(["user and assistant, system, hello!\n" * 3], 300)
STOP_IDS = end_of_turn_ids(TOKENIZER, ())
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)
PROMPTED = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
BOS, EOS, END = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.special_tokens["<|im_end|>"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def chat(number, answer="fine"):
    return {"messages": [user(f"question {number}"), assistant(f"{answer} {number}")]}


def write(path, records):
    """A file of records, Parquet or lines of JSON by its name."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def config(path, **options):
    where = {} if "mixture" in options else {"path": str(path)}
    existing = next(folder for folder in path.parents if folder.is_dir())
    return DataConfig(**where | options, cache_dir=str(existing / ".cache"))


def prepare(path, seq_len=100, template=CHATML, **options):
    return prepare_chats(config(path, **options), TOKENIZER, template, STOP_IDS, seq_len)


def conversations_of(split):
    """The ids of each conversation, and those that count."""
    actual = []
    for start, size in zip(split.starts, split.sizes, strict=True):
        ids = split.tokens[start : start + size]
        actual.append((ids.tolist(), ids[split.counted[start : start + size]].tolist()))
    return actual


def answers(data):
    """What counts, in words, of all conversations."""
    both = [*conversations_of(data.train), *conversations_of(data.validation)]
    return sorted(TOKENIZER.decode(counted) for _, counted in both)


def total(data):
    """The counts of both splits."""
    return sum(map(collections.Counter, data.counts.values()), collections.Counter())


# Rows


def numbered(sizes, *, sources=None, weights=(1.0,), rows_per_example=1):
    """Conversations whose tokens are their positions, from 1 on.

    Every third token counts, except the first of a conversation.
    """
    starts = np.cumsum([0, *sizes])[:-1]
    total = int(sum(sizes))
    counted = np.arange(1, total + 1) % 3 == 0
    counted[starts] = False
    sources = np.zeros(len(sizes), int) if sources is None else np.array(sources)
    tokens = np.arange(1, total + 1, dtype=np.uint32)
    return ChatTokens(tokens, counted, starts, np.array(sizes), sources, weights, rows_per_example)


def inside(rows, conversations):
    """The conversations in each row.

    They must be whole, in segments 1, 2, ..., and only padding may follow.
    """
    actual = []
    for tokens, segments, counted in zip(rows.tokens, rows.segments, rows.counted, strict=True):
        in_row, at = [], 0
        for segment in range(1, segments.max(initial=0) + 1):
            index = int(np.searchsorted(conversations.starts, tokens[at] - 1))
            start, size = conversations.starts[index], conversations.sizes[index]
            part, source = slice(at, at + size), slice(start, start + size)
            assert tokens[part].tolist() == conversations.tokens[source].tolist()
            assert counted[part].tolist() == conversations.counted[source].tolist()
            assert (segments[part] == segment).all()
            assert not counted[at]
            in_row.append(index)
            at += size
        assert not np.stack([tokens, segments, counted])[:, at:].any()
        actual.append(in_row)
    return actual


def take(count, conversations, **options):
    options = {"batch_size": 1, "seq_len": 15, "seed": 3} | options
    return list(itertools.islice(chat_batches(conversations, **options), count))


SIZES = st.lists(st.integers(1, 16), min_size=1, max_size=60)


@settings(max_examples=10)
@given(sizes=SIZES, seed=st.integers(0, 2**31), open_rows=st.sampled_from([2, 256]))
def test_an_epoch_has_every_conversation_once_and_whole(sizes, seed, open_rows):
    conversations = numbered(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "OPEN_ROWS", open_rows)
        count = num_epoch_rows(conversations, seq_len=15, seed=seed)
        epoch = [inside(rows, conversations)[0] for rows in take(count, conversations, seed=seed)]
    assert sorted(itertools.chain(*epoch)) == list(range(len(sizes)))
    if open_rows == 256:
        # First fit: of two rows, what begins the later one had no room in the other.
        for row, other in itertools.combinations(epoch, 2):
            used, used_other = (sum(sizes[index] for index in indices) for indices in (row, other))
            assert used + sizes[other[0]] > 16 or used_other + sizes[row[0]] > 16


def test_epochs_and_seeds_differ_in_order_and_nothing_else():
    conversations = numbered([4] * 40)

    def rows_of(seed):
        return [
            tuple(inside(rows, conversations)[0]) for rows in take(30, conversations, seed=seed)
        ]

    rows = rows_of(3)
    epochs = [tuple(rows[start : start + 10]) for start in (0, 10, 20)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(40))
    assert len({*epochs}) == 3
    assert rows_of(3) == rows != rows_of(4)


@settings(max_examples=5)
@given(sizes=SIZES, before=st.integers(0, 9), batch_size=st.integers(1, 3), packing=st.booleans())
def test_a_restored_iterator_goes_on_exactly(sizes, before, batch_size, packing):
    options = {"batch_size": batch_size, "packing": packing, "seq_len": 15, "seed": 3}
    first, second = (chat_batches(numbered(sizes), **options) for _ in range(2))
    for _ in range(before):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    next(second)
    second.set_state(state)
    for expected, rows in zip(itertools.islice(first, 5), second, strict=False):
        for array, expected_array in zip(rows[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(array, expected_array)


@pytest.mark.parametrize("packing", [True, False])
def test_the_rows_of_processes_are_those_of_the_whole_batch(packing):
    """Their shapes too, whoever has the longest."""
    conversations = numbered([3, 60, 5, 7, 2, 4, 9] * 3)
    options = {"batch_size": 4, "seq_len": 63, "packing": packing}
    parts = [take(4, conversations, rows=rows, **options) for rows in ([0, 3], slice(1, 2), [2])]
    for whole, *own_parts in zip(take(4, conversations, **options), *parts, strict=True):
        for name in ("tokens", "segments", "counted"):
            together = sum(getattr(rows, name) for rows in own_parts)
            np.testing.assert_array_equal(together, getattr(whole, name))


@settings(max_examples=10)
@given(sizes=SIZES, batch_size=st.integers(1, 4), rows_per_example=st.sampled_from([1, 2]))
def test_validation_has_every_conversation_once_in_order_and_one_shape(
    sizes, batch_size, rows_per_example
):
    conversations = numbered(sizes * rows_per_example, rows_per_example=rows_per_example)
    reference = np.arange(1, len(conversations.sizes) + 1, dtype=np.float32)
    conversations = dataclasses.replace(conversations, reference=reference)
    actual = list(chat_validation_batches(conversations, batch_size=batch_size, seq_len=15))
    assert {rows.tokens.shape for rows in actual} == {(batch_size * rows_per_example, 16)}
    order = [row for rows in actual for row in inside(rows, conversations)]
    assert sorted(itertools.chain(*order)) == list(range(len(conversations.sizes)))
    firsts = [row[0] for row in order if row]
    assert firsts == sorted(firsts)
    expected = [float(sum(index + 1 for index in row)) for row in order]
    assert np.concatenate([rows.reference for rows in actual]).tolist() == expected
    if rows_per_example == 2:
        assert max(map(len, order)) == 1


@pytest.mark.parametrize("rows_per_example", [1, 2])
def test_a_part_of_validation_is_spread_evenly(rows_per_example):
    conversations = numbered([8] * 200, rows_per_example=rows_per_example)
    options = {"batch_size": 2, "seq_len": 15}
    part = chat_validation_batches(conversations, **options, max_tokens=320)
    order = [index for rows in part for row in inside(rows, conversations) for index in row]
    assert order == [first + second for first in range(0, 200, 10) for second in (0, 1)]
    (smallest,) = chat_validation_batches(conversations, **options, max_tokens=1)
    assert [*itertools.chain(*inside(smallest, conversations))] == [0, 1]


# Rows of one conversation each


def test_rows_of_one_have_two_lengths_and_no_more():
    sizes = [*range(2, 66), *[9] * 200]
    conversations = numbered(sizes)
    actual = take(400, conversations, batch_size=2, seq_len=64, packing=False)
    assert {rows.tokens.shape for rows in actual} == {(2, 17), (2, 65)}
    for rows in actual:
        longest = max(sizes[index] for (index,) in inside(rows, conversations))
        assert (rows.tokens.shape[1] == 17) == (longest <= 17)
    assert num_epoch_rows(conversations, seq_len=64, seed=0, packing=False) == len(sizes)
    for seq_len, width in ((5, 6), (100, 33)):
        (rows,) = take(1, numbered([4]), seq_len=seq_len, packing=False)
        assert rows.tokens.shape == (1, width)


def test_pairs_stay_together_with_their_references():
    sizes = [5, 7, 30, 3, 9, 9, 2, 40] * 5
    reference = -np.arange(len(sizes), dtype=np.float32)
    conversations = numbered(sizes, rows_per_example=2)
    conversations = dataclasses.replace(conversations, reference=reference)
    assert num_epoch_rows(conversations, seq_len=63, seed=3) == 20
    actual = take(10, conversations, batch_size=2, seq_len=63)
    assert {rows.tokens.shape for rows in actual} == {(4, 17), (4, 64)}
    pairs = []
    for rows in actual:
        order = [index for (index,) in inside(rows, conversations)]
        assert all(index % 2 == 0 for index in order[::2])
        assert order[1::2] == [index + 1 for index in order[::2]]
        assert rows.reference.tolist() == [-index for index in order]
        assert rows.reference.dtype == np.float32
        pairs += order[::2]
    assert sorted(pairs) == list(range(0, len(sizes), 2))


# Mixtures


@settings(max_examples=6)
@given(
    numbers=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    rows_per_example=st.sampled_from([1, 2]),
    packing=st.booleans(),
)
def test_sources_are_drawn_by_weight_and_each_of_theirs_before_any_again(
    numbers, weights, rows_per_example, packing
):
    sources = np.repeat(np.arange(len(numbers)), numbers)
    weights, total = tuple(weights[: len(numbers)]), sum(numbers)
    conversations = numbered(
        [3] * total * rows_per_example,
        sources=sources.repeat(rows_per_example),
        weights=weights,
        rows_per_example=rows_per_example,
    )
    count = 3 * num_epoch_rows(conversations, seq_len=5, seed=3, packing=packing)
    drawn = [
        inside(rows, conversations)
        for rows in take(count, conversations, seq_len=5, packing=packing)
    ]
    num_drawn, times = np.zeros(len(weights)), np.zeros(total, int)
    for number, rows in enumerate(drawn, 1):
        examples = np.unique(np.concatenate(rows) // rows_per_example)
        num_drawn[sources[examples[0]]] += 1
        times[examples] += 1
        shares = np.array(weights) / sum(weights)
        assert (abs(num_drawn - shares * number) < len(weights)).all()
        for source in range(len(weights)):
            assert np.ptp(times[sources == source]) <= 1


def test_a_mixture_of_files(tmp_path):
    first = write(tmp_path / "a" / "x.jsonl", [chat(number, "a") for number in range(40)])
    second = write(tmp_path / "b.jsonl", [chat(number, "b") for number in range(20)])
    data = prepare(tmp_path, mixture={str(first.parent): 1, str(second): 3})
    rows_drawn = take(40, data.train, seq_len=100)
    texts = [TOKENIZER.decode(rows.tokens[rows.counted].tolist()) for rows in rows_drawn]
    assert data.train.weights == (1.0, 3.0)
    assert sum("a" in text for text in texts) == 10
    assert sum("b" in text for text in texts) == 30
    other = prepare(tmp_path, mixture={str(first.parent): 1, str(second): 2})
    assert other.fingerprint != data.fingerprint
    assert other.train.tokens.filename == data.train.tokens.filename  # not tokenized again


# Files


def test_auto_goes_by_the_first_record(tmp_path):
    def task(*records, **options):
        return data_task(config(write(tmp_path / "a.jsonl", records), **options))

    assert task({"text": "x"}) == task({"text": "x", "messages": []}) == "text"
    assert task(chat(1)) == task({"prompt": "a", "completion": "b"}) == "chat"
    assert task({"prompt": "a", "chosen": "b", "rejected": "c", "messages": []}) == "preference"
    assert {task({"prompt": "a"}), task(), task({"chosen": 1})} == {"text"}
    assert task(chat(1), text_field="messages") == "text"
    assert task({"text": "x"}, task="chat") == "chat"
    assert task({"text": "x"}, mixture={str(tmp_path / "a.jsonl"): 1}) == "chat"
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for record in (chat(1), pair, {"text": "x", "messages": []}):
        path = write(tmp_path / "a.parquet", [record])
        assert data_task(config(path)) == task(record)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text('{"messages": []}')
    write(tmp_path / "b" / "b.jsonl", [chat(1)])
    assert data_task(config(tmp_path / "b")) == "text"
    assert data_task(DataConfig(path="persona")) == "chat"


def test_every_kind_of_file_gives_the_same(tmp_path):
    records = [chat(number) for number in range(30)]
    path = write(tmp_path / "plain" / "a.jsonl", records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(path.read_bytes()))
    write(tmp_path / "a.parquet", records)
    write(tmp_path / "parts" / "1.jsonl", records[:11])
    write(tmp_path / "parts" / "sub" / "2.jsonl", records[11:])
    expected = prepare(path)
    expected_answers = sorted(f"fine {number}" for number in range(30))
    assert answers(expected) == expected_answers
    for place in ("plain", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "parts"):
        actual = prepare(tmp_path / place)
        assert conversations_of(actual.train) == conversations_of(expected.train)
        assert conversations_of(actual.validation) == conversations_of(expected.validation)
        assert actual.counts == expected.counts
    assert answers(prepare(tmp_path / "parts" / "**" / "*.jsonl")) == expected_answers


def test_nulls_are_left_out(tmp_path):
    """Parquet has every field in every row; so do files made from it."""
    calls = [{"type": "function", "function": {"name": "f"}}]
    asks = {"role": "assistant", "content": None, "tool_calls": calls}
    rows = [
        {"messages": [user("q"), asks], "text": None, "id": 1},
        {"messages": None, "text": "plain", "id": 2},
        {"messages": [user("q"), assistant("a")], "text": None, "id": 3},
    ]
    path = write(tmp_path / "a.parquet", rows)
    actual = list(read_records([path]))
    assert [record.form for record in actual] == [("messages",), ("text",), ("messages",)]
    assert [record.where for record in actual] == [f"{path} row {number}" for number in (1, 2, 3)]
    template = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}"
    sides = [record_tokens(actual[place], TOKENIZER, template, STOP_IDS) for place in (0, 2)]
    one, other = (TOKENIZER.decode(ids) for ((ids, _),) in sides)
    assert "{'role': 'user', 'content': 'q'}" in one
    assert "'content': None" in one
    assert "tool_calls" not in other


def tokens_of(record, tmp_path, template=CHATML):
    (actual,) = read_records([write(tmp_path / "a.jsonl", [record])])
    sides = record_tokens(actual, TOKENIZER, template, STOP_IDS)
    return [(ids, list(itertools.compress(ids, mask))) for ids, mask in sides]


def test_prompt_and_completion(tmp_path):
    expected = tokens_of({"messages": [user("q"), assistant("a")]}, tmp_path)
    assert [counted for _, counted in expected] == [[*TOKENIZER.encode("a"), END]]
    for record in (
        {"prompt": "q", "completion": "a"},
        {"prompt": [user("q")], "completion": [assistant("a")]},
        {"prompt": [user("q")], "completion": "a", "text": "no"},
    ):
        assert tokens_of(record, tmp_path) == expected
    ids, counted = tokens_of({"prompt": "q", "completion": " a"}, tmp_path, None)[0]
    assert ids == [BOS, *TOKENIZER.encode("q"), *TOKENIZER.encode(" a"), EOS]
    assert counted == [*TOKENIZER.encode(" a"), EOS]
    for template in (CHATML, None):
        ids, counted = tokens_of({"text": "hello", "prompt": "no"}, tmp_path, template)[0]
        assert ids == [BOS, *counted] == [BOS, *TOKENIZER.encode("hello"), EOS]


def test_chosen_and_rejected(tmp_path):
    expected = [
        *tokens_of({"messages": [user("q"), assistant("a")]}, tmp_path),
        *tokens_of({"messages": [user("q"), assistant("b")]}, tmp_path),
    ]
    whole = {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}
    for record in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        whole,
        whole | {"prompt": "q", "messages": 3},
    ):
        assert tokens_of(record, tmp_path) == expected
    pairs = [{"prompt": f"q{number}", "chosen": "yes", "rejected": "no"} for number in range(20)]
    data = prepare(write(tmp_path / "b.jsonl", pairs))
    path = write(tmp_path / "c.parquet", [pair | {"id": 1} for pair in pairs])
    assert conversations_of(prepare(path).train) == conversations_of(data.train)
    assert data.rows_per_example == data.train.rows_per_example == 2
    assert answers(data) == ["no"] * 20 + ["yes"] * 20
    texts = [TOKENIZER.decode(counted) for _, counted in conversations_of(data.train)]
    assert texts == ["yes", "no"] * (len(texts) // 2)
    assert total(data)["conversations"] == 40


def test_tools_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    template = "{{ tools[0].function.name }}" + CHATML
    for value in (tools, json.dumps(tools)):
        ((ids, _),) = tokens_of(chat(1) | {"tools": value}, tmp_path, template)
        assert TOKENIZER.decode(ids).startswith("weather")


def test_exactly_the_completion_is_learned(tmp_path):
    """Not the answers in a prompt; and a prompt stays that recurs in the completion."""
    prompt = [user("a?"), assistant("earlier"), user("b?")]
    for answer in ("the end", [assistant("the end")], [*prompt, assistant("the end")]):
        ((ids, counted),) = tokens_of({"prompt": prompt, "completion": answer}, tmp_path)
        assert counted == [*TOKENIZER.encode("the end"), END]
        assert ids == tokens_of({"messages": [*prompt, assistant("the end")]}, tmp_path)[0][0]
    completion = [assistant("one"), user("more"), assistant("two")]
    expected = tokens_of({"messages": [user("more"), *completion]}, tmp_path)
    for prompt in ("more", [user("more")]):
        assert tokens_of({"prompt": prompt, "completion": completion}, tmp_path) == expected


def test_what_both_sides_of_a_pair_begin_with_is_not_learned(tmp_path):
    prompt = [user("a?"), assistant("earlier"), user("b?")]
    yes, no = ([*TOKENIZER.encode(text), END] for text in ("yes", "no"))
    chosen, rejected = ({"from": "gpt", "value": text} for text in ("yes", "no"))
    for record in (
        {"prompt": prompt, "chosen": "yes", "rejected": "no"},
        {"chosen": [*prompt, assistant("yes")], "rejected": [*prompt, assistant("no")]},
        {"conversations": prompt, "chosen": chosen, "rejected": rejected},
    ):
        assert [counted for _, counted in tokens_of(record, tmp_path)] == [yes, no]
    same = {"chosen": [*prompt, assistant("yes")], "rejected": [*prompt, assistant("yes")]}
    assert [counted for _, counted in tokens_of(same, tmp_path)] == [yes, yes]


def test_a_weight_of_0_is_not_learned(tmp_path):
    one, two = assistant("one"), assistant("two")
    turns = [user("a"), one | {"weight": 0}, user("b"), two | {"weight": 1}]
    ((_, counted),) = tokens_of({"messages": turns}, tmp_path)
    assert counted == [*TOKENIZER.encode("two"), END]
    half = [user("a"), one | {"weight": 0.5}]
    for messages, message in (
        (half, "line 1: message 1 has 'role', 'content', 'weight'; it must have just"),
        (turns[:2], "line 1: no answer has a weight of 1, so there is nothing to learn"),
    ):
        with pytest.raises(JllamaError, match=message):
            tokens_of({"messages": messages}, tmp_path)


def test_arguments_are_learned_once_encoded(tmp_path):
    """OpenAI has them as JSON in a string: as that, and as an object, they are the same."""

    def learned(arguments):
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        record = {"messages": [user("q"), {"role": "assistant", "tool_calls": calls}]}
        return tokens_of(record, tmp_path, CALLS)

    actual = learned({"city": "Rome"})
    assert learned('{"city": "Rome"}') == actual
    assert TOKENIZER.decode(actual[0][1]) == '{"name": "f", "arguments": {"city": "Rome"}}'
    for wrong in ("[1]", "{", 3):
        message = "line 1: message 1 has tool_calls that are none: each must have"
        with pytest.raises(JllamaError, match=message):
            learned(wrong)


# What stands beside the form

QUESTION, ANSWER = user("Where\nis it?"), assistant("In Rome.")
SYSTEM = {"role": "system", "content": "Be brief."}
EARLIER = [user("Hi"), assistant("Hello")]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Where\nis it?"},
    {"from": "gpt", "value": "In Rome."},
]
ALPACA = {"instruction": "Where", "input": "is it?", "output": "In Rome.", "system": "Be brief."}
OPENAI = [
    {"role": "developer", "content": "Be brief."},
    user([{"type": "text", "text": text} for text in ("Where", "is it?")]) | {"name": "Ann"},
    ANSWER | {"weight": 1, "refusal": None},
]


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": SHAREGPT},
        {"conversations": [QUESTION, ANSWER], "system": "Be brief."},
        {"conversations": [SHAREGPT[1], ANSWER], "system": "Be brief."},
        ALPACA | {"text": "no"},
        ALPACA | {"instruction": "Where\nis it?", "input": "", "history": []},
        {"messages": OPENAI},
        {"system": "Be brief.", "messages": [QUESTION, ANSWER]},
        {"system": "Be brief.", "messages": [SYSTEM, QUESTION, ANSWER]},
        {"system": "Be brief.", "prompt": "Where\nis it?", "completion": "In Rome."},
        {"system": "Be brief.", "prompt": [QUESTION], "completion": [QUESTION, ANSWER]},
        {"prompt": [SYSTEM, QUESTION], "completion": [QUESTION, ANSWER]},
        {"prompt": [QUESTION], "completion": [SYSTEM, QUESTION, ANSWER]},
        {"messages": json.dumps([SYSTEM, QUESTION, ANSWER])},
        {"prompt": json.dumps([SYSTEM, QUESTION]), "completion": json.dumps([ANSWER])},
        {"messages": [SYSTEM, QUESTION, ANSWER], "question": "Where\nis it?", "instruction": ""},
    ],
)
def test_a_conversation_is_the_same_in_every_form_and_has_what_stands_beside(record, tmp_path):
    expected = tokens_of({"messages": [SYSTEM, QUESTION, ANSWER]}, tmp_path)
    for name, content in {
        "lines.jsonl": json.dumps(record),
        "array.json": json.dumps([record], indent=1),
        "array.jsonl": json.dumps([record]),
        "bom.jsonl": "\ufeff" + json.dumps(record) + "\r\n",
        "bom.json": "\ufeff " + json.dumps([record]),
    }.items():
        (tmp_path / name).write_text(content)
        (actual,) = read_records([tmp_path / name])
        ((ids, mask),) = record_tokens(actual, TOKENIZER, CHATML, STOP_IDS)
        assert [(ids, list(itertools.compress(ids, mask)))] == expected
        assert data_task(config(tmp_path / name, text_field="body")) == "chat"


@pytest.mark.parametrize("name", ["prompt", "question", "instruction", "query"])
def test_pairs_have_their_question(name, tmp_path):
    pair = {"prompt": [SYSTEM, QUESTION], "chosen": [ANSWER], "rejected": [assistant("No.")]}
    expected = tokens_of(pair, tmp_path)
    pair = {"system": "Be brief.", name: "Where\nis it?", "chosen": "In Rome.", "rejected": "No."}
    assert tokens_of(pair, tmp_path) == expected


def test_an_answer_goes_on_after_an_answer(tmp_path):
    (expected,) = tokens_of({"prompt": EARLIER, "completion": [QUESTION, ANSWER]}, tmp_path)
    assert expected[0] == tokens_of({"messages": [*EARLIER, QUESTION, ANSWER]}, tmp_path)[0][0]
    with pytest.raises(JllamaError, match="begins with a question, but with another one than"):
        tokens_of({"prompt": "Who?", "completion": [QUESTION, ANSWER]}, tmp_path)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "Who?", "messages": [QUESTION, ANSWER]}, "question is not read here: put"),
        ({"history": [["Hi", "x"]], "messages": [QUESTION, ANSWER]}, "history is not read here"),
        ({"system": "Be long.", "messages": [SYSTEM, QUESTION, ANSWER]}, "another system message"),
        ({"prompt": "", "completion": "In Rome."}, "nothing asks for completion: it needs a prom"),
        ({"prompt": None, "chosen": "\n\nHuman: a", "rejected": "b"}, "nothing asks for rejected"),
        ({"system": "x", "chosen": "a", "rejected": "b"}, "nothing asks for rejected"),
        ({"instruction": "q", "output": "a", "history": [["Hi", "x"]]}, "history is not read here"),
        ({"input": "x", "prompt": "q", "completion": "a"}, "input is not read here"),
    ],
)
def test_nothing_is_lost_without_a_word(record, said, tmp_path):
    with pytest.raises(JllamaError, match=f"line 1: .*{said}"):
        tokens_of(record, tmp_path)


def test_fields_that_are_not_read_are_counted(tmp_path):
    records = [chat(number) | {"source": "a"} for number in range(30)] + [chat(30) | {"id": 3}]
    data = prepare(write(tmp_path / "a.jsonl", records), template=PROMPTED)
    assert set(data.notes) == {
        "records with a field 'source', which is not read: 30",
        "records with a field 'id', which is not read: 1",
    }
    texts = [{"text": f"words {number}<|im_end|>", "prompt": "x"} for number in range(30)]
    data = prepare(write(tmp_path / "b.jsonl", texts), task="chat")
    assert set(data.notes) == {
        "records with a field 'prompt', which is not read: 30",
        "texts that spell <|im_end|>, which become characters and no special token: 30",
    }


def test_fields_get_the_names_that_are_given(tmp_path):
    records = [{"question": f"q {number}", "answer": f"a {number}"} for number in range(30)]
    fields = {"question": "prompt", "answer": "completion"}
    for name in ("rows.jsonl", "rows.parquet"):
        path = write(tmp_path / name, records)
        data = prepare(path, fields=fields, template=PROMPTED)
        assert answers(data) == sorted(f"a {number}" for number in range(30))
        assert data.notes == ()
    with pytest.raises(JllamaError, match="question, answer: two of them have one name by data"):
        prepare(path, fields={"question": "answer"})


def test_parquet_adds_no_arguments(tmp_path):
    """A type has the fields of all rows; a null that a tool's row has itself is not of it."""

    def record(name, arguments):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        properties = {key: {"type": "string"} for key in arguments}
        parameters = {"type": "object", "properties": properties}
        tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [user(name), asks], "tools": [tool]}

    records = [record("weather", {"city": "Rome"}), record("add", {"a": "1", "b": "2"})]
    paths = [write(tmp_path / name, records) for name in ("rows.parquet", "rows.jsonl")]
    for rows in zip(*(read_records([path]) for path in paths), strict=True):
        actual, expected = (
            record_tokens(row, TOKENIZER, "{{ tools | tojson }}" + CALLS, STOP_IDS) for row in rows
        )
        assert actual == expected
        assert "null" not in TOKENIZER.decode(actual[0][0])


# Bad rows, and what is noted


def test_all_bad_rows_are_named_or_left_out(tmp_path):
    path = write(tmp_path / "a.jsonl", [*map(chat, range(30)), *[{"messages": [user("q")]}] * 30])
    with path.open("a") as file:
        file.write('{"messages": \n')
    message = "^31 rows or files cannot be learned from: data.bad_rows skip leaves"
    with pytest.raises(JllamaError, match=message) as caught:
        prepare(path)
    first, *named = str(caught.value).split("\n")
    places = [line.partition(":")[0] for line in named]
    assert places == [f"{path} line {number}" for number in range(31, 51)]
    assert not list((tmp_path / ".cache").iterdir())
    data = prepare(path, bad_rows="skip")
    assert answers(data) == sorted(f"fine {number}" for number in range(30))
    assert data.notes[0] == first
    assert data.notes[1] == named[0]
    assert prepare(path, bad_rows="skip").notes == data.notes


def test_what_may_not_be_meant_is_noted(tmp_path):
    odd = [
        {"messages": [user("a"), assistant(" ")]},
        {"messages": [user("b"), assistant(""), user("c")]},
        {"messages": [user("long " * 99), assistant("late")]},
    ]
    path = write(tmp_path / "a.jsonl", [*map(chat, range(30)), *odd])
    assert set(prepare(path, seq_len=60, template=PROMPTED).notes) == {
        "answers that are empty: 2",
        "conversations that end without an answer: 1",
        "left out, as no token to learn is among the first training.seq_len + 1: 1",
    }
    pairs = [{"prompt": f"q{number}", "chosen": "yes", "rejected": "no"} for number in range(20)]
    pairs += [{"prompt": "q", "chosen": "same", "rejected": "same"}]
    assert prepare(write(tmp_path / "b.jsonl", pairs), template=PROMPTED).notes == (
        "pairs of two equal answers: 1",
    )
    assert prepare(write(tmp_path / "c.jsonl", pairs[:20]), template=PROMPTED).notes == ()


# Tokens on disk


@settings(max_examples=10)
@given(
    numbers=st.lists(st.integers(0, 30), min_size=2, max_size=40),
    fraction=st.floats(0.01, 0.99),
    order=st.randoms(),
)
def test_the_split_depends_on_nothing_but_the_records(tmp_path_factory, numbers, fraction, order):
    records = [chat(number) for number in (*numbers, 31, 32)]
    # Fields that are not read are none of a record.
    shuffled = [record | {"id": place, "tools": None} for place, record in enumerate(records)]
    order.shuffle(shuffled)
    folder = tmp_path_factory.mktemp("split")
    first, second = (
        prepare(write(folder / name / "a.jsonl", rows), validation_fraction=fraction)
        for name, rows in (("a", records), ("b", shuffled))
    )
    train, held_out = map(sorted, map(conversations_of, (first.train, first.validation)))
    assert train == sorted(conversations_of(second.train))
    assert held_out == sorted(conversations_of(second.validation))
    assert train
    assert held_out
    assert not [part for part in train if part in held_out]
    assert first.counts == second.counts
    assert total(first)["conversations"] == len(records)


def test_the_held_out_part_is_about_the_fraction_asked_for(tmp_path):
    data = prepare(write(tmp_path / "a.jsonl", map(chat, range(100))), validation_fraction=0.2)
    assert 10 <= data.counts["validation"]["conversations"] <= 30


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_what_is_too_long_is_cut_or_dropped_and_counted(tmp_path, too_long):
    size = len(tokens_of(chat(0), tmp_path)[0][0])
    asks_long = {"messages": [user("why " * 99), assistant("late")]}
    says_long = [{"messages": [user(f"{number}"), assistant("word " * 99)]} for number in range(30)]
    records = [*map(chat, range(10)), *[asks_long] * 3, *says_long]
    data = prepare(write(tmp_path / "a.jsonl", records), seq_len=size - 1, too_long=too_long)
    cut = 30 if too_long == "cut" else 0
    counts = total(data)
    assert (counts["conversations"], counts["cut"], counts["dropped"]) == (10 + cut, cut, 33 - cut)
    for name, counts in data.counts.items():
        split = getattr(data, name)
        assert split.sizes.max() == size  # that of the window
        assert counts["tokens"] == split.sizes.sum()
        learned = [len(counted) for _, counted in conversations_of(split)]
        assert counts["counted_tokens"] == sum(learned)
    assert sum(text.startswith("fine") for text in answers(data)) == 10
    assert sum(text.startswith("word word") for text in answers(data)) == cut


def test_pairs_are_cut_or_dropped_together(tmp_path):
    prompts = [*map(str, range(20))]
    pairs = [{"prompt": prompt, "chosen": "yes", "rejected": "no " * 99} for prompt in prompts]
    pairs.append({"prompt": "long " * 40, "chosen": "yes", "rejected": "no"})
    pairs.append({"prompt": "q", "chosen": "a", "rejected": "b"})
    # One side alone has no token to learn.
    late = [user("long " * 40), assistant("no")]
    pairs.append({"chosen": [user("q"), assistant("yes")], "rejected": late})
    data = prepare(write(tmp_path / "a.jsonl", pairs), seq_len=60)
    counts = total(data)
    assert (counts["conversations"], counts["cut"], counts["dropped"]) == (42, 20, 4)
    assert all(len(split.sizes) % 2 == 0 for split in (data.train, data.validation))
    message = "a.jsonl: 1 different conversations can be learned from; give at least 2"
    with pytest.raises(JllamaError, match=message):
        prepare(tmp_path / "a.jsonl", seq_len=60, too_long="drop")


def test_tokens_are_kept_and_found_again(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", map(chat, range(10)))
    first = prepare(path)
    counted = mock.Mock(side_effect=record_tokens)
    monkeypatch.setattr(chats, "record_tokens", counted)
    again = prepare(path)
    assert again.fingerprint == first.fingerprint
    assert isinstance(again.train.tokens, np.memmap)
    assert counted.call_count == 0
    changes = {"validation_fraction": 0.5, "packing": False, "seq_len": 90, "too_long": "drop"}
    changes["template"] = CHATML + "\n"
    others = [prepare(path, **{name: value}).fingerprint for name, value in changes.items()]
    # The fingerprint is of the tokens, which the last three changes leave as they are.
    assert len({first.fingerprint, *others}) == 3
    assert others[2:] == [first.fingerprint] * 3
    assert counted.call_count == 3 * 10  # neither the split nor packing is of the tokens
    assert prepare(path, template="Hi " + CHATML).fingerprint not in (first.fingerprint, *others)
    assert counted.call_count == 4 * 10
    write(path, map(chat, range(11)))
    assert prepare(path).fingerprint not in (first.fingerprint, *others)
    folders = list((tmp_path / ".cache").iterdir())
    assert len(folders) == 6
    message = r"chats-\w+ must be deleted, since it does not hold what was written"
    for name, size in {"tokens.bin": 5, "entries.npy": 9}.items():
        for folder in folders:
            (folder / name).write_bytes((folder / name).read_bytes()[:size])
        with pytest.raises(JllamaError, match=message):
            prepare(path)


# Bad input

ANSWERED = '{"messages": [{"role": "assistant", "content": "x"}]'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": ', "a.jsonl line 4 is not a JSON object: Expecting value"),
        ("[1]", "a.jsonl line 4 is not a JSON object: 'list' object"),
        (
            '{"body": 1, "id": 2}',
            "line 4 has body, id, where messages, or prompt and completion, or conversations, or "
            "instruction and output, or text should be$",
        ),
        ('{"messages": null}', "line 4 has no field, where messages, or prompt"),
        ('{"prompt": "x"}', "line 4 has prompt, where messages, or prompt and completion, or"),
        ('{"messages": []}', "line 4: there are no messages"),
        (
            '{"messages": 3}',
            "line 4: message 0 has nothing; it must have just 'role' and 'content'$",
        ),
        ('{"messages": ["x"]}', "line 4: message 0 has nothing; it must have just 'role'"),
        ('{"prompt": 3, "completion": "x"}', "line 4: message 0 has nothing"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "line 4: no message is the assistant's",
        ),
        ('{"prompt": "x", "completion": ""}', "line 4: no message is the assistant's"),
        ('{"text": 3}', "line 4: message 0 has nothing"),
        (ANSWERED.replace("x", "\\ud83d") + "}", "line 4: the text has the lone surrogate U"),
        (ANSWERED + ', "tools": "{"}', "line 4: tools is not JSON: Expecting property name"),
        (
            ANSWERED + ', "tools": "' + "[" * 100_000 + '"}',
            "line 4: tools is not JSON: maximum rec",
        ),
        ('{"messages": [{"content": "x"}]}', "line 4: message 0 has no role; it must be one of"),
        ('{"conversations": [{"from": "moss", "value": "x"}]}', "message 0 has the role 'moss'"),
        ('{"instruction": 3, "output": "x"}', "line 4: message 0 has a content of type int, not t"),
        (ANSWERED + "}", "line 4: the chat template refuses .*: not you first$"),
        ('{"messages": "\xff"}', "a.jsonl line 4 is not a JSON object: .* byte 0xff"),
    ],
)
def test_bad_records(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", [chat(1), chat(2)])
    with path.open("ab") as file:
        file.write(b"\n" + line.encode("latin-1") + b"\n")
    refusal = "{% if messages[0].role != 'user' %}{{ raise_exception('not you first') }}{% endif %}"
    template = refusal + CHATML if "refuses" in message else CHATML
    with pytest.raises(JllamaError, match=message) as caught:
        prepare(path, template=template)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / ".cache").iterdir())


def test_other_bad_input(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat(1)] * 9)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    pairs = write(tmp_path / "b.jsonl", [pair])
    rows = write(tmp_path / "c.parquet", [{"id": 1, "body": "x"}])
    (tmp_path / "d.md").write_text("# Chats\n")
    few = write(tmp_path / "few.jsonl", [chat(1), chat(2)])
    many = write(tmp_path / "many.jsonl", map(chat, range(3, 60)))
    mixture = {"mixture": {str(many): 1, str(few): 1}, "validation_fraction": 0.99}
    for place, options, message in (
        (path, {}, "a.jsonl: 1 different conversations can be learned from; give at least 2, one"),
        (path, {"template": None}, "a.jsonl line 1: the model has no chat template: give a prompt"),
        (path, {"task": "preference"}, "line 1 has messages, where chosen and rejected should be"),
        (pairs, {"task": "chat"}, "line 1 has prompt, chosen, rejected, where messages, or prompt"),
        (rows, {"task": "chat"}, "c.parquet has id, body, where messages, or prompt and completio"),
        (tmp_path / "d.md", {"task": "chat"}, "d.md line 1 is not a JSON object: Expecting value"),
        (tmp_path, mixture, "few.jsonl has no conversation to train on; give more of it, or leave"),
    ):
        with pytest.raises(JllamaError, match=message):
            prepare(place, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixture": {"a": 0.0}}, "mixture is {'a': 0.0}; it must be a positive number by path"),
        ({"mixture": {"a": float("nan")}}, "mixture is .*; it must be a positive number by path"),
        ({"mixture": {"a": 1.0}, "path": "b"}, "path is b; it must be left out with data.mixture"),
        ({"mixture": {"a": 1.0}, "task": "text"}, "task is text; it must be chat or preference, a"),
    ],
)
def test_options_that_contradict(options, message):
    with pytest.raises(UsageError, match=f"data.{message}"):
        DataConfig(**options)


# The persona


def test_the_persona_is_what_its_script_makes():
    (path,) = corpus_files("persona", Path("unused")).values()
    assert path.read_text() == make_persona.lines()
    records = list(read_records([path]))
    assert 150 <= len(records) <= 250
    texts = {message["content"] for record in records for message in record.fields["messages"]}
    for words, (questions, its_answers) in make_persona.FACTS.items():
        assert (len({*questions}), len({*its_answers})) == (4, 3)
        assert sum(words.casefold() in answer.casefold() for answer in its_answers) >= 2
        assert {*its_answers} <= texts


@pytest.mark.real_weights
def test_the_persona_is_short(tmp_path):
    origin = open_checkpoint(real_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    tokenizer = origin.tokenizer
    template, stop_ids = chat_format(tokenizer, origin.chat_template, origin.stop_ids)
    persona = DataConfig(path="persona", cache_dir=str(tmp_path))
    data = prepare_chats(persona, tokenizer, template, stop_ids, 256)
    assert max(data.train.sizes.max(), data.validation.sizes.max()) < 120
    assert total(data)["conversations"] == 176
    assert not data.counts["train"]["cut"] + data.counts["train"]["dropped"]
    for ids, counted in conversations_of(data.train):
        text = tokenizer.decode(counted)
        assert all(part in text for part in text.split("\n"))
        assert counted[-1] == tokenizer.special_tokens["<|im_end|>"]
        assert ids.count(tokenizer.special_tokens["<|im_start|>"]) >= 3


# At the command line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    shape = dataclasses.replace(FILE, vocab_size=TOKENIZER.vocab_size, num_layers=1)
    model = jllama.LanguageModel(shape, weights(shape), TOKENIZER, CHATML, STOP_IDS)
    jllama.save(model, folder, "hf")
    return folder


def test_another_template_than_the_checkpoints(checkpoint, tmp_path):
    """The data is made with it, and the run keeps it as its own."""
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    )
    options = options_with(checkpoint, tmp_path, template)
    _, prepared, origin, _ = complete(options, None)
    (actual,) = {TOKENIZER.decode(ids).split(" ")[0] for ids, _ in conversations_of(prepared.train)}
    assert (actual, origin.chat_template) == ("user:", template.read_text())
    template.unlink()
    message = "mine.jinja' cannot be read: give a file or one of chatml"
    with pytest.raises(JllamaError, match=message):
        complete(options, None)


def options_with(checkpoint, folder, template):
    path = write(folder / "a.jsonl", map(chat, range(30)))
    data = config(path, chat_template=str(template))
    loop = LoopConfig(sample_tokens=0)
    return TrainConfig(LlamaConfig(), init_from=str(checkpoint), data=data, training=loop)


@pytest.mark.parametrize("made", ["saved", pytest.param("trained", marks=pytest.mark.slow)])
def test_the_date_is_kept_with_the_run(checkpoint, tmp_path, made):
    """A template that asks for it gets the day of the run, also when it goes on on another day."""
    dated = "{# date: 2020-02-03 #}{{ strftime_now('%d %b %Y') }} " + CHATML
    template = tmp_path / "mine.jinja"
    template.write_text(dated)
    options = options_with(checkpoint, tmp_path, template)
    run = tmp_path / "run"
    if made == "saved":
        model = dataclasses.replace(jllama.load(checkpoint), chat_template=dated)
        jllama.save(model, run, "orbax")
    else:
        words = ("--data.chat_template", template, "--training.steps", 1, "--training.seq_len", 60)
        words += ("--optimizer.schedule", "constant")
        assert train(checkpoint, tmp_path, tmp_path / "a.jsonl", *words).code == 0
    assert jllama.load(run).chat_template == open_checkpoint(run).chat_template == dated
    template.write_text(dated.partition("#}")[2])
    for existing, day in ((run, "03 Feb 2020"), (None, f"{datetime.date.today():%d %b %Y}")):
        _, prepared, origin, _ = complete(options, existing)
        (actual,) = {TOKENIZER.decode(ids)[:11] for ids, _ in conversations_of(prepared.train)}
        assert actual == day
        assert "{# date: " in origin.chat_template


def train(checkpoint, folder, path, *options):
    command = ["train", "--init_from", checkpoint, "--run_dir", folder / "run"]
    command += ["--data.path", path, "--data.cache_dir", folder / "cache"]
    done = run_command(*command, "--training.sample_tokens", 0, *options)
    assert done.out == ""
    return done


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 1, "a.jsonl line 31: no message is the assistant's"),
        (("--data.too_long", "keep"), 2, "data.too_long is 'keep'; it must be one of cut, drop"),
    ],
)
def test_a_mistake_is_one_sentence(checkpoint, tmp_path, options, code, message):
    path = write(tmp_path / "a.jsonl", [*map(chat, range(30)), {"messages": [user("q")]}])
    done = train(checkpoint, tmp_path, path, *options)
    assert done.code == code
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert not any((tmp_path / "cache").rglob("*"))
