"""Prompts for training from rewards: their tokens and fields, and which are held out."""

import itertools
import json
import random

import pytest

from jllama.core import JllamaError
from jllama.data.config import DataConfig
from jllama.data.prompts import prepare_prompts
from jllama.templates.messages import TEMPLATES
from jllama.tokenizers.base import BytesTokenizer

TOKENIZER = BytesTokenizer()
MESSAGES = [{"role": "user", "content": "Who?"}]
RECORDS = [{"prompt": f"{number}+1=", "answer": number + 1} for number in range(60)]


@pytest.fixture
def read(tmp_path):
    """Write records, and return what is made of them."""

    def make(records, template=TEMPLATES["chatml"], max_prompt_tokens=60, **options):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        config = DataConfig(
            path=str(path), cache_dir=str(tmp_path / "cache"), **{"bad_rows": "refuse", **options}
        )
        return prepare_prompts(config, TOKENIZER, template, max_prompt_tokens)

    return make


def rows_of(data):
    return sorted((*data.train, *data.validation), key=lambda row: row.place)


def test_a_text_is_continued_and_messages_go_through_the_template(read):
    asked = {"messages": MESSAGES, "level": 3}
    system = {"prompt": [{"role": "system", "content": "Hm"}, *MESSAGES]}
    text, chat, listed = rows_of(read([RECORDS[1], asked, system], max_prompt_tokens=200))
    assert text.ids == (TOKENIZER.bos_id, *TOKENIZER.encode("1+1="))
    assert text.prompt == "1+1="
    assert text.fields == RECORDS[1]
    assert text.place.endswith("prompts.jsonl line 1")
    start = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(chat.ids).endswith(start)
    assert chat.prompt == MESSAGES
    assert chat.fields == asked
    assert TOKENIZER.decode(listed.ids).endswith(start)
    assert "Hm" in TOKENIZER.decode(listed.ids)


def test_nothing_that_stands_beside_a_prompt_is_lost(read):
    for name in ("system", "history"):
        with pytest.raises(JllamaError, match=f"line 1: {name} is not read here: put what it says"):
            read([RECORDS[0] | {name: "Be brief."}, RECORDS[1]])
    data = read([{"prompt": "</s>1+1="}, *RECORDS[:3]])
    assert data.notes == ("texts that spell </s>, which become characters and no special token: 1",)
    renamed = [{"question": row["prompt"], "answer": row["answer"]} for row in RECORDS]
    ids = {row.ids for row in rows_of(read(renamed, fields={"question": "prompt"}))}
    assert ids == {row.ids for row in rows_of(read(RECORDS))}


def test_the_held_out_prompts_do_not_depend_on_the_order(read):
    first = read(RECORDS, validation_fraction=0.3)
    shuffled = random.Random(0).sample(RECORDS, len(RECORDS))
    second = read([*shuffled, *shuffled[:9]], validation_fraction=0.3)

    def held_out(data):
        return {row.prompt for row in data.validation}

    assert held_out(first) == held_out(second)
    assert 5 < len(first.validation) < 30
    assert len(first.train) + len(first.validation) == len(RECORDS)  # equal records are one
    assert len(second.train) == len(first.train)
    assert first.fingerprint != read(RECORDS[:-1], validation_fraction=0.3).fingerprint


@pytest.mark.parametrize("fraction", [1e-9, 0.999])
def test_there_is_always_something_to_train_on_and_to_hold_out(read, fraction):
    data = read(RECORDS[:2], validation_fraction=fraction)
    assert (len(data.train), len(data.validation)) == (1, 1)


def test_long_prompts_are_left_out_and_counted(read):
    records = [*RECORDS[:4], {"prompt": "x" * 80}]
    data = read(records)
    assert len(rows_of(data)) == 4
    assert data.notes == ("left out, over 60 tokens: 1",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "1+1="}, "no messages, and no prompt"),
        ({"prompt": 5}, "no messages, and no prompt"),
        ({"prompt": ""}, "no messages, and no prompt"),
        ({"messages": []}, "no messages, and no prompt"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "end with a question"),
        ({"messages": [{"role": "king", "content": "Who?"}]}, "king"),
    ],
)
def test_a_record_that_is_none_is_a_sentence(read, record, message):
    with pytest.raises(JllamaError, match=message) as caught:
        read([*RECORDS[:3], record])
    assert "prompts.jsonl line 4" in str(caught.value)
    assert len(rows_of(read([*RECORDS[:3], record], bad_rows="skip"))) == 3


def test_messages_need_a_template_and_data_more_than_one_prompt(read):
    with pytest.raises(JllamaError, match="the model has no chat template: give a prompt"):
        read([*RECORDS[:2], {"messages": MESSAGES}], template=None)
    with pytest.raises(JllamaError, match="1 different prompts of at most 60 tokens"):
        read([RECORDS[0], RECORDS[0]])


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own(read):
    data = read(RECORDS, validation_fraction=0.3)
    size = len(data.train)

    def epoch(batches):
        return [row.prompt for batch in itertools.islice(batches, size) for row in batch]

    batches = data.training_prompts(1, 0)
    first = epoch(batches)
    state = json.loads(json.dumps(batches.get_state()))
    second = epoch(batches)
    assert sorted(first) == sorted(second) == sorted(row.prompt for row in data.train)
    assert first != second
    assert epoch(data.training_prompts(1, 1)) != first
    again = data.training_prompts(1, 0)
    assert epoch(again) == first
    again.set_state(state)
    assert epoch(again) == second
