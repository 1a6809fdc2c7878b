"""How much code there is: what cannot be read in an afternoon is not the core.

Size is counted in tokens without strings and comments, so a shorter line gains nothing and an empty
one costs nothing. It is the size of a closure: of all that an entry point imports, at the top of
modules, one after the other; not what a function imports, or what only types name.
"""

import ast
import functools
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import jllama

PACKAGE = Path(jllama.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "code.md"
CORE = [*sorted((PACKAGE / "core").glob("*.py"))]
EVERYTHING = [*PACKAGE.rglob("*.py")]
MAX_TOKENS = {
    "core": (CORE, 17_930),
    "training/loop": ([PACKAGE / "training/loop.py"], 51_330),
    "training/run": ([PACKAGE / "training/run.py"], 142_030),
    "generation/generate": ([PACKAGE / "generation/generate.py"], 44_390),
}
MAX_EVERYTHING = 241_380
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


@functools.cache
def count_tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in LAYOUT for token in tokenize.tokenize(file.readline))


def imported_files(path: Path) -> Iterator[Path]:
    """The files of jllama that a module imports when it is imported."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            file = PACKAGE.parent.joinpath(*name.split("."))
            candidates = file.with_suffix(".py"), file / "__init__.py"
            yield from (found for found in candidates if found.exists() and found.parent != PACKAGE)
            yield from (found for found in candidates[:1] if found == PACKAGE / "functional.py")


def closure(paths: list[Path]) -> set[Path]:
    seen: set[Path] = set()
    waiting = [*paths]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += imported_files(path)
    return seen


@pytest.mark.parametrize("entry", MAX_TOKENS)
def test_what_an_entry_point_imports_stays_small(entry):
    paths, max_tokens = MAX_TOKENS[entry]
    assert sum(map(count_tokens, closure(paths))) <= max_tokens


READING_ORDER = "config parameters ops model step engine"


def table_of_sizes() -> str:
    """The table of docs/code.md: ``python tests/test_size.py`` writes it."""
    rows = ["| file | what it has | lines | tokens |", "|---|---|---|---|"]
    total_lines = total_tokens = 0
    for name in [*READING_ORDER.split(), "__init__"]:
        path = PACKAGE / "core" / f"{name}.py"
        text = path.read_text()
        purpose = text.splitlines()[0].strip('"').rstrip(".")
        num_lines = len(text.splitlines())
        rows.append(f"| `core/{name}.py` | {purpose} | {num_lines:,} | {count_tokens(path):,} |")
        total_lines += num_lines
        total_tokens += count_tokens(path)
    rows.append(f"| | all | {total_lines:,} | {total_tokens:,} |")
    for entry, (paths, _) in [*MAX_TOKENS.items()][1:]:
        files = closure(paths)
        num_tokens = sum(map(count_tokens, files))
        rows.append(
            f"| `{entry}.py` | and all that it imports, {len(files)} files | | {num_tokens:,} |"
        )
    return "\n".join(rows)


def test_the_page_of_the_code_tells_the_sizes():
    assert table_of_sizes() in PAGE.read_text()


def test_all_of_it_stays_small():
    assert sum(map(count_tokens, EVERYTHING)) <= MAX_EVERYTHING


def test_the_core_imports_only_itself():
    assert {path.parent.name for path in closure(CORE)} == {"core"}


if __name__ == "__main__":
    before, rest = PAGE.read_text().split("<!-- sizes -->\n")
    after = rest.partition("<!-- end of sizes -->")[2]
    table = table_of_sizes()
    PAGE.write_text(f"{before}<!-- sizes -->\n{table}\n<!-- end of sizes -->{after}")
