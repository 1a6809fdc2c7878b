"""Compiled programs that commands store for later processes, which load them without tracing.

JAX's own cache identifies a program by its text, so it traces and lowers first: a second for thirty
layers. Here a program is identified by jllama's source and the shapes of its arguments. That
suffices where no other code could change what is traced: in the commands, as long as all entries of
the registries are jllama's.
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

from jllama import functional as F
from jllama.core.config import BLOCKS, LlamaConfig
from jllama.system import cache
from jllama.system.devices import num_cores

_RECORDS = "programs_asked"
_MAX_RECORDED = 6
_is_enabled = threading.Event()
_programs: dict[Any, Any] = {}
"""Programs by function, static arguments and shapes; None if JAX compiles it as usual."""
_loading: dict[str, concurrent.futures.Future[Any]] = {}
"""Programs that threads load ahead, by key."""
_task_key = ""
_recorded: list[str] = []
"""The keys of the first programs that this process has used."""
_COMPILER_OPTIONS: Any = {"xla_llvm_disable_expensive_passes": False}
"""The default; with an option set, JAX does not take a program that it has compiled before."""


def enable_store(*task: str) -> None:
    """Let ``call`` store and load programs from now on, on one CPU.

    Programs that the last process with this ``task`` (a command and its model) used are loaded in
    threads at once.
    """
    global _task_key
    if jax.default_backend() != "cpu" or not cache.max_bytes():
        return
    _is_enabled.set()
    _task_key = cache.key_of(task)
    _recorded.clear()
    record = cache.load(_RECORDS, _task_key)
    text = "" if record is None else record.tobytes().decode("latin-1")
    threads = concurrent.futures.ThreadPoolExecutor(2)
    for key in re.findall("[0-9a-f]{64}", text):
        _loading[key] = threads.submit(_load, key)


def call(function: Any, *args: Any) -> Any:
    """Return ``function(*args)``, with a stored program if there is one.

    ``function`` is made by ``jax.jit``; its static arguments are configurations and ``int``.
    """
    if not _is_enabled.is_set():
        return function(*args)
    static = tuple(arg for arg in args if isinstance(arg, LlamaConfig | int))
    dynamic = [arg for arg in args if not isinstance(arg, LlamaConfig | int)]
    leaves, tree = jax.tree.flatten(dynamic)
    shapes = static, tree, *((leaf.shape, leaf.dtype) for leaf in leaves)
    name = function, shapes
    if name not in _programs:
        _programs[name] = _find(function, args, shapes) if _is_all_own(static) else None
    program = _programs[name]
    if program:
        with contextlib.suppress(TypeError, ValueError):  # the arguments are on another device
            return program(*dynamic)
    return function(*args)


def _find(function: Any, args: Any, shapes: Any) -> Any:
    """Return the stored program, or compile and store it."""
    key = cache.key_of(function.__module__, function.__qualname__, shapes, _machine())
    # The next process with this task loads its first six ahead.
    if len(_recorded) < _MAX_RECORDED:
        _recorded.append(key)
        text = "".join(_recorded)
        cache.store(_RECORDS, _task_key, [np.frombuffer(text.encode(), np.uint8)])
    loading = _loading.pop(key, None)
    # One that was loaded ahead may have been too early: before the kernels that it calls.
    program = (loading and loading.result()) or _load(key)
    if program:
        return program
    # A program that JAX's own cache has loaded would be stored without its machine code.
    was_used = jax.config.values["jax_enable_compilation_cache"]
    _use_jax_cache(False)
    try:
        program = function.lower(*args).compile(_COMPILER_OPTIONS)
    finally:
        _use_jax_cache(was_used)
    with contextlib.suppress(Exception):  # JAX cannot serialize all programs
        content = pickle.dumps(serialize_executable.serialize(program))
        cache.store("programs", key, [np.frombuffer(content, np.uint8)])
    return program


def _load(key: str) -> Any:
    """Return a stored program; None if there is none that JAX accepts."""
    content = cache.load("programs", key)
    if content is not None:
        with contextlib.suppress(Exception):
            return serialize_executable.deserialize_and_load(*pickle.loads(content.data))
    return None


def _use_jax_cache(is_used: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_used)
    compilation_cache.reset_cache()


def _is_all_own(static: tuple[Any, ...]) -> bool:
    """Return whether all code that could be traced is jllama's."""
    traced = [*F.TRUNCATIONS.values(), *F.PENALTIES.values(), *BLOCKS.values()]
    traced += [implementation.function for implementation in F.ATTENTION.values()]
    for arg in static:
        traced += map(type, (arg, *getattr(arg, "__dict__", {}).values()))
    return all(item.__module__.partition(".")[0] in ("jllama", "builtins") for item in traced)


def _machine() -> list[Any]:
    """Return what a program depends on besides jllama: JAX, XLA, their settings, the processor."""
    settings = {
        name: value for name, value in jax.config.values.items() if "compilation_cache" not in name
    }
    environment = [os.environ.get(name) for name in ("XLA_FLAGS", "NPROC")]
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    flags = re.search(r"(?m)^(flags|Features)\s*:.*", text)
    platform = jax.devices()[0].client.platform_version
    return [settings, environment, platform, num_cores(), flags and flags[0]]
