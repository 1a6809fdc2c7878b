"""``compile_training``: the programs of a training run, from its configuration."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jllama.core import UsageError, check_fields
from jllama.core import step as core
from jllama.core.config import LlamaConfig
from jllama.core.model import check_ids
from jllama.core.parameters import Params
from jllama.core.step import Batch, Setup, StepMetrics, Targets, TrainState, map_over_devices
from jllama.functional import UnsupportedAttention, choose_attention
from jllama.models.build import check_attention, functions_of
from jllama.models.lora import dequantize
from jllama.parallel import distributed
from jllama.parallel.exchange import BY_HAND, Parallelism
from jllama.parallel.sharding import make_mesh, ruleset, state_sharding
from jllama.parallel.shards import BATCH
from jllama.system.devices import loss_chunk_tokens
from jllama.system.errors import unknown_name
from jllama.system.files import AUTOTUNING
from jllama.system.machine import keep_freed_memory
from jllama.training.config import TrainConfig
from jllama.training.objectives import OBJECTIVES, drawn_scores, row_log_probs
from jllama.training.optimizer import make_optimizer
from jllama.training.trainable import trainable_of


class Training(NamedTuple):
    """The compiled programs of a training, and how state and batches are split over the mesh.

    - ``init(key, params=None, adapter=None)``: the ``TrainState`` before the first step, from fresh
      or given parameters and adapters.
    - ``step(state, batch)``: one update, ``(state, StepMetrics)``. The given state is donated. A
      token id outside the vocabulary raises ``UsageError`` if the batch is of NumPy arrays; in JAX
      arrays it makes the step a skipped one.
    - ``evaluate(params, batch, base=None)``: the objective's sums ``(nats, count, figures)``
      without z-loss.
    - ``log_probs(params, batch, base=None)``: the summed log-probability of each row's targets,
      ``[rows]``.
    - ``drawn_log_probs(params, batch, base=None)``: the log-probability of each counted target of
      a batch with ``sampled``, ``[rows, seq]``.
    """

    init: Any
    step: Any
    evaluate: Any
    log_probs: Any
    drawn_log_probs: Any
    decisions: "Decisions"
    shardings: TrainState
    batch_sharding: NamedSharding
    trained: Params  # shapes and shardings of what is trained

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.decisions.mesh

    @property
    def trainable(self) -> Any:
        """What is trained."""
        return self.decisions.setup.trainable

    def weights(self, state: TrainState) -> Params:
        """Return the ``params`` to evaluate, with ``training.ema`` the running mean."""
        if state.average is None:
            return state.params
        return self.trainable.with_trained(state.params, state.average)

    def model_weights(self, state: TrainState) -> Params:
        """Return a whole model's weights from ``weights(state)``, adapters merged."""
        return self.trainable.merge(self.weights(state), state.base)


# What is decided before anything is compiled


class Decisions(NamedTuple):
    """What a training run's programs are made of, decided once from its configuration.

    Attributes:
        mesh: the devices.
        dtype: of activations and products.
        attention: the name of the implementation.
        setup: of the step.
        is_deterministic: whether a GPU must repeat its bits.
    """

    mesh: Mesh
    dtype: np.dtype[Any]
    attention: str
    setup: Setup
    is_deterministic: bool


def decide(config: TrainConfig, mesh: Mesh | None = None) -> Decisions:
    """Decide what a configuration leaves open; None makes a mesh by ``config.mesh``.

    Raises:
        UsageError: the configuration does not fit the devices, or names something unknown.
    """
    # The devices, and what they compute with.
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    options = config.training
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    sums_on_cpu = on_cpu and any(mesh.shape[name] > 1 for name in BY_HAND)
    if sums_on_cpu and options.reduce_dtype != "float32":
        raise UsageError(
            f"training.reduce_dtype is {options.reduce_dtype}; "
            "it must be float32 on CPUs, where XLA sums no other"
        )
    if options.objective not in OBJECTIVES:
        raise unknown_name("objective", options.objective, OBJECTIVES)
    dtype = compute_dtype(config, mesh)
    attention = attention_of(config, mesh, dtype)
    trainable = trainable_of(config, dtype, mesh.shape)

    # The step.
    rules = ruleset(config.mesh)
    parallel = Parallelism(config.model, mesh, rules, dtype, options.reduce_dtype, dequantize)
    parallel = dataclasses.replace(parallel, specs=trainable.specs(parallel.weight_specs()))
    remat = "dots" if options.remat == "auto" else str(options.remat)
    chunk_tokens = loss_chunk_tokens(mesh.devices.flat[0], config.model.vocab_size)
    setup = Setup(
        config.model,
        make_optimizer(config.optimizer, options.steps),
        OBJECTIVES[options.objective],
        options,
        functions_of(attention, remat, chunk_tokens, mesh=mesh),
        trainable,
        parallel,
        options.accumulation,
        options.reduce_dtype,
        options.ema,
        options.spike_factor,
    )
    repeats_bits = is_deterministic(config, mesh, attention)
    return Decisions(mesh, dtype, attention, setup, repeats_bits)


def compute_dtype(config: TrainConfig, mesh: Mesh) -> np.dtype[Any]:
    """Return the dtype of activations and products: as configured, or by the platform."""
    name = config.training.dtype
    if name == "auto":
        name = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def attention_of(config: TrainConfig, mesh: Mesh, dtype: np.dtype[Any]) -> str:
    """Return the name of the attention implementation, with ``auto`` resolved for a mesh.

    Raises ``UsageError`` if the platform has no such implementation, or it has no backward pass.
    """
    platform = mesh.devices.flat[0].platform
    check_attention(config.training.attention, platform, backward=True)
    if config.training.attention != "auto":
        return config.training.attention
    seq_len = config.training.seq_len or config.model.max_seq_len
    window = config.model.sliding_window > 0
    chosen = choose_attention(seq_len, seq_len, platform=platform, dtype=dtype, window=window)
    # These two take no queries from inside a row.
    if mesh.shape["sequence"] > 1 and chosen in ("tokamax", "triton"):
        return "blocked"
    return chosen


def is_deterministic(config: TrainConfig, mesh: Mesh, attention: str) -> bool:
    """Return whether a GPU must repeat its bits; ``UsageError`` if its attention cannot."""
    setting = config.training.deterministic
    if mesh.devices.flat[0].platform != "gpu":
        return False
    if attention != "cudnn":
        return setting is not False
    if setting is True:  # cudnn's backward pass adds in any order
        raise UsageError(
            "training.deterministic is true, and training.attention cudnn is not: "
            "take another, or auto"
        )
    return False


def autotuning_options(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Return XLA's options that keep a GPU's choices of kernels in the run's folder.

    XLA chooses by timing, so a resumed run would otherwise choose others. JAX's cache of compiled
    programs keeps the choices by the same options.
    """
    if jax.default_backend() != "gpu" or config.training.deterministic is False:
        return {}
    mode = "UPDATE" if distributed.process_index() == 0 else "READ"
    return {
        "xla_gpu_per_fusion_autotune_cache_dir": str((folder / AUTOTUNING).absolute()),
        "xla_gpu_experimental_autotune_cache_mode": f"AUTOTUNE_CACHE_MODE_{mode}",
    }


# The programs


def compile_training(
    config: TrainConfig, mesh: Mesh | None = None, *, compiler_options: dict[str, Any] | None = None
) -> Training:
    """Return the programs of a training run, each compiled when it is first called.

    Examples:
        >>> data = jllama.prepare_data(jllama.DataConfig(path="my_texts/", tokenizer="bytes"))
        >>> model = jllama.LlamaConfig(259, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=64)
        >>> training = jllama.compile_training(jllama.TrainConfig(model))
        >>> state = training.init(jax.random.key(0))
        >>> batches = data.training_batches(batch_size=8, seq_len=64, seed=0)
        >>> for _ in range(2):
        ...     state, metrics = training.step(state, next(batches))
        >>> int(state.step)
        2

    Args:
        config: ``model`` (with its ``vocab_size``), ``optimizer``, ``mesh``, ``lora`` and
            ``training`` are read.
        mesh: the devices; None makes a mesh by ``config.mesh``.
        compiler_options: XLA's, for ``step`` and ``evaluate``, added to those of
            ``config.training``.

    Raises:
        UsageError: the configuration does not fit the devices, or names something unknown.
    """
    decisions = decide(config, mesh)
    mesh = decisions.mesh
    setup = decisions.setup
    trainable = setup.trainable
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    if on_cpu:
        keep_freed_memory()

    # How the state and batches are split over the mesh.
    initial = functools.partial(core.initial_state, setup)
    state = jax.eval_shape(initial, jax.random.key(0))
    trained = jax.eval_shape(trainable.select, state.params)
    shardings, trained_shardings = state_sharding(
        mesh, config.model, (state, trained), ruleset(config.mesh)
    )
    trained = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), trained, trained_shardings
    )
    batch_sharding = NamedSharding(mesh, BATCH)

    # The options of the compiler.
    xla_options = {**config.training.compiler_options, **(compiler_options or {})}
    if decisions.is_deterministic and device in jax.devices():
        # Kernels are only timed where the device is present; for an absent one XLA finds none that
        # it may exclude.
        xla_options.setdefault("xla_gpu_exclude_nondeterministic_ops", True)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small
    # model on two cores.
    init_options = {"xla_backend_optimization_level": 0} if on_cpu else None

    # The programs.
    init = jax.jit(
        initial, out_shardings=shardings, donate_argnums=1, compiler_options=init_options
    )
    step = jax.jit(
        functools.partial(core.take_step, setup),
        in_shardings=(shardings, batch_sharding),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=xla_options,
    )

    def compile_scoring(function: Any, outputs: core.Outputs) -> Any:
        scoring = jax.jit(
            functools.partial(map_over_devices, without_z_loss(setup), function, outputs),
            in_shardings=(shardings.params, batch_sharding, shardings.base),
            compiler_options=xla_options,
        )
        return lambda params, batch, base=None: scoring(params, batch, base)

    return Training(
        init=init,
        step=CheckedStep(step, config.model),
        evaluate=compile_scoring(core.evaluate, "sums"),
        log_probs=compile_scoring(local_log_probs, "rows"),
        drawn_log_probs=compile_scoring(local_drawn_log_probs, "rows"),
        decisions=decisions,
        shardings=shardings,
        batch_sharding=batch_sharding,
        trained=trained,
    )


def without_z_loss(setup: Setup) -> Setup:
    """Return the setup of an evaluation."""
    return setup._replace(options=dataclasses.replace(setup.options, z_loss=0.0))


def local_log_probs(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> Float[Array, "rows"]:
    """Return the summed log-probability of the targets of each of this device's rows."""
    return row_log_probs(functools.partial(core.forward, setup, weights, variables), targets)


def local_drawn_log_probs(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> Float[Array, "rows seq"]:
    """Return ``drawn_scores`` of this device's rows."""
    forward = functools.partial(core.forward, setup, weights, variables)
    log_probs, _ = drawn_scores(forward, targets, setup.options.grpo.max_answer_tokens)
    return log_probs


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """A compiled step that checks its batch first."""

    program: Any
    config: LlamaConfig

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Check the batch and take the step."""
        self.check(batch)
        return self.program(state, batch)

    def check(self, batch: Batch) -> None:
        """Raise ``UsageError`` for different shapes, and for ids outside the vocabulary.

        Ids in JAX arrays are not inspected: that would wait for them and copy them from their
        device.
        """
        shapes = [np.shape(array) for array in batch[:3]]
        if len({*shapes}) > 1 or len(shapes[0]) != 2:
            problem = f"a batch has tokens, segments and counted of {', '.join(map(str, shapes))}"
            raise UsageError(f"{problem}; each must be [rows, training.seq_len + 1]")
        if isinstance(batch.tokens, np.ndarray):
            check_ids(batch.tokens, self.config)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the program for arrays of these shapes, as ``jax.jit(...).lower`` does.

        Raises ``UsageError`` if the attention implementation cannot serve them.
        """
        try:
            return self.program.lower(state, batch)
        except UnsupportedAttention as error:
            raise UsageError(
                f"{error}: take another training.attention, or mesh.sequence"
            ) from error


def check_batch_divides(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ``UsageError`` if rows of a batch, or tokens of a row, do not divide over the mesh."""
    options = config.training
    num_devices = mesh.shape["data"] * mesh.shape["fsdp"]
    divisor = num_devices * options.accumulation
    expected = f"a multiple of {num_devices} device(s) times {options.accumulation} part(s)"
    check_fields(options, "training.", "batch_size", lambda size: size % divisor == 0, expected)
    ways = mesh.shape["sequence"]
    check_fields(
        options,
        "training.",
        "seq_len",
        lambda size: (size or config.model.max_seq_len) % ways == 0,
        f"a multiple of mesh.sequence, {ways}",
    )


def put_on_devices(batch: Any, sharding: NamedSharding) -> Any:
    """Return a batch's arrays on the devices; each process fills the rows of its own."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
        batch,
    )
