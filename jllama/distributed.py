"""Processes that train together: how they meet, agree, and end when one is gone. JAX's own runtime connects them."""

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jllama.config import DistributedConfig
from jllama.errors import UsageError, silent_stderr
from jllama.files import fault_of, locked
from jllama.stop import end

_SILENT_S = 30
_GONE = f"error: a process has died, failed, not come or been silent for {_SILENT_S} s: see what each said; start all anew"
_NOT_MET = "error: not all processes have come within {} s: see what each one printed, then start all of them again"
_NO_CLUSTER = "JAX finds no cluster here: give distributed.coordinator as HOST:PORT"
_SIGNS = r"Gloo|NCCL|[Cc]oordination|[Bb]arrier|UNAVAILABLE"  # of that, in what JAX raises
_fate = {"said": _GONE}
_ABORTED = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: end(_fate["said"], 1))


def process_index() -> int:
    """Which process this is, from 0; a single one is not made to look for its devices, which takes seconds."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


@contextlib.contextmanager
def joined(options: DistributedConfig, folder: Path) -> Iterator[None]:
    """Inside, all processes of a run have met, and each has its own lock in the run's folder.

    Collectives would wait forever for one that is gone, so then all end, with a sentence and exit code 1. A coordinator
    that cannot be reached, and a port, process id or folder in use, raise ``JllamaError``.
    """
    if options.coordinator == "auto":
        _connect(options)
    with locked(folder, options.process_id or process_index()):
        _connect(options, options.coordinator, options.num_processes, options.process_id)
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if jax.distributed.is_initialized() and re.search(_SIGNS, str(error)):
                end(_GONE, 1)
            raise


def _connect(options: DistributedConfig, *address: Any) -> None:
    if not options.coordinator or jax.distributed.is_initialized():
        return
    if address:
        _find_coordinator(options)
    ctypes.CDLL(None).signal(
        signal.SIGABRT, _ABORTED
    )  # by JAX's runtime, from a thread that Python does not know
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    seconds = {"heartbeat_timeout_seconds": _SILENT_S, "shutdown_timeout_seconds": _SILENT_S}
    _fate["said"] = _NOT_MET.format(options.timeout_s)
    # C++ prints a stack before it aborts, which would bury the sentence: Python's stderr alone goes on, as a copy.
    with (
        open(os.dup(2), "w") as copy,
        contextlib.redirect_stderr(copy),
        silent_stderr(),
        fault_of(_NO_CLUSTER, ValueError),
    ):
        jax.distributed.initialize(*address, initialization_timeout=options.timeout_s, **seconds)
    _fate["said"] = _GONE


def _find_coordinator(options: DistributedConfig) -> None:
    """See that process 0 can listen, and that others reach it, before JAX's runtime does and aborts if not."""
    host, _, port = options.coordinator.rpartition(":")
    if options.process_id == 0:
        with fault_of(
            f"process 0 cannot listen on port {port}: give all another distributed.coordinator",
            OSError,
        ):
            return socket.create_server(("", int(port))).close()
    said = f"the coordinator {options.coordinator} has not answered for {options.timeout_s} s: start process 0 there"
    until_s = time.monotonic() + options.timeout_s
    with fault_of(said, OSError):
        while True:
            try:
                return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            except OSError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.2)


def largest(number: int) -> int:
    """The largest of the numbers that all processes give; each waits here for the others."""
    return int(np.max(process_allgather(np.int32(number))))


def check_same(facts: Mapping[str, Any]) -> None:
    """Raise ``UsageError``, in every process, for the first fact (its name, and JSON) that differs between them."""
    if not jax.distributed.is_initialized():
        return
    text = json.dumps(facts).encode()
    texts = process_allgather(np.frombuffer(text.ljust(largest(len(text))), np.uint8))
    first, *others = (json.loads(bytes(row)) for row in np.atleast_2d(texts))
    for index, other in enumerate(others, 1):
        for name in (name for name in first if first[name] != other.get(name)):
            said = f"{name} is {first[name]} in process 0 and {other.get(name)} in process {index}"
            raise UsageError(f"{said}: start every process with the same options")
