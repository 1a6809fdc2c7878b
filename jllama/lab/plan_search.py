"""The search for the fastest training step that fits: mesh, batch, remat, attention kernel."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jllama.core import JllamaError, UsageError
from jllama.core.parameters import count_row, parameter_table
from jllama.functional import ATTENTION, Mask, is_installed
from jllama.lab.plan_devices import interconnect_s, topology_devices
from jllama.lab.plan_receipt import (
    Receipt,
    describe,
    plan_training,
    recomputed,
    settings,
    stored_bytes,
)
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import check_divides, ruleset
from jllama.parallel.shards import AXES, row_ways
from jllama.system.devices import Accelerator
from jllama.training.config import TrainConfig
from jllama.training.metrics import training_flops_per_token

_REMAT = ("none", "dots", "block", "offload")
"""Each stores less than the one before."""
_MAX_COMPILATIONS = 16
_MAX_TOKENS = 2**24
"""Tokens in a step, as the largest Llama was trained."""


class Trial(NamedTuple):
    """A step to compile.

    Attributes:
        config: its configuration.
        rows: of a device at a time.
        token_s: the time of a token by formula, if compute and exchanges overlap, and if not.
    """

    config: TrainConfig
    rows: int
    token_s: tuple[float, float]


def search(
    config: TrainConfig, topology: str, fixed_batch: bool, tell: Callable[[str], None]
) -> list[tuple[Trial, Receipt]]:
    """Compile the steps that should be fastest; the fastest that fits comes first.

    They are tried in the order of their times by formula. After one of a ``remat`` and kernel fits,
    others of the same are left out. The search ends when no other step can be faster.

    Args:
        config: the configuration, whose mesh, batch, ``remat`` and attention are changed.
        topology: the devices.
        fixed_batch: whether the batch stays and is only taken in more or fewer parts; otherwise it
            also grows, to 16 million tokens.
        tell: called with a line about each step.

    Raises:
        UsageError: no step divides over the devices and could fit.
    """
    accelerator, devices = topology_devices(topology)
    tried: list[tuple[Trial, Receipt]] = []
    num_left = _MAX_COMPILATIONS
    trials = _trials(config, accelerator, devices, fixed_batch)
    for trial in sorted(trials, key=lambda trial: trial.token_s):
        fastest_s = min(
            (1 / receipt.tokens_per_s for _, receipt in tried if receipt.fits), default=math.inf
        )
        if not num_left or trial.token_s[0] > 0.999 * fastest_s:
            break  # no later trial can be faster either
        if any(_settles(compiled, receipt, trial) for compiled, receipt in tried):
            continue
        tell(f"compiling {describe(vars(trial.config.mesh), settings(trial.config))}")
        num_left -= 1
        try:
            tried.append((trial, plan_training(trial.config, topology)))
        except JllamaError as error:  # others may not need what the compiler cannot do
            tell(str(error))
    if not tried:
        raise UsageError(
            f"no step of this model and batch divides over the {len(devices)} devices of {topology}"
            " and could fit: take more devices, or another training.batch_size"
        )
    return sorted(tried, key=lambda entry: (not entry[1].fits, -entry[1].tokens_per_s))


def _settles(compiled: Trial, receipt: Receipt, trial: Trial) -> bool:
    """Whether a compiled step shows that another one is slower, or does not fit either."""
    options = compiled.config.training
    others = trial.config.training
    if receipt.fits:
        return (options.remat, options.attention) == (others.remat, others.attention)
    if compiled.config.mesh != trial.config.mesh or options.attention != others.attention:
        return False
    stores_as_much = _REMAT.index(str(others.remat)) <= _REMAT.index(str(options.remat))
    temporaries_bytes = receipt.temporaries_bytes * min(1, trial.rows / compiled.rows)
    min_bytes = receipt.arguments_bytes + temporaries_bytes
    return stores_as_much and min_bytes > receipt.device_memory_bytes


def _trials(
    config: TrainConfig, accelerator: Accelerator, devices: list, fixed_batch: bool
) -> Iterator[Trial]:
    """Yield all steps that divide over the devices and could fit by formula."""
    options = config.training
    seq_len = options.seq_len or config.model.max_seq_len
    for mesh in _meshes(config, seq_len, len(devices)):
        kernels = _kernels(config, mesh, devices[0].platform)
        for power, remat, kernel in itertools.product(range(7, -1, -1), _REMAT, kernels):
            rows = 2**power
            together = rows * row_ways(vars(mesh))
            batch_size = options.batch_size if fixed_batch else together
            is_too_large = not fixed_batch and rows > 1 and together * seq_len > _MAX_TOKENS
            if batch_size % together or is_too_large:
                continue
            training = dataclasses.replace(
                options,
                remat=remat,
                attention=kernel,
                batch_size=batch_size,
                accumulation=batch_size // together,
            )
            changed = dataclasses.replace(config, mesh=mesh, training=training)
            exchange_s, min_bytes = _by_formula(changed, accelerator, rows, seq_len)
            if min_bytes > accelerator.memory_bytes:
                continue
            flops = training_flops_per_token(config.model, seq_len) * recomputed(changed, kernel)
            compute_s = flops / len(devices) / accelerator.flops
            times_s = compute_s, exchange_s / (batch_size * seq_len)
            yield Trial(changed, rows, (max(times_s), sum(times_s)))


def _meshes(config: TrainConfig, seq_len: int, count: int) -> Iterator[MeshConfig]:
    """Yield the meshes of ``count`` devices over which the model and its rows divide."""
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    for shape in itertools.product(sizes, repeat=len(AXES)):
        mesh = dataclasses.replace(config.mesh, **dict(zip(AXES, shape, strict=True)))
        if math.prod(shape) != count or seq_len % mesh.sequence:
            continue
        try:
            check_divides(AbstractMesh(shape, AXES), config.model, ruleset(mesh))
        except UsageError:
            continue
        yield mesh


def _kernels(config: TrainConfig, mesh: MeshConfig, platform: str) -> list[str]:
    """Return the attention implementations that serve packed documents on a platform."""
    query = jnp.zeros((1, 1, 1, config.model.head_dim), jnp.bfloat16)
    offset = jnp.zeros(1) if mesh.sequence > 1 else None
    window = config.model.sliding_window or None
    mask = Mask(offset, jnp.zeros(0), jnp.zeros(0), window=window)
    attention = config.training.attention
    return [
        name
        for name, entry in ATTENTION.items()
        if (name == attention or (attention == "auto" and entry.platform == platform))
        and is_installed(name)
        and not entry.refuses(query, query, mask)
    ]


def _by_formula(
    config: TrainConfig, accelerator: Accelerator, rows: int, seq_len: int
) -> tuple[float, float]:
    """Estimate the seconds of a step's exchanges, and the least bytes that a device needs."""
    mesh = config.mesh
    model = config.model
    options = config.training
    weights = 0.0
    for row in parameter_table(model).values():
        ways = mesh.tensor * (mesh.expert if "experts" in row.axes else 1)
        weights += count_row(row, model) / ways
    tokens = rows * seq_len / mesh.sequence
    kv_heads = model.num_kv_heads * model.head_dim / mesh.tensor
    reduce_bytes = jnp.dtype(options.reduce_dtype).itemsize
    layer_bytes = options.accumulation * model.num_layers * 2  # in bfloat16
    # Received along each axis: weights twice, keys and values three times, and the result of each
    # half of a layer six times.
    gradients = 2 * weights / mesh.fsdp * reduce_bytes
    received = {
        "data": gradients,
        "fsdp": options.accumulation * weights * (2 * 2 + reduce_bytes),
        "expert": gradients + layer_bytes * 6 * 2 * tokens * mesh.expert * model.embed_dim,
        "sequence": gradients + layer_bytes * 3 * 2 * rows * seq_len * kv_heads,
        "tensor": layer_bytes * 6 * 2 * tokens * model.embed_dim,
    }
    seconds = 0.0
    stride = 1
    for name in reversed(AXES):
        size = getattr(mesh, name)
        near = min(size, max(1, accelerator.node // stride))
        seconds += interconnect_s(accelerator, size, near, received[name] * (size - 1) / size)
        stride *= size
    if options.remat == "offload":
        # To the host and back, at about the rate of a network card.
        seconds += 2 * layer_bytes * tokens * model.embed_dim / accelerator.network
    moment_bytes = jnp.dtype(config.optimizer.moment_dtype).itemsize
    num_moments = {"adamw": 2, "muon": 1, "lion": 1}.get(config.optimizer.name, 0)
    weight_bytes = 4 + num_moments * moment_bytes + reduce_bytes
    return seconds, weight_bytes * weights / mesh.fsdp + stored_bytes(config, rows)
