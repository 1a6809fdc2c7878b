"""The arrows of the house, read from the imports of every module, those inside functions and for
types alone too.
"""

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jllama

PACKAGE = Path(jllama.__file__).parent
FLOORS = [
    {"core"},
    {"kernels"},
    {"functional"},
    {"system"},
    {"tokenizers", "parallel"},
    {"templates"},
    {"data"},
    {"models"},
    {"generation", "formats"},
    {"score"},
    {"training"},
    {"rl"},
    {"lab", "serve"},
    {"commands"},
    {"__main__"},
]
"""A room (a module or a folder of them) imports rooms of lower floors and itself, and none beside
it.
"""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ADD_ONS = {
    "lab": (
        "core core.config core.model core.ops core.parameters core.step data.batches data.config "
        "data.datasets data.prompts data.tasks data.tokens formats.receipt formats.registry "
        "formats.run formats.run_checkpoints formats.tensors functional generation.generate "
        "generation.text kernels.int8 kernels.shapes models models.build models.capture "
        "models.decode_params models.language_model models.oracle models.presets "
        "models.rope_scaling parallel.config parallel.sharding parallel.shards rl.scorer "
        "score.scoring system.devices system.errors system.files system.memory system.places "
        "system.web templates.messages tokenizers.base training.compiling training.config "
        "training.loop training.metrics training.opening training.plan training.report "
        "training.trainable"
    ),
    "serve": (
        "core core.engine formats.receipt generation.engine generation.generate "
        "generation.requests generation.sampling_params generation.steps generation.text "
        "models.language_model system.devices system.errors system.files system.memory "
        "templates.messages templates.template"
    ),
}
"""The modules that the add-ons import: public names of theirs alone. Only commands import add-ons,
inside functions, but for the options of ``serve``.
"""
FORBIDDEN = {("jllama.score.scoring", "formats")}
"""A module and a room, downward and still not wanted: the module gets a loaded model."""
REGISTRIES = {
    "jllama": "jllama.",  # the public names, imported when they are first used
    "jllama.commands.cli": "jllama.commands.",  # one module a command
    "jllama.training.opening": "jllama.rl.",  # a source that stands on the loop
}
"""Modules that may name modules of ours in strings, and how those names begin."""
_IMPORTERS = ("import_module", "__import__", "run_module")


def room_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module by its dotted name, but not the front door, ``jllama`` itself."""
    paths = sorted(PACKAGE.rglob("*.py"))
    parsed = {}
    for path in paths:
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        parsed[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return parsed


def home(name: str) -> str | None:
    """The module that a dotted name is from: that of a module, a class in one, ``jllama.load``."""
    while name not in trees() and "." in name:
        parent, _, last = name.rpartition(".")
        if parent == "jllama" and last in jllama._HOMES:
            return jllama._HOMES[last]
        name = parent
    return None if name == "jllama" else name


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "jllama"
        ):
            yield f"jllama.{node.attr}"  # of ``import jllama``, which imports it when it is used
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^jllama\.[A-Z]\w*$", node.value)  # an annotation in quotes


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports."""
    found = {}
    for module, tree in trees().items():
        names = {home(name) for name in imported_names(tree) if name.split(".")[0] == "jllama"}
        found[module] = {name for name in names if name not in (None, module)}
    del found["jllama"]
    return found


def violations() -> Iterator[str]:
    for module, targets in imports().items():
        room = room_of(module)
        for target in sorted(targets):
            other = room_of(target)
            if other != room and (
                FLOOR_OF[other] >= FLOOR_OF[room] or (module, other) in FORBIDDEN
            ):
                yield f"{module} imports {target}"
    try:
        graphlib.TopologicalSorter(imports()).prepare()
    except graphlib.CycleError as error:
        yield f"circle: {' imports '.join(error.args[1])}"
    for module, tree in trees().items():
        for text in module_names_in_strings(tree):
            if not text.startswith(REGISTRIES.get(module, "nothing")):
                yield f"{module} names {text} in a string"


def module_names_in_strings(tree: ast.Module) -> Iterator[str]:
    """Modules of ours that are imported by a string: given to ``import_module`` or the like, or
    inside a program.
    """
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in _IMPORTERS
            and node.args
        ):
            text = ast.unparse(node.args[0]).lstrip("fr").strip("'\"")
            yield from [text] if text.startswith("jllama") else []
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield from re.findall(
                r"(?m)(?:^|;) *(?:from|import) (jllama[\w.]*)(?: import|;|$)", node.value
            )


def test_arrows_point_one_way():
    """No import upward or between neighbors, no circle, no module of ours in a string but in a
    registry.
    """
    assert {room_of(module) for module in imports()} <= set(FLOOR_OF)
    assert list(violations()) == []


@pytest.mark.parametrize("room", ADD_ONS)
def test_add_ons_import_few_modules_and_public_names_alone(room):
    modules = {module for module in imports() if room_of(module) == room}
    targets = set().union(*(imports()[module] for module in modules))
    others = {target.removeprefix("jllama.") for target in targets if room_of(target) != room}
    assert others == {*ADD_ONS[room].split()}
    for module in modules:
        names = [name for name in imported_names(trees()[module]) if name.startswith("jllama.")]
        private = [name for name in names if re.search(r"\._(?!_)", name)]
        assert private == [], module


def test_only_commands_load_add_ons_and_by_name():
    for module, targets in imports().items():
        add_ons = {target for target in targets if room_of(target) in ADD_ONS}
        if not add_ons or room_of(module) in ADD_ONS:
            continue
        assert room_of(module) == "commands", module
        at_top = {home(name) for name in imported_names(top_level(trees()[module])) if name}
        assert at_top & add_ons <= {"jllama.serve.config"}, module


def top_level(tree: ast.Module) -> ast.Module:
    """The imports at the top of a module: not those in functions, and not those for types alone."""
    body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.Module(body, [])


def test_floors_that_are_promised():
    """These follow from the floors, as long as nobody moves these rooms."""
    assert FLOORS[0] == {"core"}
    assert FLOORS[-3:-1] == [{"lab", "serve"}, {"commands"}]
    assert FLOOR_OF["generation"] == FLOOR_OF["formats"]


def test_few_files_lie_at_the_top():
    folders = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(folders) <= 16
    assert len([*PACKAGE.glob("*.py")]) <= 3


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import jllama.core.model", {"jllama.core.model"}),
        ("def f():\n    from jllama.formats import registry", {"jllama.formats.registry"}),
        (
            "import jllama\nx: 'jllama.Llama'\njllama.load()",
            {"jllama.core.model", "jllama.formats.registry"},
        ),
        ("from jllama.functional import rms_norm", {"jllama.functional"}),
    ],
)
def test_an_import_is_seen_however_it_is_written(program, expected):
    names = {home(name) for name in imported_names(ast.parse(program)) if name.startswith("jllama")}
    assert names - {None} == expected


@pytest.mark.parametrize(
    "program",
    ['import_module("jllama.core.model")', 'run(["-c", "import jllama.core.model"])'],
)
def test_an_import_in_a_string_is_seen(program):
    assert [*module_names_in_strings(ast.parse(program))] == ["jllama.core.model"]
