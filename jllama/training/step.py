"""One step of training, and ``compile_training``: what a training loop needs, compiled.

A step reads from top to bottom: ``step`` splits the batch over the devices, each of which calculates ``gradients`` of
an objective (``jllama.training.objectives``), whose ``forward`` pass gathers the weights; ``updated`` applies them.
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
from jllama.devices import keep_freed_memory, loss_chunk_tokens
from jllama.errors import UsageError, check_fields, unknown_name
from jllama.functional import choose_attention
from jllama.model import Llama, Parallel, build_model, check_attention, check_ids, initial_params
from jllama.parameters import Params
from jllama.sharding import BATCH, gather_stages, make_mesh, ruleset, state_sharding
from jllama.training.config import LoopConfig, TrainConfig
from jllama.training.objectives import OBJECTIVES, Objective, Sums, Targets, row_log_probs
from jllama.training.optimizer import make_optimizer
from jllama.training.parallel import BY_HAND, Parallelism
from jllama.training.trainable import Trainable, trainable_of


class TrainState(NamedTuple):
    """All that training changes: donated to each step and returned anew; what needs randomness folds step into key.

    ``step`` counts the updates; ``params`` are float32: the master weights, all of them or (``training.trainable``)
    some of which are trained, or with ``lora`` the adapters (``jllama.lora``) of ``base``, which stays as it is;
    moments are of ``optimizer.moment_dtype``.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]
    base: Params | None = None
    usual_norm: Float[Array, ""] | None = (
        None  # with ``spike_factor``, the running mean of gradient norms
    )
    average: Params | None = None  # with ``training.ema``, the running mean of what is trained


class StepMetrics(NamedTuple):
    """A step's mean loss in nats per target that counts, or per pair; the global gradient norm before clipping; the
    number of tokens that were fed, without padding; whether it was ``skipped``: its loss or gradient was not finite or
    a spike, and parameters and optimizer are as they were; how many losses the mean is of, and the sums of the
    objective's further figures.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Float[Array, ""]
    skipped: Bool[Array, ""]
    num_counted: Float[Array, ""]
    figures: dict[str, Float[Array, ""]]


class Training(NamedTuple):
    """What ``compile_training`` gives: programs, and how the state and the rows of batches are split over a mesh.

    ``init(key, params=None)`` gives the ``TrainState`` before the first step, from fresh or given parameters;
    ``step(state, batch)`` one update, ``(state, StepMetrics)``, where the state given is donated: use the one returned;
    a batch is a ``Batch`` (``text_batch`` makes one of windows of text); an id that is no token's is refused
    (``UsageError``) in NumPy's arrays, and in JAX's makes the step one that is left out;
    ``evaluate(params, batch, base=None)`` the sums ``(nats, count, figures)`` of the objective over a batch, without
    z-loss; ``log_probs``, of the same arguments, the summed log-probability of each row's targets. ``base`` is the
    state's. ``trainable`` says what of ``params`` is trained, ``trained`` has its shapes and shardings, and
    ``weights(state)`` gives those to evaluate.
    """

    init: Any
    step: Any
    evaluate: Any
    log_probs: Any
    mesh: Mesh
    shardings: TrainState
    batch_sharding: NamedSharding
    trainable: Trainable
    trained: Params

    def weights(self, state: TrainState) -> Params:
        """The ``params`` to evaluate: with ``training.ema`` their running mean is in place of what is trained."""
        return (
            state.params
            if state.average is None
            else self.trainable.replaced(state.params, state.average)
        )

    def model_weights(self, state: TrainState) -> Params:
        """The weights of a whole model with ``weights(state)``, adapters merged into their base."""
        return self.trainable.merged(self.weights(state), state.base)


class Setup(NamedTuple):
    """What the programs of a run are made for."""

    config: TrainConfig
    parallel: Parallelism
    trainable: Trainable
    optimizer: optax.GradientTransformation


def compile_training(
    config: TrainConfig, mesh: Mesh | None = None, *, compiler_options: dict[str, Any] | None = None
) -> Training:
    """The programs of a training run, each compiled when it is first called; UsageError if it cannot be.

    Example::

        training = compile_training(config)
        state = training.init(jax.random.key(config.seed))
        bos_id = data.tokenizer.bos_id
        for batch in training_batches(data.train, bos_id=bos_id, batch_size=8, seq_len=128, seed=0):
            state, metrics = training.step(state, batch)

    Args:
        config: of which ``model`` (with its ``vocab_size``), ``optimizer``, ``mesh`` and ``training`` count.
        mesh: the devices; None makes one as ``config.mesh`` says.
        compiler_options: XLA's, for ``step`` and ``evaluate``, besides those of ``config.training``.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    options = config.training
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    if on_cpu and any(mesh.shape[name] > 1 for name in BY_HAND):
        check_fields(
            options,
            "training.",
            "reduce_dtype",
            "float32".__eq__,
            "float32 on CPUs, where XLA sums no other",
        )
    if options.objective not in ("auto", *OBJECTIVES):
        raise unknown_name("objective", options.objective, ["auto", *OBJECTIVES])
    attention_of(config, mesh)
    dtype = compute_dtype(config, mesh)
    trainable = trainable_of(config, dtype, mesh.shape)
    optimizer = make_optimizer(config.optimizer, options.steps)
    setup = Setup(config, Parallelism(config, mesh, dtype), trainable, optimizer)

    # How the state and batches are split, and the programs for them.
    initial = functools.partial(initial_state, setup)
    shapes = jax.eval_shape(initial, jax.random.key(0))
    rules = ruleset(config.mesh)
    state = state_sharding(mesh, config.model, shapes, rules)
    where = state_sharding(
        mesh, config.model, jax.eval_shape(trainable.trained, shapes.params), rules
    )
    trained = jax.eval_shape(jax.jit(trainable.trained, out_shardings=where), shapes.params)
    batch = NamedSharding(mesh, BATCH)
    xla = {**options.compiler_options, **(compiler_options or {})}
    if is_deterministic(config, mesh) and mesh.devices.flat[0] in jax.devices():
        # Of kernels that are timed. Without a device none is, and XLA finds none that it could take so.
        xla.setdefault("xla_gpu_exclude_nondeterministic_ops", True)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small model on two cores.
    quick = {"xla_backend_optimization_level": 0} if on_cpu else None
    step = jax.jit(
        functools.partial(take_step, setup),
        in_shardings=(state, batch),
        out_shardings=(state, None),
        donate_argnums=0,
        compiler_options=xla,
    )

    def scoring(function: Any, outputs: PartitionSpec) -> Any:
        """A program that takes ``params, batch, base=None``."""
        compiled = jax.jit(
            functools.partial(on_each_device, setup, function, outputs),
            in_shardings=(state.params, batch, state.base),
            compiler_options=xla,
        )
        return lambda params, batch, base=None: compiled(params, batch, base)

    return Training(
        jax.jit(initial, out_shardings=state, donate_argnums=1, compiler_options=quick),
        CheckedStep(step, config.model),
        scoring(local_evaluation, PartitionSpec()),
        scoring(local_log_probs, BATCH),
        mesh,
        state,
        batch,
        trainable,
        trained,
    )


def initial_state(setup: Setup, key: Key[Array, ""], params: Params | None = None) -> TrainState:
    """The state before the first step, from fresh or given weights."""
    init_key, run_key = jax.random.split(key)
    weights = initial_params(init_key, setup.config.model) if params is None else params
    params, base = setup.trainable.init(init_key, weights)
    trained = setup.trainable.trained(params)
    options = setup.config.training
    usual_norm = jnp.zeros((), jnp.float32) if options.spike_factor else None
    average = trained if options.ema else None
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        setup.optimizer.init(trained),
        run_key,
        base,
        usual_norm,
        average,
    )


def take_step(setup: Setup, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """One update of the state by a batch."""
    *_, gradient_specs = setup.trainable.specs(setup.parallel.weight_specs())
    outputs = PartitionSpec(), gradient_specs
    (total, count, figures), sums = on_each_device(
        setup, gradients, outputs, state.params, batch, state.base
    )
    count = jnp.maximum(count, 1.0)
    state, norm, accepted = updated(setup, state, total, count, sums)
    tokens = jnp.sum(batch.segments[:, :-1] != 0, dtype=jnp.float32)
    return state, StepMetrics(total / count, norm, tokens, ~accepted, count, figures)


def objective_of(options: LoopConfig, targets: Targets) -> Objective:
    """The configured objective, or the one that suits the batch; ``UsageError`` if the batch is not made for it."""
    name = options.objective
    if name == "auto":
        name = "next_token" if targets.reference is None else "preference"
    if name == "preference" and targets.reference is None:
        raise UsageError(
            "training.objective is preference, and the data has no pairs of answers: leave it out"
        )
    return OBJECTIVES[name]


def targets_of(setup: Setup, batch: Batch) -> Targets:
    """What each token of a batch predicts."""
    if batch.reference is not None and setup.parallel.mesh.shape["sequence"] > 1:
        raise UsageError(
            "mesh.sequence is over 1, and pairs of answers are not split so: leave it out"
        )
    same_segment = batch.segments[:, :-1] == batch.segments[:, 1:]
    counted = batch.counted[:, 1:] & same_segment
    return Targets(
        batch.tokens[:, :-1], batch.tokens[:, 1:], batch.segments[:, :-1], counted, batch.reference
    )


def on_each_device(
    setup: Setup, function: Any, outputs: Any, params: Params, batch: Batch, base: Params | None
) -> Any:
    """Call ``function(setup, weights, learned, targets)`` on each device with its parts of the weights and of a batch.

    ``outputs`` says how the devices' results make up the whole.
    """
    parallel = setup.parallel
    targets = targets_of(setup, batch)
    params_specs, base_specs, _ = setup.trainable.specs(parallel.weight_specs())
    inputs = params_specs, base_specs, jax.tree.map(parallel.batch_spec, targets)
    split: Any = {
        "in_specs": inputs,
        "out_specs": outputs,
        "axis_names": {*BY_HAND},
        "check_vma": False,
    }
    local = functools.partial(on_one_device, setup, function)
    spread = jax.shard_map(local, mesh=parallel.mesh, **split)
    device = parallel.mesh.local_devices[0]
    with (
        jax.default_device(device) if device.platform == "gpu" else contextlib.nullcontext()
    ):  # tokamax asks for it
        return spread(params, base, targets)


# On each device


def on_one_device(
    setup: Setup, function: Any, params: Params, base: Params | None, targets: Targets
) -> Any:
    """Call ``function(setup, weights, learned, targets)``: see ``Trainable.learned`` for the two."""
    learned, weights = setup.trainable.learned(params, base, setup.config.training.reduce_dtype)
    return function(setup, weights, learned, targets)


def gradients(
    setup: Setup, weights: Params, learned: Params, targets: Targets
) -> tuple[Sums, Params]:
    """The sums of an objective over the whole batch, and this device's part of their gradients."""
    options = setup.config.training
    loss = functools.partial(local_loss, setup, options, weights)
    gradient = jax.value_and_grad(loss, has_aux=True)
    if options.accumulation == 1:
        (total, others), sums = gradient(learned, targets)
    else:
        # The parts' sums are added in float32 and divided once, so that parts weigh by their numbers of targets.
        parts = jax.tree.map(
            lambda each: each.reshape(options.accumulation, -1, *each.shape[1:]), targets
        )
        totals = jax.eval_shape(loss, learned, jax.tree.map(lambda each: each[0], parts))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (totals, learned))

        def add(sums: Any, part: Targets) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, gradient(learned, part)), None

        ((total, others), sums), _ = jax.lax.scan(add, zeros, parts)
    return setup.parallel.sum((total, *others)), setup.parallel.sum_gradients(sums)


def local_evaluation(setup: Setup, weights: Params, learned: Params, targets: Targets) -> Sums:
    """The sums of an objective over the whole batch, without z-loss."""
    options = dataclasses.replace(setup.config.training, z_loss=0.0)
    total, others = local_loss(setup, options, weights, learned, targets)
    return setup.parallel.sum((total, *others))


def local_log_probs(
    setup: Setup, weights: Params, learned: Params, targets: Targets
) -> Float[Array, "rows"]:
    """The summed log-probability of the targets of each of this device's rows."""
    return row_log_probs(functools.partial(forward, setup, weights, learned), targets)


def local_loss(
    setup: Setup, options: LoopConfig, weights: Params, learned: Params, targets: Targets
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]:
    """An objective's sum over this device's rows, which has a gradient, and the sums that have none."""
    objective = objective_of(options, targets)
    total, count, figures = objective(
        functools.partial(forward, setup, weights, learned), targets, options
    )
    return total, (count, figures)


def forward(
    setup: Setup, weights: Params, learned: Params, targets: Targets
) -> tuple[Llama, Float[Array, "rows seq embed"]]:
    """The model with its whole head, and the final activations of this device's tokens."""
    config, parallel = setup.config, setup.parallel
    params, gradient_of = setup.trainable.assemble(learned, weights)
    ready = dict(params)
    for name in ("embed", "final_norm"):
        ready[name] = parallel.gather(name, params[name], gradient_of[name])
    hidden = build_model(config.model, ready).hidden(
        targets.inputs,
        targets.segments,
        parallel.positions(targets.inputs),
        remat="dots" if config.training.remat == "auto" else str(config.training.remat),
        attention=attention_of(config, parallel.mesh),
        parallel=Parallel(parallel.gather_layer, parallel.mesh, gradient_of["layers"]),
    )
    # The head is gathered last, and its gradient summed before the backward pass of the layers begins.
    head = "embed" if config.model.tie_embeddings else "lm_head"
    gradient = gradient_of[head]
    if gradient is not None and gather_stages(parallel.mesh):
        hidden, gradient = jax.lax.optimization_barrier((hidden, gradient))
    ready[head] = parallel.gather(head, params[head], gradient)
    llama = build_model(config.model, ready)
    llama.chunk_tokens = loss_chunk_tokens(parallel.mesh.devices.flat[0], config.model.vocab_size)
    return llama, hidden


# On all devices


def updated(
    setup: Setup, state: TrainState, total: Float[Array, ""], count: Float[Array, ""], sums: Params
) -> tuple[TrainState, Float[Array, ""], Bool[Array, ""]]:
    """The state after an update by summed gradients, their norm, and whether the step was accepted.

    Of one that is not, only the count of steps goes on: its loss or gradient is not finite, or a spike. The running
    mean of ``training.ema`` moves by ``1 - decay`` of its way to what is trained, where the ``decay`` of step ``n``,
    counted from 1, is ``min(ema, n / (n + 9))``: early steps do not hold on to the initial weights.
    """
    options, trainable = setup.config.training, setup.trainable
    with jax.named_scope("optimizer"):
        norm = optax.tree.norm(_means(sums, count))
        usual = state.usual_norm
        accepted = jnp.isfinite(total) & jnp.isfinite(norm)
        if usual is not None:
            accepted &= (usual == 0) | (norm <= options.spike_factor * usual)
            usual = jnp.where(
                accepted, jnp.where(usual == 0, norm, 0.98 * usual + 0.02 * norm), usual
            )

        def update(
            turn: Array, old: tuple[Params, optax.OptState, Any]
        ) -> tuple[Params, optax.OptState, Any]:
            params, opt_state, average = old
            own_sums, _ = jax.lax.optimization_barrier(
                (sums, turn)
            )  # keeps its products in the loop
            trained = trainable.trained(params)
            updates, opt_state = setup.optimizer.update(_means(own_sums, count), opt_state, trained)
            trained = jax.tree.map(jnp.add, trained, updates)
            if average is not None:
                share = jnp.maximum(1 - options.ema, 9 / (state.step + 10)).astype(jnp.float32)
                average = jax.tree.map(
                    lambda mean, leaf: mean + share * (leaf - mean), average, trained
                )
            return trainable.replaced(params, trained), opt_state, average

        # A loop of one turn, or of none, changes its carry in place. A cond copies all of it on GPUs with jax 0.10,
        # and a where after the update does on CPUs.
        turns = accepted.astype(jnp.int32)
        old = state.params, state.opt_state, state.average
        params, opt_state, average = jax.lax.fori_loop(0, turns, update, old)
    return (
        TrainState(state.step + 1, params, opt_state, state.key, state.base, usual, average),
        norm,
        accepted,
    )


def _means(sums: Params, count: Float[Array, ""]) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / count.astype(jnp.float32), sums)


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """A compiled step, before which ``check`` looks at the batch."""

    program: Any
    config: LlamaConfig

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take the step."""
        self.check(batch)
        return self.program(state, batch)

    def check(self, batch: Batch) -> None:
        """Raise ``UsageError`` for arrays of other shapes, and for an id that is no token's in NumPy's.

        Arrays of JAX are not looked at: they would have to be waited for, and copied from their device.
        """
        shapes = [np.shape(each) for each in batch[:3]]
        if len({*shapes}) > 1 or len(shapes[0]) != 2:
            said = f"a batch has tokens, segments and counted of {', '.join(map(str, shapes))}"
            raise UsageError(f"{said}; each must be [rows, training.seq_len + 1]")
        if isinstance(batch.tokens, np.ndarray):
            check_ids(batch.tokens, self.config)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the program for arrays of these shapes, as ``jax.jit(...).lower`` does."""
        return self.program.lower(state, batch)


def attention_of(config: TrainConfig, mesh: Mesh) -> str:
    """The attention implementation of a configuration, ``auto`` resolved for a mesh; UsageError if it has none such."""
    platform, dtype = mesh.devices.flat[0].platform, compute_dtype(config, mesh)
    check_attention(config.training.attention, platform, backward=True)
    seq_len = config.training.seq_len or config.model.max_seq_len
    chosen = choose_attention(seq_len, seq_len, platform=platform, dtype=dtype)
    if mesh.shape["sequence"] > 1 and chosen in (
        "tokamax",
        "triton",
    ):  # which take no queries from inside a row
        chosen = "blocked"
    return chosen if config.training.attention == "auto" else config.training.attention


def is_deterministic(config: TrainConfig, mesh: Mesh) -> bool:
    """Whether a GPU is to leave out what gives other bits each time; ``UsageError`` if its attention cannot."""
    platform, wanted = mesh.devices.flat[0].platform, config.training.deterministic
    can = attention_of(config, mesh) != "cudnn"  # whose backward pass adds in any order
    if platform == "gpu" and wanted is True and not can:
        raise UsageError(
            "training.deterministic is true, and training.attention cudnn is not: take another, or auto"
        )
    return platform == "gpu" and can and wanted is not False


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ``UsageError`` for a batch whose rows, or rows whose tokens, do not divide over the mesh."""
    options = config.training
    ways, sequence = (
        mesh.shape["data"] * mesh.shape["fsdp"] * options.accumulation,
        mesh.shape["sequence"],
    )
    said = f"a multiple of {ways // options.accumulation} device(s) times {options.accumulation} part(s)"
    check_fields(options, "training.", "batch_size", lambda size: size % ways == 0, said)
    said = f"a multiple of mesh.sequence, {sequence}"
    check_fields(
        options,
        "training.",
        "seq_len",
        lambda size: (size or config.model.max_seq_len) % sequence == 0,
        said,
    )


def on_devices(batch: Any, sharding: NamedSharding) -> Any:
    """A batch's arrays, of whose rows each process has those of its own devices."""
    return jax.tree.map(
        lambda each: jax.make_array_from_callback(each.shape, sharding, each.__getitem__), batch
    )


def compute_dtype(config: TrainConfig, mesh: Mesh) -> np.dtype[Any]:
    """The dtype of activations and products: as configured, or by the platform."""
    name, platform = config.training.dtype, mesh.devices.flat[0].platform
    return jnp.dtype(name if name != "auto" else "float32" if platform == "cpu" else "bfloat16")
