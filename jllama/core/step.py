"""One training step: the objective, its gradients, and the update.

From top to bottom. ``theta`` is what is trained, ``n`` the number of targets that count::

    take_step                theta, batch -> theta'
        gradients            d loss_sum / d theta, summed over parts of the batch
            loss             the objective: from the model and a batch to a sum and a count
                forward      the model's parameters, and its final activations
        update               divide by n, clip, ask the optimizer, add

All of it is for one device. ``Setup.parallel`` brings what several devices exchange, and
``Setup.trainable`` other parameters than all weights.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from jllama.core.config import LlamaConfig
from jllama.core.model import DEFAULTS, Functions, LayerGather, Llama, build_llama, initial_params
from jllama.core.parameters import Params

Scalar = Float[Array, ""]
Sums = tuple[Scalar, Scalar, dict[str, Scalar]]
"""The sum of losses, what it is divided by, and sums of an objective's further figures."""


class Sampled(NamedTuple):
    """What training from rewards knows of a batch's answers.

    Log-probabilities belong to the token of their column, and are those of the distribution that it
    was drawn from (``jllama.functional.drawn_log_probs``), in nats; zeros elsewhere.
    """

    advantages: Any  # Float32[Array, "rows"]: how much better an answer is than its group
    sampler: Any  # Float32[Array, "rows window"], as computed when the token was drawn
    old: Any  # Float32[Array, "rows window"], by the trainer's program before the first update
    settings: dict[str, Any]  # [rows]: temperature, other truncations, ``num_ids`` that are drawn
    reference: Any = None  # Float32[Array, "rows window"], of the model before training


class Batch(NamedTuple):
    """Rows of tokens to learn from, in which each token predicts the next.

    The arrays are NumPy's or JAX's. Tokens attend within their own segment, which is a document or
    a conversation. A token is a target if it is counted and the token before it is in its segment.

    With ``reference``, rows are pairs of answers: the preferred one has an even index, the rejected
    one the odd index after it. ``reference`` is the summed log-probability of a row's targets under
    the model before training.

    Examples:
        >>> tokens = np.array([[5, 6, 7, 0]])
        >>> batch = Batch(tokens, segments=np.array([[1, 1, 1, 0]]), counted=tokens == 7)
        >>> batch.tokens[batch.counted].tolist()
        [7]
    """

    tokens: Any  # Int32[Array, "rows window"]
    segments: Any  # Int32[Array, "rows window"], 0 for padding, then 1, 2, ... in each row
    counted: Any  # Bool[Array, "rows window"]
    reference: Any = None  # Float32[Array, "rows"]
    sampled: Sampled | None = None  # what is known of answers that the model gave


class Targets(NamedTuple):
    """A batch as an objective sees it: each input token predicts the target at its index."""

    inputs: Int[Array, "rows seq"]
    targets: Int[Array, "rows seq"]
    segments: Int[Array, "rows seq"]  # of the inputs
    # Targets that take part in the loss, each in its input's segment.
    counted: Bool[Array, "rows seq"]
    reference: Float[Array, "rows"] | None  # of pairs of answers, see ``Batch``
    # Of answers that the model gave; its arrays ``[rows, seq]`` are those of the targets.
    sampled: Sampled | None = None


def targets_of(batch: Batch) -> Targets:
    """Return inputs and targets: token ``t`` predicts token ``t + 1`` of its segment."""
    same_segment = batch.segments[:, :-1] == batch.segments[:, 1:]
    counted = batch.counted[:, 1:] & same_segment
    # Arrays ``[rows, window]`` lose their first column; ``[rows]`` stay.
    sampled = jax.tree.map(lambda leaf: leaf[:, 1:] if leaf.ndim > 1 else leaf, batch.sampled)
    inputs = batch.tokens[:, :-1]
    targets = batch.tokens[:, 1:]
    return Targets(inputs, targets, batch.segments[:, :-1], counted, batch.reference, sampled)


Forward = Callable[[Targets], tuple[Llama, Float[Array, "rows seq embed"]]]
"""The model and its final activations for a batch's inputs; ``model.loss``, ``logits`` and others
continue from them.
"""
Objective = Callable[[Forward, Targets, Any], Sums]


def next_token(forward: Forward, batch: Targets, options: Any) -> Sums:
    """Sum ``-log p(target | tokens up to its input)`` over counted targets, in nats.

    ``options.z_loss`` times the squared log-normalizer is added to it, if there are options
    (arXiv:2204.02311, section 5).
    """
    llama, hidden = forward(batch)
    z_loss = options.z_loss if options else 0.0
    loss_sum, count = llama.loss(hidden, batch.targets, batch.counted, z_loss)
    return loss_sum, count, {}


class Trainable:
    """What is trained: all weights, which are float32 masters."""

    def init(self, key: Key[Array, ""], weights: Params) -> tuple[Params, Params | None]:
        """Return the state's ``params`` and ``base``, from all weights."""
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights), None

    def select(self, params: Params) -> Params:
        """Return what the optimizer updates."""
        return params

    def with_trained(self, params: Params, trained: Params) -> Params:
        """Return ``params`` with new values of what ``select`` returns."""
        return trained

    def split(self, params: Params, base: Params | None, dtype: Any) -> tuple[Params, Params]:
        """Return what the loss is differentiated by, and this device's parts of the weights.

        The variables are zeros of the shapes of what is trained: ``Exchanges.gather`` gives them
        the gradients, which may thus have another ``dtype`` than the weights.
        """
        trained = self.select(params)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), trained), params

    def assemble(self, variables: Params, weights: Params) -> tuple[Params, Params]:
        """Return the model's parameters, and for each the variable that receives its gradient.

        That is None for a parameter without one. ``variables`` and ``weights`` come from ``split``;
        the receivers are the variables, in the form of the parameters.
        """
        return weights, variables


Outputs = Literal["sums", "gradients", "rows"]
"""What a function of ``map_over_devices`` returns: sums over all devices, these and gradients, or
something of each row."""


class Exchanges:
    """What devices exchange in a step: on one device, nothing."""

    gathers = False  # whether weights are gathered

    def map(self, function: Any, outputs: Outputs, *arguments: Any) -> Any:
        """Call a function on each device; ``outputs`` says what its results are."""
        return function(*arguments)

    def gather(self, path: str, part: Any, receiver: Any) -> Any:
        """Return a whole parameter, or one layer's share of it, in the dtype of products.

        Its gradient becomes that of ``receiver``, zeros of the shape of ``part``, unless it is
        None.
        """
        return part if receiver is None else jax.lax.stop_gradient(part) + receiver

    def gather_layer(self, weights: Params, receivers: Params) -> Params:
        """Return one layer's whole weights."""
        return {
            name: self.gather(f"layers/{name}", part, receivers.get(name))
            for name, part in weights.items()
        }

    def positions(self, inputs: Int[Array, "rows seq"]) -> Int[Array, "1 seq"]:
        """Return the indices of this device's tokens in their rows."""
        return jnp.arange(inputs.shape[1])[None]

    def sum(self, tree: Any) -> Any:
        """Sum figures over all devices."""
        return tree

    def sum_gradients(self, gradients: Params) -> Params:
        """Sum over all devices what ``gather`` has not summed."""
        return gradients


class Setup(NamedTuple):
    """What is fixed when a step is compiled."""

    config: LlamaConfig
    optimizer: optax.GradientTransformation
    objective: Objective = next_token
    options: Any = None  # of the objective
    functions: Functions = DEFAULTS
    trainable: Trainable = Trainable()
    parallel: Exchanges = Exchanges()
    accumulation: int = 1  # parts of a batch that are computed one after the other
    gradient_dtype: Any = jnp.float32
    ema: float = 0.0  # the largest decay of the running mean of weights; 0 for none
    spike_factor: float = 0.0  # skip gradients over this many times the usual norm; 0: none
    route: Any = None  # chooses experts: ``ops.balanced_route`` with the weights of its losses


class TrainState(NamedTuple):
    """Everything that training changes. A step donates the state and returns a new one.

    ``params`` are float32 master weights, of which all or some are trained. With adapters they are
    these, of ``base``, which never changes. Randomness comes from ``key`` with ``step`` folded in.

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
    usual_norm: Scalar | None = None  # the running mean of gradient norms, with ``spike_factor``
    average: Params | None = None  # the running mean of what is trained, with ``ema``


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


def initial_state(
    setup: Setup,
    key: Key[Array, ""],
    params: Params | None = None,
    adapter: Params | None = None,
) -> TrainState:
    """Return the state before the first step, from fresh or given weights and adapters."""
    init_key, run_key = jax.random.split(key)
    weights = initial_params(init_key, setup.config) if params is None else params
    params, base = setup.trainable.init(init_key, weights)
    params = adapter or params
    trained = setup.trainable.select(params)
    usual_norm = jnp.zeros((), jnp.float32) if setup.spike_factor else None
    average = trained if setup.ema else None
    step = jnp.zeros((), jnp.int32)
    opt_state = setup.optimizer.init(trained)
    return TrainState(step, params, opt_state, run_key, base, usual_norm, average)


def take_step(setup: Setup, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """Update the state by one batch."""
    # The objective's sums over the batch, and their gradients.
    sums, gradient_sums = map_over_devices(
        setup, gradients, "gradients", state.params, batch, state.base
    )
    loss_sum, count, figures = sums

    # One step of the optimizer by their means.
    count = jnp.maximum(count, 1.0)
    state, grad_norm, is_accepted = update(setup, state, loss_sum, count, gradient_sums)
    num_tokens = jnp.sum(batch.segments[:, :-1] != 0, dtype=jnp.float32)
    return state, StepMetrics(loss_sum / count, grad_norm, num_tokens, ~is_accepted, count, figures)


def map_over_devices(
    setup: Setup,
    function: Any,
    outputs: Outputs,
    params: Params,
    batch: Batch,
    base: Params | None,
) -> Any:
    """Call ``function(setup, weights, variables, targets)`` on each device with its parts.

    ``weights`` and ``variables``, which the loss is differentiated by, come from ``split`` of what
    is trained.
    """

    def local(params: Params, base: Params | None, targets: Targets) -> Any:
        variables, weights = setup.trainable.split(params, base, setup.gradient_dtype)
        return function(setup, weights, variables, targets)

    return setup.parallel.map(local, outputs, params, base, targets_of(batch))


def gradients(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> tuple[Sums, Params]:
    """Return the objective's sums over the whole batch, and this device's part of the gradients."""
    loss_of = functools.partial(loss, setup, weights)
    loss_and_gradients = jax.value_and_grad(loss_of, has_aux=True)
    if setup.accumulation == 1:
        (loss_sum, others), results = loss_and_gradients(variables, targets)
    else:
        # Sums of the parts are added in float32 and divided once, so that a part weighs by its
        # number of targets.
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(setup.accumulation, -1, *leaf.shape[1:]), targets
        )
        loss_sums = jax.eval_shape(loss_of, variables, jax.tree.map(lambda leaf: leaf[0], parts))
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (loss_sums, variables)
        )

        def add_part(sums: Any, part: Targets) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, loss_and_gradients(variables, part)), None

        ((loss_sum, others), results), _ = jax.lax.scan(add_part, zeros, parts)
    return setup.parallel.sum((loss_sum, *others)), setup.parallel.sum_gradients(results)


def loss(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> tuple[Scalar, tuple[Scalar, dict[str, Scalar]]]:
    """Return the objective's sum over this device's rows, and its sums that have no gradient."""
    forward_of = functools.partial(forward, setup, weights, variables)
    loss_sum, count, figures = setup.objective(forward_of, targets, setup.options)
    return loss_sum, (count, figures)


def forward(
    setup: Setup, weights: Params, variables: Params, targets: Targets
) -> tuple[Llama, Float[Array, "rows seq embed"]]:
    """Return the model with its whole head, and the final activations of this device's tokens."""
    parallel = setup.parallel
    params, receivers = setup.trainable.assemble(variables, weights)

    # Embedding and layers; a layer's weights are gathered when it runs.
    gathered = dict(params)
    for name in ("embed", "final_norm"):
        gathered[name] = parallel.gather(name, params[name], receivers[name])
    functions = setup.functions
    # The losses of answers are sums over rows, which those of tokens would drown.
    has_answers = targets.reference is not None or targets.sampled is not None
    trained = receivers["layers"]
    trains_router = any(trained.get(name) is not None for name in ("router", "router_bias"))
    if setup.route and trains_router and not has_answers:
        counted = targets.counted.reshape(-1)
        route = functools.partial(setup.route, counted=counted, sum_devices=parallel.sum)
        functions = functions._replace(route=route)
    hidden = build_llama(setup.config, gathered, functions).hidden(
        targets.inputs,
        targets.segments,
        parallel.positions(targets.inputs),
        parallel=LayerGather(parallel.gather_layer, receivers["layers"]),
    )

    # The head is gathered last, and its gradient is summed before the backward pass of the layers
    # begins.
    head = "embed" if setup.config.tie_embeddings else "lm_head"
    receiver = receivers[head]
    if receiver is not None and parallel.gathers:
        hidden, receiver = jax.lax.optimization_barrier((hidden, receiver))
    gathered[head] = parallel.gather(head, params[head], receiver)
    return build_llama(setup.config, gathered, setup.functions), hidden


def update(
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

    The running mean of weights moves by ``1 - decay`` of its distance to what is trained. In step
    ``n``, counted from 1, ``decay = min(ema, n / (n + 9))``, so that early steps forget the initial
    weights.
    """
    trainable = setup.trainable
    with jax.named_scope("optimizer"):
        # Whether the step is taken.
        norm = optax.tree.norm(_mean_gradients(gradient_sums, count))
        usual_norm = state.usual_norm
        is_accepted = jnp.isfinite(loss_sum) & jnp.isfinite(norm)
        if usual_norm is not None:
            is_accepted &= (usual_norm == 0) | (norm <= setup.spike_factor * usual_norm)
            new_norm = jnp.where(usual_norm == 0, norm, 0.98 * usual_norm + 0.02 * norm)
            usual_norm = jnp.where(is_accepted, new_norm, usual_norm)

        def take(
            turn: Array, old: tuple[Params, optax.OptState, Any]
        ) -> tuple[Params, optax.OptState, Any]:
            params, opt_state, average = old
            # The barrier keeps the mean gradients' products in the loop.
            sums, _ = jax.lax.optimization_barrier((gradient_sums, turn))
            trained = trainable.select(params)
            updates, opt_state = setup.optimizer.update(
                _mean_gradients(sums, count), opt_state, trained
            )
            trained = jax.tree.map(jnp.add, trained, updates)
            if average is not None:
                share = jnp.maximum(1 - setup.ema, 9 / (state.step + 10)).astype(jnp.float32)
                average = jax.tree.map(
                    lambda mean, leaf: mean + share * (leaf - mean), average, trained
                )
            return trainable.with_trained(params, trained), opt_state, average

        # A loop of one turn, or of none, changes its carry in place. A cond copies all of it on
        # GPUs with jax 0.10, and a where after the update does on CPUs.
        num_turns = is_accepted.astype(jnp.int32)
        old = state.params, state.opt_state, state.average
        params, opt_state, average = jax.lax.fori_loop(0, num_turns, take, old)
    step = state.step + 1
    updated = TrainState(step, params, opt_state, state.key, state.base, usual_norm, average)
    return updated, norm, is_accepted


def _mean_gradients(gradient_sums: Params, count: Scalar) -> Params:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) / count.astype(jnp.float32), gradient_sums
    )


def evaluate(setup: Setup, weights: Params, variables: Params, targets: Targets) -> Sums:
    """Return the objective's sums over the whole batch; ``map_over_devices`` calls it."""
    loss_sum, others = loss(setup, weights, variables, targets)
    return setup.parallel.sum((loss_sum, *others))
