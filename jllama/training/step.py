"""One step of training, and ``compile_training``: what a training loop needs, compiled."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from jllama.errors import check_fields
from jllama.functional import choose_attention
from jllama.model import Parallel, abstract_params, build_model, check_attention, initial_params
from jllama.parameters import Params, map_by_path, parameter_table
from jllama.sharding import BATCH, gather, gather_stages, make_mesh, row_spec, ruleset, spread_attention, state_sharding
from jllama.training.config import TrainConfig
from jllama.training.optimizer import make_optimizer

_BY_HAND = ("data", "fsdp", "sequence")  # mesh axes whose exchanges are written out


class TrainState(NamedTuple):
    """All that training changes: donated to each step and returned anew; what needs randomness folds step into key.

    ``step`` counts the updates; ``params``, the master weights, are float32; moments are of ``optimizer.moment_dtype``.
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
        compiler_options: XLA's, for ``step`` and ``evaluate``, besides those of ``config.training``.
    """
    mesh = make_mesh(config.mesh) if mesh is None else mesh
    model, options, platform = config.model, config.training, mesh.devices.flat[0].platform
    dtype = compute_dtype(config, mesh)
    optimizer, rules = make_optimizer(config.optimizer, model, options.steps), ruleset(config.mesh)
    attention, xla = attention_of(config, mesh), {**options.compiler_options, **(compiler_options or {})}
    specs = {path: row_spec(mesh, row, model, rules) for path, row in parameter_table(model).items()}
    split = [name for name in _BY_HAND if mesh.shape[name] > 1]
    if split and platform == "cpu":
        check_fields(options, "training.", "reduce_dtype", "float32".__eq__, "float32 on CPUs, where XLA sums no other")
    stages = gather_stages(mesh)

    def init(key: Key[Array, ""], params: Params | None = None) -> TrainState:
        init_key, run_key = jax.random.split(key)
        drawn = initial_params(init_key, model) if params is None else params
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn)  # also where JAX is in 64-bit mode
        return TrainState(jnp.zeros((), jnp.int32), masters, optimizer.init(masters), run_key)

    def whole(path: str, part: Array, kept: Array) -> Array:
        """A parameter, or one layer's share of it, for the products: in ``dtype``, from all devices that hold some."""
        spec = specs[path][len(specs[path]) - part.ndim :] if specs[path] else ()
        axis = next((index for index, names in enumerate(spec) if names and "fsdp" in names), None)
        return gather(part, kept, axis, dtype, stages)

    def gather_layer(weights: Params, kept: Params) -> Params:
        return {name: whole(f"layers/{name}", part, kept[name]) for name, part in weights.items()}

    def loss(kept: Params, params: Params, parts: tuple[Array, ...], z_loss: float) -> tuple[Array, Array]:
        """The summed loss of this device's tokens, and their number; gradients of ``params`` are those of ``kept``."""
        inputs, targets, segments, mask = parts
        first = jax.lax.axis_index("sequence") * inputs.shape[1]
        weights = {**params, **{name: whole(name, params[name], kept[name]) for name in ("embed", "final_norm")}}
        hidden = build_model(model, weights).hidden(
            inputs,
            segments,
            (first + jnp.arange(inputs.shape[1]))[None],
            remat=str(options.remat),
            attention=attention,
            parallel=Parallel(gather_layer, functools.partial(spread_attention, mesh), kept["layers"]),
        )
        head = "embed" if model.tie_embeddings else "lm_head"

        def last(hidden: Array, kept: Array, part: Array) -> tuple[Array, Array]:
            return build_model(model, {**params, head: whole(head, part, kept)}).loss(hidden, targets, mask, z_loss)

        return (with_early_gradient(last) if stages else last)(hidden, kept[head], params[head])

    def zeros(params: Params) -> Params:
        return jax.tree.map(lambda part: jnp.zeros(part.shape, options.reduce_dtype), params)

    def sums(params: Params, *parts: Array) -> tuple[Array, Array]:
        return jax.lax.psum(loss(zeros(params), params, parts, 0.0), _BY_HAND)

    def gradients(params: Params, *parts: Array) -> tuple[tuple[Array, Array], Params]:
        # A batch is taken in parts, whose sums are added in float32 and divided once by the number of targets, so that
        # parts with different numbers of them weigh as they should.
        gradient = jax.value_and_grad(lambda kept, parts: loss(kept, params, parts, options.z_loss), has_aux=True)
        if options.accumulation == 1:
            totals, leaves = gradient(zeros(params), parts)
        else:
            pieces = tuple(part.reshape(options.accumulation, -1, part.shape[1]) for part in parts)
            none = jax.tree.map(jnp.zeros_like, ((jnp.float32(0), jnp.float32(0)), params))
            (totals, leaves), _ = jax.lax.scan(
                lambda sums, part: (jax.tree.map(jnp.add, sums, gradient(zeros(params), part)), None), none, pieces
            )

        def summed(path: str, leaf: Array) -> Array:
            scattered = any(names and "fsdp" in names for names in specs[path])
            names = [name for name in split if not (scattered and name == "fsdp")]
            return jax.lax.psum(leaf.astype(options.reduce_dtype), names) if names else leaf

        return jax.lax.psum(totals, _BY_HAND), map_by_path(summed, leaves)

    fsdp = {path: PartitionSpec(*(name if name == "fsdp" else None for name in spec)) for path, spec in specs.items()}
    by_hand = map_by_path(lambda path, _: fsdp[path], abstract_params(model))
    tokens = PartitionSpec(BATCH[0], "sequence")

    def spread(function: Any, outputs: Any) -> Any:
        """The function on each device's part of the parameters and of a batch's tokens, targets, segments and mask."""
        split: Any = {"in_specs": (by_hand, *[tokens] * 4), "out_specs": outputs, "axis_names": {*_BY_HAND}}
        return jax.shard_map(function, mesh=mesh, **split, check_vma=False)

    def parts_of(windows: Array, mask: Array | bool = True) -> tuple[Array, ...]:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        return inputs, targets, jnp.cumsum(inputs == bos_id, axis=1), (targets != bos_id) & mask

    def step(state: TrainState, windows: Int[Array, "batch window"]) -> tuple[TrainState, StepMetrics]:
        scalars = PartitionSpec(), PartitionSpec()
        (total, count), leaves = spread(gradients, (scalars, by_hand))(state.params, *parts_of(windows))
        count = jnp.maximum(count, 1.0)
        leaves = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / count.astype(jnp.float32), leaves)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(leaves, state.opt_state, state.params)
            params = jax.tree.map(jnp.add, state.params, updates)
        metrics = StepMetrics(total / count, optax.tree.norm(leaves), count)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    def evaluate(params: Params, windows: Array, mask: Array) -> tuple[Array, Array]:
        return spread(sums, (PartitionSpec(), PartitionSpec()))(params, *parts_of(windows, mask))

    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings, batch = state_sharding(mesh, model, shapes, rules), NamedSharding(mesh, BATCH)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small model on two cores.
    quick = {"xla_backend_optimization_level": 0} if platform == "cpu" else None
    where = {"in_shardings": (shardings, batch), "out_shardings": (shardings, None)}
    return Training(
        jax.jit(init, out_shardings=shardings, donate_argnums=1, compiler_options=quick),
        jax.jit(step, **where, donate_argnums=0, compiler_options=xla),
        jax.jit(evaluate, in_shardings=(shardings.params, batch, batch), compiler_options=xla),
        *(mesh, shardings, batch),
    )


def with_early_gradient(function: Any) -> Any:
    """``function(*arrays) -> (total, other)``, whose gradient by the first two is computed with its value, and kept.

    What the gradient needs, such as a head that was gathered for it, does not wait for the backward pass of what is
    before.
    """

    def forward(*arrays: Array) -> Any:
        total, pull, other = jax.vjp(lambda *first: function(*first, *arrays[2:]), *arrays[:2], has_aux=True)
        total, gradients = jax.lax.optimization_barrier((total, pull(jnp.ones_like(total))))
        return (total, other), gradients

    def backward(gradients: tuple[Array, ...], scales: tuple[Array, Any]) -> Any:
        return *((gradient * scales[0].astype(gradient.dtype)) for gradient in gradients), None

    early = jax.custom_vjp(function)
    early.defvjp(forward, backward)
    return early


def attention_of(config: TrainConfig, mesh: Mesh) -> str:
    """The attention implementation of a configuration, ``auto`` resolved for a mesh; UsageError if it has none such."""
    platform, dtype = mesh.devices.flat[0].platform, compute_dtype(config, mesh)
    check_attention(config.training.attention, platform)
    seq_len = config.training.seq_len or config.model.max_seq_len
    chosen = choose_attention(seq_len, seq_len, platform=platform, dtype=dtype)
    if mesh.shape["sequence"] > 1 and chosen == "triton":  # which takes no queries from inside a row
        chosen = "blocked"
    return chosen if config.training.attention == "auto" else config.training.attention


def check_batch(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ``UsageError`` for a batch whose rows, or rows whose tokens, do not divide over the mesh."""
    options = config.training
    ways, sequence = mesh.shape["data"] * mesh.shape["fsdp"] * options.accumulation, mesh.shape["sequence"]
    said = f"a multiple of {ways // options.accumulation} device(s) times {options.accumulation} part(s)"
    check_fields(options, "training.", "batch_size", lambda size: size % ways == 0, said)
    said = f"a multiple of mesh.sequence, {sequence}"
    check_fields(options, "training.", "seq_len", lambda size: (size or config.model.max_seq_len) % sequence == 0, said)


def compute_dtype(config: TrainConfig, mesh: Mesh) -> np.dtype[Any]:
    """The dtype of activations and products: as configured, or by the platform."""
    name, platform = config.training.dtype, mesh.devices.flat[0].platform
    return jnp.dtype(name if name != "auto" else "float32" if platform == "cpu" else "bfloat16")
