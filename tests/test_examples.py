"""The notebooks run, and show what they were committed with."""

import json
from pathlib import Path

import pytest
from notebook import code_cells, run_cells

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


def text_of(output):
    return "".join(output.get("text") or output["data"]["text/plain"])


def committed(path):
    """What the cells of a notebook show, as the file has it."""
    cells = code_cells(json.loads(path.read_text()))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    return ["".join(map(text_of, cell["outputs"])) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_was_committed_with(path):
    assert ["".join(shown) for shown in run_cells(path)] == committed(path)


def test_each_component_is_wrong_first_and_right_in_the_end():
    path = next(path for path in NOTEBOOKS if path.stem == "check_your_own")
    verdicts = {}
    for value in committed(path):
        component, _, said = value.partition(": ")
        verdicts.setdefault(component, []).append(said)
    for component in ("rms_norm", "rope", "attention"):
        *wrong, last = verdicts[component]
        assert wrong
        assert all("\nIt behaves like this known mistake: " in said for said in wrong)
        assert last == "equal to the oracle (tolerance 1e-04)."
