"""The fastest training step that fits: meshes, micro-batches, what is recomputed, and attention kernels."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jllama.devices import Accelerator
from jllama.errors import UsageError
from jllama.functional import ATTENTION, Mask
from jllama.parameters import count_parameters, training_flops_per_token
from jllama.plan.devices import interconnect_s, topology_devices
from jllama.plan.receipt import Receipt, plan_training, recomputed
from jllama.sharding import AXES, check_divides
from jllama.training.config import TrainConfig

_REMAT = ("none", "dots", "block", "offload")  # each keeps less than the one before
_FITTING, _MOST = 3, 16


class Trial(NamedTuple):
    """A step to compile: the rows of a device at a time, and by formula the seconds of a token.

    They are two: where compute and exchanges overlap, and where they do not.
    """

    config: TrainConfig
    rows: int
    token_s: tuple[float, float]


def search(
    config: TrainConfig, topology: str, fixed_batch: bool, tell: Callable[[str], None]
) -> list[tuple[Trial, Receipt]]:
    """Compile the steps that should be fastest, until three fit: the fastest comes first, what does not fit last.

    With ``fixed_batch`` the batch is taken in more or fewer parts, else it grows. ``tell`` is given what is compiled
    next. ``UsageError`` if no step divides over the devices and could fit.
    """
    accelerator, devices = topology_devices(topology)
    tried: list[tuple[Trial, Receipt]] = []
    for trial in sorted(_trials(config, accelerator, devices, fixed_batch), key=lambda trial: trial.token_s):
        if len(tried) == _MOST or sum(receipt.fits for _, receipt in tried) == _FITTING:
            break
        if not any(_settles(*each, trial) for each in tried):
            tell(describe(trial.config))
            tried.append((trial, plan_training(trial.config, topology)))
    if not tried:
        said = f"no step of this model and batch divides over the {len(devices)} devices of {topology} and could fit"
        raise UsageError(f"{said}: take more devices, or another training.batch_size")
    return sorted(tried, key=lambda each: (not each[1].fits, -each[1].tokens_per_s))


def describe(config: TrainConfig) -> str:
    """``data=2 fsdp=4, batch 16 in 2 parts, remat block, triton``."""
    sizes = " ".join(f"{name}={size}" for name in AXES if (size := getattr(config.mesh, name)) > 1) or "one device"
    loop = config.training
    parts = f"batch {loop.batch_size} in {loop.accumulation} part{'s'[: loop.accumulation - 1]}"
    return f"{sizes}, {parts}, remat {loop.remat}, {loop.attention}"


def _settles(tried: Trial, receipt: Receipt, trial: Trial) -> bool:
    """Whether what was compiled tells that this one is slower, or does not fit either."""
    one, two = tried.config.training, trial.config.training
    if tried.config.mesh != trial.config.mesh or one.attention != two.attention:
        return False
    if receipt.fits:
        return one.remat == two.remat and tried.rows >= trial.rows
    least = receipt.arguments_bytes + receipt.temporaries_bytes * min(1, trial.rows / tried.rows)
    return _REMAT.index(str(two.remat)) <= _REMAT.index(str(one.remat)) and least > receipt.device_memory_bytes


def _trials(config: TrainConfig, accelerator: Accelerator, devices: list, fixed_batch: bool) -> Iterator[Trial]:
    """The steps that divide over the devices and that could fit."""
    options, model = config.training, config.model
    seq_len = options.seq_len or model.max_seq_len
    query = jnp.zeros((1, 1, 1, model.head_dim), jnp.bfloat16)
    segments = Mask(query_segments=jnp.zeros(0), key_segments=jnp.zeros(0))
    whole, split = (  # kernels for rows that have all their tokens on a device, and for others
        [
            name
            for name, row in ATTENTION.items()
            if (row.platform == devices[0].platform if options.attention == "auto" else name == options.attention)
            and not row.refuses(query, query, mask)
        ]
        for mask in (segments, segments._replace(offset=jnp.zeros(1)))
    )
    sizes = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
    for shape in itertools.product(sizes, repeat=4):
        mesh = dataclasses.replace(config.mesh, **dict(zip(AXES, shape, strict=True)))
        if mesh.data * mesh.fsdp * mesh.sequence * mesh.tensor != len(devices) or seq_len % mesh.sequence:
            continue
        try:
            check_divides(AbstractMesh(shape, AXES), model)
        except UsageError:
            continue
        ways = mesh.data * mesh.fsdp
        for power, remat, kernel in itertools.product(range(7, -1, -1), _REMAT, split if mesh.sequence > 1 else whole):
            rows = 2**power
            parts = options.batch_size // (ways * rows) if fixed_batch else 1
            batch_size = ways * rows * parts
            if not parts or (fixed_batch and batch_size != options.batch_size):
                continue
            loop = {"remat": remat, "attention": kernel, "batch_size": batch_size, "accumulation": parts}
            changed = dataclasses.replace(config, mesh=mesh, training=dataclasses.replace(options, **loop))
            exchange_s, least_bytes = _by_formula(changed, accelerator, rows, seq_len)
            if least_bytes <= accelerator.memory_bytes:
                flops = training_flops_per_token(model, seq_len) * recomputed(changed) / len(devices)
                compute_s, exchange_s = flops / accelerator.flops, exchange_s / (batch_size * seq_len)
                yield Trial(changed, rows, (max(compute_s, exchange_s), compute_s + exchange_s))


def _by_formula(config: TrainConfig, accelerator: Accelerator, rows: int, seq_len: int) -> tuple[float, float]:
    """Of a step about the seconds of its exchanges, and the bytes that a device holds at least."""
    mesh, model, options = config.mesh, config.model, config.training
    weights, tokens = count_parameters(model) / mesh.tensor, rows * seq_len / mesh.sequence
    summed, kv_dim = jnp.dtype(options.reduce_dtype).itemsize, model.num_kv_heads * model.head_dim / mesh.tensor
    own = weights / mesh.fsdp
    received = {  # in bfloat16: weights twice, keys and values three times, what each half of a layer gives six times
        "data": 2 * own * summed,
        "fsdp": options.accumulation * weights * (4 + summed),
        "sequence": 2 * own * summed + options.accumulation * model.num_layers * 12 * rows * seq_len * kv_dim,
        "tensor": options.accumulation * model.num_layers * 24 * tokens * model.embed_dim,
    }
    seconds, stride = 0.0, 1
    for name in reversed(AXES):
        size = getattr(mesh, name)
        near = min(size, max(1, accelerator.node // stride))
        seconds += interconnect_s(accelerator, size, near, received[name] * (size - 1) / size)
        stride *= size
    kept = model.embed_dim * (options.remat != "offload")
    if options.remat in ("none", "dots"):
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        kept += 2 * model.embed_dim + (heads + 2 * model.mlp_dim) / mesh.tensor
    state = {"adamw": 16, "lion": 12}.get(config.optimizer.name, 8) * own
    return seconds, state + 2 * model.num_layers * tokens * kept
