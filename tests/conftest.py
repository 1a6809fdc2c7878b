"""Before any test: JAX on the CPU unless told otherwise; shapes and types checked in every call
into jllama where ``JLLAMA_TESTS_TYPED=1`` asks for it, as CI does.
"""

import contextlib
import gc
import importlib.metadata
import os
import signal
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of what the tests do: with these flags a program takes a quarter of the time.
# Processes that tests start get them too, from the environment. XLA refuses a flag it does not
# know: jax 0.11 has one code generator alone.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + (
        " --xla_cpu_use_fusion_emitters=false"
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else ""
    ),
)
# Where these are set, pytest explains every difference of unequal bytes: hours for megabytes.
os.environ.pop("CI", None)
os.environ.pop("BUILD_NUMBER", None)
# Compiled programs are shared by the workers of pytest-xdist and by processes that tests start, and
# kept for later runs. The folder's own name says that they are not what users run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jllama-tests", "compiled"
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Threads of torch and NumPy wait for each other on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import jax
import pytest

if os.environ.get("JLLAMA_TESTS_TYPED"):
    import typecheck  # noqa: F401 - before jllama; processes of tests run as a user's do

import helpers
from servers import bucket, gcs, s3  # noqa: F401 - fixtures of all tests

from jllama.system import programs

# A shell that runs this in the background ignores Ctrl-C, and so would the processes of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

_cache = tempfile.TemporaryDirectory(prefix="jllama-tests-")  # not the user's own
os.environ.setdefault("JLLAMA_CACHE", _cache.name)


COMPILED_DAYS = 14


@pytest.fixture(autouse=True)
def no_kept_programs():
    """A command that ran in this process does not change how later tests' programs are called."""
    yield
    programs._is_enabled.clear()


@pytest.fixture(autouse=True, scope="module")
def quick_runs(request):
    """Runs in these folders are quick; ``tests/commands`` reads pages with charts."""
    is_quick = request.path.parent.name in ("core", "rl", "training")
    with helpers.quick_runs() if is_quick else contextlib.nullcontext():
        yield


def pytest_ignore_collect(collection_path, config):
    """Do not import a file that cannot have a test of the mark that ``-m`` asks for."""
    mark = config.option.markexpr
    is_in_files = mark.isidentifier() and mark != "versions"  # set below, by path
    if is_in_files and collection_path.name.startswith("test_"):
        return mark not in collection_path.read_text() or None
    return None


def pytest_collection_finish():
    gc.freeze()  # what was imported is not searched for garbage again and again


@pytest.fixture(autouse=True, scope="module")
def no_programs_of_earlier_modules():
    """Drop a module's traces and programs, and do not search what stays for garbage again."""
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


# A slow machine is no fault of what is tested: neither a deadline nor a limit on how long drawing
# takes.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ci")


VERSIONS = """
    functional commands/test_cli.py commands/test_train.py formats/test_run.py
    data/test_batches.py data/test_chats.py core generation/test_engine.py models/test_model.py
    models/test_decode_params.py training/test_optimizer.py training/test_step.py
    parallel/test_sharding.py test_64_bits.py test_typecheck.py
"""
"""What depends on the versions of jax, flax, optax, orbax, grain and jsonargparse: ``python -m
pytest -m versions``.
"""


DEADLINE = float(os.environ.get("CI_DEADLINE", "inf"))
"""When a slow machine begins no more slow tests, in seconds since 1970; ``.ci/run`` sets it."""


def pytest_runtest_setup(item):
    if time.time() > DEADLINE and item.get_closest_marker("slow"):
        pytest.skip("left out: CI_DEADLINE is over")


LAST = ("commands/test_distributed", "commands/test_buckets")
"""Slow tests of many processes, about as long as each other: what a slow machine leaves out."""
LONGEST_FIRST = [
    "commands/test_train",
    "test_docstrings",
    "test_extending",
    "core",
    "training",
    "rl",
    "commands",
    "lab",
    "serve",
    "functional",
    "generation",
    "formats",
]
"""How the paths of what takes longest begin, for two workers to end together: not by how many tests
a file has.
"""


def pytest_collection_modifyitems(items):
    def rank(item):
        path = str(item.path.relative_to(Path(__file__).parent))
        is_last = path.startswith(LAST) and item.get_closest_marker("slow") is not None
        return [is_last, *(not path.startswith(start) for start in LONGEST_FIRST)]

    items.sort(key=rank)
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        depends_on_versions = {str(path), path.parts[0]} & set(VERSIONS.split())
        if depends_on_versions and not item.get_closest_marker("slow"):
            item.add_marker("versions")


def pytest_addoption(parser):
    parser.addoption("--costs", action="store_true", help="print what each test file costs")


def pytest_configure(config):
    if config.getoption("costs"):
        import costs

        config.pluginmanager.register(costs.Costs())
    for path in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*"):
        with contextlib.suppress(OSError):  # another worker was first
            if path.stat().st_mtime < time.time() - COMPILED_DAYS * 86_400:
                path.unlink()
    config.addinivalue_line("filterwarnings", "error:.*donated buffers were not usable")
