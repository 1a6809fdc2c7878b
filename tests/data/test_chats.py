"""Chats become rows in which every conversation is whole and once, in an order that is a function of seed and step."""

import functools
import json

from helpers import trained_smollm

from jllama.data.batches import chat_validation_batches
from jllama.data.chats import data_task, prepare_chats
from jllama.data.config import DataConfig
from jllama.templates.messages import TEMPLATES, end_of_turn_ids


@functools.cache
def tokenizer():
    return trained_smollm(["user and assistant, system, hello!\n" * 3], 300)


def chat(number, answer="fine"):
    said = {"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"{answer} {number}"}
    return {"messages": [*said]}


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_answer_and_its_end_count(tmp_path):
    path = write(tmp_path / "a.jsonl", [chat(number) for number in range(40)])
    config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"))
    assert data_task(config) == "chat"
    data = prepare_chats(config, tokenizer(), TEMPLATES["chatml"], end_of_turn_ids(tokenizer(), ()), 128)
    answers = []
    for split in data.train, data.validation:
        for batch in chat_validation_batches(split, batch_size=2, seq_len=128):
            text = "".join(
                tokenizer().decode(row[mask].tolist()) for row, mask in zip(batch.tokens, batch.counted, strict=True)
            )
            answers += text.replace("fine", ",fine").split(",")[1:]
    assert sorted(answers) == sorted(f"fine {number}" for number in range(40))
    assert data.counts["train"]["conversations"] + data.counts["validation"]["conversations"] == 40
