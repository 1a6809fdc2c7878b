"""The tests' import hook, in processes of its own, where it is on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

WRONG_CALL = """
import jax.numpy as jnp, jllama
print(jllama.LlamaConfig(vocab_size=9, rope_theta=500000).rope_theta)
print(jllama.functional.ban(jnp.ones((2, 3)), jnp.ones((2, 1), bool)).shape)
"""


pytestmark = pytest.mark.skipif(
    not os.environ.get("JLLAMA_TESTS_TYPED"), reason="JLLAMA_TESTS_TYPED=1 turns the hook on"
)


def run(code, is_checked):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    hook = "import typecheck\n" if is_checked else ""
    return subprocess.run(
        [sys.executable, "-c", hook + code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("is_checked", [False, True])
def test_the_hook_checks_every_call(is_checked):
    checked = run(WRONG_CALL, is_checked)
    assert checked.stdout.startswith("500000")
    assert (checked.returncode == 0) != is_checked
    if is_checked:
        assert "The problem arose whilst typechecking parameter 'banned'" in checked.stderr
        assert re.search(r"Bool\[[\w.]*Array, 'batch vocab'\]", checked.stderr)


def test_functions_without_shapes_are_checked_too():
    checked = run("import jllama; jllama.preset(7)", True)
    assert "preset() parameter name=7 violates type hint <class 'str'>" in checked.stderr


def test_decorators_of_others_stay_jaxtypings():
    """Also those without a checker."""
    code = (
        "import jllama, jaxtyping\n"
        "@jaxtyping.jaxtyped(typechecker=None)\n"
        "def double(number: int): return 2 * number\n"
        "print(double(4))"
    )
    assert run(code, True).stdout == "8\n"
