"""A small task that a model can learn from rewards alone: sums, as texts and as chats.

A text is a sum such as ``17+25=<42>``. Two of nine texts are like this one. The others have another
format, or are off by ten, so a base that learns them well is right in two of nine answers. A chat
asks ``What is 17 + 25?``, and two of three answers are right. No prompt is in the texts or chats.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jllama.system.files import atomic_write_text

CHATS = "chats.jsonl"
QUESTIONS = "questions.jsonl"


def write_sums(folder: Path) -> None:
    """Write texts or chats to train on, and prompts to learn from rewards, which both have.

    The files are ``texts.jsonl`` and ``prompts.jsonl``, ``chats.jsonl`` and ``questions.jsonl``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    pairs = [(a, b) for a in range(50) for b in range(50)]
    generator.shuffle(pairs)
    prompts = [{"prompt": f"{a}+{b}=", "answer": f"<{a + b}>"} for a, b in pairs[:500]]
    _write(folder / "prompts.jsonl", prompts)
    texts = []
    for _ in range(60_000):
        a, b = generator.choice(pairs[500:])
        answers = f"<{a + b}>", f"<{a + b + 10}>", f"({a + b})", f"{a + b}."
        (answer,) = generator.choices(answers, (2, 2, 3, 2))
        texts.append({"text": f"{a}+{b}={answer}"})
    _write(folder / "texts.jsonl", texts)
    chats = []
    for a, b in generator.choices(pairs[500:], k=8_000):
        (mistake,) = generator.choices((0, 1, 10), (4, 1, 1))
        answer = {"role": "assistant", "content": f"It is {a + b + mistake}."}
        chats.append({"messages": [_question(a, b), answer]})
    _write(folder / CHATS, chats)
    questions = [{"messages": [_question(a, b)], "answer": a + b} for a, b in pairs[:500]]
    _write(folder / QUESTIONS, questions)


def _question(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {a} + {b}?"}


def _write(path: Path, records: Iterable[Any]) -> None:
    atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in records))
