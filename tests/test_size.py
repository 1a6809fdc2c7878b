"""How long the code may be: what cannot be read in an afternoon is not the core."""

from pathlib import Path

import pytest

import jllama

PACKAGE = Path(jllama.__file__).parent
CORE = [
    "functional",
    "model",
    "decode_params",
    "lora",
    "language_model",
    "parameters",
    "config",
    "rope_scaling",
    "presets",
    "oracle",
    "sharding",
    "distributed",
    "data",
    "training",
    "generation",
]


def count_lines(*rooms: str) -> int:
    paths = [path for room in rooms for path in (PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py"))]
    return sum(path.read_text().count("\n") for path in paths if path.exists())


@pytest.mark.parametrize(
    ("rooms", "most"),
    [(CORE, 5_545), (["checkpoints"], 2_900), (["tokenizers"], 1_200), (["verify"], 1_800), ([""], 16_980)],
    ids=["core", "checkpoints", "tokenizers", "verify", "everything"],
)
def test_the_code_stays_short(rooms, most):
    assert count_lines(*rooms) <= most


def test_every_room_of_the_core_is_counted():
    assert [room for room in CORE if not count_lines(room)] == []
