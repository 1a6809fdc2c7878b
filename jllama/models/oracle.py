"""The whole Llama in float64 NumPy, from the papers and independent of the JAX code.

Tests compare the JAX code with it. It takes one sequence at a time; only ``forward`` has a batch
axis. Heads come before the sequence. Masks are Boolean, true where a query (row) sees a key
(column).

>>> print(softmax(np.zeros(4)))
[0.25 0.25 0.25 0.25]
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray as Array

if TYPE_CHECKING:
    from jllama.core.config import LlamaConfig

Rows = Float[Array, "*lead embed"]
Heads = Float[Array, "*heads seq head_dim"]
Keys = Float[Array, "kv_heads kv_seq head_dim"]
Mask = Bool[Array, "seq kv_seq"]
Positions = Int[Array, "seq"]
Tokens = Int[Array, "batch seq"]
Frequencies = Float[Array, "half"]


def rms_norm(x: Rows, scale: Float[Array, "embed"], eps: float) -> Rows:
    """Compute ``x / sqrt(mean(x**2) + eps) * scale`` over the last axis.

    Source: Zhang and Sennrich 2019, eq. 4 (arXiv:1910.07467).
    """
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def rope_frequencies(config: "LlamaConfig", seq: int = 0) -> Frequencies:
    """Compute the radians that a token turns each pair of channels.

    Sources: RoFormer, eq. 15 (arXiv:2104.09864); ``apply_scaling`` of Meta's Llama 3.1; Peng et al.
    2023, sec. 3 (arXiv:2309.00071), and their code.

    ``dynamic`` does not change the first pair and slows the last, those between in a geometric
    series. ``yarn`` goes from unchanged to divided in a straight line, from the pair that turns
    ``beta_fast`` times in the original context to the one that turns ``beta_slow`` times.
    """
    scaling: Any = config.rope_scaling
    rotated = int(config.head_dim * config.partial_rotary_factor)
    half = rotated // 2
    plain = config.rope_theta ** (-np.arange(half) / half)
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain / scaling.factor
    if scaling.type == "dynamic":
        excess = max(seq, config.max_seq_len) / scaling.original_max_seq_len - 1
        return plain / (1 + scaling.factor * max(excess, 0)) ** np.linspace(0, 1, half)
    if scaling.type == "yarn":
        pairs = np.arange(rotated)  # the bounds may lie past the last real pair
        turns = scaling.original_max_seq_len / (2 * np.pi) * config.rope_theta ** (-pairs / half)
        first = max((turns >= scaling.beta_fast).sum() - 1, 0)
        last = min((turns > scaling.beta_slow).sum(), rotated - 1)
        divided = np.interp(pairs[:half], [first, max(last, first + 1e-3)], [0, 1])
        return plain * (1 - divided) + plain / scaling.factor * divided
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = scaling.original_max_seq_len / (2 * np.pi / plain)
    smooth = (turns - low) / max(high - low, 1e-9)
    between = (1 - smooth) * plain / scaling.factor + smooth * plain
    return np.where(turns > high, plain, np.where(turns < low, plain / scaling.factor, between))


def rotate(x: Heads, positions: Positions, frequencies: Frequencies) -> Heads:
    """Turn each token by its position: channels i and i + half are one complex number.

    Channels after these pairs stay. Source: RoFormer, eq. 12.
    """
    half = len(frequencies)
    real, imaginary, others = np.split(x, [half, 2 * half], axis=-1)
    turned = (real + 1j * imaginary) * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([turned.real, turned.imag, others], axis=-1)


def softmax(x: Rows) -> Rows:
    """Compute ``exp(x) / sum(exp(x))`` over the last axis.

    Source: Goodfellow, Bengio and Courville 2016, eq. 4.1.
    """
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(q: Heads, k: Keys, v: Keys, mask: Mask) -> Heads:
    """Compute ``softmax(q k^T / sqrt(head_dim)) v``; zeros where no key is seen.

    Sources: Vaswani 2017, eq. 1; Ainslie 2023.
    """
    if q.ndim != 3 or mask.shape != (q.shape[1], k.shape[1]) or len(q) % len(k):
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}, mask {list(mask.shape)}: they must be "
            "[heads, seq, head_dim], [kv_heads, kv_seq, head_dim], [seq, kv_seq], "
            "one sequence at a time, heads a multiple of kv_heads"
        )
    if mask.dtype != bool:
        raise ValueError(f"mask is {mask.dtype}; it must be boolean, true where a query sees a key")
    out = np.zeros(q.shape)
    group = len(q) // len(k)
    sees_any = mask.any(axis=-1)
    for n in range(len(q)):
        scores = q[n, sees_any] @ k[n // group].T / np.sqrt(q.shape[-1])
        weights = softmax(np.where(mask[sees_any], scores, -np.inf))
        out[n, sees_any] = weights @ v[n // group]
    return out


def swiglu(
    x: Rows,
    w_gate: Float[Array, "embed mlp"],
    w_up: Float[Array, "embed mlp"],
    w_down: Float[Array, "mlp embed"],
) -> Rows:
    """Compute ``(silu(x @ w_gate) * (x @ w_up)) @ w_down``.

    Source: Shazeer 2020, eq. 6 (arXiv:2002.05202).
    """
    gate = x @ w_gate
    return (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down


def experts(
    x: Rows,
    router: Float[Array, "embed experts"],
    w_gate: Float[Array, "experts mlp embed"],
    w_up: Float[Array, "experts mlp embed"],
    w_down: Float[Array, "experts embed mlp"],
    count: int,
    normalize: bool,
    scales_input: bool = False,
    bias: Float[Array, "experts"] | None = None,
) -> Rows:
    """Sum ``weight * swiglu(x)`` of the ``count`` experts with the largest weights, token by token.

    The weights are ``softmax(x @ router)``, divided by the sum of those of the chosen if
    ``normalize``. Of two equal ones the first is chosen. With ``scales_input`` they are
    ``sigmoid(x @ router)``, and it sums ``swiglu(weight * x)`` (Llama 4's code). ``bias`` is added
    to weights for the choice alone (Wang et al. 2024, arXiv:2408.15664).
    Source: Jiang et al. 2024, sec. 2.1 (arXiv:2401.04088); Shazeer et al. 2017, sec. 2.1
    (arXiv:1701.06538).
    """
    out = np.zeros_like(x)
    logits = x @ router
    all_weights = 1 / (1 + np.exp(-logits)) if scales_input else softmax(logits)
    for token, weights in enumerate(all_weights):
        scores = logits[token] if bias is None else weights + bias
        chosen = sorted(range(len(weights)), key=lambda expert: (-scores[expert], expert))[:count]
        total = sum(weights[expert] for expert in chosen) if normalize else 1.0
        for expert in chosen:
            matrices = (w[expert].T for w in (w_gate, w_up, w_down))
            weight = weights[expert] / total
            if scales_input:
                out[token] += swiglu(weight * x[token], *matrices)
            else:
                out[token] += weight * swiglu(x[token], *matrices)
    return out


def cross_entropy(
    logits: Float[Array, "*lead vocab"], targets: Int[Array, "*lead"], mask: Bool[Array, "*lead"]
) -> tuple[float, int]:
    """Sum ``-log softmax(logits)[target]`` where ``mask`` is true; return the sum and the count.

    Source: Goodfellow et al. 2016, eq. 6.30.
    """
    total = 0.0
    for row, target in zip(logits[mask].astype(np.float64), targets[mask], strict=True):
        total += row.max() - row[target] + np.log(np.exp(row - row.max()).sum())
    return float(total), int(mask.sum())


def block(
    x: Rows,
    w: dict,
    config: "LlamaConfig",
    mask: Mask,
    positions: Positions,
    frequencies: Frequencies,
    layer: int = 0,
) -> Rows:
    """Compute one block, of index ``layer``: attention, then SwiGLU, both added to their input.

    Both normalize their input, or in OLMo 2 their output. ``frequencies`` are those of the whole
    model.
    Sources: Touvron et al. 2023, sec. 2.2; for sliding windows Jiang et al. 2023, sec. 2
    (arXiv:2310.06825); for biases Qwen 2, sec. 2.2 (arXiv:2407.10671); for norms of each query and
    key Qwen 3, sec. 2 (arXiv:2505.09388), of all heads together and of outputs OLMo 2, sec. 2.3
    (arXiv:2501.00656); for layers without rotation SmolLM3's report and Yang et al. 2025
    (arXiv:2501.18795); for multipliers Granite 3's configuration.
    """
    eps = config.norm_eps
    norms_inputs = config.norm_placement == "before"
    has_window = config.sliding_window and layer not in config.full_attention_layers

    # 1) Queries, keys and values, [heads, seq, head_dim].
    h = rms_norm(x, w["attn_norm"], eps) if norms_inputs else x
    q, k, v = (np.tensordot(h, w[name], axes=1) for name in ("wq", "wk", "wv"))
    if config.attention_bias:
        q = q + w["bq"]
        k = k + w["bk"]
        v = v + w["bv"]
    if config.qk_norm == "head":
        q = rms_norm(q, w["q_norm"], eps)
        k = rms_norm(k, w["k_norm"], eps)
    if config.qk_norm == "whole":
        q = q / np.sqrt((q**2).mean(axis=(1, 2), keepdims=True) + eps) * w["q_norm_whole"]
        k = k / np.sqrt((k**2).mean(axis=(1, 2), keepdims=True) + eps) * w["k_norm_whole"]
    q, k, v = (array.swapaxes(0, 1) for array in (q, k, v))

    # 2) Rotation. OLMo 3 does not scale it in layers with a window.
    if layer not in config.no_rope_layers:
        if has_window and config.rope_scaling_layers == "full_attention":
            half = len(frequencies)
            frequencies = config.rope_theta ** (-np.arange(half) / half)
        elif config.rope_scaling:
            factors = np.ones(config.head_dim)
            factors[: 2 * len(frequencies)] = config.rope_scaling.attention_factor**2
            q = q * factors  # YaRN's 1/t, sec. 3.4, of what is rotated
        q = rotate(q, positions, frequencies)
        k = rotate(k, positions, frequencies)
        if config.qk_norm == "rotated":
            q = rms_norm(q, np.ones(config.head_dim), eps)
            k = rms_norm(k, np.ones(config.head_dim), eps)

    # 3) Attention. Llama 4 has chunks where it rotates, and a temperature elsewhere.
    starts = np.array([np.flatnonzero(row)[0] for row in mask])
    places = np.arange(len(x)) - starts
    if config.attention_chunk and layer not in config.no_rope_layers:
        chunks = places // config.attention_chunk
        mask = mask & np.equal.outer(chunks, chunks)
    if config.temperature_step and layer in config.no_rope_layers:
        steps = (places + 1) // config.temperature_step
        q = q * (1 + config.temperature_scale * np.log1p(steps))[:, None]
    if has_window:
        indices = np.arange(len(x))
        mask = mask & (np.subtract.outer(indices, indices) < config.sliding_window)
    if config.attention_multiplier:
        q = q * config.attention_multiplier * np.sqrt(config.head_dim)
    heads = attention(q, k, v, mask)
    h = np.tensordot(heads.swapaxes(0, 1), w["wo"], axes=2)
    h = h if norms_inputs else rms_norm(h, w["attn_out_norm"], eps)
    x = x + config.residual_multiplier * h

    # 4) The feed-forward network.
    h = rms_norm(x, w["mlp_norm"], eps) if norms_inputs else x
    update = np.zeros_like(h)
    if "router" in w:
        update += experts(
            h,
            w["router"],
            w["experts_gate"],
            w["experts_up"],
            w["experts_down"],
            config.experts_per_token,
            config.normalize_expert_weights,
            scales_input=config.router == "sigmoid",
            bias=w.get("router_bias"),
        )
    for prefix in ("w", "shared"):
        if f"{prefix}_gate" in w:
            update += swiglu(h, w[f"{prefix}_gate"], w[f"{prefix}_up"], w[f"{prefix}_down"])
    h = update if norms_inputs else rms_norm(update, w["mlp_out_norm"], eps)
    return x + config.residual_multiplier * h


def forward(
    params: dict,
    tokens: Tokens,
    config: "LlamaConfig",
    positions: Tokens | None = None,
    segments: Tokens | None = None,
) -> Float[Array, "batch seq vocab"]:
    """Compute logits: all blocks, a norm and the head.

    Source: Touvron et al. 2023 (arXiv:2302.13971).
    """
    batch, seq = tokens.shape
    if positions is None:
        positions = np.tile(np.arange(seq), (batch, 1))
    if segments is None:
        segments = np.zeros_like(tokens)
    frequencies = rope_frequencies(config, seq)
    final_norm = np.asarray(params["final_norm"], np.float64)
    head = params["embed"].T if config.tie_embeddings else params["lm_head"]
    head = np.asarray(head, np.float64)
    logits = []
    for row, position, segment in zip(tokens, positions, segments, strict=True):
        mask = np.tri(seq, dtype=bool) & np.equal.outer(segment, segment)
        x = config.embedding_multiplier * np.asarray(params["embed"][row], np.float64)
        for i in range(config.num_layers):
            # Layers of two kinds have stacks of their own: dense ones, and those with experts.
            is_dense = i in config.dense_layers
            of_kind = [layer for layer in range(i) if (layer in config.dense_layers) == is_dense]
            w = {}
            for name, stack in params["layers"].items():
                place = i
                if config.dense_layers and name.startswith(("w_", "router", "experts", "shared")):
                    if name.startswith("w_") != is_dense:
                        continue
                    place = len(of_kind)
                w[name] = np.asarray(stack[place], np.float64)
            x = block(x, w, config, mask, position, frequencies, i)
        hidden = rms_norm(x, final_norm, config.norm_eps)
        logits.append(hidden @ head / config.logits_scaling)
    return np.stack(logits)
