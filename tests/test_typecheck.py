"""JLLAMA_CHECK_SHAPES, in processes without the tests' own import hook."""

import os
import re
import subprocess
import sys

import pytest

WRONG_CALL = """
import jax.numpy as jnp, jllama
print(jllama.LlamaConfig(vocab_size=9, rope_theta=500000).rope_theta)
print(jllama.functional.ban(jnp.ones((2, 3)), jnp.ones((2, 1), bool)).shape)
"""


def run(code, switch):
    environment = os.environ | {"JLLAMA_CHECK_SHAPES": switch}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch_checks_every_call(switch):
    checked = run(WRONG_CALL, switch)
    assert checked.stdout.startswith("500000")
    assert (checked.returncode == 0) == (switch == "0")
    if switch == "1":
        assert "The problem arose whilst typechecking parameter 'banned'" in checked.stderr
        assert re.search(r"Bool\[[\w.]*Array, 'batch vocab'\]", checked.stderr)


def test_functions_without_shapes_are_checked_too():
    checked = run("import jllama; jllama.preset(7)", "1")
    assert "preset() parameter name=7 violates type hint <class 'str'>" in checked.stderr


def test_decorators_of_others_stay_jaxtypings():
    """Also those without a checker."""
    code = (
        "import jllama, jaxtyping\n"
        "@jaxtyping.jaxtyped(typechecker=None)\n"
        "def double(number: int): return 2 * number\n"
        "print(double(4))"
    )
    assert run(code, "1").stdout == "8\n"


def test_without_beartype_it_says_what_to_install():
    missing = run("import sys; sys.modules['beartype'] = None; import jllama", "1")
    assert missing.stderr.splitlines()[-1] == (
        "ImportError: JLLAMA_CHECK_SHAPES=1 checks with beartype, which is missing: "
        "pip install beartype"
    )


def test_the_parts_are_at_hand():
    names = ", ".join(f"jllama.{name}.__name__" for name in ("oracle", "functional", "check"))
    code = f"import jllama; print({names})"
    assert run(code, "0").stdout.split() == ["jllama.oracle", "jllama.functional", "jllama.check"]
