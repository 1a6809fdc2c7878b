"""Processes that train together: they connect, agree, and all end if one of them is gone."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jllama.core import UsageError
from jllama.parallel.config import DistributedConfig
from jllama.system.errors import silent_stderr
from jllama.system.files import errors_as, file_lock
from jllama.system.stop import exit_now

_SILENT_S = 30
_ADVICE = "read what each one printed, then start all of them again"
GONE = (
    "error: a process has died, failed, never connected or been silent for "
    f"{_SILENT_S} s: {_ADVICE}"
)
_NOT_CONNECTED = "error: not all processes have connected within {} s: " + _ADVICE
_NO_CLUSTER = "JAX finds no cluster here: give distributed.coordinator as HOST:PORT"
_GONE_SIGNS = r"Gloo|NCCL|[Cc]oordination|[Bb]arrier|UNAVAILABLE"
"""What JAX's errors contain if another process is gone."""
_abort = {"message": GONE}
_ON_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: exit_now(_abort["message"], 1))


def process_index() -> int:
    """Return this process's index; a single one does not look for devices (that takes seconds)."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


@contextlib.contextmanager
def connect_processes(
    options: DistributedConfig, find_folder: Callable[[int], Path]
) -> Iterator[Path]:
    """Connect all processes of a run, and lock the run's folder for this one, inside the block.

    ``find_folder`` returns the folder for a process's index.

    Collectives would wait forever for a process that is gone, so then all processes print a
    sentence and end with exit code 1.

    Raises:
        JllamaError: the coordinator cannot be reached, or a port, process id or folder is in use.
    """
    if options.coordinator == "auto":
        _connect(options)
    index = options.process_id or process_index()
    folder = find_folder(index)
    with file_lock(folder, index):
        _connect(options, options.coordinator, options.num_processes, options.process_id)
        try:
            yield folder
        except (RuntimeError, ValueError) as error:
            if jax.distributed.is_initialized() and re.search(_GONE_SIGNS, str(error)):
                exit_now(GONE, 1)
            raise


def _connect(options: DistributedConfig, *address: Any) -> None:
    """Start JAX's runtime at an address (coordinator, count, index) or in the cluster it finds."""
    if not options.coordinator or jax.distributed.is_initialized():
        return
    if address:
        _find_coordinator(options)
    # JAX's runtime aborts in a thread that Python does not know.
    ctypes.CDLL(None).signal(signal.SIGABRT, _ON_ABORT)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    _abort["message"] = _NOT_CONNECTED.format(options.timeout_s)
    # C++ prints a stack before it aborts, which would bury the message: only Python's stderr stays,
    # as a copy.
    with (
        open(os.dup(2), "w") as copy,
        contextlib.redirect_stderr(copy),
        silent_stderr(),
        errors_as(_NO_CLUSTER, ValueError),
    ):
        jax.distributed.initialize(
            *address,
            initialization_timeout=options.timeout_s,
            heartbeat_timeout_seconds=_SILENT_S,
            shutdown_timeout_seconds=_SILENT_S,
        )
    _abort["message"] = GONE


def _find_coordinator(options: DistributedConfig) -> None:
    """Check that process 0 can listen and that the others reach it; JAX's runtime would abort."""
    host, _, port = options.coordinator.rpartition(":")
    if options.process_id == 0:
        problem = (
            f"process 0 cannot listen on port {port}: "
            "give all processes another distributed.coordinator"
        )
        with errors_as(problem, OSError):
            socket.create_server(("", int(port))).close()
        return
    problem = (
        f"the coordinator {options.coordinator} has not answered for {options.timeout_s} s: "
        "start process 0 there"
    )
    end_s = time.monotonic() + options.timeout_s
    with errors_as(problem, OSError):
        while True:
            try:
                return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.2)


def max_over_processes(number: int) -> int:
    """Return the largest of the numbers of all processes; each waits here for the others."""
    return int(np.max(process_allgather(np.int32(number))))


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, which JSON can hold; each waits here for the others."""
    text = json.dumps(value).encode()
    texts = process_allgather(np.frombuffer(text.ljust(max_over_processes(len(text))), np.uint8))
    return [json.loads(bytes(row)) for row in np.atleast_2d(texts)]


def check_same(facts: Mapping[str, Any]) -> None:
    """Check that all processes have the same facts, which are JSON by name.

    Raises:
        UsageError: in every process, for the first fact that differs.
    """
    if not jax.distributed.is_initialized():
        return
    first, *others = gather(facts)
    for index, other in enumerate(others, 1):
        for name, value in first.items():
            if value != other.get(name):
                raise UsageError(
                    f"{name} is {value} in process 0 and {other.get(name)} in process {index}: "
                    "start every process with the same options"
                )
