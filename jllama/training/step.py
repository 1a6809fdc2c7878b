"""One training step, and ``compile_training``, which compiles what a training loop needs.

A step, from top to bottom. ``theta`` is what is trained, ``n`` the number of targets that count::

    take_step                    theta, batch -> theta'
        map_over_devices         give each device its rows of the batch and its parts of the weights
            local_gradients      d loss_sum / d theta, summed over parts of the batch and devices
                local_loss       the objective (``jllama.training.objectives``)
                    forward_pass gather the weights, run the model
        apply_update             divide by n, clip, ask the optimizer, add

Functions named ``local_...`` run on each device inside ``jax.shard_map``.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jllama.config import LlamaConfig
from jllama.data.batches import Batch
from jllama.decode_params import DecodeParams
from jllama.devices import keep_freed_memory, loss_chunk_tokens
from jllama.errors import UsageError, check_fields, unknown_name
from jllama.functional import UnsupportedAttention, choose_attention
from jllama.model import LayerGather, Llama, build_model, check_attention, check_ids, initial_params
from jllama.parameters import Params
from jllama.sharding import BATCH, gather_groups, make_mesh, ruleset, state_sharding
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.exact import ExactConfig, ExactValues, exact_config
from jllama.training.objectives import (
    OBJECTIVES,
    Objective,
    Scalar,
    Sums,
    Targets,
    drawn_scores,
    row_log_probs,
)
from jllama.training.optimizer import make_optimizer
from jllama.training.parallel import BY_HAND, Parallelism
from jllama.training.trainable import Trainable, trainable_of


class TrainState(NamedTuple):
    """Everything that training changes. A step donates the state and returns a new one.

    ``params`` are float32 master weights, of which all or some (``training.trainable``) are
    trained. With ``lora`` they are the adapters (``jllama.lora``) of ``base``, which never changes.
    Moments in ``opt_state`` have ``optimizer.moment_dtype``. Randomness comes from ``key`` with
    ``step`` folded in.

    Examples:
        >>> model = jllama.LlamaConfig(512, num_layers=1, embed_dim=32, num_heads=2, max_seq_len=64)
        >>> training = jllama.compile_training(jllama.TrainConfig(model))
        >>> int(training.init(jax.random.key(0)).step)
        0
    """

    step: Int[Array, ""]  # the number of updates so far
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]
    base: Params | None = None
    # The running mean of gradient norms, with ``training.spike_factor``.
    usual_norm: Scalar | None = None
    average: Params | None = None  # the running mean of what is trained, with ``training.ema``


class StepMetrics(NamedTuple):
    """What a step measures, over the whole batch."""

    loss: Scalar  # the mean over counted targets in nats, or over pairs
    grad_norm: Scalar  # the global norm of the mean gradient, before clipping
    tokens: Scalar  # the number of input tokens without padding
    # Whether the loss or gradient was not finite or a spike; then parameters and optimizer are
    # unchanged.
    skipped: Bool[Array, ""]
    num_counted: Scalar  # what the loss was divided by
    figures: dict[str, Scalar]  # sums of the objective's further figures


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
    mesh: Mesh
    shardings: TrainState
    batch_sharding: NamedSharding
    trainable: Trainable
    trained: Params  # shapes and shardings of what is trained

    def weights(self, state: TrainState) -> Params:
        """Return the ``params`` to evaluate, with ``training.ema`` the running mean."""
        if state.average is None:
            return state.params
        return self.trainable.with_trained(state.params, state.average)

    def model_weights(self, state: TrainState) -> Params:
        """Return a whole model's weights from ``weights(state)``, adapters merged."""
        return self.trainable.merge(self.weights(state), state.base)


class Setup(NamedTuple):
    """What is fixed when a step is compiled."""

    config: TrainConfig
    parallel: Parallelism
    trainable: Trainable
    optimizer: optax.GradientTransformation
    specs: tuple[Any, Any, Any]  # partition specs of ``params``, ``base`` and gradients
    # Inside the step, with ``training.grpo.exact``: the sampler's weights, with stacked layers.
    exact: DecodeParams | None = None


# The step


def initial_state(
    setup: Setup,
    key: Key[Array, ""],
    params: Params | None = None,
    adapter: Params | None = None,
) -> TrainState:
    """Return the state before the first step, from fresh or given weights and adapters."""
    options = setup.config.training
    init_key, run_key = jax.random.split(key)
    weights = initial_params(init_key, setup.config.model) if params is None else params
    params, base = setup.trainable.init(init_key, weights)
    params = adapter or params
    trained = setup.trainable.select(params)
    usual_norm = jnp.zeros((), jnp.float32) if options.spike_factor else None
    average = trained if options.ema else None
    step = jnp.zeros((), jnp.int32)
    opt_state = setup.optimizer.init(trained)
    return TrainState(step, params, opt_state, run_key, base, usual_norm, average)


def take_step(
    setup: Setup, state: TrainState, batch: Batch, exact: DecodeParams | None = None
) -> tuple[TrainState, StepMetrics]:
    """Update the state by one batch."""
    # The objective's sums over the batch, and their gradients.
    *_, gradient_specs = setup.specs
    outputs = PartitionSpec(), gradient_specs
    sums, gradient_sums = map_over_devices(
        setup, local_gradients, outputs, state.params, batch, state.base, exact
    )
    loss_sum, count, figures = sums

    # One step of the optimizer by their means.
    count = jnp.maximum(count, 1.0)
    state, grad_norm, is_accepted = apply_update(setup, state, loss_sum, count, gradient_sums)
    num_tokens = jnp.sum(batch.segments[:, :-1] != 0, dtype=jnp.float32)
    return state, StepMetrics(loss_sum / count, grad_norm, num_tokens, ~is_accepted, count, figures)


def map_over_devices(
    setup: Setup,
    function: Any,
    outputs: Any,
    params: Params,
    batch: Batch,
    base: Params | None,
    exact: DecodeParams | None = None,
) -> Any:
    """Call ``function(setup, weights, variables, targets)`` on each device with its parts.

    ``weights`` and ``variables``, which the loss is differentiated by, come from
    ``Trainable.split``. ``outputs`` are the partition specs by which the devices' results make up
    the whole.
    """
    parallel = setup.parallel
    trainable = setup.trainable
    targets = targets_of(setup, batch)
    params_specs, base_specs, _ = setup.specs
    target_specs = jax.tree.map(parallel.batch_spec, targets)

    def local(params: Params, base: Params | None, targets: Targets, exact: Any) -> Any:
        variables, weights = trainable.split(params, base, setup.config.training.reduce_dtype)
        return function(setup._replace(exact=exact), weights, variables, targets)

    mapped = jax.shard_map(
        local,
        mesh=parallel.mesh,
        in_specs=(params_specs, base_specs, target_specs, PartitionSpec()),
        out_specs=outputs,
        axis_names={*BY_HAND},
        check_vma=False,
    )
    device = parallel.mesh.local_devices[0]
    on_gpu = device.platform == "gpu"  # tokamax asks for the default device
    with jax.default_device(device) if on_gpu else contextlib.nullcontext():
        return mapped(params, base, targets, exact)


def targets_of(setup: Setup, batch: Batch) -> Targets:
    """Return inputs and targets: token ``t`` predicts token ``t + 1`` of its segment."""
    has_answers = batch.reference is not None or batch.sampled is not None
    if has_answers and setup.parallel.mesh.shape["sequence"] > 1:
        raise UsageError(
            "mesh.sequence is over 1, and answers cannot be split along it: leave it out"
        )
    same_segment = batch.segments[:, :-1] == batch.segments[:, 1:]
    counted = batch.counted[:, 1:] & same_segment
    sampled = jax.tree.map(_of_targets, batch.sampled)
    return Targets(
        inputs=batch.tokens[:, :-1],
        targets=batch.tokens[:, 1:],
        segments=batch.segments[:, :-1],
        counted=counted,
        reference=batch.reference,
        sampled=sampled,
    )


def _of_targets(array: Array) -> Array:
    """Return the columns ``[rows, seq]`` of the targets; ``[rows]`` stays."""
    return array[:, 1:] if array.ndim > 1 else array


def local_gradients(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> tuple[Sums, Params]:
    """Return the objective's sums over the whole batch, and this device's part of the gradients."""
    options = setup.config.training
    loss = functools.partial(local_loss, setup, options, weights)
    loss_and_gradients = jax.value_and_grad(loss, has_aux=True)
    if options.accumulation == 1:
        (loss_sum, others), gradients = loss_and_gradients(variables, targets)
    else:
        # Sums of the parts are added in float32 and divided once, so that a part weighs by its
        # number of targets.
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(options.accumulation, -1, *leaf.shape[1:]), targets
        )
        loss_sums = jax.eval_shape(loss, variables, jax.tree.map(lambda leaf: leaf[0], parts))
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (loss_sums, variables)
        )

        def add_part(sums: Any, part: Targets) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, loss_and_gradients(variables, part)), None

        ((loss_sum, others), gradients), _ = jax.lax.scan(add_part, zeros, parts)
    return jax.lax.psum((loss_sum, *others), BY_HAND), setup.parallel.sum_gradients(gradients)


def local_loss(
    setup: Setup, options: LoopConfig, weights: Params, variables: Params, targets: Targets
) -> tuple[Scalar, tuple[Scalar, dict[str, Scalar]]]:
    """Return the objective's sum over this device's rows, and its sums that have no gradient."""
    objective = choose_objective(options, targets)
    forward = functools.partial(forward_pass, setup, weights, variables)
    loss_sum, count, figures = objective(forward, targets, options)
    return loss_sum, (count, figures)


def choose_objective(options: LoopConfig, targets: Targets) -> Objective:
    """Return the configured objective; ``auto`` chooses ``preference`` for pairs of answers."""
    name = options.objective
    if name == "auto":
        name = "next_token" if targets.reference is None else "preference"
        if targets.sampled is not None:
            name = "grpo"
    if name == "grpo" and targets.sampled is None:
        raise UsageError(
            "training.objective is grpo, and the batch has no answers of the model: "
            "give reward and prompts, or another objective"
        )
    if name == "preference" and targets.reference is None:
        raise UsageError(
            "training.objective is preference, and the data has no pairs of answers: leave it out"
        )
    return OBJECTIVES[name]


def forward_pass(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> tuple[Llama, Float[Array, "rows seq embed"]]:
    """Return the model with its whole head, and the final activations of this device's tokens."""
    config = setup.config
    parallel = setup.parallel
    params, slots = setup.trainable.assemble(variables, weights)

    # Embedding and layers; a layer's weights are gathered when it runs.
    gathered = dict(params)
    for name in ("embed", "final_norm"):
        gathered[name] = parallel.gather(name, params[name], slots[name])
    values = None
    if setup.exact:
        exact = exact_config(config.model, sampler_block(config, parallel.mesh))
        values = ExactValues(exact, setup.exact, targets.segments)
    llama = build_model(config.model, gathered)
    llama.values = values
    hidden = llama.hidden(
        targets.inputs,
        targets.segments,
        parallel.positions(targets.inputs),
        remat="dots" if config.training.remat == "auto" else str(config.training.remat),
        attention=attention_of(config, parallel.mesh),
        parallel=LayerGather(parallel.gather_layer, parallel.mesh, slots["layers"]),
    )

    # The head is gathered last, and its gradient is summed before the backward pass of the layers
    # begins.
    head = "embed" if config.model.tie_embeddings else "lm_head"
    slot = slots[head]
    if slot is not None and gather_groups(parallel.mesh):
        hidden, slot = jax.lax.optimization_barrier((hidden, slot))
    gathered[head] = parallel.gather(head, params[head], slot)
    llama = build_model(config.model, gathered)
    llama.values = values
    llama.chunk_tokens = loss_chunk_tokens(parallel.mesh.devices.flat[0], config.model.vocab_size)
    return llama, hidden


def sampler_block(config: TrainConfig, mesh: Mesh) -> int:
    """Return how many answers each device generates at once, so many tokens has an exact block."""
    return config.training.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])


def apply_update(
    setup: Setup,
    state: TrainState,
    loss_sum: Scalar,
    count: Scalar,
    gradient_sums: Params,
) -> tuple[TrainState, Scalar, Bool[Array, ""]]:
    """Update by summed gradients; return the state, the mean gradient's norm, and acceptance.

    A step is rejected if its loss or gradient is not finite, or if ``norm > spike_factor *
    usual_norm``; it only advances the step counter. ``usual_norm`` is a running mean of accepted
    norms with decay 0.98.

    The running mean of ``training.ema`` moves by ``1 - decay`` of its distance to what is trained.
    In step ``n``, counted from 1, ``decay = min(ema, n / (n + 9))``, so that early steps forget the
    initial weights.
    """
    options = setup.config.training
    trainable = setup.trainable
    with jax.named_scope("optimizer"):
        norm = optax.tree.norm(_mean_gradients(gradient_sums, count))
        usual_norm = state.usual_norm
        is_accepted = jnp.isfinite(loss_sum) & jnp.isfinite(norm)
        if usual_norm is not None:
            is_accepted &= (usual_norm == 0) | (norm <= options.spike_factor * usual_norm)
            new_norm = jnp.where(usual_norm == 0, norm, 0.98 * usual_norm + 0.02 * norm)
            usual_norm = jnp.where(is_accepted, new_norm, usual_norm)

        def update(
            turn: Array, old: tuple[Params, optax.OptState, Any]
        ) -> tuple[Params, optax.OptState, Any]:
            params, opt_state, average = old
            # The barrier keeps the mean gradients' products in the loop.
            sums, _ = jax.lax.optimization_barrier((gradient_sums, turn))
            trained = trainable.select(params)
            gradients = _mean_gradients(sums, count)
            updates, opt_state = setup.optimizer.update(gradients, opt_state, trained)
            trained = jax.tree.map(jnp.add, trained, updates)
            if average is not None:
                share = jnp.maximum(1 - options.ema, 9 / (state.step + 10)).astype(jnp.float32)
                average = jax.tree.map(
                    lambda mean, leaf: mean + share * (leaf - mean), average, trained
                )
            return trainable.with_trained(params, trained), opt_state, average

        # A loop of one turn, or of none, changes its carry in place. A cond copies all of it on
        # GPUs with jax 0.10, and a where after the update does on CPUs.
        num_turns = is_accepted.astype(jnp.int32)
        old = state.params, state.opt_state, state.average
        params, opt_state, average = jax.lax.fori_loop(0, num_turns, update, old)
    step = state.step + 1
    updated = TrainState(step, params, opt_state, state.key, state.base, usual_norm, average)
    return updated, norm, is_accepted


def _mean_gradients(gradient_sums: Params, count: Scalar) -> Params:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) / count.astype(jnp.float32), gradient_sums
    )


# Evaluation


def local_evaluation(setup: Setup, weights: Params, variables: Params, targets: Targets) -> Sums:
    """Return the objective's sums over the whole batch, without z-loss."""
    options = dataclasses.replace(setup.config.training, z_loss=0.0)
    loss_sum, others = local_loss(setup, options, weights, variables, targets)
    return jax.lax.psum((loss_sum, *others), BY_HAND)


def local_log_probs(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> Float[Array, "rows"]:
    """Return the summed log-probability of the targets of each of this device's rows."""
    return row_log_probs(functools.partial(forward_pass, setup, weights, variables), targets)


def local_drawn_log_probs(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> Float[Array, "rows seq"]:
    """Return ``drawn_scores`` of this device's rows."""
    forward = functools.partial(forward_pass, setup, weights, variables)
    max_answer_tokens = setup.config.training.grpo.max_answer_tokens
    log_probs, _ = drawn_scores(forward, targets, max_answer_tokens)
    return log_probs


# Compilation


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
    # What the programs are made for.
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    options = config.training
    device = mesh.devices.flat[0]
    on_cpu = device.platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    sums_on_cpu = on_cpu and any(mesh.shape[name] > 1 for name in BY_HAND)
    if sums_on_cpu and options.reduce_dtype != "float32":
        raise UsageError(
            f"training.reduce_dtype is {options.reduce_dtype}; "
            "it must be float32 on CPUs, where XLA sums no other"
        )
    if options.objective not in ("auto", *OBJECTIVES):
        raise unknown_name("objective", options.objective, ["auto", *OBJECTIVES])
    attention_of(config, mesh)
    dtype = compute_dtype(config, mesh)
    trainable = trainable_of(config, dtype, mesh.shape)
    optimizer = make_optimizer(config.optimizer, options.steps)
    parallel = Parallelism(config, mesh, dtype)
    specs = trainable.specs(parallel.weight_specs())
    setup = Setup(config, parallel, trainable, optimizer, specs)

    # How the state and batches are split over the mesh.
    initial = functools.partial(initial_state, setup)
    state = jax.eval_shape(initial, jax.random.key(0))
    trained = jax.eval_shape(trainable.select, state.params)
    shardings, trained_shardings = state_sharding(
        mesh, config.model, (state, trained), ruleset(config.mesh)
    )
    trained = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), trained, trained_shardings
    )
    batch_sharding = NamedSharding(mesh, BATCH)

    # The programs.
    xla_options = {**options.compiler_options, **(compiler_options or {})}
    if options.grpo.exact:
        xla_options |= ExactConfig.compiler_options
    if is_deterministic(config, mesh) and device in jax.devices():
        # Kernels are only timed where the device is present; for an absent one XLA finds none that
        # it may exclude.
        xla_options.setdefault("xla_gpu_exclude_nondeterministic_ops", True)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small
    # model on two cores.
    init_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    init = jax.jit(
        initial, out_shardings=shardings, donate_argnums=1, compiler_options=init_options
    )
    # The sampler's weights are whole on each device.
    exact = (NamedSharding(mesh, PartitionSpec()),) if options.grpo.exact else ()
    step = jax.jit(
        functools.partial(take_step, setup),
        in_shardings=(shardings, batch_sharding, *exact),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=xla_options,
    )

    def compile_scoring(function: Any, outputs: PartitionSpec) -> Any:
        scoring = jax.jit(
            functools.partial(map_over_devices, setup, function, outputs),
            in_shardings=(shardings.params, batch_sharding, shardings.base, *exact),
            compiler_options=xla_options,
        )
        return lambda params, batch, base=None, *others: scoring(params, batch, base, *others)

    return Training(
        init,
        CheckedStep(step, config.model),
        compile_scoring(local_evaluation, PartitionSpec()),
        compile_scoring(local_log_probs, BATCH),
        compile_scoring(local_drawn_log_probs, BATCH),
        mesh,
        shardings,
        batch_sharding,
        trainable,
        trained,
    )


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """A compiled step that checks its batch first."""

    program: Any
    config: LlamaConfig

    def __call__(
        self, state: TrainState, batch: Batch, *exact: DecodeParams
    ) -> tuple[TrainState, StepMetrics]:
        """Check the batch and take the step."""
        self.check(batch)
        return self.program(state, batch, *exact)

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

    def lower(self, state: Any, batch: Any, *exact: Any) -> Any:
        """Lower the program for arrays of these shapes, as ``jax.jit(...).lower`` does.

        Raises ``UsageError`` if the attention implementation cannot serve them.
        """
        try:
            return self.program.lower(state, batch, *exact)
        except UnsupportedAttention as error:
            raise UsageError(
                f"{error}: take another training.attention, or mesh.sequence"
            ) from error


def compute_dtype(config: TrainConfig, mesh: Mesh) -> np.dtype[Any]:
    """Return the dtype of activations and products: as configured, or by the platform."""
    name = config.training.dtype
    if name == "auto":
        name = "float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def attention_of(config: TrainConfig, mesh: Mesh) -> str:
    """Return the name of the attention implementation, with ``auto`` resolved for a mesh.

    Raises ``UsageError`` if the platform has no such implementation, or it has no backward pass.
    """
    platform = mesh.devices.flat[0].platform
    dtype = compute_dtype(config, mesh)
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


def is_deterministic(config: TrainConfig, mesh: Mesh) -> bool:
    """Return whether a GPU must repeat its bits; ``UsageError`` if its attention cannot."""
    setting = config.training.deterministic
    if mesh.devices.flat[0].platform != "gpu":
        return False
    if attention_of(config, mesh) != "cudnn":
        return setting is not False
    if setting is True:  # cudnn's backward pass adds in any order
        raise UsageError(
            "training.deterministic is true, and training.attention cudnn is not: "
            "take another, or auto"
        )
    return False


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
