"""The Flax module: the operations of ``jllama.core.ops``, composed into a Llama.

It has no state but its parameters. Compiled code takes ``params`` (see ``jllama.core.parameters``)
and begins with ``llama = build_llama(config, params)``.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

from jllama.core import UsageError, ops
from jllama.core.config import BLOCKS, LayerKind, LlamaConfig, inverse_frequencies
from jllama.core.parameters import (
    EXPERT_MATRICES,
    PARAMETERS,
    Params,
    initial_std,
    joined_groups,
    layer_places,
    layers_of,
    parameter_table,
    shape_of,
)

Segments = Int[Array, "batch seq"] | None
TokenIds = Integer[Array | np.ndarray, "batch seq"] | Sequence[Sequence[int]]
Stream = Float[Array, "batch seq embed"]
KeysValues = tuple[
    Float[Array, "batch kv_heads kv_seq head_dim"], Float[Array, "batch kv_heads kv_seq head_dim"]
]
Attended = tuple[Stream, KeysValues | None]
Attention = Callable[[Array, Array, Array, ops.Mask], Array]


class KVCache(NamedTuple):
    """Keys and values of the tokens so far. Slot ``i`` of a row belongs to position ``i``.

    Attributes:
        keys: one array a layer, each updated in place.
        values: the same of the values.
        lengths: how many tokens each row has; later slots are never read.

    Examples:
        >>> config = LlamaConfig(61, num_layers=2, embed_dim=64, num_heads=4, max_seq_len=32)
        >>> cache = KVCache.zeros(config, batch=3, max_len=16)
        >>> print(len(cache.keys), cache.keys[0].shape, cache.lengths)
        2 (3, 4, 16, 16) [0 0 0]
    """

    keys: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    values: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    lengths: Int[Array, "batch"]

    @classmethod
    def zeros(
        cls, config: LlamaConfig, batch: int, max_len: int, dtype: jnp.dtype | type = jnp.float32
    ) -> "KVCache":
        """Return an empty cache with ``max_len`` slots in each of ``batch`` rows."""
        shape = (batch, config.num_kv_heads, max_len, config.head_dim)
        keys, values = (
            tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2)
        )
        return cls(keys, values, jnp.zeros(batch, jnp.int32))


def write_slots(cached: Array, new: Array, positions: Array) -> Array:
    """Write ``new`` keys or values into each row's own slots.

    What does not fit is dropped; a dynamic slice would shift it instead.
    """
    batch, kv_heads, max_len, head_dim = cached.shape
    # Rows and heads are joined to one axis: where one of them is of size one, XLA would copy the
    # whole cache on a CPU.
    rows = jnp.arange(batch * kv_heads)[:, None]
    slots = jnp.repeat(positions, kv_heads, axis=0)
    new = new.reshape(batch * kv_heads, -1, head_dim).astype(cached.dtype)
    flat = cached.reshape(-1, max_len, head_dim)
    return flat.at[rows, slots].set(new, mode="drop").reshape(cached.shape)


class Functions(NamedTuple):
    """The functions that a model calls. The defaults are the formulas on one device.

    ``jllama.models.build`` gives faster ones.

    Attributes:
        attention: of whole sequences to themselves.
        prefill: the same, of tokens that begin a cache; needs no gradient.
        cached: attention over a cache, to which the tokens' own keys are written.
        write: writes keys or values to the slots of a cache.
        embedding: looks up rows of the table.
        project: makes logits, ``(hidden, head)``.
        loss: ``ops.cross_entropy``, or what equals it.
        score: ``ops.score_tokens``, or what equals it.
        likelihood: ``ops.likelihood``, or what equals it.
        remat: takes a layer, and returns it with another choice of what is saved for gradients.
        route: chooses the experts of each token.
        mix_experts: ``ops.mix_experts``, or what equals it.
    """

    attention: Attention = ops.attention
    prefill: Attention = ops.attention
    cached: Attention = ops.attention
    write: Callable[[Array, Array, Array], Array] = write_slots
    embedding: Callable[[Any, Array], Array] = ops.embedding
    project: Callable[[Array, Any], Array] = ops.project
    loss: Callable[..., tuple[Array, Array]] = ops.cross_entropy
    score: Callable[..., Any] = ops.score_tokens
    likelihood: Callable[..., tuple[Array, Array]] = ops.likelihood
    remat: Callable[[Any], Any] = lambda layer: layer
    route: Callable[..., tuple[Array, Array]] = ops.route
    mix_experts: Callable[..., Array] = ops.mix_experts


DEFAULTS = Functions()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cos", "sin", "mask", "slots", "temperature"],
    meta_fields=["functions", "cache_is_empty"],
)
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What a layer needs besides its input; layers of one kind share it.

    The types of arrays are ``Any`` because JAX also builds trees from leaves that are not arrays.

    Attributes:
        cos: the rotary table, Float[Array, "#batch seq half"]; None for layers without rotation.
        sin: the same.
        mask: which keys a query sees.
        slots: Int[Array, "batch seq"], those of the cache that new keys and values are written to.
        functions: those that the model calls; ``attention`` is that for these tokens.
        cache_is_empty: whether no tokens are cached, so that attention needs only the new keys.
        temperature: Float[Array, "#batch seq"], the factor of queries; None for 1.
    """

    cos: Any
    sin: Any
    mask: ops.Mask
    slots: Any = None
    functions: Functions = DEFAULTS
    cache_is_empty: bool = False
    temperature: Any = None


class LayerGather(NamedTuple):
    """How stacked layers are gathered when they run, for devices that hold parts of them.

    Attributes:
        gather: ``(parts, receivers) -> weights``, one layer's whole weights.
        receivers: zeros like this device's parts, whose gradients become those of the parts.
    """

    gather: Callable[[Params, Params], Params]
    receivers: Params


class _Module(nnx.Module):
    """A module whose parameters are rows of the table.

    ``nnx.vmap`` adds the axis ``layers`` to those of a layer.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param[Array]: ...

    def add_parameters(self, config: LlamaConfig, rngs: nnx.Rngs, prefix: str = "") -> None:
        """Draw the parameters of a prefix, ``layers/`` or none, as the table says."""
        for path, row in parameter_table(config).items():
            is_of_layer = path.startswith("layers/")
            if is_of_layer != bool(prefix):
                continue
            shape = shape_of(row, config)
            if is_of_layer:
                shape = shape[1:]
            if row.init == "normal":
                noise = jax.random.normal(rngs.params(), shape, jnp.float32)
                values = initial_std(row, config) * noise
            else:
                values = jnp.full(shape, float(row.init == "ones"), jnp.float32)
            setattr(self, path.removeprefix(prefix), nnx.Param(values))


class Layer(_Module):
    """One transformer block: ``x += attention(norm(x))``, then ``x += swiglu(norm(x))``.

    With ``norm_placement`` "after" it is ``x += norm(attention(x))``, ``x += norm(swiglu(x))``.
    """

    is_joined = False  # whether matrices are joined, as in the layout for decoding

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.add_parameters(config, rngs, "layers/")

    def __call__(
        self, x: Stream, inputs: AttentionInputs, cached: KeysValues | None = None
    ) -> Attended:
        """Return the block's output, and ``cached`` with the new keys and values in it, if set."""
        with jax.named_scope("attention"):
            update, cached = self.attention(self.normalize(x, "attn_norm"), inputs, cached)
            x = x + self.residual(self.normalize(update, "attn_out_norm"))
        with jax.named_scope("feed_forward"):
            update = self.feed_forward_network(self.normalize(x, "mlp_norm"), inputs.functions)
            return x + self.residual(self.normalize(update, "mlp_out_norm")), cached

    def heads(self, x: Stream, inputs: AttentionInputs) -> tuple[Array, ...]:
        """Compute queries, keys and values, ``[batch, heads or kv_heads, seq, head_dim]``."""
        config = self.config

        # 1) Products, biases and norms, [tokens, heads, head_dim].
        query, key, value = self.products(x, "wq", "wk", "wv")
        if config.attention_bias:
            query = query + self.bq[...]
            key = key + self.bk[...]
            value = value + self.bv[...]
        query = self.normalize_heads(query, "q_norm")
        key = self.normalize_heads(key, "k_norm")
        if config.attention_multiplier:  # attention divides scores by sqrt(head_dim)
            query = query * (config.attention_multiplier * config.head_dim**0.5)

        # 2) Rotation.
        query, key, value = (
            product.reshape(*x.shape[:2], *product.shape[1:]).swapaxes(1, 2)
            for product in (query, key, value)
        )
        query = self.rotate(query, inputs)
        if inputs.temperature is not None:
            query = (query * inputs.temperature[:, None, :, None]).astype(query.dtype)
        return query, self.rotate(key, inputs), value

    def rotate(self, x: Array, inputs: AttentionInputs) -> Array:
        """Apply the rotary embedding to the first ``rotary_dim`` channels of each head."""
        if inputs.cos is None:
            return x
        dim = self.config.rotary_dim
        rotated = ops.apply_rope(x[..., :dim], inputs.cos, inputs.sin)
        if dim != x.shape[-1]:
            rotated = jnp.concatenate([rotated, x[..., dim:]], axis=-1)
        if self.config.qk_norm == "rotated":
            rotated = ops.rms_norm(rotated, jnp.ones(x.shape[-1], x.dtype), self.config.norm_eps)
        return rotated

    def attention(
        self, x: Stream, inputs: AttentionInputs, cached: KeysValues | None = None
    ) -> Attended:
        """Attend over the keys and values of ``x``, or over ``cached`` with these written to it.

        Return the projected result, and the updated ``cached``.
        """
        query, key, value = self.heads(x, inputs)

        # 3) Attention.
        visible = (key, value)
        if cached is not None:
            cached_keys, cached_values = cached
            cached_keys = inputs.functions.write(cached_keys, key, inputs.slots)
            cached_values = inputs.functions.write(cached_values, value, inputs.slots)
            cached = (cached_keys, cached_values)
            if not inputs.cache_is_empty:
                visible = cached
        mixed = inputs.functions.attention(query, *visible, inputs.mask).swapaxes(1, 2)
        wo = self.wo[...]
        flat = mixed.reshape(x.shape[0] * x.shape[1], -1)
        return (flat @ wo.reshape(-1, wo.shape[-1])).reshape(x.shape), cached

    def feed_forward_network(self, x: Stream, functions: Functions) -> Stream:
        """Compute the SwiGLU of a dense layer, or the sum of experts and the one that all share."""
        is_dense = hasattr(self, "w_down")  # a layer has the parameters of its kind
        if is_dense:
            return self.feed_forward(x)
        update = self.experts(x, functions)
        if self.config.shared_expert:
            update = update + self.swiglu(x, "shared")
        return update

    def feed_forward(self, x: Stream) -> Stream:
        """Compute SwiGLU with this layer's own matrices."""
        return self.swiglu(x, "w")

    def swiglu(self, x: Stream, prefix: str) -> Stream:
        """Compute ``(silu(x w_gate) * (x w_up)) w_down`` with the matrices of a prefix."""
        # 4) SwiGLU.
        gate, up = self.products(x, f"{prefix}_gate", f"{prefix}_up")
        down = getattr(self, f"{prefix}_down")[...]
        return (ops.silu_gate(gate, up) @ down).reshape(x.shape)

    def experts(self, x: Stream, functions: Functions) -> Stream:
        """Sum the SwiGLU of each token's experts, each times its weight.

        Every token has all of its experts, however many others chose them. Source: Jiang et al.
        2024, section 2.1 (arXiv:2401.04088).
        """
        config = self.config
        flat = x.reshape(-1, x.shape[-1])
        # 4) The choice, in float32 whatever the dtype of x.
        with jax.default_matmul_precision("highest"):
            logits = flat.astype(ops.sum_dtype(flat)) @ self.router[...]
        weights, chosen = functions.route(
            logits,
            config.experts_per_token,
            config.normalize_expert_weights,
            config.router,
            self.router_bias[...] if config.router_bias else None,
        )
        if config.router == "sigmoid":  # the weight is one of the input
            flat = flat * weights.astype(flat.dtype)
            weights = jnp.ones_like(weights)
        # 5) SwiGLU of those that were chosen, and its sum.
        matrices = [getattr(self, name)[...] for name in EXPERT_MATRICES]
        return functions.mix_experts(flat, weights, chosen, *matrices).reshape(x.shape)

    def normalize(self, x: Array, name: str) -> Array:
        """Apply one of the layer's norms, if the model has it."""
        if not PARAMETERS[f"layers/{name}"].when(self.config):
            return x
        return ops.rms_norm(x, getattr(self, name)[...], self.config.norm_eps)

    def normalize_heads(self, x: Array, name: str) -> Array:
        """Normalize each head, or with ``qk_norm`` "whole" all heads of a token together.

        ``x`` is ``[tokens, heads, head_dim]``. Without such a norm it is returned unchanged.
        """
        if self.config.qk_norm != "whole":
            return self.normalize(x, name)
        scale = getattr(self, f"{name}_whole")[...]
        whole = ops.rms_norm(x.reshape(len(x), -1), scale.reshape(-1), self.config.norm_eps)
        return whole.reshape(x.shape)

    def residual(self, update: Stream) -> Stream:
        """Multiply what is added to the residual stream by ``residual_multiplier``."""
        return multiply(update, self.config.residual_multiplier)

    def products(self, x: Stream, *names: str) -> list[Array]:
        """Multiply each token of ``x`` by each of these matrices: ``[tokens, *outputs]``."""
        # XLA:CPU computes the gradients of the weights 1.8 times faster from two axes.
        flat = x.reshape(-1, x.shape[-1])
        rows = [PARAMETERS[f"layers/{name}"] for name in names]
        if self.is_joined and rows[0].joined:
            joined = getattr(self, rows[0].joined)[...]
            shapes = [shape_of(row, self.config)[2:] for row in rows]
            ends = np.cumsum([math.prod(shape) for shape in shapes])
            products = jnp.split(flat @ joined, ends[:-1], axis=1)
        else:
            matrices = [getattr(self, name)[...] for name in names]
            shapes = [matrix.shape[1:] for matrix in matrices]
            products = [flat @ matrix.reshape(x.shape[-1], -1) for matrix in matrices]
        return [
            product.reshape(len(flat), *shape)
            for product, shape in zip(products, shapes, strict=True)
        ]


def multiply(x: Array, factor: float) -> Array:
    """Return ``x`` times a factor of the configuration, which is mostly 1."""
    return x if factor == 1 else x * factor


def new_layer(config: LlamaConfig, key: Array | int) -> Layer:
    """Draw one layer, of the configured block."""
    return BLOCKS.get(config.block, Layer)(config, nnx.Rngs(key))


class Llama(_Module):
    """A whole Llama. The layout of its parameters decides how its layers run.

    Stacked layers are scanned, for training: the time of compilation does not grow with depth.
    Separate layers are unrolled, for decoding: no weights are copied. Source: Touvron et al. 2023
    (arXiv:2302.13971), section 2.2.

    Attributes:
        functions: what is called for attention, the loss and others.

    Examples:
        >>> model = jllama.load("smollm2/", layout="training")
        >>> llama = jllama.build_model(model.config, model.params)
        >>> llama(jnp.array([[1, 2, 3]])).shape
        (1, 3, 300)
    """

    functions = DEFAULTS

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.add_parameters(config, rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers: Layer | nnx.Dict[Layer] = nnx.vmap(functools.partial(new_layer, config))(keys)
        for path, row in parameter_table(config).items():
            layers = layers_of(row, config)
            if len(layers) < config.num_layers:  # others do not have it
                own = nnx.vmap(functools.partial(new_layer, config))(keys[np.array(layers)])
                name = path.removeprefix("layers/")
                setattr(self.layers, name, getattr(own, name))

    def __call__(
        self, tokens: TokenIds, segments: Segments = None
    ) -> Float[Array, "batch seq vocab"]:
        """Compute float32 logits of the token that follows each token; see ``hidden``."""
        return self.logits(self.hidden(tokens, segments))

    def hidden(
        self,
        tokens: TokenIds,
        segments: Segments = None,
        positions: Int[Array, "#batch seq"] | None = None,
        *,
        parallel: LayerGather | None = None,
    ) -> Stream:
        """Compute the final normalized activations of whole sequences.

        Args:
            tokens: ids, ``[batch, seq]``.
            segments: numbers that tell packed documents apart; tokens attend within their own. None
                for one document a row.
            positions: those that queries and keys are turned by; None for 0, 1, 2, ...
            parallel: how layers are gathered, inside ``jax.shard_map``; None for whole weights.

        Raises:
            UsageError: ``tokens`` has more than ``max_seq_len`` a row, without ``positions`` or
                ``dynamic`` scaling, or is no array of this model's ids.
        """
        tokens = as_token_ids(tokens, self.config)
        length = tokens.shape[1]
        if positions is None:
            check_length(self.config, length)
            positions = jnp.arange(length)[None]
        mask = ops.Mask(query_segments=segments, key_segments=segments)
        inputs = attention_inputs(
            self.config, positions, mask, length, len(tokens), functions=self.functions
        )
        x = self.embedding(tokens)
        if isinstance(self.layers, Layer):
            x = _scan_layers(self.layers, x, inputs, self.functions.remat, parallel)
        else:
            for index in range(self.config.num_layers):
                x, _ = self.layers[str(index)](x, inputs[index])
        return ops.rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def decode(
        self,
        tokens: TokenIds,
        cache: KVCache,
        counts: Int[Array, "batch"],
        *,
        cache_is_empty: bool = False,
    ) -> tuple[Stream, KVCache]:
        """Continue each row of a cache by its first ``counts`` tokens: prefill, or one step.

        Tokens after a row's count are padding: they are not written, and no real token sees them.
        Tokens after the end of the cache are not written either, so the caller checks that
        ``lengths + counts`` fit. The layers must be separate.

        Args:
            tokens: ids, ``[batch, seq]``.
            cache: keys and values of the tokens so far. If it is donated to a compiled function, it
                is updated in place.
            counts: how many of each row's tokens are real.
            cache_is_empty: whether all rows are empty. Attention then has whole sequences, which
                kernels are made for.

        Returns:
            The activations as from ``hidden``, with the same errors, and the longer cache.
        """
        assert isinstance(self.layers, nnx.Dict), "decoding takes separate layers"
        tokens = as_token_ids(tokens, self.config)
        counts = counts.astype(jnp.int32)
        max_len = cache.keys[0].shape[2]

        # 1) Find each token's position, and its slot: padding has none.
        seq = tokens.shape[1]
        positions = cache.lengths[:, None] + jnp.arange(seq, dtype=jnp.int32)
        slots = jnp.where(jnp.arange(seq) < counts[:, None], positions, max_len)

        # 2) Say which keys are seen. A row without new tokens reads nothing, however long it is.
        mask = ops.Mask()
        attention = self.functions.prefill
        if not cache_is_empty:
            mask = ops.Mask(offset=jnp.where(counts > 0, cache.lengths, 0))
            attention = self.functions.cached
        inputs = attention_inputs(
            self.config,
            positions,
            mask,
            functions=self.functions._replace(attention=attention),
            slots=slots,
            cache_is_empty=cache_is_empty,
            batch=tokens.shape[0],
            num_keys=seq if cache_is_empty else max_len,
        )

        # 3) Run the layers.
        x = self.embedding(tokens)
        updated = []
        for index in range(self.config.num_layers):
            cached = (cache.keys[index], cache.values[index])
            layer = self.layers[str(index)]
            x, cached = _run_layer(*nnx.split(layer), x, inputs[index], cached)
            updated.append(cached)
        keys, values = zip(*updated, strict=True)
        x = ops.rms_norm(x, self.final_norm[...], self.config.norm_eps)
        return x, KVCache(keys, values, cache.lengths + counts)

    def embedding(self, tokens: Int[Array, "batch seq"]) -> Stream:
        """Look up the input of the first layer."""
        with jax.named_scope("embedding"):
            looked_up = self.functions.embedding(self.embed[...], tokens)
            return multiply(looked_up, self.config.embedding_multiplier)

    def logits(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead vocab"]:
        """Compute float32 scores of every token: ``hidden @ head / logits_scaling``."""
        with jax.named_scope("head"):
            return self.functions.project(self._scale(hidden), self.head)

    def loss(
        self,
        hidden: Stream,
        targets: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"],
        z_loss: float = 0.0,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sum the loss of the counted targets, and count them, see ``ops.cross_entropy``."""
        with jax.named_scope("head"):
            return self.functions.loss(self._scale(hidden), self.head, targets, mask, z_loss)

    def token_log_probs(
        self, hidden: Stream, targets: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
        """Compute each target's log-probability, and whether it is the likeliest token."""
        return self.score_tokens(self.functions.likelihood, hidden, targets)

    def score_tokens(self, score: Callable[[Array, Any], Any], hidden: Stream, targets: Any) -> Any:
        """Compute ``score(logits, targets)``, see ``ops.score_tokens``."""
        with jax.named_scope("head"):
            return self.functions.score(score, self._scale(hidden), self.head, targets)

    def _scale(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead embed"]:
        """Divide the input of the head, and so the logits, by ``logits_scaling``."""
        return multiply(hidden, 1 / self.config.logits_scaling)

    @property
    def head(self) -> Any:
        """The matrix that makes logits, ``[embed, vocab]``: ``lm_head``, or ``embed.T`` if tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.lm_head[...]


def _scan_layers(
    layers: Layer,
    x: Stream,
    inputs: Sequence[AttentionInputs],
    remat: Callable[[Any], Any],
    parallel: LayerGather | None,
) -> Stream:
    """Run stacked layers one after the other, in one loop.

    An iteration runs one layer, or a few if their kinds repeat: four for three layers with a
    sliding window and one without.
    """
    config = layers.config
    stacked = (nnx.to_pure_dict(nnx.state(layers)),)
    if parallel:
        stacked = (*stacked, parallel.receivers)

    def run_layer(
        inputs: AttentionInputs, x: Array, parts: tuple[Params, ...]
    ) -> tuple[Array, None]:
        weights = parallel.gather(*parts) if parallel else parts[0]
        x, _ = build_layer(config, weights)(x, inputs)
        return x, None

    period = _period(config.layer_kinds)
    runs = [remat(functools.partial(run_layer, inputs[index])) for index in range(period)]
    if period == 1:
        x, _ = jax.lax.scan(runs[0], x, stacked)
        return x

    def run_period(x: Array, parts: tuple[Params, ...]) -> tuple[Array, None]:
        for index, run in enumerate(runs):
            x, _ = run(x, tuple(weights_of_layer(part, config, index) for part in parts))
        return x, None

    # The first axis of a stack is cut into periods.
    num_periods = config.num_layers // period
    stacked = jax.tree.map(lambda leaf: leaf.reshape(num_periods, -1, *leaf.shape[1:]), stacked)
    x, _ = jax.lax.scan(run_period, x, stacked)
    return x


def weights_of_layer(stacks: Params, config: LlamaConfig, layer: int) -> Params:
    """Return the weights of a layer among those of all, or of a period, whose first one is 0."""
    return {
        name: jax.tree.map(operator.itemgetter(place), stacks[name])
        for name, place in layer_places(config)[layer].items()
        if name in stacks
    }


def _period(kinds: Sequence[LayerKind]) -> int:
    """Return after how many layers their kinds repeat; the number of all layers if they do not."""
    for size in range(1, len(kinds)):
        if [*kinds[size:], *kinds[:size]] == [*kinds]:
            return size
    return len(kinds)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef[Layer], weights: Any, *arguments: Any) -> Attended:
    """Run one of many equal layers, which an outer ``jit`` then traces once and not once each."""
    return nnx.merge(graph, weights)(*arguments)


# The inputs of a model


def check_length(config: LlamaConfig, length: int) -> None:
    """Raise ``UsageError`` for rows longer than the context, unless RoPE's scaling grows."""
    context = config.max_seq_len
    grows = config.rope_scaling is not None and config.rope_scaling.grows
    if length > context and not grows:
        raise UsageError(
            f"tokens has {length} a row; the model's context is {context}: cut it into windows"
        )


def as_token_ids(tokens: Any, config: LlamaConfig) -> Integer[Array, "batch seq"]:
    """Return a nested list or an array as an array of ids.

    Raises:
        UsageError: it is not ``[batch, seq]``, or has no integers, or an id that is not below
            ``vocab_size`` (which is checked where values are known).
    """
    try:
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    except ValueError:
        raise UsageError(
            "the rows of tokens differ in length: pad them, or pass one at a time"
        ) from None
    actual = f"tokens is {tokens.dtype}{list(tokens.shape)}"
    if tokens.ndim != 2:
        raise UsageError(f"{actual}; it must be [batch, seq]; for a single row, pass tokens[None]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(f"{actual}; token ids are integers")
    if not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True):
        check_ids(np.asarray(tokens), config)
    return jnp.asarray(tokens)


def check_ids(tokens: np.ndarray, config: LlamaConfig) -> None:
    """Raise ``UsageError`` for an id that is not in the vocabulary.

    Its embedding would be NaN, or another token's row.
    """
    if not tokens.size:
        return
    for id in (tokens.min(), tokens.max()):
        if not 0 <= id < config.vocab_size:
            raise UsageError(
                f"tokens holds the id {id}; this model's are 0 to {config.vocab_size - 1}"
            )


def attention_inputs(
    config: LlamaConfig,
    positions: Array,
    mask: ops.Mask,
    seq_len: int = 0,
    batch: int = 1,
    num_keys: int = 0,
    **others: Any,
) -> list[AttentionInputs]:
    """Make the inputs of each layer for these positions.

    ``seq_len`` is as in ``rope_frequencies``, ``num_keys`` how many keys there are in each of
    ``batch`` rows (0: as many as positions); ``others`` are further fields of ``AttentionInputs``.
    """
    kinds = config.layer_kinds
    num_keys = num_keys or positions.shape[1]
    # Chunks and temperatures count tokens, however far they are turned.
    indices = jnp.arange(positions.shape[1])[None] if mask.offset is None else positions
    of_document = ops.document_positions(indices, mask.query_segments)
    by_kind = {}
    for kind in dict.fromkeys(kinds):
        cos, sin = _rope_tables(config, kind, positions, seq_len)
        visible = dataclasses.replace(mask, window=kind.window)
        temperature = None
        if kind.chunk:
            visible = ops.within_chunks(visible, of_document, kind.chunk, batch, num_keys)
        if kind.rope == "none" and config.temperature_step:
            steps = (of_document + 1) // config.temperature_step
            temperature = 1 + config.temperature_scale * jnp.log1p(steps.astype(jnp.float32))
        by_kind[kind] = AttentionInputs(cos, sin, visible, temperature=temperature, **others)
    return [by_kind[kind] for kind in kinds]


def _rope_tables(config: LlamaConfig, kind: LayerKind, positions: Array, seq_len: int) -> Any:
    """Return the tables of layers of one kind, or two times None if they do not rotate."""
    if kind.rope == "none":
        return None, None
    if kind.rope == "plain":
        config = dataclasses.replace(config, rope_scaling=None)
    cos, sin = ops.rope_tables(positions, rope_frequencies(config, seq_len))
    if config.rope_scaling:
        cos *= config.rope_scaling.attention_factor
        sin *= config.rope_scaling.attention_factor
    return cos, sin


def rope_frequencies(config: LlamaConfig, seq_len: int = 0) -> np.ndarray:
    """Compute a configuration's scaled rotary frequencies, in radians a token (float64).

    Only ``dynamic`` scaling depends on a length, ``max(seq_len, config.max_seq_len)``. ``seq_len``
    is the length of whole sequences. It is 0 with a KV cache, whose keys are stored rotated, so
    that their base cannot change later.
    """
    if config.rope_scaling is None:
        return np.array(inverse_frequencies(config.rotary_dim, config.rope_theta))
    length = max(seq_len, config.max_seq_len)
    return np.array(config.rope_scaling.frequencies(config.rotary_dim, config.rope_theta, length))


# From parameters to the module, and the first ones


def build_llama(config: LlamaConfig, params: Params, functions: Functions = DEFAULTS) -> Llama:
    """Put parameters into the module; those of layers are stacked, or a dictionary by index.

    Raises:
        UsageError: the embedding does not have one row for each id of the vocabulary, or a norm's
            scale has another shape.
    """
    rows = jax.tree.leaves(params["embed"])[0].shape[0]
    if rows != config.vocab_size:
        raise UsageError(
            f"embed has {rows} rows, and vocab_size is {config.vocab_size}: take the configuration "
            "that the parameters were made with"
        )
    is_separate = "0" in params["layers"]
    for path, row in parameter_table(config).items():
        if row.role != "scale":  # which would be broadcast; products check their shapes themselves
            continue
        _, is_of_layer, name = path.rpartition("layers/")
        shape = shape_of(row, config)
        holder = params
        if is_of_layer and is_separate:
            holder = params["layers"]["0"]
            shape = shape[1:]
        elif is_of_layer:
            holder = params["layers"]
        if holder[name].shape != shape:
            actual = list(holder[name].shape)
            raise UsageError(f"{path} is {actual}; it must be {list(shape)}")
    names = ()
    if is_separate:
        names = tuple(tuple(params["layers"][str(i)]) for i in range(config.num_layers))
    llama = nnx.merge(_graph(config, names), params)
    llama.functions = functions
    return llama


@functools.cache
def _graph(config: LlamaConfig, names: tuple[tuple[str, ...], ...]) -> nnx.GraphDef[Llama]:
    """Return the module's structure: with stacked layers, or with separate ones.

    ``names`` are those of each separate layer's parameters, in the layout for decoding.
    """
    llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    if names:
        layers = {str(i): nnx.clone(layer_with(config, own)) for i, own in enumerate(names)}
        llama.layers = nnx.Dict(layers)
    return nnx.graphdef(llama)


def build_layer(config: LlamaConfig, weights: Params) -> Layer:
    """Build one block from its weights, a value of an unstacked ``params["layers"]``."""
    return nnx.merge(nnx.graphdef(layer_with(config, tuple(weights))), weights)


@functools.cache
def layer_with(config: LlamaConfig, names: tuple[str, ...]) -> Layer:
    """Return shapes of a layer that has parameters of these names, joined ones among them."""
    layer = nnx.eval_shape(lambda: new_layer(config, 0))
    for joined, parts in joined_groups(config).items():
        if joined in names:
            layer.is_joined = True
            setattr(layer, joined, nnx.Param(jax.ShapeDtypeStruct((), jnp.float32)))
            for part in parts:
                delattr(layer, part)
    for path, row in parameter_table(config).items():
        name = path.removeprefix("layers/")
        if row.feed_forward and name not in names and hasattr(layer, name):
            delattr(layer, name)
    return layer


def initial_params(key: Array, config: LlamaConfig) -> Params:
    """Draw float32 parameters with stacked layers, as the table says.

    It works under ``jax.jit`` and ``jax.eval_shape``.

    Examples:
        >>> config = jllama.LlamaConfig(512, num_layers=2, embed_dim=64, num_heads=4)
        >>> jllama.initial_params(jax.random.key(0), config)["embed"].shape
        (512, 64)
    """
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key))))


def abstract_params(config: LlamaConfig, dtype: jnp.dtype | type = jnp.float32) -> Params:
    """Return shapes of ``initial_params``, with a dtype, without any memory."""
    shapes = {
        path: jax.ShapeDtypeStruct(shape_of(row, config), dtype)
        for path, row in parameter_table(config).items()
    }
    return unflatten_dict(shapes, sep="/")
