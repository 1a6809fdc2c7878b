"""What a compiled training or decoding step will need on devices that are not there: memory, exchanges, time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jllama.config import LlamaConfig, MeshConfig
from jllama.decode_params import DecodeParams, Quantization, decode_layout
from jllama.errors import UsageError
from jllama.model import KVCache, abstract_params, build_model
from jllama.parameters import tensor_specs, training_flops_per_token
from jllama.plan import program
from jllama.plan.devices import Accelerator, interconnect_s, topology_devices
from jllama.sharding import BATCH, check_divides, make_mesh, matrix_sharding
from jllama.training.config import TrainConfig
from jllama.training.step import check_batch, compile_training


@dataclasses.dataclass(frozen=True)
class Receipt:
    """A plan: bytes are those of one device, times and rates those of a step at the device's published rates.

    Args:
        device: the accelerator and how many there are: the topology.
        mesh: the sizes of the mesh's axes.
        attention: the attention kernel in the program; empty if it has none.
        arguments_bytes: what the step takes: parameters, moments, the batch; returned in the same memory.
        parameters_bytes, moments_bytes: parts of it.
        temporaries_bytes: gradients, activations and what the compiler needs besides; of a program that the compiler
            refused, by what it says.
        flops: of a device in a step, by the formula of ``training_flops_per_token``.
        traffic_bytes: read and written in memory, at most.
        collectives: exchanges by kind and size, with how often a step does them and the bytes a device receives.
        compute_s, memory_s, interconnect_s: what each of them alone would take.
        largest: the largest buffers of a program that does not fit, as ``(bytes, shape, operation)``.
    """

    device: str
    devices: int
    mesh: dict[str, int]
    arguments_bytes: int
    parameters_bytes: int
    moments_bytes: int
    temporaries_bytes: int
    device_memory_bytes: int
    attention: str
    flops: float
    traffic_bytes: float
    collectives: list[program.Collective]
    compute_s: float
    memory_s: float
    interconnect_s: float
    tokens: int
    compile_s: float
    largest: list[tuple[float, str, str]]

    @property
    def fits(self) -> bool:
        """Whether arguments and temporaries are within the device's memory."""
        return self.arguments_bytes + self.temporaries_bytes <= self.device_memory_bytes

    @property
    def mfu_limit(self) -> float:
        """The share of peak FLOP/s that the slower of compute and exchanges leaves, if the two overlap."""
        return self.compute_s / max(self.compute_s, self.interconnect_s, 1e-12)

    @property
    def tokens_per_s(self) -> float:
        """The tokens of all devices, at that limit."""
        return self.tokens / max(self.compute_s, self.interconnect_s, 1e-12)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as ``--json`` prints it."""
        derived = {"fits": self.fits, "mfu_limit": self.mfu_limit, "tokens_per_s": self.tokens_per_s}
        rows = [row._asdict() for row in self.collectives]
        return derived | dataclasses.asdict(self) | {"collectives": rows}


def plan_training(config: TrainConfig, topology: str) -> Receipt:
    """Compile the training step of a configuration for the devices of a topology, such as ``v5p:4x4x4`` or ``h100:8``.

    Nothing is allocated and no such device is needed. ``UsageError`` for a topology, mesh or batch that cannot be.
    """
    accelerator, devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    check_batch(config, mesh)
    training = compile_training(config, mesh, bos_id=1)
    abstract = jax.eval_shape(training.init, jax.random.key(0))
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract,
        training.shardings,
    )
    seq_len = config.training.seq_len or config.model.max_seq_len
    shape = (config.training.batch_size, seq_len + 1)
    windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=training.batch_sharding)
    tokens = config.training.batch_size * seq_len
    flops = training_flops_per_token(config.model, seq_len) * tokens / len(devices)
    sizes = {"parameters_bytes": _device_bytes(state.params), "moments_bytes": _device_bytes(state.opt_state)}
    return _receipt(topology, accelerator, mesh, training.step.lower(state, windows), flops, tokens, sizes)


def plan_decoding(
    config: LlamaConfig,
    topology: str,
    mesh: MeshConfig,
    batch_size: int,
    length: int,
    dtype: Any = jnp.bfloat16,
    quantize: Quantization | None = None,
) -> Receipt:
    """Compile a decoding step of ``batch_size`` rows with ``length`` tokens each, in the layout for decoding.

    Matrices and key-value heads are split over ``tensor``, rows over other axes. ``UsageError`` as ``plan_training``.
    """
    accelerator, devices = topology_devices(topology)
    split = make_mesh(mesh, devices)
    check_divides(split, config)
    rows, heads = BATCH[0], "tensor" if config.num_kv_heads % split.shape["tensor"] == 0 else None
    if batch_size % (ways := split.shape["data"] * split.shape["fsdp"]):
        raise UsageError(f"batch_size {batch_size} does not divide {ways} ways: give a multiple of {ways}")

    def placed(leaf: Any, *names: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(split, PartitionSpec(*names)))

    def layout() -> DecodeParams:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), abstract_params(config))
        return decode_layout(zeros, config, quantize)

    specs = {spec.key: matrix_sharding(split, spec.parameter, config).spec for spec in tensor_specs(config)}

    def weight(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        spec = next(specs["/".join(names[1:end])] for end in (4, 2) if "/".join(names[1:end]) in specs)
        return placed(leaf, *spec[: leaf.ndim])

    params = jax.tree_util.tree_map_with_path(weight, jax.eval_shape(layout))
    cache = jax.eval_shape(lambda: KVCache.zeros(config, batch_size, length, dtype))
    cache = jax.tree.map(lambda leaf: placed(leaf, rows, heads) if leaf.ndim > 1 else placed(leaf, rows), cache)
    tokens = placed(jax.ShapeDtypeStruct((batch_size, 1), jnp.int32), rows)

    def step(params: DecodeParams, tokens: Any, cache: KVCache) -> tuple[Any, KVCache]:
        llama = build_model(config, params)
        hidden, cache = llama.forward_with_cache(tokens, cache, jnp.ones(batch_size, jnp.int32), "reference")
        return jnp.argmax(llama.logits(hidden)[:, 0], axis=-1), cache

    places = jax.tree.map(lambda leaf: leaf.sharding, cache)
    lowered = jax.jit(step, donate_argnums=2, out_shardings=(None, places)).lower(params, tokens, cache)
    flops = training_flops_per_token(config, length) / 3 * batch_size / len(devices)
    sizes = {"parameters_bytes": _device_bytes(params), "moments_bytes": 0}
    return _receipt(topology, accelerator, split, lowered, flops, batch_size, sizes)


def _receipt(
    topology: str, accelerator: Accelerator, mesh: Any, lowered: Any, flops: float, tokens: int, sizes: dict[str, int]
) -> Receipt:
    start_s, refused = time.perf_counter(), ""
    arguments = _device_bytes(lowered.args_info)
    parsed, text, temporaries = program.Program({}, "", len(mesh.devices.flat)), "", 0
    try:
        compiled = lowered.compile()
        memory = compiled.memory_analysis()
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        temporaries += max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
        text = compiled.as_text()
        parsed = program.parse(text)
    except jax.errors.JaxRuntimeError as error:  # TPUs' compiler refuses what does not fit
        if not (used := re.search(r"Used ([\d.]+)([GMT]) of", str(error))):
            raise
        refused = str(error)
        temporaries = int(float(used[1]) * {"M": 2**20, "G": 2**30, "T": 2**40}[used[2]]) - arguments
    exchanges = program.collectives(parsed)
    fits = arguments + temporaries <= accelerator.memory_bytes
    return Receipt(
        device=topology,
        devices=len(mesh.devices.flat),
        mesh=dict(mesh.shape),
        arguments_bytes=arguments,
        temporaries_bytes=temporaries,
        device_memory_bytes=accelerator.memory_bytes,
        attention=", ".join(program.kernels(text)),
        flops=flops,
        traffic_bytes=program.traffic_bytes(parsed),
        collectives=exchanges,
        compute_s=flops / accelerator.flops,
        memory_s=program.traffic_bytes(parsed) / accelerator.bandwidth,
        interconnect_s=sum(interconnect_s(accelerator, row.devices, row.times * row.bytes_each) for row in exchanges),
        tokens=tokens,
        compile_s=time.perf_counter() - start_s,
        largest=[] if fits else list(_refused_buffers(refused)) or program.largest_buffers(parsed),
        **sizes,
    )


def _device_bytes(tree: Any) -> int:
    """The bytes of one device's parts of abstract arrays."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) else leaf.shape
        total += math.prod(shape) * (
            jnp.dtype(leaf.dtype).itemsize if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else 8
        )
    return total


def _refused_buffers(message: str) -> Iterator[tuple[float, str, str]]:
    """The largest buffers that the compiler names when it refuses a program."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for found in re.finditer(
        r"Size: ([\d.]+)([KMG]).*?\n(?:.*\n)*?.*?Shape: (\S+)\n(?:.*\n)*?.*?(?:XLA label|Operator): (.*)", message
    ):
        yield float(found[1]) * units[found[2]], found[3], found[4][:120]
