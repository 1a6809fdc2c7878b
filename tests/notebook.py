"""Runs a notebook's code cells in one namespace, without Jupyter, and gives what Jupyter would show
of each.

``python tests/notebook.py NOTEBOOK`` writes that into the notebook, as if it had been run there.
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path


def run_cells(path: Path, **settings):
    """Of each code cell: what it printed, and the value of its last expression if that is one.

    ``settings`` are names that the notebook assigns, and other values for them.
    """
    namespace = {"__name__": "__main__"}
    for cell in code_cells(json.loads(path.read_text())):
        body, printed = ast.parse("".join(cell["source"])).body, io.StringIO()
        for statement in body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in settings:
                value = settings[ast.unparse(statement.targets[0])]
                statement.value = ast.copy_location(ast.Constant(value), statement.value)
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), path.name, "exec"), namespace)
            value = (
                eval(compile(ast.Expression(last.value), path.name, "eval"), namespace)
                if last
                else None
            )
        yield printed.getvalue(), "" if value is None else repr(value)


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def write_outputs(path: Path):
    notebook = json.loads(path.read_text())
    for count, (cell, (printed, value)) in enumerate(
        zip(code_cells(notebook), run_cells(path), strict=True), 1
    ):
        stream = {
            "name": "stdout",
            "output_type": "stream",
            "text": printed.splitlines(keepends=True),
        }
        shown = {"text/plain": value.splitlines(keepends=True)}
        result = {
            "data": shown,
            "execution_count": count,
            "metadata": {},
            "output_type": "execute_result",
        }
        cell["outputs"] = [stream] * bool(printed) + [result] * bool(value)
        cell["execution_count"] = count
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_outputs(Path(sys.argv[1]))
