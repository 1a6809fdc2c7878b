"""One pass over a checkpoint's weights: the float64 oracle and jllama's own layers side by side.

The files are read once, in order, and no more than one layer (or a block of the embedding or head) is in memory.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64

from jllama import functional as F
from jllama import oracle
from jllama.checkpoints.tensors import Checkpoint, blocks
from jllama.config import LlamaConfig
from jllama.model import attention_inputs, build_layer
from jllama.parameters import Params, TensorSpec, as_matrix, shape_of, tensor_specs

Stream = Float[np.ndarray, "seq embed"]


class LayerwiseRun(NamedTuple):
    """What a checkpoint computes, and how it is damaged."""

    logits: Float64[np.ndarray, "seq vocab"]  # the oracle's
    own_logits: Float32[np.ndarray, "seq vocab"]
    layer_errors: list[float]  # each layer's ``update_error``
    fingerprint: str  # the SHA-256 of the weights
    damage: list[
        str
    ]  # a sentence for the tensors that are not finite, and one for those that are all zeros


def update_error(actual: Stream, expected: Stream, residual: Stream) -> float:
    """The relative error of what a layer adds to the residual stream, in the worst channel.

    That is ``rms(actual - expected) / (rms(expected) + rms(residual) / 100)``, over positions. A trained Llama's stream
    has values of 1e4 in a few channels of its first token, beside which doubling RoPE's base is 4e-5 of the largest
    value, and float32 itself cannot add to them exactly. So the addition is compared, each channel counts, and the
    stream's rounding (2**-24 of its values) can come to no more than about 1e-5.
    """
    error, added, before = (
        np.sqrt(np.mean(np.square(z), axis=0)) for z in (actual - expected, expected, residual)
    )
    scale = added + 0.01 * before
    return float(np.max(np.divide(error, scale, out=error.copy(), where=scale != 0)))


class _Reader:
    """Reads tensors in float32, in order: hashes them as stored, and replaces what is not finite by 0."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.digest = checkpoint, hashlib.sha256()
        self.not_finite, self.zeros = list[str](), list[str]()  # what to say of such tensors

    def blocks(self, spec: TensorSpec) -> Iterator[tuple[slice, Float32[np.ndarray, "..."]]]:
        """Some rows of a tensor at a time: which ones, and their values."""
        not_finite, any_set, start = 0, False, 0
        self.digest.update(f"{spec.key} {list(spec.shape)}\n".encode())
        for block in blocks(self._checkpoint.tensors[spec.key], np.float32):
            self.digest.update(block.data)
            finite, any_set = np.isfinite(block), any_set or bool(block.any())
            not_finite += int(np.count_nonzero(~finite))
            yield slice(start, start := start + len(block)), np.where(finite, block, np.float32(0))
        if not_finite:
            self.not_finite.append(
                f"{spec.key} ({not_finite:,} of {math.prod(spec.shape):,} numbers)"
            )
        if not any_set:
            self.zeros.append(spec.key)

    def whole(self, spec: TensorSpec) -> Float32[np.ndarray, "..."]:
        """A tensor in the parameter's own axes, without that of the layers."""
        in_layers = spec.parameter.axes[0] == "layers"
        array = np.empty(shape_of(spec.parameter, self._checkpoint.config)[in_layers:], np.float32)
        matrix = as_matrix(spec.parameter, array)
        for rows, block in self.blocks(spec):
            matrix[rows] = block
        return array


def run_layerwise(
    checkpoint: Checkpoint, tokens: Sequence[int], on_stage: Callable[[str], None] = lambda _: None
) -> LayerwiseRun:
    """Run the oracle on ``tokens``, and each of jllama's layers twice: on the oracle's input, which gives its own
    error, and on the output of jllama's layers before it, which leads to ``own_logits``.
    """
    config, reader = checkpoint.config, _Reader(checkpoint)
    specs = {spec.key: spec for spec in tensor_specs(config)}
    ids, seq = np.asarray(tokens), len(tokens)
    where = np.tri(seq, dtype=bool), np.arange(seq), oracle.rope_frequencies(config, seq)
    on_stage("embedding")
    own = np.empty((seq, config.embed_dim), np.float32)
    for rows, block in reader.blocks(specs["embed"]):
        inside = (ids >= rows.start) & (ids < rows.stop)
        own[inside] = block[ids[inside] - rows.start]
    x, errors = own.astype(np.float64), []
    for index in range(config.num_layers):
        on_stage(f"layer {index + 1} of {config.num_layers}")
        layer = {
            key.split("/")[2]: reader.whole(specs[key])
            for key in specs
            if key.startswith(f"layers/{index}/")
        }
        rounded = x.astype(np.float32)
        output, own = np.asarray(_layer(layer, jnp.stack([rounded, own]), config))
        # Popped in an argument, so that neither copy of a matrix lives longer than it is needed.
        y = oracle.block(
            x, {name: layer.pop(name).astype(np.float64) for name in list(layer)}, config, *where
        )
        errors.append(update_error(output - rounded.astype(np.float64), y - x, x))
        x = y
    on_stage("head")
    norm = reader.whole(specs["final_norm"])
    hidden = oracle.rms_norm(x, norm.astype(np.float64), config.norm_eps)
    own = F.rms_norm(jnp.asarray(own), jnp.asarray(norm), config.norm_eps)
    logits, own_logits = (
        np.empty((seq, config.vocab_size), dtype) for dtype in (np.float64, np.float32)
    )
    project = jax.jit(F.project)
    is_tied = config.tie_embeddings  # what is read again counts once
    for rows, block in (
        _Reader(checkpoint).blocks(specs["embed"]) if is_tied else reader.blocks(specs["lm_head"])
    ):
        logits[:, rows] = hidden @ block.astype(np.float64).T
        own_logits[:, rows] = project(own, block.T)  # as ``Llama.logits``
    damage, nan = [], "NaN or infinity stands in {}; all else here takes 0 for it"
    for keys, said in ((reader.not_finite, nan), (reader.zeros, "nothing but zeros stands in {}")):
        listed = ", ".join(keys[:9]) + f" and {len(keys) - 9} more" * (
            len(keys) > 9
        )  # 9: those of a layer
        damage += [f"{said.format(listed)}: fetch or convert the files again"] * bool(keys)
    return LayerwiseRun(logits, own_logits, errors, reader.digest.hexdigest(), damage)


@functools.partial(jax.jit, static_argnames="config")
def _layer(weights: Params, x: Array, config: LlamaConfig) -> Array:
    attend = attention_inputs(config, jnp.arange(x.shape[1])[None], F.Mask(), x.shape[1])
    return build_layer(config, weights)(x, attend)[0]
