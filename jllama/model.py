"""The Flax module: the pure functions of ``jllama.functional`` composed into a Llama.

The module holds no state but its parameters. Compiled code takes ``params`` (a nested dictionary of arrays, see
``jllama.parameters``) and puts the module together on its first line: ``llama = build_model(config, params)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

from jllama import functional as F
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import UsageError
from jllama.parameters import Params, initial_std, parameter_table, shape_of
from jllama.rope_scaling import inverse_frequencies

TokenIds = Integer[Array | np.ndarray, "batch seq"] | Sequence[Sequence[int]]


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far. Slot ``i`` of a row belongs to position ``i``.

    Args:
        keys, values: one array a layer, so that each is updated in place.
        lengths: how many tokens each row holds; later slots are unused and never read.
    """

    keys: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    values: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    lengths: Int[Array, "batch"]

    @classmethod
    def zeros(cls, config: LlamaConfig, batch: int, max_len: int, dtype: jnp.dtype | type = jnp.float32) -> KVCache:
        """An empty cache with room for ``max_len`` tokens in each of ``batch`` rows."""
        shape = (batch, config.num_kv_heads, max_len, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
        return cls(keys, values, jnp.zeros(batch, jnp.int32))


class AttentionInputs(NamedTuple):
    """What every layer needs to know of the positions: rotary tables, who sees whom, and where new keys go."""

    cos: Float[Array, "#batch seq half"]
    sin: Float[Array, "#batch seq half"]
    mask: F.Mask
    positions: Int[Array, "#batch seq"]


KeysValues = tuple[Float[Array, "batch kv_heads kv_seq head_dim"], Float[Array, "batch kv_heads kv_seq head_dim"]]


class Layer(nnx.Module):
    """One transformer block: ``x += attention(norm(x))``, then ``x += swiglu(norm(x))``."""

    attn_norm: nnx.Param[Array]
    wq: nnx.Param[Array]
    wk: nnx.Param[Array]
    wv: nnx.Param[Array]
    wo: nnx.Param[Array]
    mlp_norm: nnx.Param[Array]
    w_gate: nnx.Param[Array]
    w_up: nnx.Param[Array]
    w_down: nnx.Param[Array]

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.norm_eps = config.norm_eps
        _add_parameters(self, config, rngs, "layers/")

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        attend: AttentionInputs,
        cached: KeysValues | None = None,
        implementation: str = "auto",
    ) -> tuple[Float[Array, "batch seq embed"], KeysValues]:
        """The block's output, and the keys and values attended to: the new ones written into ``cached``, if given."""
        with jax.named_scope("attention"):
            normed = F.rms_norm(x, self.attn_norm[...], self.norm_eps)
            mixed, kept = self.attention(normed, attend, cached, implementation)
            x = x + mixed
        with jax.named_scope("feed_forward"):
            normed = F.rms_norm(x, self.mlp_norm[...], self.norm_eps)
            return x + F.swiglu(normed, self.w_gate[...], self.w_up[...], self.w_down[...]), kept

    def attention(
        self,
        x: Float[Array, "batch seq embed"],
        attend: AttentionInputs,
        cached: KeysValues | None = None,
        implementation: str = "auto",
    ) -> tuple[Float[Array, "batch seq embed"], KeysValues]:
        """Queries, keys and values of ``x``, mixed and projected back; and the keys and values attended to."""
        query, key, value = self.heads(x)
        query, key = (F.apply_rope(each, attend.cos, attend.sin) for each in (query, key))
        kept = key, value
        if cached is not None:
            kept = _write(cached[0], key, attend.positions), _write(cached[1], value, attend.positions)
        mixed = F.attention(query, *kept, attend.mask, implementation)
        return _from_heads(mixed, self.wo[...]), kept

    def heads(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each ``[batch, heads or kv_heads, seq, head_dim]``, before the rotary embedding."""
        return _to_heads(x, self.wq[...]), _to_heads(x, self.wk[...]), _to_heads(x, self.wv[...])


LAYER_CLASSES: dict[type[LlamaConfig], type[Layer]] = {LlamaConfig: Layer}
"""The block of the models of a class of configurations, and of those derived from it that have none of their own."""


def _layer_class(config: LlamaConfig) -> type[Layer]:
    return next(LAYER_CLASSES[kind] for kind in type(config).__mro__ if kind in LAYER_CLASSES)


class Llama(nnx.Module):
    """A whole Llama. Its layers are stacked on a leading axis and scanned, or separate and unrolled.

    Scanning compiles in a time that does not grow with depth: for training. Unrolling spares each step the copy of a
    layer's weights out of the stack: for decoding. Which one is a matter of how the parameters are laid out.
    Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2.
    """

    embed: nnx.Param[Array]
    final_norm: nnx.Param[Array]
    lm_head: nnx.Param[Array]  # unless tied

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        if not config.vocab_size:
            raise UsageError("vocab_size is 0; give the number of the tokenizer's tokens")
        self.config = config
        _add_parameters(self, config, rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers: Layer | nnx.Dict[Layer] = nnx.vmap(lambda key: _layer_class(config)(config, nnx.Rngs(key)))(keys)

    def __call__(
        self, tokens: TokenIds, segments: Int[Array, "batch seq"] | None = None
    ) -> Float[Array, "batch seq vocab"]:
        """Float32 logits of the token that follows each one; ``segments`` and errors as in ``hidden``."""
        return self.logits(self.hidden(tokens, segments))

    def hidden(
        self,
        tokens: TokenIds,
        segments: Int[Array, "batch seq"] | None = None,
        positions: Int[Array, "#batch seq"] | None = None,
        *,
        remat: bool = False,
        attention: str = "auto",
    ) -> Float[Array, "batch seq embed"]:
        """The final normalised activations of whole sequences.

        Args:
            tokens: ids below ``vocab_size``.
            segments: numbers that tell packed documents apart; tokens attend only within their own. None: one each row.
            positions: by which queries and keys are turned; defaults to 0, 1, 2, ...
            remat: keep only each layer's input for the backward pass; else products with weights are kept too.

            attention: one of ``functional.ATTENTION``, or ``auto``, see ``functional.choose_attention``.

        Raises:
            UsageError: tokens are not ids of this model (``as_token_ids``), or more than ``max_seq_len`` without
                ``positions``, other than with ``dynamic`` scaling.
        """
        tokens = as_token_ids(tokens, self.config)
        if positions is None:
            length, context, scaling = tokens.shape[1], self.config.max_seq_len, self.config.rope_scaling
            if length > context and not (scaling and scaling.grows):
                raise UsageError(f"tokens has {length} a row; the model's context is {context}: cut it into windows")
            positions = jnp.arange(length)[None]
        mask = F.Mask(query_segments=segments, key_segments=segments)
        attend, x = attention_inputs(self.config, positions, mask, tokens.shape[1]), self._embed(tokens)
        if isinstance(self.layers, Layer):
            graph, stacked = nnx.split(self.layers)

            def step(x: Array, weights: Any) -> tuple[Array, None]:
                return nnx.merge(graph, weights)(x, attend, implementation=attention)[0], None

            # What elementwise operations and attention make is cheaper to compute again than to stack for every layer:
            # keeping only the results of products with weights, a training step on CPU is 1.2 to 1.6 times faster.
            keep = None if remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            x, _ = jax.lax.scan(jax.checkpoint(step, policy=keep, prevent_cse=False), x, stacked)
        else:
            for index in range(self.config.num_layers):
                x, _ = self.layers[str(index)](x, attend, implementation=attention)
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def forward_with_cache(
        self, tokens: TokenIds, cache: KVCache | None, counts: Int[Array, "batch"], attention: str = "auto"
    ) -> tuple[Float[Array, "batch seq embed"], KVCache]:
        """Continue each row of the cache by its first ``counts`` tokens: prefill, or one step of decoding.

        Tokens past a row's count are padding: their activations mean nothing and no real token ever sees them.
        Slots past the end of the cache are not written; the caller checks that ``lengths + counts`` fit. With no cache,
        the tokens begin a new one, as long as they are.
        Needs unrolled layers (``DecodeParams``). Returns the final normalised activations and the longer cache.
        """
        assert isinstance(self.layers, nnx.Dict), "decoding takes DecodeParams"
        tokens = as_token_ids(tokens, self.config)
        counts = counts.astype(jnp.int32)
        lengths = jnp.zeros_like(counts) if cache is None else cache.lengths
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        kv_seq = tokens.shape[1] if cache is None else cache.keys[0].shape[2]
        if attention == "auto":
            attention = F.choose_attention(jax.default_backend(), tokens.shape[1], kv_seq, backward=False)
        mask = F.Mask(offset=None if cache is None else lengths)
        attend = attention_inputs(self.config, positions, mask)
        x = self._embed(tokens)
        updated: list[KeysValues] = []
        for index in range(self.config.num_layers):
            cached = None if cache is None else (cache.keys[index], cache.values[index])
            x, kept = _run_layer(*nnx.split(self.layers[str(index)]), x, attend, cached, attention)
            updated.append(kept)
        keys, values = zip(*updated, strict=True)
        x = F.rms_norm(x, self.final_norm[...], self.config.norm_eps)
        return x, KVCache(keys, values, lengths + counts)

    def logits(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead vocab"]:
        """Float32 scores of every token in the vocabulary: ``hidden @ head``."""
        with jax.named_scope("head"):
            return F.project(hidden, self.head)

    def loss(
        self,
        hidden: Float[Array, "batch seq embed"],
        targets: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"],
        z_loss: float = 0.0,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed loss of the unmasked targets, and their number: ``functional.linear_cross_entropy``."""
        with jax.named_scope("head"):
            return F.linear_cross_entropy(hidden, self.head, targets, mask, z_loss)

    def token_log_probs(
        self, hidden: Float[Array, "batch seq embed"], targets: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
        """``functional.token_log_probs``: each target's log-probability, and whether it is the likeliest token."""
        with jax.named_scope("head"):
            chunk_tokens = min(2048, max(2**28 // (4 * self.config.vocab_size), 1))  # at most 256 MiB of float32 logits
            return F.token_log_probs(hidden, self.head, targets, chunk_tokens)

    @property
    def head(self) -> Any:
        """The matrix that makes logits, ``[embed, vocab]``: ``lm_head``, or the embedding transposed if tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.lm_head[...]

    def _embed(self, tokens: Array) -> Array:
        with jax.named_scope("embedding"):
            return self.embed[...][tokens]


def as_token_ids(tokens: Any, config: LlamaConfig) -> Integer[Array, "batch seq"]:
    """``tokens``, a nested list or an array, as an array; ``UsageError`` if they are not ``[batch, seq]`` ids below
    ``vocab_size``. Under ``jit`` their values can't be read and are not checked.
    """
    try:
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    except ValueError:
        raise UsageError("the rows of tokens differ in length: pad them, or take one at a time") from None
    given = f"tokens is {tokens.dtype}{list(tokens.shape)}"
    if tokens.ndim != 2:
        raise UsageError(f"{given}; it must be [batch, seq]; of a row alone, take tokens[None]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(f"{given}; token ids are integers")
    if tokens.size and not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True):
        low, high = np.min(np.asarray(tokens)), np.max(np.asarray(tokens))
        if low < 0 or high >= config.vocab_size:
            raise UsageError(
                f"tokens holds the id {low if low < 0 else high}; this model's are 0 to {config.vocab_size - 1}"
            )
    return jnp.asarray(tokens)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_layer(
    graph: nnx.GraphDef[Layer],
    weights: Any,
    x: Array,
    attend: AttentionInputs,
    cached: KeysValues | None,
    implementation: str,
) -> tuple[Array, KeysValues]:
    """One of many equal layers: under an outer ``jit`` they are traced once, not once each."""
    return nnx.merge(graph, weights)(x, attend, cached, implementation)


def attention_inputs(config: LlamaConfig, positions: Array, mask: F.Mask, seq_len: int = 0) -> AttentionInputs:
    """What every layer is told of the positions; ``seq_len`` as in ``rope_frequencies``."""
    cos, sin = F.rope_tables(positions, rope_frequencies(config, seq_len))
    if scaling := config.rope_scaling:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return AttentionInputs(cos, sin, mask, positions)


def rope_frequencies(config: LlamaConfig, seq_len: int = 0) -> np.ndarray:
    """The rotary frequencies of a configuration, scaled as it asks, in radians per token (float64).

    Only ``dynamic`` scaling depends on a length: ``max(seq_len, config.max_seq_len)``. ``seq_len`` is the length of the
    arrays in a forward pass over whole sequences, a static shape. It is left at 0 with a KV cache, whose keys are kept
    rotated, so that the base cannot move under them: decoding equals the full forward up to ``max_seq_len`` tokens.
    """
    if config.rope_scaling is None:
        return np.array(inverse_frequencies(config.head_dim, config.rope_theta))
    length = max(seq_len, config.max_seq_len)
    return np.array(config.rope_scaling.frequencies(config.head_dim, config.rope_theta, length))


def build_model(config: LlamaConfig, params: Params | DecodeParams) -> Llama:
    """The module with these parameters in it, of either layout: the first line of a compiled function."""
    if isinstance(params, DecodeParams):
        return nnx.merge(_graph(config, unrolled=True), params.weights)
    return nnx.merge(_graph(config, unrolled=False), params)


def build_layer(config: LlamaConfig, weights: Params) -> Layer:
    """One block by itself with these weights in it: a value of an unstacked ``params["layers"]``."""
    return nnx.merge(_layer_graph(config), weights)


def initial_params(key: Array, config: LlamaConfig) -> Params:
    """Freshly drawn parameters, float32, layers stacked, as the table says. Works under ``jit`` and ``eval_shape``."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key))))


def abstract_params(config: LlamaConfig) -> Params:
    """Shapes and dtypes of ``initial_params``, without any memory."""
    return jax.eval_shape(functools.partial(initial_params, config=config), jax.random.key(0))


@functools.cache
def _graph(config: LlamaConfig, *, unrolled: bool) -> nnx.GraphDef[Llama]:
    llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    if unrolled:
        layer = nnx.eval_shape(lambda: _layer_class(config)(config, nnx.Rngs(0)))
        llama.layers = nnx.Dict({str(i): nnx.clone(layer) for i in range(config.num_layers)})
    return nnx.graphdef(llama)


@functools.cache
def _layer_graph(config: LlamaConfig) -> nnx.GraphDef[Layer]:
    return nnx.graphdef(nnx.eval_shape(lambda: _layer_class(config)(config, nnx.Rngs(0))))


def _add_parameters(module: nnx.Module, config: LlamaConfig, rngs: nnx.Rngs, prefix: str = "") -> None:
    """Give a module the table's rows of this prefix. The ``layers`` axis is added by ``nnx.vmap``."""
    for path, row in parameter_table(config).items():
        if path.startswith("layers/") != (prefix == "layers/"):
            continue
        shape = tuple(size for size, axis in zip(shape_of(row, config), row.axes, strict=True) if axis != "layers")
        if row.init == "normal":
            values = initial_std(row, config) * jax.random.normal(rngs.params(), shape, jnp.float32)
        else:
            values = jnp.full(shape, float(row.init == "ones"), jnp.float32)
        setattr(module, path.removeprefix(prefix), nnx.Param(values))


def _to_heads(
    x: Float[Array, "batch seq embed"], w: Float[Array | F.DecodeMatrix, "embed heads head_dim"]
) -> Float[Array, "batch heads seq head_dim"]:
    batch, seq, embed = x.shape
    flat = x.reshape(-1, embed) @ w.reshape(embed, -1)
    return flat.reshape(batch, seq, *w.shape[1:]).swapaxes(1, 2)


def _from_heads(
    x: Float[Array, "batch heads seq head_dim"], w: Float[Array | F.DecodeMatrix, "heads head_dim embed"]
) -> Float[Array, "batch seq embed"]:
    batch, heads, seq, head_dim = x.shape
    flat = x.swapaxes(1, 2).reshape(-1, heads * head_dim) @ w.reshape(-1, w.shape[-1])
    return flat.reshape(batch, seq, -1)


def _write(
    cached: Float[Array, "batch kv_heads max_len head_dim"],
    new: Float[Array, "batch kv_heads seq head_dim"],
    positions: Int[Array, "batch seq"],
) -> Float[Array, "batch kv_heads max_len head_dim"]:
    """Put ``new`` into each row's own slots. Unlike a dynamic slice, which would shift, it drops what does not fit.

    Rows and heads are joined to one axis: where one of them is of size one, XLA would copy the whole cache on a CPU.
    """
    batch, kv_heads, max_len, head_dim = cached.shape
    rows = jnp.arange(batch * kv_heads)[:, None]
    slots = jnp.repeat(positions, kv_heads, axis=0)
    joined = new.reshape(batch * kv_heads, -1, head_dim).astype(cached.dtype)
    return cached.reshape(-1, max_len, head_dim).at[rows, slots].set(joined, mode="drop").reshape(cached.shape)
