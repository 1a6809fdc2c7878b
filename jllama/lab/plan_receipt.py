"""Plans: the memory, exchanges and time that a compiled step needs on absent devices."""

import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from jllama.core import JllamaError
from jllama.core.config import LlamaConfig
from jllama.core.model import KVCache, abstract_params
from jllama.core.step import Batch
from jllama.formats.tensors import tensor_specs
from jllama.functional import choose_cache_attention
from jllama.lab import plan_program as program
from jllama.lab.plan_devices import MEASURED, interconnect_s, topology_devices
from jllama.models.build import build_model
from jllama.models.decode_params import DecodeParams, Quantization, decode_layout
from jllama.parallel.config import MeshConfig
from jllama.parallel.sharding import check_divides, make_mesh, matrix_sharding
from jllama.parallel.shards import AXES, batch_shardings, row_ways
from jllama.system.devices import ACCELERATORS, Accelerator
from jllama.system.files import Json
from jllama.system.memory import device_bytes, program_bytes
from jllama.training.compiling import compile_plan
from jllama.training.config import TrainConfig
from jllama.training.metrics import training_flops_per_token
from jllama.training.plan import Plan, check_batch_divides, decide
from jllama.training.trainable import LoraAdapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Receipt:
    """The result of a plan. Bytes and FLOPs are those of one device in one step.

    Times are the least that the step takes, at the device's published rates.

    Attributes:
        device: the topology: which accelerator, and how many.
        devices: their number.
        mesh: the sizes of its axes.
        settings: the planned options of ``training``.
        arguments_bytes: parameters, moments and the batch, which the step takes and returns in the
            same memory.
        parameters_bytes: a part of ``arguments_bytes``.
        moments_bytes: a part of ``arguments_bytes``.
        least_bytes: weights, keys and values, which a decoding step must read.
        temporaries_bytes: gradients, activations and what else the compiler needs; as its message
            says if it refuses the program.
        gradients_bytes: a part of ``temporaries_bytes``, by formula.
        starting_bytes: the most that is needed while weights under adapters are read and quantized.
        device_memory_bytes: what the device has.
        attention: the attention kernel in the program; empty if it has none.
        flops: by the formula of ``training_flops_per_token``.
        recomputed: FLOPs including what ``training.remat`` computes again, over ``flops``.
        attention_flops: the part of attention in ``flops``.
        attends_again: whether the backward pass computes attention's forward pass again.
        traffic_bytes: read and written in memory, by the program's text.
        launches: of kernels and copies, by the program's text.
        collectives: the exchanges between devices.
        compute_s: the time of the FLOPs alone.
        memory_s: the time of the memory traffic alone.
        interconnect_s: the time of the exchanges alone.
        tokens: of all devices in a step.
        compile_s: how long compiling took.
        largest: ``(bytes, shape, name)`` of the largest buffers, if the step does not fit.
        advice: options that would make the step fit.
    """

    device: str
    devices: int
    mesh: dict[str, int]
    settings: Json = dataclasses.field(default_factory=dict)
    arguments_bytes: int
    parameters_bytes: int
    moments_bytes: int = 0
    least_bytes: int = 0
    temporaries_bytes: int
    gradients_bytes: int = 0
    starting_bytes: int = 0
    device_memory_bytes: int
    attention: str
    flops: float
    recomputed: float = 1.0
    attention_flops: float = 0.0
    attends_again: bool = False
    traffic_bytes: float
    launches: int = 0
    collectives: Sequence[program.Collective]
    compute_s: float
    memory_s: float
    interconnect_s: float
    tokens: int
    compile_s: float
    largest: Sequence[tuple[float, str, str]] = ()
    advice: Sequence[str] = ()

    @property
    def needed_bytes(self) -> int:
        """The memory that the step needs."""
        return self.arguments_bytes + self.temporaries_bytes

    @property
    def max_bytes(self) -> int:
        """The memory that is needed at any time, also before the first step."""
        return max(self.needed_bytes, self.starting_bytes)

    @property
    def fits(self) -> bool:
        """Whether the device has that memory."""
        return self.max_bytes <= self.device_memory_bytes

    @property
    def times_s(self) -> dict[str, float]:
        """The times of compute, memory and interconnect, which overlap."""
        return {name: getattr(self, f"{name}_s") for name in ("compute", "memory", "interconnect")}

    @property
    def binds(self) -> str:
        """Which of them takes longest."""
        times_s = self.times_s
        return max(times_s, key=lambda name: times_s[name])

    @property
    def tokens_per_s(self) -> float:
        """The highest speed of all devices together."""
        return self.tokens / max(*self.times_s.values(), 1e-12)

    @property
    def mfu_limit(self) -> float:
        """The share of peak FLOP/s at that speed, by the model's own FLOPs."""
        return self.compute_s / self.recomputed * self.tokens_per_s / self.tokens

    @property
    def expected_s(self) -> float | None:
        """The expected time of a step, by ``plan_devices.MEASURED``.

        None if the device or the kernel was not measured. Attention, the other products and the
        memory traffic are taken to follow each other, and the exchanges to run beside them.
        """
        kind = self.device.partition(":")[0]
        measured = MEASURED.get(kind)
        if not measured or self.attention not in measured.attention:
            return None
        published = ACCELERATORS[kind]
        forward, both = measured.attention[self.attention]
        # The forward pass is a third of a step's FLOPs.
        again = self.attends_again / 3
        attention_s = self.attention_flops / published.flops * (1 / both + again / forward)
        others = self.flops * self.recomputed - self.attention_flops * (1 + again)
        products_s = others / (measured.products * published.flops)
        traffic_s = self.traffic_bytes / (measured.bandwidth * published.bandwidth)
        return max(attention_s + products_s + traffic_s, self.interconnect_s)

    @property
    def expected_mfu(self) -> float | None:
        """The MFU in that time."""
        at_peak_s = self.compute_s / self.recomputed
        return self.expected_s and at_peak_s / self.expected_s

    def as_dict(self) -> Json:
        """Return all of it, as ``--json`` prints it."""
        names = ("fits", "binds", "mfu_limit", "tokens_per_s", "expected_s", "expected_mfu")
        derived = {name: getattr(self, name) for name in names}
        derived["activations_bytes"] = self.temporaries_bytes - self.gradients_bytes
        collectives = [row._asdict() for row in self.collectives]
        return derived | dataclasses.asdict(self) | {"collectives": collectives}


def plan_training(config: TrainConfig, topology: str) -> Receipt:
    """Compile the training step of a configuration for the devices of a topology.

    Nothing is allocated, and no such device is needed.

    Args:
        config: the configuration; with ``remat`` auto, the first of dots and block that fits.
        topology: such as ``v5p:4x4x4`` or ``h100:8``.

    Raises:
        UsageError: the topology, mesh or batch is not possible.
    """
    # If remat is auto, plan dots first, and block if that does not fit.
    options = config.training
    if options.remat == "auto":
        dots, block = (
            dataclasses.replace(config, training=dataclasses.replace(options, remat=remat))
            for remat in ("dots", "block")
        )
        receipt = plan_training(dots, topology)
        return receipt if receipt.fits else plan_training(block, topology)

    # The step, and abstract arrays of what it takes.
    accelerator, devices = topology_devices(topology)
    mesh = make_mesh(config.mesh, devices)
    plan = decide(config, mesh)
    check_batch_divides(plan)
    training = compile_plan(plan)
    state = jax.eval_shape(training.init, jax.random.key(0))
    seq_len = plan.options.seq_len
    ids, counted = (
        jax.ShapeDtypeStruct(
            (options.batch_size, seq_len + 1), dtype, sharding=training.batch_sharding
        )
        for dtype in (jnp.int32, bool)
    )
    batch = Batch(ids, ids, counted)

    # The parts of the receipt that formulas give.
    tokens = options.batch_size * seq_len
    attention = plan.attention
    shares = plan.trainable.shares
    token_flops = training_flops_per_token(config.model, seq_len, shares)
    products_flops = training_flops_per_token(config.model, 0, shares)
    flops = token_flops * tokens / len(devices)
    reduce_bytes = jnp.dtype(options.reduce_dtype).itemsize
    known = {
        "arguments_bytes": device_bytes((state, batch)),
        "parameters_bytes": device_bytes((state.params, state.base, state.average)),
        "moments_bytes": device_bytes(state.opt_state),
        "gradients_bytes": device_bytes(training.trained) * reduce_bytes // 4,
        "recomputed": recomputed(config, attention, shares),
        "attention_flops": flops * (1 - products_flops / token_flops),
        "attends_again": attends_again(config, attention),
        "settings": settings(config),
        "starting_bytes": starting_bytes(plan),
    }
    if not accelerator.kind:  # nothing compiles for it
        rows = options.batch_size / row_ways(mesh.shape) / options.accumulation
        known["temporaries_bytes"] = known["gradients_bytes"] + int(stored_bytes(config, rows))

    # The program, and advice if it does not fit.
    lowered = training.step.lower(state, batch)
    receipt = _receipt(topology, accelerator, mesh, lowered, flops, tokens, known)
    if receipt.fits:
        return receipt
    return dataclasses.replace(receipt, advice=_advice(config, receipt))


def stored_bytes(config: TrainConfig, rows: float) -> float:
    """Compute what a device stores of ``rows`` for the backward pass, in 16 bits.

    With ``block`` that is the input of each layer.
    """
    model = config.model
    stored = model.embed_dim
    if config.training.remat == "offload":
        stored = 0
    elif config.training.remat != "block":
        heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        stored *= 3
        num_experts = model.experts_per_token + model.shared_expert
        widths = {"dense": model.mlp_dim, "experts": num_experts * model.expert_dim}
        mlp_dim = statistics.mean(widths[kind.feed_forward] for kind in model.layer_kinds)
        stored += (heads + 2 * mlp_dim) / config.mesh.tensor
    seq_len = config.training.seq_len or model.max_seq_len
    return 2 * model.num_layers * rows * seq_len / config.mesh.sequence * stored


def starting_bytes(plan: Plan) -> int:
    """Compute the most that a device holds while the weights under adapters are read and quantized.

    The files are in bfloat16. Weights that are not quantized are read in their final form: 0.
    """
    trainable = plan.trainable
    if not isinstance(trainable, LoraAdapters) or trainable.lora.base not in ("int8", "nf4"):
        return 0
    quantize = trainable.convert
    stacks: Any = flatten_dict(abstract_params(plan.model, jnp.bfloat16), sep="/")
    quantized_bytes = 0
    max_bytes = 0
    # In the order in which ``load_params`` reads: the largest first.
    for path in sorted(stacks, key=lambda path: -stacks[path].size):
        stack = stacks[path]
        stack_bytes = device_bytes(stack)
        result_bytes = device_bytes(jax.eval_shape(functools.partial(quantize, path), stack))
        # int8 transposes the stack; nf4 has a few layers in float32.
        working_bytes = stack_bytes
        if trainable.lora.base == "nf4":
            working_bytes = 12 * math.prod(stack.shape[1:])
        quantized_bytes += result_bytes
        max_bytes = max(max_bytes, quantized_bytes + stack_bytes + working_bytes)
    return max_bytes


def settings(config: TrainConfig) -> Json:
    """Return the options, besides the mesh, that a search changes."""
    names = ("batch_size", "accumulation", "remat", "attention")
    return {name: getattr(config.training, name) for name in names}


def describe(mesh: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """Describe a mesh and settings in a line.

    Examples:
        >>> mesh = {"data": 1, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}
        >>> describe(mesh, {"batch_size": 16, "remat": "block"})
        'fsdp=4 x tensor=2, batch_size 16, remat block'
    """
    sizes = " x ".join(f"{name}={mesh[name]}" for name in AXES if mesh[name] > 1)
    values = (f"{name} {value}" for name, value in settings.items())
    return ", ".join([sizes or "one device", *values])


def recomputed(
    config: TrainConfig, attention: str, trained: Mapping[str, float] | None = None
) -> float:
    """Compute a step's FLOPs, including what its backward pass computes again, over those without.

    The latter are by ``training_flops_per_token``. ``block`` and ``offload`` run the layers forward
    twice, but not the head.

    Args:
        config: the configuration.
        attention: the name of the attention implementation.
        trained: how much of each parameter is trained; None if all are.
    """
    model = config.model
    seq_len = config.training.seq_len or model.max_seq_len
    products = training_flops_per_token(model, 0)
    again = 0.0
    if attends_again(config, attention):
        again += (training_flops_per_token(model, seq_len) - products) / 3
    if config.training.remat in ("block", "offload"):
        again += products / 3 - 2 * model.vocab_size * model.embed_dim
    return 1 + again / training_flops_per_token(model, seq_len, trained)


def attends_again(config: TrainConfig, attention: str) -> bool:
    """Whether the backward pass computes attention's forward pass again.

    ``dots`` stores the results of some kernels.
    """
    remat = config.training.remat
    is_stored = attention not in ("tokamax", "blocked")
    return remat in ("block", "offload") or (remat == "dots" and is_stored)


def _advice(config: TrainConfig, receipt: Receipt) -> list[str]:
    """Return options that would make a step fit and are not taken yet, the cheapest first."""
    options = config.training
    mesh = receipt.mesh
    ways = row_ways(mesh)
    rows = options.batch_size // ways
    tips = []
    if options.remat != "offload":
        tips.append(f"--training.remat {'offload' if options.remat == 'block' else 'block'}")
    if rows > options.accumulation:
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
    state_bytes = receipt.arguments_bytes + receipt.gradients_bytes
    if state_bytes > receipt.device_memory_bytes:
        min_devices = math.ceil(receipt.devices * state_bytes / receipt.device_memory_bytes)
        tips.append(
            f"at least {min_devices} devices: parameters, moments and gradients alone take "
            f"{state_bytes / 2**30:.1f} GiB"
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
    """Compile a decoding step, in bfloat16, for the devices of a topology.

    Keys and values are split as ``batch_shardings`` says.

    Args:
        config: the model.
        topology: such as ``v5p:4x4x4`` or ``h100:8``.
        mesh: how the devices share the work.
        batch_size: rows, over all devices.
        length: tokens in the cache of each row.
        quantize: of the weights.

    Raises:
        UsageError: the topology or mesh is not possible.
    """
    # The mesh.
    accelerator, devices = topology_devices(topology)
    split = make_mesh(mesh, devices)
    check_divides(split, config)

    # Abstract weights, tokens and cache, with their shardings.
    floats = abstract_params(config, jnp.bfloat16)
    layout = jax.eval_shape(
        lambda params: decode_layout(params, config, quantize, joins=split.size == 1), floats
    )
    specs = {
        spec.key: matrix_sharding(split, spec.parameter, config).spec
        for spec in tensor_specs(config)
    }
    params = jax.tree_util.tree_map_with_path(
        functools.partial(_place_weight, split, specs), layout
    )
    cache = jax.eval_shape(lambda: KVCache.zeros(config, batch_size, length, jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((batch_size, 1), jnp.int32), cache._replace(lengths=None)
    shardings = batch_shardings(split, rows)
    tokens, cache = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), rows, shardings
    )

    # The step, which replaces its input cache.
    window = config.sliding_window or config.attention_chunk or None
    attention = choose_cache_attention(1, cache.keys[0], devices[0].platform, window)

    def step(params: DecodeParams, tokens: Any, cache: Any) -> tuple[Any, Any]:
        platform = devices[0].platform
        llama = build_model(config, params, attention=attention, platform=platform)
        # With constant lengths, the program's text says how often attention's loop runs.
        cache = cache._replace(lengths=jnp.full(batch_size, length - 1, jnp.int32))
        hidden, cache = llama.decode(tokens, cache, jnp.ones(batch_size, jnp.int32))
        return jnp.argmax(llama.logits(hidden)[:, 0], axis=-1), cache._replace(lengths=None)

    compiled = jax.jit(step, donate_argnums=2, out_shardings=(None, shardings[1]))
    lowered = compiled.lower(params, tokens, cache)

    # The parts of the receipt that formulas give.
    flops = training_flops_per_token(config, length) / 3 * batch_size / len(devices)
    arguments_bytes = device_bytes((params, tokens, cache))
    # Keys outside of a window are not read, and only a few rows of a separate embedding.
    cache_bytes = device_bytes(cache)
    num_cached = config.num_layers * length
    unread_bytes = cache_bytes - cache_bytes * config.num_visible(length) // num_cached
    if not config.tie_embeddings:
        unread_bytes += device_bytes(params.weights["embed"])
    known = {
        "parameters_bytes": device_bytes(params),
        "arguments_bytes": arguments_bytes,
        "least_bytes": arguments_bytes - unread_bytes,
    }
    return _receipt(topology, accelerator, split, lowered, flops, batch_size, known)


def _place_weight(
    mesh: Any, specs: Mapping[str, Any], path: Any, leaf: Any
) -> jax.ShapeDtypeStruct:
    """Give a weight its sharding; ``specs`` are those of whole matrices."""
    name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
    # A quantized matrix has leaves below its name: its values, and their scale.
    spec = specs.get(name) or specs.get(name.rpartition("/")[0], ())
    return leaf.update(sharding=NamedSharding(mesh, PartitionSpec(*spec[: leaf.ndim])))


def _receipt(
    topology: str,
    accelerator: Accelerator,
    mesh: Any,
    lowered: Any,
    flops: float,
    tokens: int,
    known: Json,
) -> Receipt:
    """Compile a step, and read the rest of its receipt from the program.

    Args:
        topology: of ``mesh``.
        accelerator: the kind of its devices.
        mesh: the devices.
        lowered: the step.
        flops: of a device in a step.
        tokens: of all devices in a step.
        known: fields of the receipt that are known by formula.
    """
    # 1) Compile the step, and read how much memory it takes.
    start_s = time.perf_counter()
    text = ""
    temporaries_bytes = known.pop("temporaries_bytes", 0)
    try:
        if not temporaries_bytes:
            compiled = lowered.compile()
            known["arguments_bytes"], temporaries_bytes = program_bytes(compiled)
            text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        # The compiler for TPUs refuses what does not fit.
        temporaries_bytes = _refused_bytes(topology, error, known["arguments_bytes"])

    # 2) Read traffic, launches and collectives from the program's text, and compute times.
    parsed = program.parse(text)
    collectives = program.collectives(parsed, accelerator.node)
    traffic_bytes = program.traffic_bytes(parsed)
    receipt = Receipt(
        device=topology,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        temporaries_bytes=temporaries_bytes,
        device_memory_bytes=int(accelerator.memory_bytes),
        attention=", ".join(program.kernels(text)),
        flops=flops,
        traffic_bytes=traffic_bytes,
        launches=program.launches(parsed),
        collectives=collectives,
        compute_s=flops * known.get("recomputed", 1.0) / accelerator.flops,
        memory_s=traffic_bytes / accelerator.bandwidth,
        interconnect_s=sum(
            interconnect_s(accelerator, row.devices, row.near, row.times * row.bytes_each)
            for row in collectives
        ),
        tokens=tokens,
        compile_s=time.perf_counter() - start_s,
        **known,
    )

    # 3) If the step does not fit, add its largest arrays.
    if receipt.fits:
        return receipt
    if not text:
        parsed = program.parse(lowered.as_text(dialect="hlo", debug_info=True))
    return dataclasses.replace(receipt, largest=program.largest_buffers(parsed))


def _refused_bytes(topology: str, error: Exception, arguments_bytes: int) -> int:
    """Read the bytes of temporaries from a compiler's message that a program does not fit.

    Raises:
        JllamaError: the message is another one.
    """
    message = " ".join(str(error).split())
    match = re.search(r"(Used|HLO temporaries) \(?([\d.]+)([KMGT])", message)
    if not match:
        raise JllamaError(
            f"the compiler for {topology} refuses the program: {message[:300]}"
        ) from error
    subject, number, unit = match.groups()
    size = int(float(number) * 2 ** (10 * ("KMGT".index(unit) + 1)))
    return size - arguments_bytes if subject == "Used" else size
