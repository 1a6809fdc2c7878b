"""Small tasks that a model can learn from rewards alone, because it is right now and then.

A text is a sum such as ``17+25=<42>``. Two of nine texts are like this one. The others have another
format, or are off by ten, so a base that learns them well is right in two of nine answers. A chat
asks ``List 17 and 25.``, and one of three answers has the format ``17, 25``. No prompt is in the
texts or chats.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jllama.system.files import atomic_write_text

CHATS = "chats.jsonl"
PROMPTS = "prompts.jsonl"


def write_sums(folder: Path) -> None:
    """Write ``texts.jsonl``, to train a base on, and ``prompts.jsonl``, to learn from rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    pairs = [(a, b) for a in range(50) for b in range(50)]
    generator.shuffle(pairs)
    prompts = [{"prompt": f"{a}+{b}=", "answer": f"<{a + b}>"} for a, b in pairs[:500]]
    _write(folder / PROMPTS, prompts)
    texts = []
    for _ in range(60_000):
        a, b = generator.choice(pairs[500:])
        answers = f"<{a + b}>", f"<{a + b + 10}>", f"({a + b})", f"{a + b}."
        (answer,) = generator.choices(answers, (2, 2, 3, 2))
        texts.append({"text": f"{a}+{b}={answer}"})
    _write(folder / "texts.jsonl", texts)


def write_lists(folder: Path) -> None:
    """Write ``chats.jsonl``, to learn answers from, and ``prompts.jsonl``, for rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    chats = []
    prompts = []
    pairs = [(a, b) for a in range(100) for b in range(100)]
    generator.shuffle(pairs)
    for index, (a, b) in enumerate(pairs):
        question = {"role": "user", "content": f"List {a} and {b}."}
        answer = f"{a}, {b}"
        if index < 500:
            prompts.append({"messages": [question], "answer": answer})
        else:
            text = generator.choice((answer, f"{a} and {b}", f"{a} {b}"))
            chats.append({"messages": [question, {"role": "assistant", "content": text}]})
    _write(folder / CHATS, chats)
    _write(folder / PROMPTS, prompts)


def _write(path: Path, records: Iterable[Any]) -> None:
    atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in records))
