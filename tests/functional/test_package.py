import doctest
import importlib
import os
import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import pytest

from jllama import functional

# Runs in a fresh interpreter, which can import only jax, the packages jax needs, and jaxtyping.
IMPORT_WITH_JAX_ALONE = """
import importlib.metadata, sys

allowed = {"jllama", "jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum"}
allowed |= {"jaxtyping", "wadler_lindig"}
blocked = {"flax", "optax", "orbax", *importlib.metadata.packages_distributions()} - allowed

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked in this test", name=name)

sys.meta_path.insert(0, Block())
already = blocked & {name.partition(".")[0] for name in sys.modules}
import jllama.functional
imported = blocked & {name.partition(".")[0] for name in sys.modules} - already
assert not imported, imported

import jax.numpy as jnp
print(jllama.functional.rms_norm(jnp.ones((1, 4)), jnp.ones(4), 1e-5).sum())
"""


def test_functional_imports_with_jax_alone():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_JAX_ALONE], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert abs(float(run.stdout) - 4) < 1e-3


@pytest.mark.skipif(
    not os.environ.get("JLLAMA_TESTS_TYPED"), reason="JLLAMA_TESTS_TYPED=1 turns the checks on"
)
def test_wrong_shapes_and_types_are_caught_in_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        functional.ban(jnp.ones((2, 3)), jnp.ones((2, 4), bool))
    with pytest.raises(jaxtyping.TypeCheckError):
        functional.ban(jnp.ones((2, 3)), jnp.ones((2, 3)))


@pytest.mark.parametrize("name", ["functional", "core.ops", "kernels.loss", "kernels.sampling"])
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"jllama.{name}"))
    assert results.attempted
    assert results.failed == 0


def test_every_public_name_exists_and_is_documented():
    for name in (name for name in dir(functional) if callable(getattr(functional, name))):
        assert getattr(functional, name).__doc__
