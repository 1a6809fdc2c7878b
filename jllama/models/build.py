"""Models with the functions that suit their devices: the first line of a compiled function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from jllama import functional as F
from jllama.core import UsageError, ops
from jllama.core.config import LlamaConfig
from jllama.core.model import Functions, Llama, build_llama, write_slots
from jllama.core.parameters import Params
from jllama.kernels.experts import multiply_rows
from jllama.kernels.loss import likelihood
from jllama.models.decode_params import DecodeParams
from jllama.models.remat import REMAT, rematerialize
from jllama.parallel.shards import map_shards, sharded_attention, spread_experts
from jllama.system.devices import loss_chunk_tokens
from jllama.system.errors import unknown_name

AnyMesh = Mesh | AbstractMesh


def build_model(
    config: LlamaConfig,
    params: Params | DecodeParams,
    *,
    attention: str = "auto",
    remat: str = "dots",
    chunk_tokens: int | None = None,
    mesh: AnyMesh | None = None,
    platform: str = "",
) -> Llama:
    """Put parameters of either layout into the module: the first line of a compiled function.

    Args:
        config: the architecture.
        params: the parameters.
        attention: a name of ``functional.ATTENTION``, or ``auto``: see
            ``functional.choose_attention`` and ``choose_cache_attention``.
        remat: what is saved of each layer for the backward pass, see ``REMAT``.
        chunk_tokens: how many tokens' logits the loss makes at a time; None for what suits this
            machine.
        mesh: the devices that attention is spread over, inside ``jax.shard_map``; None for one
            device, or that of the parameters.
        platform: what the program is compiled for, if not this machine's.

    Raises:
        UsageError: the embedding does not have one row for each id of the vocabulary, or a name is
            unknown.

    Examples:
        >>> config = jllama.LlamaConfig(512, num_layers=2, embed_dim=64, num_heads=4)
        >>> params = jllama.initial_params(jax.random.key(0), config)
        >>> jllama.build_model(config, params)(jnp.array([[1, 2, 3]])).shape
        (1, 3, 512)
    """
    weights: Any = params
    cache_mesh = None
    if isinstance(params, DecodeParams):
        weights = params.weights
        cache_mesh = jax.typeof(weights["final_norm"]).sharding.mesh
        cache_mesh = cache_mesh if cache_mesh.size > 1 else None
    num_tokens = chunk_tokens or loss_chunk_tokens(jax.devices()[0], config.vocab_size)
    window = config.sliding_window or config.attention_chunk or None
    functions = functions_of(
        attention, remat, num_tokens, window, mesh, cache_mesh, platform=platform
    )
    return build_llama(config, weights, functions)


@functools.cache
def functions_of(
    attention: str,
    remat: str,
    chunk_tokens: int,
    window: int | None = None,
    mesh: AnyMesh | None = None,
    cache_mesh: AnyMesh | None = None,
    kernel: Callable[..., Array] = F.attention,
    platform: str = "",
) -> Functions:
    """Return the functions that a model calls.

    Equal arguments give the same functions, because compiled programs are found by them. ``window``
    is the sliding window or the chunk of some layer, ``cache_mesh`` the devices of a cache, and
    ``kernel`` what computes attention by the name of an implementation; ``platform`` is what a
    program is compiled for, if not this machine's; the others are as in ``build_model``.
    """
    check_attention(attention)
    if remat not in REMAT:
        raise unknown_name("remat", remat, REMAT)

    def whole(query: Array, key: Array, value: Array, mask: F.Mask) -> Array:
        return _on_mesh(kernel, mesh, query, key, value, mask, attention)

    def prefill(query: Array, key: Array, value: Array, mask: F.Mask) -> Array:
        name = attention
        if name == "auto":
            seq = query.shape[2]
            options: Any = {"platform": jax.default_backend(), "dtype": query.dtype}
            options["packed"] = mask.query_segments is not None
            options["window"] = mask.window is not None
            name = F.choose_attention(seq, seq, backward=False, **options)
        return _on_mesh(kernel, cache_mesh, query, key, value, mask, name)

    def cached(query: Array, key: Array, value: Array, mask: F.Mask) -> Array:
        name = attention
        if name == "auto":
            platform = jax.default_backend()
            name = F.choose_cache_attention(query.shape[2], key, platform, window)
        return _on_mesh(kernel, cache_mesh, query, key, value, mask, name)

    multiply = functools.partial(multiply_rows, platform or jax.default_backend())
    mix_experts = functools.partial(ops.mix_experts, grouped_product=multiply)
    if mesh and mesh.shape["expert"] > 1:
        mix_experts = functools.partial(spread_experts, mix_experts)
    return Functions(
        whole,
        prefill,
        cached,
        write=functools.partial(map_shards, cache_mesh, write_slots),
        embedding=F.embedding,
        project=F.project,
        loss=functools.partial(F.linear_cross_entropy, chunk_tokens=chunk_tokens),
        score=functools.partial(F.score_tokens, chunk_tokens=chunk_tokens),
        likelihood=likelihood,
        remat=functools.partial(rematerialize, remat),
        mix_experts=mix_experts,
    )


def _on_mesh(kernel: Callable[..., Array], mesh: AnyMesh | None, *arguments: Any) -> Array:
    return kernel(*arguments) if mesh is None else sharded_attention(mesh, *arguments)


def check_attention(name: str, platform: str = "", *, backward: bool = False) -> None:
    """Raise ``UsageError`` unless ``name`` is ``auto`` or one of ``functional.ATTENTION``.

    With ``platform`` it must run there; with ``backward`` it must have a backward pass.
    """
    if name == "auto":
        return
    if name not in F.ATTENTION:
        raise unknown_name("attention implementation", name, F.ATTENTION)
    implementation = F.ATTENTION[name]
    if backward and not implementation.backward:
        raise UsageError(
            f"attention is {name}, which has no backward pass: take another to train with"
        )
    needs = implementation.platform
    if platform and needs and needs != platform:
        raise UsageError(
            f"attention is {name}, which needs a {needs}; these devices are of platform {platform}"
        )
    if platform and not F.is_installed(name):
        raise UsageError(
            f"{name} is not installed: pip install 'jllama[cuda]' with Python 3.12 or later, or "
            "set another training.attention"
        )
