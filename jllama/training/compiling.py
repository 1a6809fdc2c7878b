"""``compile_training``: the programs of a training run, from its configuration."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from jllama.core import UsageError
from jllama.core import step as core
from jllama.core.config import LlamaConfig
from jllama.core.model import check_ids
from jllama.core.ops import balanced_route
from jllama.core.parameters import Params
from jllama.core.step import Batch, Setup, StepMetrics, Targets, TrainState, map_over_devices
from jllama.functional import UnsupportedAttention
from jllama.models.build import functions_of
from jllama.models.lora import dequantize
from jllama.parallel.exchange import Parallelism
from jllama.parallel.sharding import state_sharding
from jllama.parallel.shards import BATCH
from jllama.system.devices import loss_chunk_tokens
from jllama.system.machine import keep_freed_memory
from jllama.training.config import TrainConfig
from jllama.training.objectives import OBJECTIVES, drawn_scores, row_log_probs
from jllama.training.optimizer import make_optimizer
from jllama.training.plan import Plan, decide
from jllama.training.trainable import FullWeights


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
    plan: Plan
    shardings: TrainState
    batch_sharding: NamedSharding
    trained: Params  # shapes and shardings of what is trained

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @property
    def trainable(self) -> FullWeights:
        """What is trained."""
        return self.plan.trainable

    def weights(self, state: TrainState) -> Params:
        """Return the ``params`` to evaluate, with ``training.ema`` the running mean."""
        if state.average is None:
            return state.params
        return self.trainable.with_trained(state.params, state.average)

    def model_weights(self, state: TrainState) -> Params:
        """Return a whole model's weights from ``weights(state)``, adapters merged."""
        return self.trainable.merge(self.weights(state), state.base)


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
    return compile_plan(decide(config, mesh, compiler_options))


def compile_plan(plan: Plan) -> Training:
    """Return the programs of a plan, each compiled when it is first called.

    Raises:
        UsageError: the weights do not divide over the mesh, or the optimizer is unknown.
    """
    on_cpu = plan.mesh.devices.flat[0].platform == "cpu"
    if on_cpu:
        keep_freed_memory()
    setup = setup_of(plan)

    # How the state and batches are split over the mesh.
    initial = functools.partial(core.initial_state, setup)
    state = jax.eval_shape(initial, jax.random.key(0))
    trained = jax.eval_shape(plan.trainable.select, state.params)
    shardings, trained_shardings = state_sharding(
        plan.mesh, plan.model, (state, trained), plan.rules
    )
    trained = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), trained, trained_shardings
    )
    batch_sharding = NamedSharding(plan.mesh, BATCH)

    # The programs. init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise,
    # for a small model on two cores.
    init_options = {"xla_backend_optimization_level": 0} if on_cpu else None
    init = jax.jit(
        initial, out_shardings=shardings, donate_argnums=1, compiler_options=init_options
    )
    step = jax.jit(
        functools.partial(core.take_step, setup),
        in_shardings=(shardings, batch_sharding),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=plan.compiler_options,
    )
    without_z_loss = setup._replace(options=dataclasses.replace(plan.options, z_loss=0.0))

    def compile_scoring(function: Any, outputs: core.Outputs) -> Any:
        scoring = jax.jit(
            functools.partial(map_over_devices, without_z_loss, function, outputs),
            in_shardings=(shardings.params, batch_sharding, shardings.base),
            compiler_options=plan.compiler_options,
        )
        return lambda params, batch, base=None: scoring(params, batch, base)

    return Training(
        init=init,
        step=CheckedStep(step, plan.model),
        evaluate=compile_scoring(core.evaluate, "sums"),
        log_probs=compile_scoring(local_log_probs, "rows"),
        drawn_log_probs=compile_scoring(local_drawn_log_probs, "rows"),
        plan=plan,
        shardings=shardings,
        batch_sharding=batch_sharding,
        trained=trained,
    )


def setup_of(plan: Plan) -> Setup:
    """Return what is fixed when the step of a plan is compiled."""
    options = plan.options
    parallel = Parallelism(
        plan.model, plan.mesh, plan.rules, plan.dtype, options.reduce_dtype, dequantize
    )
    parallel = dataclasses.replace(parallel, specs=plan.trainable.specs(parallel.weight_specs()))
    remat = "dots" if plan.remat == "auto" else plan.remat
    device = plan.mesh.devices.flat[0]
    chunk_tokens = loss_chunk_tokens(device, plan.model.vocab_size)
    route = None
    is_text = options.objective in ("auto", "next_token")
    if is_text and (options.balance_loss or options.router_z_loss or plan.model.router_bias):
        route = functools.partial(
            balanced_route, balance=options.balance_loss, z_loss=options.router_z_loss
        )
    return Setup(
        plan.model,
        make_optimizer(plan.optimizer, options.steps),
        OBJECTIVES[options.objective],
        options,
        functions_of(plan.attention, remat, chunk_tokens, mesh=plan.mesh, platform=device.platform),
        plan.trainable,
        parallel,
        options.accumulation,
        options.reduce_dtype,
        options.ema,
        options.spike_factor,
        route,
    )


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


def put_on_devices(batch: Any, sharding: NamedSharding) -> Any:
    """Return a batch's arrays on the devices; each process fills the rows of its own."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
        batch,
    )
