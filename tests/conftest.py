"""Before any test: JAX on the CPU unless told otherwise, shapes and types checked in every call into jllama."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is most of what the tests do

import hypothesis
import jaxtyping

# The checker is named by its import path; tests/ is on the path (pyproject.toml, pythonpath).
jaxtyping.install_import_hook("jllama", "typecheck.typechecker")

_cache = tempfile.TemporaryDirectory(prefix="jllama-tests-")  # not the user's own
os.environ.setdefault("JLLAMA_CACHE", _cache.name)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("ci")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:.*donated buffers were not usable")
