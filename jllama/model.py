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
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from jllama import functional as F
from jllama import kernels as kernels  # which adds to F.ATTENTION
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams
from jllama.devices import loss_chunk_tokens
from jllama.errors import UsageError, unknown_name
from jllama.parameters import (
    PARAMETERS,
    Params,
    initial_std,
    joined_groups,
    parameter_table,
    shape_of,
)
from jllama.rope_scaling import inverse_frequencies
from jllama.sharding import spread, spread_attention

Segments = Int[Array, "batch seq"] | None
TokenIds = Integer[Array | np.ndarray, "batch seq"] | Sequence[Sequence[int]]
Stream = Float[Array, "batch seq embed"]
KeysValues = tuple[
    Float[Array, "batch kv_heads kv_seq head_dim"], Float[Array, "batch kv_heads kv_seq head_dim"]
]
Attended = tuple[Stream, KeysValues | None]


class KVCache(NamedTuple):
    """Keys and values of the tokens seen so far. Slot ``i`` of a row belongs to position ``i``."""

    keys: tuple[
        Float[Array, "batch kv_heads max_len head_dim"], ...
    ]  # one array a layer, each updated in place
    values: tuple[Float[Array, "batch kv_heads max_len head_dim"], ...]
    lengths: Int[Array, "batch"]  # how many tokens each row holds; later slots are never read

    @classmethod
    def zeros(
        cls, config: LlamaConfig, batch: int, max_len: int, dtype: jnp.dtype | type = jnp.float32
    ) -> "KVCache":
        """An empty cache with room for ``max_len`` tokens in each of ``batch`` rows."""
        shape = (batch, config.num_kv_heads, max_len, config.head_dim)
        keys, values = (
            tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2)
        )
        return cls(keys, values, jnp.zeros(batch, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """What every layer needs to know: rotary tables, who sees whom, where new keys go, and which implementation."""

    cos: Any  # Float[Array, "#batch seq half"]; JAX puts trees together from leaves that are no arrays, too
    sin: Any  # Float[Array, "#batch seq half"]
    mask: F.Mask
    slots: Any = (
        None  # Int[Array, "batch seq"], of a cache that new keys and values are written into
    )
    implementation: str = dataclasses.field(default="reference", metadata={"static": True})
    mesh: Mesh | AbstractMesh | None = dataclasses.field(
        default=None, metadata={"static": True}
    )  # None: one device
    begins: bool = dataclasses.field(
        default=False, metadata={"static": True}
    )  # nothing in the cache is seen


class Parallel(NamedTuple):
    """How a pass over stacked layers is spread over devices, see ``jllama.sharding``."""

    gather: Callable[
        [Params, Params], Params
    ]  # a layer's weights, from this device's parts of them and of ``kept``
    mesh: Mesh | AbstractMesh
    kept: Params  # zeros like the stacked parts: their gradients are those of the parts


_BLOCK_INPUT = "block_input"
_policies = jax.checkpoint_policies
_TO_HOST: Any = {
    "names_which_can_be_saved": [],
    "offload_src": "device",
    "offload_dst": "pinned_host",
}


def _products_with_weights(primitive: Any, *operands: Any, **how: Any) -> bool:
    """Whether to keep a result: of a product with a weight, unless (an adapter's) making it costs less than keeping."""
    if not _policies.dots_with_no_batch_dims_saveable(primitive, *operands, **how):
        return False
    summed = math.prod(operands[1].shape[axis] for axis in how["dimension_numbers"][0][1])
    return 8 * summed >= math.prod(operands[1].shape) // summed


REMAT: dict[str, Callable[..., Any] | None] = {
    "none": _policies.everything_saveable,
    "dots": _policies.save_from_both_policies(
        _products_with_weights, _policies.save_only_these_names(F.ATTENDED)
    ),
    "block": None,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_offloaded=[_BLOCK_INPUT], **_TO_HOST
    ),
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
            values = jnp.full(
                shape_of(row, config)[bool(prefix) :], float(row.init == "ones"), jnp.float32
            )
            if row.init == "normal":
                values = initial_std(row, config) * jax.random.normal(
                    rngs.params(), values.shape, jnp.float32
                )
            setattr(self, path.removeprefix(prefix), nnx.Param(values))


class Layer(_Module):
    """One transformer block: ``x += attention(norm(x))``, then ``x += swiglu(norm(x))``."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.norm_eps = config.norm_eps
        self.add_parameters(config, rngs, "layers/")

    def __call__(
        self, x: Stream, attend: AttentionInputs, cached: KeysValues | None = None
    ) -> Attended:
        """The block's output, and ``cached`` with the new keys and values in it, if given."""
        with jax.named_scope("attention"):
            mixed, cached = self.attention(
                F.rms_norm(x, self.attn_norm[...], self.norm_eps), attend, cached
            )
            x = x + mixed
        with jax.named_scope("feed_forward"):
            normed = F.rms_norm(x, self.mlp_norm[...], self.norm_eps)
            return x + self.feed_forward(normed), cached

    def attention(
        self, x: Stream, attend: AttentionInputs, cached: KeysValues | None = None
    ) -> Attended:
        """Queries, keys and values of ``x``, mixed and projected back; and ``cached`` with the new ones in it."""
        query, key, value = self.heads(x)
        query, key = (F.apply_rope(each, attend.cos, attend.sin) for each in (query, key))
        seen = key, value
        if cached is not None:
            key_cache, value_cache = cached
            key_cache = spread(attend.mesh, write_slots, key_cache, key, attend.slots)
            value_cache = spread(attend.mesh, write_slots, value_cache, value, attend.slots)
            cached = key_cache, value_cache
            seen = seen if attend.begins else cached
        attention = (
            F.attention if attend.mesh is None else functools.partial(spread_attention, attend.mesh)
        )
        mixed = attention(query, *seen, attend.mask, attend.implementation).swapaxes(1, 2)
        wo = self.wo[...]
        flat = mixed.reshape(x.shape[0] * x.shape[1], -1)
        return (flat @ wo.reshape(-1, wo.shape[-1])).reshape(x.shape), cached

    def heads(self, x: Stream) -> tuple[Array, ...]:
        """Queries, keys and values, each ``[batch, heads or kv_heads, seq, head_dim]``, before the rotary embedding."""
        products = self.products(x, "wq", "wk", "wv")
        return tuple(
            each.reshape(*x.shape[:2], *each.shape[1:]).swapaxes(1, 2) for each in products
        )

    def feed_forward(self, x: Stream) -> Stream:
        """``functional.swiglu`` by this layer's matrices."""
        gate, up = self.products(x, "w_gate", "w_up")
        return (F.gated(gate, up) @ self.w_down[...]).reshape(x.shape)

    def products(self, x: Stream, *names: str) -> list[Array]:
        """Each token of ``x`` times each of these matrices, which are joined in the decoding layout."""
        flat = x.reshape(
            -1, x.shape[-1]
        )  # XLA:CPU makes the weights' gradients 1.8 times faster from two axes
        rows = [PARAMETERS[f"layers/{name}"] for name in names]
        if hasattr(self, rows[0].joined):
            shapes = [shape_of(row, self.config)[2:] for row in rows]
            ends = np.cumsum([math.prod(shape) for shape in shapes])
            products = jnp.split(flat @ getattr(self, rows[0].joined)[...], ends[:-1], axis=1)
        else:
            matrices = [getattr(self, name)[...] for name in names]
            shapes = [matrix.shape[1:] for matrix in matrices]
            products = [flat @ matrix.reshape(x.shape[-1], -1) for matrix in matrices]
        return [
            product.reshape(len(flat), *shape)
            for product, shape in zip(products, shapes, strict=True)
        ]


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

    chunk_tokens: int | None = (
        None  # how many tokens' logits are made at a time; None: as suits this machine
    )

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        if not config.vocab_size:
            raise UsageError("vocab_size is 0; give the number of the tokenizer's tokens")
        self.config = config
        self.add_parameters(config, rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers: Layer | nnx.Dict[Layer] = nnx.vmap(functools.partial(_layer, config))(keys)

    def __call__(
        self, tokens: TokenIds, segments: Segments = None
    ) -> Float[Array, "batch seq vocab"]:
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
        length = tokens.shape[1]
        if positions is None:
            check_length(self.config, length)
        positions = jnp.arange(length)[None] if positions is None else positions
        mask = F.Mask(query_segments=segments, key_segments=segments)
        attend, x = (
            attention_inputs(self.config, positions, mask, length, attention),
            self.embedding(tokens),
        )
        if isinstance(self.layers, Layer):
            graph, stacked = nnx.split(self.layers)
            if parallel:
                attend = dataclasses.replace(attend, mesh=parallel.mesh)

            def step(x: Array, parts: tuple[Params, ...]) -> tuple[Array, None]:
                x = checkpoint_name(x, _BLOCK_INPUT)
                return nnx.merge(graph, parallel.gather(*parts) if parallel else parts[0])(
                    x, attend
                )[0], None

            run = (
                step
                if remat == "none"
                else jax.checkpoint(step, policy=REMAT[remat], prevent_cse=False)
            )
            x, _ = jax.lax.scan(
                run, x, (nnx.to_pure_dict(stacked), *([parallel.kept] if parallel else []))
            )
        else:
            for index in range(self.config.num_layers):
                x, _ = self.layers[str(index)](x, attend)
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps)

    def decode(
        self,
        tokens: TokenIds,
        cache: KVCache,
        counts: Int[Array, "batch"],
        *,
        begins: bool = False,
        attention: str = "auto",
    ) -> tuple[Stream, KVCache]:
        """Continue each row of a cache by its first ``counts`` tokens: prefill, or one step of decoding.

        Tokens past a row's count are padding: they are not written, and no real token sees them; nor are those past the
        end of the cache, so the caller checks that ``lengths + counts`` fit. Needs ``DecodeParams``.

        Args:
            tokens: ids, ``[batch, seq]``.
            cache: keys and values of the tokens so far; donated to a compiled function, it is updated in place.
            counts: how many of each row's tokens are real.
            begins: all rows are empty. Attention then has whole sequences, which kernels are made for.
            attention: one of ``functional.ATTENTION``; ``auto`` asks ``functional.choose_cache_attention`` or, where
                it ``begins``, ``choose_attention``.

        Returns:
            What ``hidden`` does, with its errors, and the longer cache.
        """
        assert isinstance(self.layers, nnx.Dict), "decoding takes DecodeParams"
        tokens = as_token_ids(tokens, self.config)
        counts = counts.astype(jnp.int32)
        seq, max_len = tokens.shape[1], cache.keys[0].shape[2]
        platform = jax.default_backend()
        if attention == "auto" and begins:
            dtype = self.final_norm[...].dtype
            attention = F.choose_attention(
                seq, seq, backward=False, platform=platform, dtype=dtype, packed=False
            )
        elif attention == "auto":
            attention = F.choose_cache_attention(seq, cache.keys[0], platform)
        # Where the tokens stand, and the slots that they are written to: padding to none.
        positions = cache.lengths[:, None] + jnp.arange(seq, dtype=jnp.int32)
        slots = jnp.where(jnp.arange(seq) < counts[:, None], positions, max_len)
        # A row that takes none reads nothing, however long it is.
        mask = F.Mask() if begins else F.Mask(offset=jnp.where(counts > 0, cache.lengths, 0))
        mesh = jax.typeof(self.final_norm[...]).sharding.mesh
        attend = attention_inputs(self.config, positions, mask, implementation=attention)
        attend = dataclasses.replace(
            attend, slots=slots, mesh=mesh if mesh.size > 1 else None, begins=begins
        )
        x = self.embedding(tokens)
        updated = []
        for index in range(self.config.num_layers):
            cached = cache.keys[index], cache.values[index]
            x, kept = _run_layer(*nnx.split(self.layers[str(index)]), x, attend, cached)
            updated.append(kept)
        keys, values = zip(*updated, strict=True)
        return F.rms_norm(x, self.final_norm[...], self.config.norm_eps), KVCache(
            keys, values, cache.lengths + counts
        )

    def logits(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead vocab"]:
        """Float32 scores of every token in the vocabulary: ``hidden @ head``."""
        with jax.named_scope("head"):
            return F.project(hidden, self.head)

    def loss(
        self,
        hidden: Stream,
        targets: Int[Array, "batch seq"],
        mask: Bool[Array, "batch seq"],
        z_loss: float = 0.0,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Summed loss of the unmasked targets, and their number: ``functional.linear_cross_entropy``."""
        with jax.named_scope("head"):
            return F.linear_cross_entropy(
                hidden, self.head, targets, mask, z_loss, self._chunk_tokens()
            )

    def token_log_probs(
        self, hidden: Stream, targets: Int[Array, "batch seq"]
    ) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
        """``functional.token_log_probs``: each target's log-probability, and whether it is the likeliest token."""
        with jax.named_scope("head"):
            return F.token_log_probs(hidden, self.head, targets, self._chunk_tokens())

    def _chunk_tokens(self) -> int:
        return self.chunk_tokens or loss_chunk_tokens(jax.devices()[0], self.config.vocab_size)

    @property
    def head(self) -> Any:
        """The matrix that makes logits, ``[embed, vocab]``: ``lm_head``, or the embedding transposed if tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.lm_head[...]

    def embedding(self, tokens: Int[Array, "batch seq"]) -> Stream:
        """The input of the first layer."""
        with jax.named_scope("embedding"):
            return F.embedding(self.embed[...], tokens)


def check_length(config: LlamaConfig, length: int) -> None:
    """Raise ``UsageError`` for rows of so many tokens if they exceed the context, unless RoPE's scaling grows."""
    context, scaling = config.max_seq_len, config.rope_scaling
    if length > context and not (scaling and scaling.grows):
        raise UsageError(
            f"tokens has {length} a row; the model's context is {context}: cut it into windows"
        )


def as_token_ids(tokens: Any, config: LlamaConfig) -> Integer[Array, "batch seq"]:
    """A nested list or an array as one; ``UsageError`` unless ``[batch, seq]`` ids, below ``vocab_size`` where seen."""
    try:
        tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    except ValueError:
        raise UsageError(
            "the rows of tokens differ in length: pad them, or take one at a time"
        ) from None
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
            raise UsageError(
                f"tokens holds the id {id}; this model's are 0 to {config.vocab_size - 1}"
            )


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graph: nnx.GraphDef[Layer], weights: Any, *where: Any) -> Attended:
    """One of many equal layers: under an outer ``jit`` they are traced once, not once each."""
    return nnx.merge(graph, weights)(*where)


def check_attention(name: str, platform: str = "", *, backward: bool = False) -> None:
    """Raise ``UsageError`` unless this is ``auto`` or one of ``functional.ATTENTION`` (for this platform, if given).

    With ``backward`` it must have a backward pass, too.
    """
    if name == "auto":
        return
    if name not in F.ATTENTION:
        raise unknown_name("attention implementation", name, F.ATTENTION)
    if backward and not F.ATTENTION[name].backward:
        raise UsageError(
            f"attention is {name}, which has no backward pass: take another to train with"
        )
    needs = F.ATTENTION[name].platform
    if platform and needs not in ("", platform):
        raise UsageError(
            f"attention is {name}, which needs a {needs}; these devices are of platform {platform}"
        )


def attention_inputs(
    config: LlamaConfig,
    positions: Array,
    mask: F.Mask,
    seq_len: int = 0,
    implementation: str = "auto",
) -> AttentionInputs:
    """What every layer is told of the positions; ``seq_len`` as in ``rope_frequencies``."""
    check_attention(implementation)
    cos, sin = F.rope_tables(positions, rope_frequencies(config, seq_len))
    if scaling := config.rope_scaling:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return AttentionInputs(cos, sin, mask, implementation=implementation)


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
    return nnx.merge(
        _graph(config, tuple(sorted(weights["layers"]["0"])) if unrolled else ()), weights
    )


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
def _graph(config: LlamaConfig, names: tuple[str, ...]) -> nnx.GraphDef[Llama]:
    """The module's structure; with the ``names`` of a layer's parameters in the decoding layout, or stacked."""
    llama = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    if names:
        layer = nnx.eval_shape(lambda: _layer(config, 0))
        for joined, parts in joined_groups(config).items():
            if joined in names:
                setattr(layer, joined, nnx.Param(jax.ShapeDtypeStruct((), jnp.float32)))
                for part in parts:
                    delattr(layer, part)
        llama.layers = nnx.Dict({str(i): nnx.clone(layer) for i in range(config.num_layers)})
    return nnx.graphdef(llama)


def write_slots(cached: Array, new: Array, positions: Array) -> Array:
    """Put ``new`` into each row's own slots. Unlike a dynamic slice, which would shift, it drops what does not fit."""
    batch, kv_heads, max_len, head_dim = cached.shape
    # Rows and heads are joined to one axis: where one of them is of size one, XLA would copy the whole cache on a CPU.
    rows, slots = jnp.arange(batch * kv_heads)[:, None], jnp.repeat(positions, kv_heads, axis=0)
    joined = new.reshape(batch * kv_heads, -1, head_dim).astype(cached.dtype)
    return (
        cached.reshape(-1, max_len, head_dim)
        .at[rows, slots]
        .set(joined, mode="drop")
        .reshape(cached.shape)
    )


def power_of_two_at_least(number: int, least: int) -> int:
    """The length that an array is padded to: one of a few, so that few programs are compiled."""
    return max(least, 1 << (number - 1).bit_length())
