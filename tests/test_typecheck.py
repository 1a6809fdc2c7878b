"""The tests' import hook, in processes of its own, where it is on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = """
import jax.numpy as jnp, jaxtyping, jllama

@jaxtyping.jaxtyped(typechecker=None)
def double(number: int): return 2 * number

print(double(4), jllama.LlamaConfig(vocab_size=9, rope_theta=500000).rope_theta)
for call in (
    lambda: jllama.functional.ban(jnp.ones((2, 3)), jnp.ones((2, 1), bool)),
    lambda: jllama.preset(7),
):
    try:
        call()
    except Exception as error:
        print(error)
"""


@pytest.mark.skipif(
    not os.environ.get("JLLAMA_TESTS_TYPED"), reason="JLLAMA_TESTS_TYPED=1 turns the hook on"
)
@pytest.mark.parametrize("is_checked", [False, True])
def test_the_hook_checks_every_call(is_checked):
    """With and without shapes; decorators of others, also without a checker, stay jaxtyping's."""
    hook = "import typecheck\n" if is_checked else ""
    run = subprocess.run(
        [sys.executable, "-c", hook + CALLS],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("8 500000")
    for sentence in (
        "The problem arose whilst typechecking parameter 'banned'",
        r"Bool\[[\w.]*Array, 'batch vocab'\]",
        r"preset\(\) parameter name=7 violates type hint <class 'str'>",
    ):
        assert bool(re.search(sentence, run.stdout)) == is_checked
