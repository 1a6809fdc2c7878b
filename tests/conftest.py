"""Before any test: JAX on the CPU unless told otherwise, shapes and types checked in every call into jllama."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is most of what the tests do

os.environ["JLLAMA_CHECK_SHAPES"] = "1"

import hypothesis

import jllama  # noqa: F401

del os.environ["JLLAMA_CHECK_SHAPES"]  # processes that the tests start run as a user's do

_cache = tempfile.TemporaryDirectory(prefix="jllama-tests-")  # not the user's own
os.environ.setdefault("JLLAMA_CACHE", _cache.name)

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("ci")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:.*donated buffers were not usable")
