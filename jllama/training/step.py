"""One step of training, and ``compile_training``: what a training loop needs, compiled."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Key

from jllama.model import build_model, check_attention, initial_params
from jllama.parameters import Params
from jllama.sharding import BATCH, make_mesh, state_sharding
from jllama.training.config import TrainConfig
from jllama.training.optimizer import make_optimizer


class TrainState(NamedTuple):
    """All that training changes: donated to each step and returned anew; what needs randomness folds step into key.

    ``step`` counts the updates; ``params``, the master weights, and ``opt_state``, the moments, are float32.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]


class StepMetrics(NamedTuple):
    """A step's mean loss in nats per token, global gradient norm before clipping, and number of tokens learned from."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Float[Array, ""]


class Training(NamedTuple):
    """What ``compile_training`` gives: three programs, and how the state and the rows of batches are split over a mesh.

    ``init(key, params=None)`` gives the ``TrainState`` before the first step, from fresh or given parameters;
    ``step(state, windows)`` one update, ``(state, StepMetrics)``, from int32 windows ``[batch, seq + 1]``, each token
    predicting the next, where the state given is donated: use the one returned; ``evaluate(params, windows, mask)``
    ``(nats, tokens)``, the summed loss of the targets in ``mask`` ``[batch, seq]``, without z-loss, and their number.
    """

    init: Any
    step: Any
    evaluate: Any
    mesh: Mesh
    shardings: TrainState
    batch_sharding: NamedSharding


def compile_training(
    config: TrainConfig, mesh: Mesh | None = None, *, bos_id: int, compiler_options: dict[str, Any] | None = None
) -> Training:
    """The programs of a training run, each compiled when it is first called; UsageError if it cannot be.

    Example::

        training = compile_training(config, bos_id=data.tokenizer.bos_id)
        state = training.init(jax.random.key(config.seed))
        for windows in training_batches(data.train, batch_size=8, seq_len=128, seed=0):
            state, metrics = training.step(state, windows)

    Args:
        config: of which ``model`` (with its ``vocab_size``), ``optimizer``, ``mesh`` and ``training`` count.
        mesh: the devices; None makes one as ``config.mesh`` says.
        bos_id: the token that starts a document: attention stays within documents, and it is never a target.
        compiler_options: XLA's, for ``step`` and ``evaluate``.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    model, options, is_cpu = config.model, config.training, mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.dtype(options.dtype if options.dtype != "auto" else "float32" if is_cpu else "bfloat16")
    optimizer = make_optimizer(config.optimizer, model, options.steps)
    check_attention(options.attention)

    def init(key: Key[Array, ""], params: Params | None = None) -> TrainState:
        init_key, run_key = jax.random.split(key)
        drawn = initial_params(init_key, model) if params is None else params
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn)  # also where JAX is in 64-bit mode
        return TrainState(jnp.zeros((), jnp.int32), masters, optimizer.init(masters), run_key)

    def loss(params: Params, windows: Array, mask: Array | bool = True, z_loss: float = 0.0) -> tuple[Array, Array]:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        segments = jnp.cumsum(inputs == bos_id, axis=1)
        llama = build_model(model, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
        hidden = llama.hidden(inputs, segments, remat=options.remat, attention=options.attention)
        return llama.loss(hidden, targets, (targets != bos_id) & mask, z_loss)

    def step(state: TrainState, windows: Int[Array, "batch window"]) -> tuple[TrainState, StepMetrics]:
        # A batch is taken in parts, whose sums are added in float32 and divided once by the number of targets, so that
        # parts with different numbers of them weigh as they should.
        gradient = jax.value_and_grad(lambda params, part: loss(params, part, True, options.z_loss), has_aux=True)
        if options.accumulation == 1:
            (total, count), gradients = gradient(state.params, windows)
        else:
            parts = windows.reshape(options.accumulation, -1, windows.shape[1])
            zeros = jax.tree.map(jnp.zeros_like, ((jnp.float32(0), jnp.float32(0)), state.params))
            (total, count), gradients = jax.lax.scan(
                lambda sums, part: (jax.tree.map(jnp.add, sums, gradient(state.params, part)), None), zeros, parts
            )[0]
        count = jnp.maximum(count, 1.0)
        gradients = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), gradients)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = jax.tree.map(jnp.add, state.params, updates)
        metrics = StepMetrics(total / count, optax.tree.norm(gradients), count)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    shardings, batch = state_sharding(mesh, model, jax.eval_shape(init, jax.random.key(0))), NamedSharding(mesh, BATCH)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small model on two cores.
    quick = {"xla_backend_optimization_level": 0} if is_cpu else None
    where = {"in_shardings": (shardings, batch), "out_shardings": (shardings, None)}
    return Training(
        jax.jit(init, out_shardings=shardings, donate_argnums=1, compiler_options=quick),
        jax.jit(step, **where, donate_argnums=0, compiler_options=compiler_options),
        jax.jit(loss, in_shardings=(shardings.params, batch, batch), compiler_options=compiler_options),
        *(mesh, shardings, batch),
    )
