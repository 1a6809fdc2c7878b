"""A small task that a model can learn from rewards alone: sums in a fixed format.

A text is a sum such as ``17+25=<42>``. Two of nine texts are like this one. The others have another
format, or are off by ten, so a base that learns them well is right in two of nine answers. No
prompt is in the texts.
"""

import json
import random
from pathlib import Path


def write_sums(folder: Path) -> None:
    """Write ``texts.jsonl``, to train a base on, and ``prompts.jsonl``, to learn from rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    pairs = [(a, b) for a in range(50) for b in range(50)]
    generator.shuffle(pairs)
    with (folder / "prompts.jsonl").open("w") as file:
        for a, b in pairs[:500]:
            file.write(json.dumps({"prompt": f"{a}+{b}=", "answer": f"<{a + b}>"}) + "\n")
    with (folder / "texts.jsonl").open("w") as file:
        for _ in range(60_000):
            a, b = generator.choice(pairs[500:])
            answers = f"<{a + b}>", f"<{a + b + 10}>", f"({a + b})", f"{a + b}."
            (answer,) = generator.choices(answers, (2, 2, 3, 2))
            file.write(json.dumps({"text": f"{a}+{b}={answer}"}) + "\n")
