"""Compiled programs that commands keep for later processes, which load them without tracing anything.

JAX's own cache knows a program by its text, so it traces and lowers first: a second for thirty layers. Here it is known
by jllama's source and the shapes of its arguments. That is enough where nobody else's code could have changed what is
traced: in the commands, as long as all registries hold what is jllama's.
"""

import concurrent.futures
import contextlib
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jllama import cache
from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.model import LAYER_CLASSES

_keeps = threading.Event()
_loading: dict[str, concurrent.futures.Future[Any]] = {}  # by key
_recorded: list[
    str
] = []  # the key of the record of those that were asked for first, and then their keys
_RECORDS = "programs_asked"
_programs: dict[
    Any, Any
] = {}  # by function, static arguments and shapes; None where ``call`` leaves it to JAX
_ANEW: Any = {
    "xla_llvm_disable_expensive_passes": False
}  # as ever; given, JAX does not take what it has compiled


def keep(*task: str) -> None:
    """From now on ``call`` keeps programs for one CPU.

    Those that the last process with this ``task`` (a command and its model) asked for are loaded in threads already.
    """
    if jax.default_backend() == "cpu" and cache.most_bytes():
        _keeps.set()
        _recorded[:] = [cache.key_of(task)]
        record = cache.recall(_RECORDS, _recorded[0])
        keys = (
            [] if record is None else re.findall("[0-9a-f]{64}", record.tobytes().decode("latin-1"))
        )
        threads = concurrent.futures.ThreadPoolExecutor(2)
        _loading.update({key: threads.submit(_loaded, key) for key in keys})


def call(function: Any, *args: Any) -> Any:
    """``function(*args)``; it is made by ``jax.jit``, and its static arguments are configurations and ``int``."""
    if not _keeps.is_set():
        return function(*args)
    static = tuple(arg for arg in args if isinstance(arg, LlamaConfig | int))
    dynamic = [arg for arg in args if not isinstance(arg, LlamaConfig | int)]
    leaves, tree = jax.tree.flatten(dynamic)
    name = function, static, tree, *((leaf.shape, leaf.dtype) for leaf in leaves)
    if name not in _programs:
        _programs[name] = _program(function, args, name[1:]) if _only_ours(static) else None
    if program := _programs[name]:
        with contextlib.suppress(TypeError, ValueError):  # the arguments lie elsewhere
            return program(*dynamic)
    return function(*args)


def _program(function: Any, args: Any, shapes: Any) -> Any:
    """The program that was kept, or that is compiled and kept now."""
    key = cache.key_of(function.__module__, function.__qualname__, shapes, _machine())
    _record(key)
    if program := _loading.pop(key).result() if key in _loading else _loaded(key):
        return program
    was_used = jax.config.values["jax_enable_compilation_cache"]
    _use_jax_cache(
        False
    )  # a program that was loaded from there is written without its machine code
    try:
        program = function.lower(*args).compile(_ANEW)
    finally:
        _use_jax_cache(was_used)
    with contextlib.suppress(Exception):  # whatever JAX cannot write
        cache.keep(
            "programs",
            key,
            [np.frombuffer(pickle.dumps(serialize_executable.serialize(program)), np.uint8)],
        )
    return program


def _record(key: str) -> None:
    """Add a program to those, six at most, that the next process with this task loads ahead."""
    if len(_recorded) < 7:
        _recorded.append(key)
        cache.keep(
            _RECORDS, _recorded[0], [np.frombuffer("".join(_recorded[1:]).encode(), np.uint8)]
        )


def _loaded(key: str) -> Any:
    if (content := cache.recall("programs", key)) is not None:
        with contextlib.suppress(Exception):  # whatever JAX finds wrong with it
            return serialize_executable.deserialize_and_load(*pickle.loads(content.data))
    return None


def _use_jax_cache(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    compilation_cache.reset_cache()


def _only_ours(static: tuple[Any, ...]) -> bool:
    """Whether everything that could be traced is jllama's own."""
    traced = [
        *F.TRUNCATIONS.values(),
        *F.PENALTIES.values(),
        *(each.function for each in F.ATTENTION.values()),
    ]
    fields = [each for arg in static for each in (arg, *getattr(arg, "__dict__", {}).values())]
    traced += [*LAYER_CLASSES.values(), *map(type, fields)]
    return all(each.__module__.partition(".")[0] in ("jllama", "builtins") for each in traced)


def _machine() -> list[Any]:
    """What a program depends on beside jllama: JAX's settings, XLA's, and the processor."""
    settings = {
        name: value for name, value in jax.config.values.items() if "compilation_cache" not in name
    }
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpus, environment = (
        Path("/proc/cpuinfo"),
        [os.environ.get(name) for name in ("XLA_FLAGS", "NPROC")],
    )
    flags = re.search(r"(?m)^(flags|Features)\s*:.*", cpus.read_text()) if cpus.exists() else None
    return [
        settings,
        environment,
        jax.devices()[0].client.platform_version,
        cores,
        flags and flags[0],
    ]
