"""The rules of docs/style.md that a program can check, over all of jllama's code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jllama

PACKAGE = Path(jllama.__file__).parent
STYLE = Path(__file__).parent.parent / "docs/style.md"
MAX_STATEMENTS = 60
MAX_DEPTH = 1  # of functions inside functions
MAX_JOINT_ASSIGNMENTS = 40
"""How many assignments of several expressions at once remain: where they are truly parallel."""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def banned_identifiers() -> set[str]:
    """The first column of the table of names in docs/style.md."""
    table = STYLE.read_text().partition("| do not write | write |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that code defines: variables, arguments, attributes, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield name, node.lineno


def is_condition(node: ast.expr) -> bool:
    """Whether an expression is a Boolean by its form."""
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id="bool")):
            return True
    return False


def is_text_or_list(node: ast.expr) -> bool:
    match node:
        case ast.List() | ast.Tuple() | ast.JoinedStr() | ast.Constant(value=str()):
            return True
    return False


def is_joint_assignment(node: ast.AST) -> bool:
    """Whether several expressions are assigned at once, not counting names and literals."""
    match node:
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
            return sum(not isinstance(value, ast.Constant | ast.Name) for value in values) >= 2
    return False


def riddles(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Expressions that a reader has to decode."""
    for node in ast.walk(tree):
        match node:
            case ast.IfExp(body=ast.IfExp()) | ast.IfExp(orelse=ast.IfExp()):
                yield "a conditional expression inside another", node.lineno
            case ast.BinOp(op=ast.Mult(), left=left, right=right):
                if (is_text_or_list(left) and is_condition(right)) or (
                    is_text_or_list(right) and is_condition(left)
                ):
                    yield "a text or list times a condition", node.lineno
            case ast.Subscript(slice=ast.Compare()):
                yield "a condition as an index", node.lineno
            case ast.Attribute(attr="__getitem__" | "__contains__" | "__eq__"):
                yield "a dunder as a function", node.lineno
            case ast.Call(func=ast.IfExp()):
                yield "a call of a conditional expression", node.lineno
            case ast.Call(func=ast.Name(id="property")):
                yield "property(...) in place of a decorated method", node.lineno
            case ast.For(iter=ast.IfExp()):
                yield "a loop over a conditional expression", node.lineno
            case ast.comprehension(iter=ast.IfExp() as values):
                yield "a loop over a conditional expression", values.lineno


def functions_in(node: ast.AST, depth: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """All functions below a node, with the number of functions that each is inside of."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, FUNCTIONS)
        if is_function:
            yield child, depth
        yield from functions_in(child, depth + is_function)


def places_of(search):
    """What a function finds in each module, with the places."""
    for path, tree in TREES.items():
        for name, line in search(tree):
            yield name, f"{path.relative_to(PACKAGE)}:{line}"


def test_the_table_of_names_is_read():
    assert {"said", "each", "found", "given", "kept", "ours"} <= banned_identifiers()


def test_names_say_what_they_hold():
    banned = banned_identifiers()
    assert [place for place in places_of(identifiers) if place[0] in banned] == []


def test_no_expression_is_a_riddle():
    assert list(places_of(riddles)) == []


def test_functions_are_short_and_flat():
    for tree in TREES.values():
        for function, depth in functions_in(tree):
            num_statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
            assert num_statements <= MAX_STATEMENTS, function.name
            assert depth <= MAX_DEPTH, function.name


def test_few_assignments_hold_several_expressions():
    places = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if is_joint_assignment(node)
    ]
    assert len(places) <= MAX_JOINT_ASSIGNMENTS, places


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a = b if c else d if e else f", 1),
        ("a = 'x' * (b > 1)", 1),
        ("a = (b, c)[d > 1]", 1),
        ("a = map(b.__getitem__, c)", 1),
        ("(a if b else c)(d)", 1),
        ("for a in b if c else d: pass", 1),
        ("a = [b for b in (c if d else e)]", 1),
        ("class A:\n    b = property(lambda self: 1)", 1),
        ("a = 'x' * 3 if b else c[d]", 0),
    ],
)
def test_riddles_are_seen(code, expected):
    assert len(list(riddles(ast.parse(code)))) == expected
