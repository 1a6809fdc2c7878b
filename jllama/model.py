"""The Flax module: the pure functions of ``jllama.functional`` composed into a Llama, with no state but parameters.

Compiled code takes ``params`` (see ``jllama.parameters``) and begins with ``llama = build_model(config, params)``.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

from jllama import functional as F
from jllama import kernels as kernels  # which adds to F.ATTENTION
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.errors import UsageError, unknown_name
from jllama.parameters import Params, initial_std, parameter_table, shape_of
from jllama.rope_scaling import inverse_frequencies
from jllama.sharding import spread, spread_attention

Segments = Int[Array, "batch seq"] | None
TokenIds = Integer[Array | np.ndarray, "batch seq"] | Sequence[Sequence[int]]
Stream = Float[Array, "batch seq embed"]
KeysValues = tuple[Float[Array, "batch kv_heads kv_seq head_dim"], Float[Array, "batch kv_heads kv_seq head_dim"]]
Cached = tuple[Any, Any] | None  # ``KeysValues``, or what ``AttentionInputs.write`` and ``attention`` take for them
Attended = tuple[Stream, tuple[Any, Any]]


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far. Slot ``i`` of a row belongs to position ``i``."""

    keys: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]  # one array a layer, each updated in place
    values: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    lengths: Int[Array, "batch"]  # how many tokens each row holds; later slots are never read

    @classmethod
    def zeros(cls, config: LlamaConfig, batch: int, max_len: int, dtype: jnp.dtype | type = jnp.float32) -> "KVCache":
        """An empty cache with room for ``max_len`` tokens in each of ``batch`` rows."""
        shape = (batch, config.num_kv_heads, max_len, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
        return cls(keys, values, jnp.zeros(batch, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What every layer needs to know: rotary tables, who sees whom, where new keys go, and which implementation."""

    cos: Any  # Float[Array, "#batch seq half"]; JAX puts trees together from leaves that are no arrays, too
    sin: Any  # Float[Array, "#batch seq half"]
    mask: F.Mask
    positions: Any  # Int[Array, "#batch seq"]
    implementation: str = dataclasses.field(metadata={"static": True})
    attention: Callable[..., Array] = dataclasses.field(default=lambda *a: F.attention(*a), metadata={"static": True})
    write: Callable[..., Array] = dataclasses.field(default=lambda *into: write_slots(*into), metadata={"static": True})


class Parallel(NamedTuple):
    """How a pass over stacked layers is spread over devices, see ``jllama.sharding``."""

    gather: Callable[[Params, Params], Params]  # a layer's weights, from this device's parts of them and of ``kept``
    attention: Callable[..., Array]  # as ``functional.attention``, beyond this device's tokens and heads
    kept: Params  # zeros like the stacked parts: their gradients are those of the parts


_BLOCK_INPUT = "block_input"
_policies = jax.checkpoint_policies
_TO_HOST: Any = {"names_which_can_be_saved": [], "offload_src": "device", "offload_dst": "pinned_host"}


def _products_with_weights(primitive: Any, *operands: Any, **how: Any) -> bool:
    """Whether to keep a result: of a product with a weight, unless (an adapter's) making it costs less than keeping."""
    if not _policies.dots_with_no_batch_dims_saveable(primitive, *operands, **how):
        return False
    summed = math.prod(operands[1].shape[axis] for axis in how["dimension_numbers"][0][1])
    return 8 * summed >= math.prod(operands[1].shape) // summed


REMAT: dict[str, Callable[..., Any] | None] = {
    "none": _policies.everything_saveable,
    "dots": _policies.save_from_both_policies(_products_with_weights, _policies.save_only_these_names(F.ATTENDED)),
    "block": None,
    "offload": _policies.save_and_offload_only_these_names(names_which_can_be_offloaded=[_BLOCK_INPUT], **_TO_HOST),
}
"""What a backward pass finds kept of each layer: everything; the results of products with weights and what attention
in blocks needs; its input; its input, which is moved to the host's memory meanwhile.

What elementwise operations and attention make is cheaper to compute again than to stack for every layer: with ``dots``
a training step on a CPU is 1.2 to 1.6 times as fast as with ``none``.
"""


class _Module(nnx.Module):
    """A module with the parameters of the table's rows of a prefix; their ``layers`` axis is added by ``nnx.vmap``."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> nnx.Param[Array]: ...

    def add_parameters(self, config: LlamaConfig, rngs: nnx.Rngs, prefix: str = "") -> None:
        """Draw them as the table says."""
        for path, row in parameter_table(config).items():
            if path.startswith("layers/") != (prefix == "layers/"):
                continue
            values = jnp.full(shape_of(row, config)[bool(prefix) :], float(row.init == "ones"), jnp.float32)
            if row.init == "normal":
                values = initial_std(row, config) * jax.random.normal(rngs.params(), values.shape, jnp.float32)
            setattr(self, path.removeprefix(prefix), nnx.Param(values))


class Layer(_Module):
    """One transformer block: ``x += attention(norm(x))``, then ``x += swiglu(norm(x))``."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.norm_eps = config.norm_eps
        self.add_parameters(config, rngs, "layers/")

    def __call__(self, x: Stream, attend: AttentionInputs, cached: Cached = None) -> Attended:
        """The block's output, and the keys and values attended to: the new ones written into ``cached``, if given."""
        with jax.named_scope("attention"):
            mixed, kept = self.attention(F.rms_norm(x, self.attn_norm[...], self.norm_eps), attend, cached)
            x = x + mixed
        with jax.named_scope("feed_forward"):
            normed = F.rms_norm(x, self.mlp_norm[...], self.norm_eps)
            return x + F.swiglu(normed, self.w_gate[...], self.w_up[...], self.w_down[...]), kept

    def attention(self, x: Stream, attend: AttentionInputs, cached: Cached = None) -> Attended:
        """Queries, keys and values of ``x``, mixed and projected back; and the keys and values attended to."""
        query, key, value = self.heads(x)
        query, key = (F.apply_rope(each, attend.cos, attend.sin) for each in (query, key))
        kept = key, value
        if cached is not None:
            kept = attend.write(cached[0], key, attend.positions), attend.write(cached[1], value, attend.positions)
        mixed = attend.attention(query, *kept, attend.mask, attend.implementation).swapaxes(1, 2)
        wo = self.wo[...]
        return (mixed.reshape(x.shape[0] * x.shape[1], -1) @ wo.reshape(-1, wo.shape[-1])).reshape(x.shape), kept

    def heads(self, x: Stream) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each ``[batch, heads or kv_heads, seq, head_dim]``, before the rotary embedding."""
        batch, seq, embed = x.shape

        def to_heads(w: Any) -> Array:
            return (x.reshape(-1, embed) @ w.reshape(embed, -1)).reshape(batch, seq, *w.shape[1:]).swapaxes(1, 2)

        return to_heads(self.wq[...]), to_heads(self.wk[...]), to_heads(self.wv[...])


LAYER_CLASSES: dict[type[LlamaConfig], type[Layer]] = {LlamaConfig: Layer}
"""The block of the models of a class of configurations, and of those derived from it that have none of their own."""


def _layer(config: LlamaConfig, key: Array | int) -> Layer:
    kind = next(LAYER_CLASSES[kind] for kind in type(config).__mro__ if kind in LAYER_CLASSES)
    return kind(config, nnx.Rngs(key))


class Llama(_Module):
    """A whole Llama. Its layers are stacked and scanned, or separate and unrolled, as the parameters are laid out.

    Scanning, to train, compiles in a time that does not grow with depth; unrolling, to decode, spares copying weights.
    Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        if not config.vocab_size:
            raise UsageError("vocab_size is 0; give the number of the tokenizer's tokens")
        self.config = config
        self.add_parameters(config, rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers: Layer | nnx.Dict[Layer] = nnx.vmap(functools.partial(_layer, config))(keys)

    def __call__(self, tokens: TokenIds, segments: Segments = None) -> Float[Array, "batch seq vocab"]:
        """Float32 logits of the token that follows each one; ``segments`` and errors as in ``hidden``."""
        return self.logits(self.hidden(tokens, segments))

    def hidden(
        self,
        tokens: TokenIds,
        segments: Segments = None,
        positions: Int[Array, "#batch seq"] | None = None,
        *,
        remat: str = "dots",
        attention: str = "auto",
        parallel: Parallel | None = None,
    ) -> Stream:
        """The final normalized activations of whole sequences.

        Args:
            tokens: ids, at most ``max_seq_len`` a row without ``positions`` or ``dynamic`` scaling (``UsageError``).
            segments: numbers that tell packed documents apart; tokens attend only within their own. None: one each row.
            positions: by which queries and keys are turned; defaults to 0, 1, 2, ...
            remat: what is kept for the backward pass, see ``REMAT``; the rest is computed again.
            attention: one of ``functional.ATTENTION``, or ``auto``, see ``functional.choose_attention``.
            parallel: how the pass is spread over devices, inside ``jax.shard_map``; None: it is all here.
        """
        tokens = as_token_ids(tokens, self.config)
        length, context, scaling = tokens.shape[1], self.config.max_seq_len, self.config.rope_scaling
        if positions is None and length > context and not (scaling and scaling.grows):
            raise UsageError(f"tokens has {length} a row; the model's context is {context}: cut it into windows")
        positions = jnp.arange(length)[None] if positions is None else positions
        mask = F.Mask(query_segments=segments, key_segments=segments)
        attend, x = attention_inputs(self.config, positions, mask, length, attention), self._embed(tokens)
        if isinstance(self.layers, Layer):
            graph, stacked = nnx.split(self.layers)
            if parallel:
                attend = dataclasses.replace(attend, attention=parallel.attention)

            def step(x: Array, parts: tuple[Params, ...]) -> tuple[Array, None]:
                x = checkpoint_name(x, _BLOCK_INPUT)
                return nnx.merge(graph, parallel.gather(*parts) if parallel else parts[0])(x, attend)[0], None

            run = step if remat == "none" else jax.checkpoint(step, policy=REMAT[remat], prevent_cse=False)
            x, _ = jax.lax.scan(run, x, (nnx.to_pure_dict(stacked), *([parallel.kept] if parallel else [])))
        else:
            for index in range(self.config.num_layers):
                x, _ = self.layers[str(index)](x, attend)
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def forward_with_cache(
        self, tokens: TokenIds, cache: KVCache | None, counts: Int[Array, "batch"], attention: str = "auto"
    ) -> tuple[Stream, KVCache]:
        """Continue each row of the cache by its first ``counts`` tokens: prefill, or one step of decoding.

        Tokens past a row's count are padding, which no real token ever sees. Slots past the end of the cache are not
        written; the caller checks that ``lengths + counts`` fit. With no cache, the tokens begin a new one, as long as
        they are. Needs ``DecodeParams``. Returns what ``hidden`` does, with its errors, and the longer cache.
        """
        assert isinstance(self.layers, nnx.Dict), "decoding takes DecodeParams"
        tokens, counts = as_token_ids(tokens, self.config), counts.astype(jnp.int32)
        lengths = jnp.zeros_like(counts) if cache is None else cache.lengths
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        kv_seq = tokens.shape[1] if cache is None else cache.keys[0].shape[2]
        if attention == "auto":
            options = {"backward": False, "platform": jax.default_backend(), "dtype": self.final_norm[...].dtype}
            attention = F.choose_attention(tokens.shape[1], kv_seq, packed=False, **options)
        mask = F.Mask(offset=None if cache is None else lengths)
        attend, x = attention_inputs(self.config, positions, mask, implementation=attention), self._embed(tokens)
        if (mesh := jax.typeof(self.final_norm[...]).sharding.mesh).size > 1:
            by_mesh = functools.partial(spread_attention, mesh), functools.partial(spread, mesh, write_slots)
            attend = dataclasses.replace(attend, attention=by_mesh[0], write=by_mesh[1])
        updated = []
        for index in range(self.config.num_layers):
            cached = None if cache is None else (cache.keys[index], cache.values[index])
            x, kept = _run_layer(*nnx.split(self.layers[str(index)]), x, attend, cached)
            updated.append(kept)
        keys, values = zip(*updated, strict=True)
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps), KVCache(keys, values, lengths + counts)

    def forward_behind_cache(
        self, tokens: Int[Array, "batch seq"], cache: KVCache, row: Int[Array, ""], lengths: Int[Array, "batch"]
    ) -> tuple[Stream, tuple[KeysValues, ...]]:
        """New tokens behind the first ``lengths`` of the cache's rows from ``row`` on: what ``hidden`` returns of them,
        and each layer's new keys and values. The cache is read only, see ``functional.cached_attention``.
        """
        assert isinstance(self.layers, nnx.Dict), "decoding takes DecodeParams"
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])
        attend = attention_inputs(self.config, positions, F.Mask(offset=lengths), implementation="reference")
        attend, x = dataclasses.replace(attend, attention=_over_cache, write=_beside_cache), self._embed(tokens)
        updated = []
        for index in range(self.config.num_layers):
            cached = (cache.keys[index], row), (cache.values[index], row)
            x, ((_, key), (_, value)) = _run_layer(*nnx.split(self.layers[str(index)]), x, attend, cached)
            updated.append((key, value))
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps), tuple(updated)

    def logits(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead vocab"]:
        """Float32 scores of every token in the vocabulary: ``hidden @ head``."""
        with jax.named_scope("head"):
            return F.project(hidden, self.head)

    def loss(
        self, hidden: Stream, targets: Int[Array, "batch seq"], mask: Bool[Array, "batch seq"], z_loss: float = 0.0
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed loss of the unmasked targets, and their number: ``functional.linear_cross_entropy``."""
        with jax.named_scope("head"):
            return F.linear_cross_entropy(hidden, self.head, targets, mask, z_loss, self._chunk_tokens)

    def token_log_probs(
        self, hidden: Stream, targets: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
        """``functional.token_log_probs``: each target's log-probability, and whether it is the likeliest token."""
        with jax.named_scope("head"):
            return F.token_log_probs(hidden, self.head, targets, self._chunk_tokens)

    _chunk_tokens = property(lambda self: min(2048, max(2**28 // (4 * self.config.vocab_size), 1)))  # 256 MiB of logits

    @property
    def head(self) -> Any:
        """The matrix that makes logits, ``[embed, vocab]``: ``lm_head``, or the embedding transposed if tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.lm_head[...]

    def _embed(self, tokens: Array) -> Array:
        with jax.named_scope("embedding"):
            return self.embed[...][tokens]


def as_token_ids(tokens: Any, config: LlamaConfig) -> Integer[Array, "batch seq"]:
    """A nested list or an array as one; ``UsageError`` unless ``[batch, seq]`` ids, below ``vocab_size`` where seen."""
    try:
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    except ValueError:
        raise UsageError("the rows of tokens differ in length: pad them, or take one at a time") from None
    given = f"tokens is {tokens.dtype}{list(tokens.shape)}"
    if tokens.ndim != 2:
        raise UsageError(f"{given}; it must be [batch, seq]; of a row alone, take tokens[None]")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise UsageError(f"{given}; token ids are integers")
    if not isinstance(tokens, Tracer) and getattr(tokens, "is_fully_addressable", True):
        check_ids(np.asarray(tokens), config)
    return jnp.asarray(tokens)


def check_ids(tokens: np.ndarray, config: LlamaConfig) -> None:
    """Raise ``UsageError`` for an id that is no token's; embedding it would give NaN, or another token's row."""
    for id in (tokens.min(), tokens.max()) if tokens.size else ():
        if not 0 <= id < config.vocab_size:
            raise UsageError(f"tokens holds the id {id}; this model's are 0 to {config.vocab_size - 1}")


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef[Layer], weights: Any, *where: Any) -> Attended:
    """One of many equal layers: under an outer ``jit`` they are traced once, not once each."""
    return nnx.merge(graph, weights)(*where)


def check_attention(name: str, platform: str = "") -> None:
    """Raise ``UsageError`` unless this is ``auto`` or one of ``functional.ATTENTION`` (for this platform, if given)."""
    if name not in ("auto", *F.ATTENTION):
        raise unknown_name("attention implementation", name, F.ATTENTION)
    needs = F.ATTENTION[name].platform if name != "auto" else ""
    if platform and needs not in ("", platform):
        raise UsageError(f"attention is {name}, which needs a {needs}; these devices are of platform {platform}")


def attention_inputs(
    config: LlamaConfig, positions: Array, mask: F.Mask, seq_len: int = 0, implementation: str = "auto"
) -> AttentionInputs:
    """What every layer is told of the positions; ``seq_len`` as in ``rope_frequencies``."""
    check_attention(implementation)
    cos, sin = F.rope_tables(positions, rope_frequencies(config, seq_len))
    if scaling := config.rope_scaling:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return AttentionInputs(cos, sin, mask, positions, implementation)


def rope_frequencies(config: LlamaConfig, seq_len: int = 0) -> np.ndarray:
    """The rotary frequencies of a configuration, scaled as it asks, in radians per token (float64).

    Only ``dynamic`` scaling depends on a length: ``max(seq_len, config.max_seq_len)``. ``seq_len`` is that of whole
    sequences, and 0 with a KV cache, whose keys are kept rotated: the base cannot move under them.
    """
    if config.rope_scaling is None:
        return np.array(inverse_frequencies(config.head_dim, config.rope_theta))
    length = max(seq_len, config.max_seq_len)
    return np.array(config.rope_scaling.frequencies(config.head_dim, config.rope_theta, length))


def build_model(config: LlamaConfig, params: Params | DecodeParams) -> Llama:
    """Put parameters of either layout into the module: the first line of a compiled function.

    Raises ``UsageError`` if the embedding has not one row for each id of the vocabulary.
    """
    unrolled = isinstance(params, DecodeParams)
    weights = params.weights if unrolled else params
    rows = jax.tree.leaves(weights["embed"])[0].shape[0]
    if rows != config.vocab_size:
        said = f"embed has {rows} rows, and vocab_size is {config.vocab_size}"
        raise UsageError(f"{said}: take the configuration that the parameters were made with")
    return nnx.merge(_graph(config, unrolled), weights)


def build_layer(config: LlamaConfig, weights: Params) -> Layer:
    """One block by itself with these weights in it: a value of an unstacked ``params["layers"]``."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: _layer(config, 0))), weights)


def initial_params(key: Array, config: LlamaConfig) -> Params:
    """Freshly drawn parameters, float32, layers stacked, as the table says. Works under ``jit`` and ``eval_shape``."""
    return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key))))


def abstract_params(config: LlamaConfig) -> Params:
    """Shapes and dtypes of ``initial_params``, without any memory."""
    return jax.eval_shape(functools.partial(initial_params, config=config), jax.random.key(0))


@functools.cache
def _graph(config: LlamaConfig, unrolled: bool) -> nnx.GraphDef[Llama]:
    llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    if unrolled:
        layer = nnx.eval_shape(lambda: _layer(config, 0))
        llama.layers = nnx.Dict({str(i): nnx.clone(layer) for i in range(config.num_layers)})
    return nnx.graphdef(llama)


def write_slots(cached: Array, new: Array, positions: Array) -> Array:
    """Put ``new`` into each row's own slots. Unlike a dynamic slice, which would shift, it drops what does not fit."""
    batch, kv_heads, max_len, head_dim = cached.shape
    # Rows and heads are joined to one axis: where one of them is of size one, XLA would copy the whole cache on a CPU.
    rows, slots = jnp.arange(batch * kv_heads)[:, None], jnp.repeat(positions, kv_heads, axis=0)
    joined = new.reshape(batch * kv_heads, -1, head_dim).astype(cached.dtype)
    return cached.reshape(-1, max_len, head_dim).at[rows, slots].set(joined, mode="drop").reshape(cached.shape)


def _beside_cache(cached: Any, new: Array, positions: Array) -> Any:
    return cached, new


def _over_cache(query: Array, key: Any, value: Any, mask: F.Mask, implementation: str) -> Array:
    ((cached_key, row), key), ((cached_value, _), value) = key, value
    assert mask.offset is not None
    return F.cached_attention(query, key, value, (cached_key, cached_value), row, mask.offset)


def power_of_two_at_least(number: int, least: int) -> int:
    """The length that an array is padded to: one of a few, so that few programs are compiled."""
    return max(least, 1 << (number - 1).bit_length())
