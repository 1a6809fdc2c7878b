"""One step of training and one of evaluation, as pure functions; the loop compiles them once."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from jllama.config import LlamaConfig
from jllama.model import build_model, initial_params
from jllama.parameters import Params


class TrainState(NamedTuple):
    """All that training changes: saved together, donated to each step and returned anew.

    Args:
        step: updates done so far.
        params: float32 master weights.
        opt_state: Adam's moments, float32.
        key: the run's random key; what needs randomness folds ``step`` into it.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]


class StepMetrics(NamedTuple):
    """Of one step: mean loss in nats a token, global gradient norm before clipping, tokens learned from."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Float[Array, ""]


def initial_state(
    key: Key[Array, ""],
    params: Params | None = None,
    *,
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """The state before the first step; ``params`` None draws fresh ones. Float32 also where JAX is in 64-bit mode."""
    init_key, run_key = jax.random.split(key)
    drawn = initial_params(init_key, config) if params is None else params
    masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn)
    return TrainState(jnp.zeros((), jnp.int32), masters, optimizer.init(masters), run_key)


def token_losses(
    params: Params,
    windows: Int[Array, "batch window"],
    config: LlamaConfig,
    bos_id: int,
    *,
    mask: Bool[Array, "batch seq"] | bool = True,
    z_loss: float = 0.0,
    dtype: jnp.dtype | type = jnp.float32,
    remat: bool = False,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Summed loss over windows of ``seq + 1`` tokens, each token predicting the next, and the tokens counted.

    A BOS starts a document: attention stays within documents, and BOS itself is never a target, since nothing before
    it belongs to its text. Matrix products run in ``dtype``; the parameters stay float32.
    """
    inputs, targets = windows[:, :-1], windows[:, 1:]
    segments = jnp.cumsum(inputs == bos_id, axis=1)
    llama = build_model(config, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    return llama.loss(llama.hidden(inputs, segments, remat=remat), targets, (targets != bos_id) & mask, z_loss)


def train_step(
    state: TrainState,
    windows: Int[Array, "batch window"],
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    bos_id: int,
    *,
    accumulation: int = 1,
    z_loss: float = 0.0,
    dtype: jnp.dtype | type = jnp.float32,
    remat: bool = False,
) -> tuple[TrainState, StepMetrics]:
    """One update from one batch, taken in ``accumulation`` equal parts that give the gradient of the whole.

    Sums of losses and gradients are added in float32 (losses in ``dtype`` if that is wider) and divided once by the
    number of tokens, so parts with different numbers of counted tokens weigh as they should.
    """

    def total_loss(params: Params, part: Array) -> tuple[Array, Array]:
        return token_losses(params, part, config, bos_id, z_loss=z_loss, dtype=dtype, remat=remat)

    gradient = jax.value_and_grad(total_loss, has_aux=True)
    if accumulation == 1:
        (total, count), gradients = gradient(state.params, windows)
    else:
        parts = windows.reshape(accumulation, -1, windows.shape[1])
        zero = jnp.zeros((), jnp.promote_types(dtype, jnp.float32))
        zeros = ((zero, zero), jax.tree.map(jnp.zeros_like, state.params))
        (total, count), gradients = jax.lax.scan(
            lambda sums, part: (jax.tree.map(jnp.add, sums, gradient(state.params, part)), None), zeros, parts
        )[0]
    count = jnp.maximum(count, 1.0)
    gradients = jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = jax.tree.map(jnp.add, state.params, updates)
    metrics = StepMetrics(total / count, optax.tree.norm(gradients), count)
    return TrainState(state.step + 1, params, opt_state, state.key), metrics


def eval_step(
    params: Params,
    windows: Int[Array, "batch window"],
    mask: Bool[Array, "batch seq"],
    config: LlamaConfig,
    bos_id: int,
    token_bytes: Int[Array, "vocab"],
    *,
    dtype: jnp.dtype | type = jnp.float32,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Sums over the unmasked targets of one batch: nats without z-loss, tokens, and bytes of text they stand for."""
    nats, tokens = token_losses(params, windows, config, bos_id, mask=mask, dtype=dtype)
    return nats, tokens, jnp.sum(jnp.where(mask, token_bytes[windows[:, 1:]], 0), dtype=jnp.float32)
