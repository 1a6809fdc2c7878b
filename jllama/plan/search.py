"""The fastest training step that fits: meshes, micro-batches, what is recomputed, and attention kernels."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jllama.devices import Accelerator
from jllama.errors import JllamaError, UsageError
from jllama.functional import ATTENTION, Mask, is_installed
from jllama.parameters import count_parameters, training_flops_per_token
from jllama.plan.devices import interconnect_s, topology_devices
from jllama.plan.receipt import Receipt, describe, plan_training, recomputed, settings
from jllama.sharding import AXES, check_divides, ruleset
from jllama.training.config import TrainConfig

_REMAT = ("none", "dots", "block", "offload")  # each keeps less than the one before
_MOST, _MOST_TOKENS = (
    16,
    2**24,
)  # compilations, and tokens in a step, as the largest Llama was trained


class Trial(NamedTuple):
    """A step to compile."""

    config: TrainConfig
    rows: int  # of a device at a time
    token_s: tuple[
        float, float
    ]  # of a token, by formula: where compute and exchanges overlap, and where they do not


def search(
    config: TrainConfig, topology: str, fixed_batch: bool, tell: Callable[[str], None]
) -> list[tuple[Trial, Receipt]]:
    """Compile the steps that should be fastest; the fastest that fits comes first, what does not fit last.

    Of what fits, one is taken of each ``remat`` and kernel, the first by formula, until no other can be faster.
    With ``fixed_batch`` the batch is taken in more or fewer parts, else it grows, to 16 million tokens. ``tell`` is
    given a line about each. ``UsageError`` if no step divides over the devices and could fit.
    """
    accelerator, devices = topology_devices(topology)
    tried, left = list[tuple[Trial, Receipt]](), _MOST
    for trial in sorted(
        _trials(config, accelerator, devices, fixed_batch), key=lambda trial: trial.token_s
    ):
        fastest_s = min(
            (1 / receipt.tokens_per_s for _, receipt in tried if receipt.fits), default=math.inf
        )
        if not left or trial.token_s[0] > 0.999 * fastest_s:  # nor can any that follows be faster
            break
        if not any(_settles(*each, trial) for each in tried):
            tell(f"compiling {describe(vars(trial.config.mesh), settings(trial.config))}")
            left -= 1
            try:
                tried.append((trial, plan_training(trial.config, topology)))
            except JllamaError as error:  # what the compiler cannot do, others may need not
                tell(str(error))
    if not tried:
        said = f"no step of this model and batch divides over the {len(devices)} devices of {topology} and could fit"
        raise UsageError(f"{said}: take more devices, or another training.batch_size")
    return sorted(tried, key=lambda each: (not each[1].fits, -each[1].tokens_per_s))


def _settles(tried: Trial, receipt: Receipt, trial: Trial) -> bool:
    """Whether what was compiled tells that this one is slower, or does not fit either."""
    one, two = tried.config.training, trial.config.training
    if receipt.fits:
        return (one.remat, one.attention) == (two.remat, two.attention)
    if tried.config.mesh != trial.config.mesh or one.attention != two.attention:
        return False
    least = receipt.arguments_bytes + receipt.temporaries_bytes * min(1, trial.rows / tried.rows)
    return (
        _REMAT.index(str(two.remat)) <= _REMAT.index(str(one.remat))
        and least > receipt.device_memory_bytes
    )


def _trials(
    config: TrainConfig, accelerator: Accelerator, devices: list, fixed_batch: bool
) -> Iterator[Trial]:
    options, model = config.training, config.model
    seq_len, query = (
        options.seq_len or model.max_seq_len,
        jnp.zeros((1, 1, 1, model.head_dim), jnp.bfloat16),
    )
    sizes = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
    for shape in itertools.product(sizes, repeat=len(AXES)):
        mesh = dataclasses.replace(config.mesh, **dict(zip(AXES, shape, strict=True)))
        if math.prod(shape) != len(devices) or seq_len % mesh.sequence:
            continue
        try:
            check_divides(AbstractMesh(shape, AXES), model, ruleset(mesh))
        except UsageError:
            continue
        mask = Mask(jnp.zeros(1) if mesh.sequence > 1 else None, jnp.zeros(0), jnp.zeros(0))
        kernels = [
            name
            for name, row in ATTENTION.items()
            if (
                row.platform == devices[0].platform
                if options.attention == "auto"
                else name == options.attention
            )
            and is_installed(name)
            and not row.refuses(query, query, mask)
        ]
        for power, remat, kernel in itertools.product(range(7, -1, -1), _REMAT, kernels):
            together = 2**power * mesh.data * mesh.fsdp
            batch_size = options.batch_size if fixed_batch else together
            if batch_size % together == 0 and (
                fixed_batch or not power or together * seq_len <= _MOST_TOKENS
            ):
                loop = {"batch_size": batch_size, "accumulation": batch_size // together}
                training = dataclasses.replace(options, remat=remat, attention=kernel, **loop)
                changed = dataclasses.replace(config, mesh=mesh, training=training)
                exchange_s, least_bytes = _by_formula(changed, accelerator, 2**power, seq_len)
                if least_bytes <= accelerator.memory_bytes:
                    flops = (
                        training_flops_per_token(model, seq_len)
                        * recomputed(changed, kernel)
                        / len(devices)
                    )
                    times = flops / accelerator.flops, exchange_s / (batch_size * seq_len)
                    yield Trial(changed, 2**power, (max(times), sum(times)))


def _by_formula(
    config: TrainConfig, accelerator: Accelerator, rows: int, seq_len: int
) -> tuple[float, float]:
    """Of a step about the seconds of its exchanges, and the bytes that a device holds at least."""
    mesh, model, options = config.mesh, config.model, config.training
    weights, tokens = count_parameters(model) / mesh.tensor, rows * seq_len / mesh.sequence
    heads, kv_heads = (
        count * model.head_dim / mesh.tensor for count in (model.num_heads, model.num_kv_heads)
    )
    summed = jnp.dtype(options.reduce_dtype).itemsize
    layers = options.accumulation * model.num_layers * 2  # in bfloat16
    received = {  # weights twice, keys and values three times, and what each half of a layer gives six times
        "data": 2 * weights / mesh.fsdp * summed,
        "fsdp": options.accumulation * weights * (2 * 2 + summed),
        "sequence": 2 * weights / mesh.fsdp * summed + layers * 3 * 2 * rows * seq_len * kv_heads,
        "tensor": layers * 6 * 2 * tokens * model.embed_dim,
    }
    seconds, stride = 0.0, 1
    for name in reversed(AXES):
        size = getattr(mesh, name)
        near = min(size, max(1, accelerator.node // stride))
        seconds += interconnect_s(accelerator, size, near, received[name] * (size - 1) / size)
        stride *= size
    kept = model.embed_dim
    if options.remat == "offload":  # to the host and back, at about the rate of a network card
        seconds, kept = seconds + 2 * layers * tokens * kept / accelerator.network, 0
    if options.remat in ("none", "dots"):
        kept += 2 * model.embed_dim + heads + 2 * kv_heads + 2 * model.mlp_dim / mesh.tensor
    moment_bytes = jnp.dtype(config.optimizer.moment_dtype).itemsize
    moments = {"adamw": 2, "muon": 1, "lion": 1}.get(config.optimizer.name, 0) * moment_bytes
    return seconds, (
        4 + moments + summed
    ) * weights / mesh.fsdp + 2 * model.num_layers * tokens * kept
