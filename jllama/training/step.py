"""One step of training, and ``compile_training``: what a training loop needs, compiled."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from jllama.config import LlamaConfig
from jllama.data.batches import Rows
from jllama.devices import keep_freed_memory
from jllama.errors import UsageError, check_fields
from jllama.functional import choose_attention
from jllama.functional.linear import AdaptedMatrix
from jllama.lora import adapted, dense, frozen, initial_adapter
from jllama.model import Llama, Parallel, build_model, check_attention, check_ids, initial_params
from jllama.parameters import Params, map_by_path, parameter_table, shape_of
from jllama.sharding import BATCH, gather, gather_stages, make_mesh, row_spec, ruleset, state_sharding
from jllama.training.config import TrainConfig
from jllama.training.optimizer import make_optimizer

_BY_HAND = ("data", "fsdp", "sequence")  # mesh axes whose exchanges are written out


class TrainState(NamedTuple):
    """All that training changes: donated to each step and returned anew; what needs randomness folds step into key.

    ``step`` counts the updates; ``params``, what is trained, are float32: the master weights, or with ``lora`` the
    adapters (``jllama.lora``) of ``base``, which stays as it is; moments are of ``optimizer.moment_dtype``.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState
    key: Key[Array, ""]
    base: Params | None = None
    usual_norm: Float[Array, ""] | None = None  # with ``spike_factor``, the running mean of gradient norms


class StepMetrics(NamedTuple):
    """A step's mean loss in nats per token that counts, or per pair; the global gradient norm before clipping; the
    number of tokens, of text those learned from, of ``Rows`` all but padding; and whether it was ``skipped``: its loss
    or gradient was not finite or a spike, and parameters and optimizer are as they were.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    tokens: Float[Array, ""]
    skipped: Bool[Array, ""]
    preference: Float[Array, "4"] | None = None  # of pairs: sums for ``metrics.preference_means``


class Training(NamedTuple):
    """What ``compile_training`` gives: programs, and how the state and the rows of batches are split over a mesh.

    ``init(key, params=None)`` gives the ``TrainState`` before the first step, from fresh or given parameters;
    ``step(state, batch)`` one update, ``(state, StepMetrics)``, where the state given is donated: use the one returned;
    a batch is int32 windows of text ``[batch, seq + 1]``, each token predicting the next, or ``Rows``; an id that is no
    token's is refused (``UsageError``) in NumPy's arrays, and in JAX's makes the step one that is left out;
    ``evaluate(params, batch, mask=None, base=None)`` ``(nats, tokens)``, the summed loss of a batch's targets (of
    windows those in ``mask`` ``[batch, seq]``), without z-loss, and their number, or of pairs the sums of
    ``StepMetrics.preference``, which begin with it; ``log_probs``, of the same arguments,
    the summed log-probability of each row's targets. ``base`` is the state's.
    """

    init: Any
    step: Any
    evaluate: Any
    log_probs: Any
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
    optimizer, rules = make_optimizer(config.optimizer, options.steps), ruleset(config.mesh)
    attention, xla = attention_of(config, mesh), {**options.compiler_options, **(compiler_options or {})}
    table = parameter_table(model)
    specs = {path: row_spec(mesh, row, model, rules) for path, row in table.items()}
    head = "embed" if model.tie_embeddings else "lm_head"
    split = [name for name in _BY_HAND if mesh.shape[name] > 1]
    if platform == "cpu":
        keep_freed_memory()
    if split and platform == "cpu":
        check_fields(options, "training.", "reduce_dtype", "float32".__eq__, "float32 on CPUs, where XLA sums no other")
    stages, lora = gather_stages(mesh), config.lora
    split_by = [name for name in ("fsdp", "tensor") if mesh.shape[name] > 1 and lora.base in ("int8", "nf4")]
    if lora.rank and split_by:
        said = f"lora.base is {lora.base}, whose weights are whole on each device"
        raise UsageError(f"{said}, and mesh.{split_by[0]} would split them: make it 1")

    def init(key: Key[Array, ""], params: Params | None = None) -> TrainState:
        init_key, run_key = jax.random.split(key)
        drawn = initial_params(init_key, model) if params is None else params
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), drawn)  # also where JAX is in 64-bit mode
        base, usual = None, jnp.zeros((), jnp.float32) if options.spike_factor else None
        if lora.rank:
            base, masters = frozen(drawn, model, lora, dtype), initial_adapter(init_key, drawn, model, lora)
        return TrainState(jnp.zeros((), jnp.int32), masters, optimizer.init(masters), run_key, base, usual)

    def whole(path: str, part: Any, kept: Any) -> Any:
        """A parameter, or one layer's share of it, for the products: in ``dtype``, from all devices that hold some."""
        if isinstance(part, AdaptedMatrix):
            others = {name: leaf.astype(dtype) for name, leaf in vars(part).items() if isinstance(leaf, Array)}
            return dataclasses.replace(part, **{**others, "base": whole(path, part.base, None)})
        if not isinstance(part, Array):
            return dense(part, shape_of(table[path], model)[1:], dtype)
        spec = tuple(specs[path])[-part.ndim :]
        return gather(part, kept, spec.index("fsdp") if "fsdp" in spec else None, dtype, stages)

    def gather_layer(weights: Params, kept: Params) -> Params:
        return {name: whole(f"layers/{name}", part, kept.get(name)) for name, part in weights.items()}

    def forward(learned: Params, weights: Params, parts: Any) -> tuple[Llama, Array]:
        """The model with its whole head, and the last activations of this device's tokens."""
        inputs, _, segments = parts[:3]
        kept = {**dict.fromkeys(weights), "layers": {}} if lora.rank else learned
        params = adapted(weights, learned, lora) if lora.rank else weights
        ready = {**params, **{name: whole(name, params[name], kept[name]) for name in ("embed", "final_norm")}}
        parallel = Parallel(gather_layer, mesh, kept["layers"])
        how: Any = {"remat": str(options.remat), "attention": attention, "parallel": parallel}
        positions = (jax.lax.axis_index("sequence") * inputs.shape[1] + jnp.arange(inputs.shape[1]))[None]
        hidden, scattered = build_model(model, ready).hidden(inputs, segments, positions, **how), kept[head]
        if stages and not lora.rank:  # so is the head's gradient, before the backward pass of the layers begins
            hidden, scattered = jax.lax.optimization_barrier((hidden, scattered))
        return build_model(model, {**ready, head: whole(head, params[head], scattered)}), hidden

    def loss(learned: Params, weights: Params, parts: Any, z_loss: float) -> tuple[Array, Array]:
        """The summed loss of this device's tokens, and their number.

        Of pairs the loss of DPO (arXiv:2305.18290, eq. 7), and the sums of ``StepMetrics.preference``.
        """
        if len(parts) > 4:
            ratios = (row_log_probs(learned, weights, parts) - parts[4]).reshape(-1, 2)
            margins = options.dpo_beta * (ratios[:, 0] - ratios[:, 1])
            is_pair = jnp.any(parts[3], axis=1)[::2]  # and not padding
            rewards = options.dpo_beta * ratios.T
            figures = jnp.stack([jnp.ones_like(margins), margins > 0, *rewards])
            losses = jax.nn.softplus(-margins)
            return jnp.sum(jnp.where(is_pair, losses, 0.0)), jnp.sum(jnp.where(is_pair, figures, 0.0), axis=1)
        llama, hidden = forward(learned, weights, parts)
        return llama.loss(hidden, parts[1], parts[3], z_loss)

    def row_log_probs(learned: Params, weights: Params, parts: Any) -> Array:
        """The summed log-probability of the counted targets of each of this device's rows."""
        llama, hidden = forward(learned, weights, parts)
        return jnp.sum(jnp.where(parts[3], llama.token_log_probs(hidden, parts[1])[0], 0.0), axis=1)

    def gradients(learned: Params, weights: Params, parts: Any) -> tuple[tuple[Array, Array], Params]:
        # The parts' sums are added in float32 and divided once, so that parts weigh by their numbers of targets.
        gradient = jax.value_and_grad(lambda kept, parts: loss(kept, weights, parts, options.z_loss), has_aux=True)
        if options.accumulation == 1:
            totals, leaves = gradient(learned, parts)
        else:
            pieces = tuple(part.reshape(options.accumulation, -1, *part.shape[1:]) for part in parts)
            figures = np.zeros(4) if len(parts) > 4 else 0.0
            none = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), ((0.0, figures), learned))
            (totals, leaves), _ = jax.lax.scan(
                lambda sums, part: (jax.tree.map(jnp.add, sums, gradient(learned, part)), None), none, pieces
            )

        def summed(path: str, leaf: Array) -> Array:
            names = [name for name in split if name != "fsdp" or "fsdp" not in specs.get(path, ())]
            return jax.lax.psum(leaf.astype(options.reduce_dtype), names) if names else leaf

        return jax.lax.psum(totals, _BY_HAND), map_by_path(summed, leaves)

    by_fsdp = {path: [name if name == "fsdp" else None for name in spec] for path, spec in specs.items()}
    parts = {path: PartitionSpec(*(spec if "fsdp" in spec else ())) for path, spec in by_fsdp.items()}
    by_hand = (unflatten_dict(parts, sep="/"), PartitionSpec())[:: -1 if lora.rank else 1]
    tokens, scalars = PartitionSpec(BATCH[0], "sequence"), (PartitionSpec(), PartitionSpec())

    def spread(function: Any, outputs: Any, params: Params, batch: Any, mask: Any, base: Params | None) -> Any:
        """``function(learned, weights, parts)`` on each device's part of the parameters and of a batch's parts."""
        parts = parts_of(batch, mask)
        inputs = (*by_hand, *(tokens if part.ndim > 1 else BATCH for part in parts))
        split: Any = {"in_specs": inputs, "out_specs": outputs, "axis_names": {*_BY_HAND}, "check_vma": False}

        def local(params: Params, base: Params | None, *parts: Array) -> Any:  # zeros' gradients are the weights' own
            zeros = jax.tree.map(lambda part: jnp.zeros(part.shape, options.reduce_dtype), params)
            return function(zeros, params, parts) if base is None else function(params, base, parts)

        return jax.shard_map(local, mesh=mesh, **split)(params, base, *parts)

    def parts_of(batch: Any, mask: Array | None) -> tuple[Array, ...]:
        """Inputs, targets, segments and which targets count; of pairs, too, each row's reference."""
        tokens = batch.tokens if isinstance(batch, Rows) else batch
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if not isinstance(batch, Rows):
            return inputs, targets, jnp.cumsum(inputs == bos_id, axis=1), (targets != bos_id) & (mask is None or mask)
        reference = () if batch.reference is None else (batch.reference,)
        if reference and mesh.shape["sequence"] > 1:
            raise UsageError("mesh.sequence is over 1, and pairs of answers are not split so: leave it out")
        same = batch.segments[:, :-1] == batch.segments[:, 1:]
        return inputs, targets, batch.segments[:, :-1], batch.counted[:, 1:] & same, *reference

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        (total, figures), leaves = spread(gradients, (scalars, by_hand[0]), state.params, batch, None, state.base)
        preference = figures if figures.ndim else None
        count = jnp.maximum(figures if preference is None else figures[0], 1.0)

        def means(sums: Params) -> Params:
            return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / count.astype(jnp.float32), sums)

        def update(turn: Array, old: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
            params, opt_state = old
            sums, _ = jax.lax.optimization_barrier((leaves, turn))  # keeps its products in the loop
            updates, opt_state = optimizer.update(means(sums), opt_state, params)
            return jax.tree.map(jnp.add, params, updates), opt_state

        with jax.named_scope("optimizer"):
            norm, usual = optax.tree.norm(means(leaves)), state.usual_norm
            accepted = jnp.isfinite(total) & jnp.isfinite(norm)
            if usual is not None:
                accepted &= (usual == 0) | (norm <= options.spike_factor * usual)
                usual = jnp.where(accepted, jnp.where(usual == 0, norm, 0.98 * usual + 0.02 * norm), usual)
            # A loop of one turn, or of none, changes its carry in place. A cond copies all of it on GPUs with jax 0.10,
            # and a where after the update does on CPUs.
            turns = accepted.astype(jnp.int32)
            params, opt_state = jax.lax.fori_loop(0, turns, update, (state.params, state.opt_state))
        tokens = jnp.sum(batch.segments != 0, dtype=jnp.float32) if isinstance(batch, Rows) else count
        metrics = StepMetrics(total / count, norm, tokens, ~accepted, preference)
        return TrainState(state.step + 1, params, opt_state, state.key, state.base, usual), metrics

    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings, batch = state_sharding(mesh, model, shapes, rules), NamedSharding(mesh, BATCH)
    # init runs once, so what counts is compiling: 0.9 s unoptimized, 5.6 s otherwise, for a small model on two cores.
    quick = {"xla_backend_optimization_level": 0} if platform == "cpu" else None

    def scoring(function: Any, outputs: Any) -> Any:
        """A program that takes ``params, batch, mask=None, base=None``."""
        where: Any = {"in_shardings": (shardings.params, batch, batch, shardings.base), "compiler_options": xla}
        compiled = jax.jit(functools.partial(spread, function, outputs), **where)
        return lambda params, batch, mask=None, base=None: compiled(params, batch, mask, base)

    where = {"in_shardings": (shardings, batch), "out_shardings": (shardings, None)}
    return Training(
        jax.jit(init, out_shardings=shardings, donate_argnums=1, compiler_options=quick),
        CheckedStep(jax.jit(step, **where, donate_argnums=0, compiler_options=xla), model),
        scoring(lambda learned, weights, parts: jax.lax.psum(loss(learned, weights, parts, 0.0), _BY_HAND), scalars),
        scoring(row_log_probs, BATCH),
        *(mesh, shardings, batch),
    )


@dataclasses.dataclass(frozen=True)
class CheckedStep:
    """A compiled step, before which ``check`` looks at the batch."""

    program: Any
    config: LlamaConfig

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        """Take the step."""
        self.check(batch)
        return self.program(state, batch)

    def check(self, batch: Any) -> None:
        """Raise ``UsageError`` for an id that is no token's in a batch of NumPy arrays.

        Arrays of JAX are not looked at: they would have to be waited for, and copied from their device.
        """
        tokens = getattr(batch, "tokens", batch)
        if isinstance(tokens, np.ndarray):
            check_ids(tokens, self.config)

    def lower(self, state: Any, batch: Any) -> Any:
        """Lower the program for arrays of these shapes, as ``jax.jit(...).lower`` does."""
        return self.program.lower(state, batch)


def attention_of(config: TrainConfig, mesh: Mesh) -> str:
    """The attention implementation of a configuration, ``auto`` resolved for a mesh; UsageError if it has none such."""
    platform, dtype = mesh.devices.flat[0].platform, compute_dtype(config, mesh)
    check_attention(config.training.attention, platform, backward=True)
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


def on_devices(batch: Any, sharding: NamedSharding) -> Any:
    """A batch's arrays, of whose rows each process has those of its own devices."""
    return jax.tree.map(lambda each: jax.make_array_from_callback(each.shape, sharding, each.__getitem__), batch)


def compute_dtype(config: TrainConfig, mesh: Mesh) -> np.dtype[Any]:
    """The dtype of activations and products: as configured, or by the platform."""
    name, platform = config.training.dtype, mesh.devices.flat[0].platform
    return jnp.dtype(name if name != "auto" else "float32" if platform == "cpu" else "bfloat16")
