"""How much code there is: what cannot be read in an afternoon is not the core.

Size is counted in tokens without strings and comments, so a shorter line gains nothing and an empty
one costs nothing.
"""

import functools
import tokenize
from pathlib import Path

import pytest

import jllama

PACKAGE = Path(jllama.__file__).parent
CORE = """
    functional model remat decode_params lora language_model capture parameters config rope_scaling
    presets oracle sharding distributed data training generation
"""
ADD_ONS = "serve plan verify check evaluation/harness commands/bench"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.STRING,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def files_of(rooms: str) -> set[Path]:
    paths = set()
    for room in rooms.split():
        paths |= {PACKAGE / f"{room}.py", *(PACKAGE / room).rglob("*.py")}
    return {path for path in paths if path.exists()}


@functools.cache
def count_tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in LAYOUT for token in tokenize.tokenize(file.readline))


EVERYTHING = {*PACKAGE.rglob("*.py")}
RINGS = {
    "core": (files_of(CORE), 81_000),
    "add-ons": (files_of(ADD_ONS), 58_800),
    "rooms": (EVERYTHING - files_of(CORE) - files_of(ADD_ONS), 73_500),
    "everything": (EVERYTHING, 210_000),
}


@pytest.mark.parametrize("ring", RINGS)
def test_the_code_stays_small(ring):
    files, max_tokens = RINGS[ring]
    assert sum(map(count_tokens, files)) <= max_tokens


def test_every_room_of_a_ring_is_there():
    assert [room for room in f"{CORE} {ADD_ONS}".split() if not files_of(room)] == []
