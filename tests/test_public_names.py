"""What ``import jllama`` offers: to editors, at the prompt, in ``help``, and in what goes wrong."""

import ast
import importlib.metadata
import pydoc
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import jllama

SOURCE = Path(jllama.__file__)


def test_editors_see_what_is_there_at_run_time():
    """The imports that only type checkers read are those that happen when a name is used."""
    tests = [node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If)]
    (block,) = [node for node in tests if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = {alias.asname: node.module for node in block.body for alias in node.names}
    assert imports == jllama._HOMES
    assert all(alias.name == alias.asname for node in block.body for alias in node.names)
    assert (SOURCE.parent / "py.typed").exists()
    assert jllama.__version__ == importlib.metadata.version("jllama")


def test_every_public_name_is_found_and_documented():
    assert {*jllama.__all__} <= {*dir(jllama)}
    for name in jllama.__all__:
        value = getattr(jllama, name)
        if isinstance(value, types.ModuleType):
            assert value.__doc__, name
        elif not isinstance(value, dict):
            assert value.__doc__.splitlines()[0].endswith((".", ":", "``")), name


def test_a_name_that_is_not_there():
    with pytest.raises(
        AttributeError, match=r"^module 'jllama' has no attribute 'lod'; did you mean load\?$"
    ):
        jllama.lod  # noqa: B018
    assert not hasattr(jllama, "nothing_like_it")


def test_help_says_everything_in_one_place():
    shown = pydoc.plain(pydoc.render_doc(jllama.generate))
    parts = "Examples: Args: Returns: Raises: max_new_tokens: temperature seed"
    for part in parts.split():
        assert part in shown
    assert "as in ``Prompt``" not in shown
    first = pydoc.plain(pydoc.render_doc(jllama)).partition("CLASSES")[0]
    assert "jllama.load(" in first
    assert "help(jllama.generate)" in first


def test_the_parts_are_at_hand():
    """In a process that has imported nothing else."""
    names = ", ".join(f"jllama.{name}.__name__" for name in ("oracle", "functional", "check"))
    command = [sys.executable, "-c", f"import jllama; print({names})"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert shown.split() == ["jllama.models.oracle", "jllama.functional", "jllama.lab.check"]


def test_types_are_seen_from_outside(tmp_path):
    program = """
        import jllama

        model = jllama.load("x")
        reveal_type(model)
        reveal_type(jllama.generate(model, "a", temperature=1))
        reveal_type(jllama.Conversation(model).answer("a", seed=1))
        jllama.LlamaConfig(vocab="x")
        jllama.stream(model, "a", temprature=1)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    words = ["-m", "basedpyright", "--pythonpath", sys.executable, str(tmp_path / "program.py")]
    shown = subprocess.run(
        [sys.executable, *words],
        cwd=SOURCE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert 'Type of "model" is "LanguageModel"' in shown
    assert 'is "list[Completion]"' in shown
    assert 'is "Generator[str, None, Completion]"' in shown
    assert 'No parameter named "vocab"' in shown
    assert 'No parameter named "temprature"' in shown
