"""What a compiled training or decoding step will need on devices that are not there: memory, exchanges, time."""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jllama.config import LlamaConfig, MeshConfig
from jllama.data.batches import Batch
from jllama.decode_params import DecodeParams, Quantization, decode_layout
from jllama.devices import ACCELERATORS, Accelerator, device_bytes, program_bytes
from jllama.errors import JllamaError, UsageError
from jllama.files import Json
from jllama.functional import Refused, choose_cache_attention
from jllama.model import KVCache, abstract_params, build_model
from jllama.parameters import parameter_table, shape_of, tensor_specs, training_flops_per_token
from jllama.plan import program
from jllama.plan.devices import MEASURED, interconnect_s, topology_devices
from jllama.sharding import AXES, batch_shardings, check_divides, make_mesh, matrix_sharding
from jllama.training.config import TrainConfig
from jllama.training.step import Training, attention_of, check_batch, compile_training


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """A plan: bytes are those of one device, times those that it takes at least, at the device's published rates."""

    device: str  # the topology: which accelerator, and how many
    devices: int
    mesh: dict[str, int]  # the sizes of its axes
    settings: Json = dataclasses.field(default_factory=dict)  # of ``training``, as planned
    arguments_bytes: (
        int  # what the step takes, and returns in the same memory: parameters, moments, the batch
    )
    parameters_bytes: int
    moments_bytes: int = 0
    least_bytes: int = 0  # of weights, keys and values, which a step of decoding reads at least
    temporaries_bytes: int  # gradients, activations, what the compiler needs besides; if it refuses, by what it says
    gradients_bytes: int = 0  # a part of it, by formula
    starting_bytes: int = 0  # at most, while the weights to adapt are read and quantized
    device_memory_bytes: int
    attention: str  # the attention kernel in the program; empty if it has none
    flops: float  # of a device in a step, by the formula of ``training_flops_per_token``
    recomputed: float = 1.0  # FLOPs with what ``training.remat`` computes again, over those without
    attention_flops: float = 0.0  # the part of attention in ``flops``
    attends_again: bool = False  # whether the backward pass computes attention's forward pass again
    traffic_bytes: float  # read and written in memory, by the program's text
    launches: int = 0  # of kernels and copies, by the same
    collectives: Sequence[program.Collective]
    compute_s: float  # what each of the three alone would take
    memory_s: float
    interconnect_s: float
    tokens: int  # of all devices in a step
    compile_s: float
    largest: Sequence[
        tuple[float, str, str]
    ] = ()  # ``(bytes, shape, name)`` of buffers, of what does not fit
    advice: Sequence[str] = ()  # what would make it fit, of what is not done yet

    needed_bytes = property(
        lambda it: it.arguments_bytes + it.temporaries_bytes, doc="Of a device, all together."
    )
    most_bytes = property(
        lambda it: max(it.needed_bytes, it.starting_bytes), doc="Of a device, at any time."
    )
    fits = property(
        lambda it: it.most_bytes <= it.device_memory_bytes, doc="Whether that is within its memory."
    )
    times_s = property(
        lambda it: {
            name: getattr(it, f"{name}_s") for name in ("compute", "memory", "interconnect")
        }
    )
    binds = property(
        lambda it: max(it.times_s, key=it.times_s.get),
        doc="Which of these takes longest: all overlap.",
    )
    tokens_per_s = property(
        lambda it: it.tokens / max(*it.times_s.values(), 1e-12), doc="Of all devices, so limited."
    )

    @property
    def mfu_limit(self) -> float:
        """The share of peak FLOP/s that this leaves, by the model's own FLOPs."""
        return self.compute_s / self.recomputed * self.tokens_per_s / self.tokens

    @property
    def expected_s(self) -> float | None:
        """What a step should take by ``plan.devices.MEASURED``; None where the device or kernel was not measured.

        Attention, the other products, and all that is read and written are taken to follow each other.
        """
        measured = MEASURED.get(self.device.partition(":")[0])
        if not measured or self.attention not in measured.attention:
            return None
        published = ACCELERATORS[self.device.partition(":")[0]]
        forward, both = measured.attention[self.attention]
        attention_s = (
            self.attention_flops / published.flops * (1 / both + self.attends_again / 3 / forward)
        )
        others = self.flops * self.recomputed - self.attention_flops * (1 + self.attends_again / 3)
        products_s = others / (measured.products * published.flops)
        traffic_s = self.traffic_bytes / (measured.bandwidth * published.bandwidth)
        return max(
            attention_s + products_s + traffic_s, self.interconnect_s
        )  # the last runs beside them

    @property
    def expected_mfu(self) -> float | None:
        """The MFU that this gives."""
        at_peak_s = self.compute_s / self.recomputed
        return self.expected_s and at_peak_s / self.expected_s

    def as_dict(self) -> Json:
        """All of it, as ``--json`` prints it."""
        names = ("fits", "binds", "mfu_limit", "tokens_per_s", "expected_s", "expected_mfu")
        derived = {name: getattr(self, name) for name in names}
        derived["activations_bytes"] = self.temporaries_bytes - self.gradients_bytes
        return (
            derived
            | dataclasses.asdict(self)
            | {"collectives": [row._asdict() for row in self.collectives]}
        )


def plan_training(config: TrainConfig, topology: str) -> Receipt:
    """Compile the training step of a configuration for the devices of a topology, such as ``v5p:4x4x4`` or ``h100:8``.

    Nothing is allocated and no such device is needed. ``UsageError`` for a topology, mesh or batch that cannot be.
    """
    if config.training.remat == "auto":
        trials = (dataclasses.replace(config.training, remat=remat) for remat in ("dots", "block"))
        receipts = (
            plan_training(dataclasses.replace(config, training=trial), topology) for trial in trials
        )
        first = next(receipts)
        return first if first.fits else next(receipts)
    accelerator, devices = topology_devices(topology)
    mesh, options = make_mesh(config.mesh, devices), config.training
    check_batch(config, mesh)
    training = compile_training(config, mesh)
    state, seq_len = (
        jax.eval_shape(training.init, jax.random.key(0)),
        options.seq_len or config.model.max_seq_len,
    )
    shape = options.batch_size, seq_len + 1
    int_rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=training.batch_sharding)
    batch = Batch(
        int_rows, int_rows, jax.ShapeDtypeStruct(shape, bool, sharding=training.batch_sharding)
    )
    tokens = options.batch_size * seq_len
    attention, shares = attention_of(config, mesh), training.trainable.shares
    whole, without = (
        training_flops_per_token(config.model, length, shares) for length in (seq_len, 0)
    )
    flops = whole * tokens / len(devices)
    sizes = {
        "arguments_bytes": device_bytes((state, batch)),
        "parameters_bytes": device_bytes((state.params, state.base, state.average)),
        "moments_bytes": device_bytes(state.opt_state),
        "gradients_bytes": device_bytes(training.trained)
        * jnp.dtype(options.reduce_dtype).itemsize
        // 4,
        "recomputed": recomputed(config, attention, shares),
        "attention_flops": flops * (1 - without / whole),
        "attends_again": attends_again(config, attention),
        "settings": settings(config),
        "starting_bytes": starting_bytes(config, training),
    }
    try:
        lowered = training.step.lower(state, batch)
    except Refused as error:
        raise UsageError(f"{error}: take another training.attention, or mesh.sequence") from error
    receipt = _receipt(topology, accelerator, mesh, lowered, flops, tokens, sizes)
    return (
        receipt if receipt.fits else dataclasses.replace(receipt, advice=_advice(config, receipt))
    )


def starting_bytes(config: TrainConfig, training: Training) -> int:
    """What a device holds at most while the weights to adapt are read from bfloat16 files and quantized."""
    if not config.trains_adapters or config.lora.base not in ("int8", "nf4"):
        return 0  # each is read in its final form
    held = training.trainable.convert
    shapes = {
        path: shape_of(row, config.model) for path, row in parameter_table(config.model).items()
    }
    held_bytes, most = 0, 0
    for path in sorted(
        shapes, key=lambda path: -math.prod(shapes[path])
    ):  # as ``load_params`` reads them
        stack = jax.ShapeDtypeStruct(shapes[path], jnp.bfloat16)
        own_bytes = device_bytes(jax.eval_shape(functools.partial(held, path), stack))
        # int8 transposes the stack; nf4 has a few layers in float32.
        others_bytes = (
            device_bytes(stack) if config.lora.base == "int8" else 12 * math.prod(stack.shape[1:])
        )
        most = max(most, held_bytes + own_bytes + device_bytes(stack) + others_bytes)
        held_bytes += own_bytes
    return most


def settings(config: TrainConfig) -> Json:
    """What a search changes of a step, but for the mesh."""
    return {
        name: getattr(config.training, name)
        for name in ("batch_size", "accumulation", "remat", "attention")
    }


def describe(mesh: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """``fsdp=4 x tensor=2, batch_size 16, remat block``."""
    sizes = " x ".join(f"{name}={mesh[name]}" for name in AXES if mesh[name] > 1)
    return ", ".join(
        [sizes or "one device", *(f"{name} {value}" for name, value in settings.items())]
    )


def recomputed(
    config: TrainConfig, attention: str, trained: Mapping[str, float] | None = None
) -> float:
    """The FLOPs of a step with what its backward pass computes again, over those of ``training_flops_per_token``.

    ``block`` and ``offload`` run the layers forward twice, but not the head.
    """
    model, remat = config.model, config.training.remat
    seq_len = config.training.seq_len or model.max_seq_len
    products, all_of_it = (training_flops_per_token(model, length) for length in (0, seq_len))
    again = 0.0
    if attends_again(config, attention):
        again += (all_of_it - products) / 3
    if remat in ("block", "offload"):
        again += products / 3 - 2 * model.vocab_size * model.embed_dim
    return 1 + again / training_flops_per_token(model, seq_len, trained)


def attends_again(config: TrainConfig, attention: str) -> bool:
    """Whether the backward pass computes attention's forward pass again; ``dots`` keeps some kernels' results."""
    remat = config.training.remat
    return remat in ("block", "offload") or (
        remat == "dots" and attention not in ("tokamax", "blocked")
    )


def _advice(config: TrainConfig, receipt: Receipt) -> list[str]:
    """What would make a step fit, of what it does not do yet, the cheapest first."""
    options, mesh = config.training, receipt.mesh
    ways, tips = mesh["data"] * mesh["fsdp"], []
    if options.remat != "offload":
        tips.append(f"--training.remat {'offload' if options.remat == 'block' else 'block'}")
    if (rows := options.batch_size // ways) > options.accumulation:
        tips.append(f"--training.accumulation {rows}, one row of each device at a time")
    elif ways % 2 == 0 and receipt.attention not in ("tokamax", "triton"):
        sizes = f"--mesh.sequence {2 * mesh['sequence']} --mesh.data 1 --mesh.fsdp {ways // 2}"
        tips.append(f"{sizes} --batch_size {options.batch_size // 2}, half the tokens of a device")
    if options.reduce_dtype == "float32":
        tips.append("--training.reduce_dtype bfloat16, half of the gradients")
    if config.optimizer.moment_dtype == "float32" and config.optimizer.beta2 <= 0.99:
        tips.append("--optimizer.moment_dtype bfloat16, half of the moments")
    if mesh["data"] > 1:
        tips.append(f"--mesh.data 1 --mesh.fsdp {ways}, so that no device holds what another does")
    held, has = receipt.arguments_bytes + receipt.gradients_bytes, receipt.device_memory_bytes
    if held > has:
        least = math.ceil(receipt.devices * held / has)
        tips.append(
            f"at least {least} devices: parameters, moments and gradients alone take {held / 2**30:.1f} GiB"
        )
    return tips


def plan_decoding(
    config: LlamaConfig,
    topology: str,
    mesh: MeshConfig,
    batch_size: int,
    length: int,
    quantize: Quantization | None,
) -> Receipt:
    """Compile a decoding step of ``batch_size`` rows with ``length`` tokens each, for decoding, in bfloat16.

    Keys and values are split as ``batch_shardings`` has it. ``UsageError`` as ``plan_training``.
    """
    accelerator, devices = topology_devices(topology)
    split = make_mesh(mesh, devices)
    check_divides(split, config)

    floats = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_params(config)
    )
    layout = jax.eval_shape(
        lambda params: decode_layout(params, config, quantize, joins=split.size == 1), floats
    )
    specs = {
        spec.key: matrix_sharding(split, spec.parameter, config).spec
        for spec in tensor_specs(config)
    }

    def weight(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        spec = specs.get(name) or specs.get(
            name.rpartition("/")[0], ()
        )  # of a matrix: its values, or scale
        return leaf.update(sharding=NamedSharding(split, PartitionSpec(*spec[: leaf.ndim])))

    params = jax.tree_util.tree_map_with_path(weight, layout)
    cache = jax.eval_shape(lambda: KVCache.zeros(config, batch_size, length, jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((batch_size, 1), jnp.int32), cache._replace(lengths=None)
    shardings = batch_shardings(split, rows)
    tokens, cache = jax.tree.map(lambda leaf, where: leaf.update(sharding=where), rows, shardings)

    attention = choose_cache_attention(1, cache.keys[0], devices[0].platform)

    def step(params: DecodeParams, tokens: Any, cache: Any) -> tuple[Any, Any]:
        llama = build_model(config, params)
        # Lengths that the compiler knows: how often attention's loop runs is then in the program's text.
        cache = cache._replace(lengths=jnp.full(batch_size, length - 1, jnp.int32))
        hidden, cache = llama.decode(
            tokens, cache, jnp.ones(batch_size, jnp.int32), attention=attention
        )
        return jnp.argmax(llama.logits(hidden)[:, 0], axis=-1), cache._replace(lengths=None)

    lowered = jax.jit(step, donate_argnums=2, out_shardings=(None, shardings[1])).lower(
        params, tokens, cache
    )
    flops = training_flops_per_token(config, length) / 3 * batch_size / len(devices)
    sizes = {
        "parameters_bytes": device_bytes(params),
        "arguments_bytes": device_bytes((params, tokens, cache)),
    }
    looked_up = 0 if config.tie_embeddings else device_bytes(params.weights["embed"])
    sizes["least_bytes"] = sizes["arguments_bytes"] - looked_up
    return _receipt(topology, accelerator, split, lowered, flops, batch_size, sizes)


def _receipt(
    topology: str,
    accelerator: Accelerator,
    mesh: Any,
    lowered: Any,
    flops: float,
    tokens: int,
    sizes: Json,
) -> Receipt:
    start_s, text = time.perf_counter(), ""
    try:
        compiled = lowered.compile()
        sizes["arguments_bytes"], temporaries = program_bytes(compiled)
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # TPUs' compiler refuses what does not fit
        said = " ".join(str(error).split())
        if not (used := re.search(r"(Used|HLO temporaries) \(?([\d.]+)([KMGT])", said)):
            raise JllamaError(
                f"the compiler for {topology} refuses the program: {said[:300]}"
            ) from error
        temporaries = int(float(used[2]) * 2 ** (10 * ("KMGT".index(used[3]) + 1)))
        temporaries -= sizes["arguments_bytes"] if used[1] == "Used" else 0
    parsed = program.parse(text)
    exchanges, traffic_bytes = (
        program.collectives(parsed, accelerator.node),
        program.traffic_bytes(parsed),
    )
    received = ((row.devices, row.near, row.times * row.bytes_each) for row in exchanges)
    receipt = Receipt(
        device=topology,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        temporaries_bytes=temporaries,
        device_memory_bytes=int(accelerator.memory_bytes),
        attention=", ".join(program.kernels(text)),
        flops=flops,
        traffic_bytes=traffic_bytes,
        launches=program.launches(parsed),
        collectives=exchanges,
        compute_s=flops * sizes.get("recomputed", 1.0) / accelerator.flops,
        memory_s=traffic_bytes / accelerator.bandwidth,
        interconnect_s=sum(interconnect_s(accelerator, *row) for row in received),
        tokens=tokens,
        compile_s=time.perf_counter() - start_s,
        **sizes,
    )
    if receipt.fits:
        return receipt
    as_written = parsed if text else program.parse(lowered.as_text(dialect="hlo", debug_info=True))
    return dataclasses.replace(receipt, largest=program.largest_buffers(as_written))
