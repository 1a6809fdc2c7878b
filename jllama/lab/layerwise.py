"""One pass over a checkpoint, in which the float64 oracle and jllama's layers run side by side.

The files are read once, in order. At most one layer, or a block of rows of the embedding or the
head, is in memory.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int

from jllama import functional as F
from jllama.core.config import LlamaConfig
from jllama.core.model import attention_inputs, build_layer
from jllama.core.parameters import Params, shape_of
from jllama.formats.tensors import Checkpoint, as_matrix, blocks, tensor_specs
from jllama.models import oracle
from jllama.models.build import functions_of

Stream = Float[np.ndarray, "seq embed"]

_DECIDED = 64
"""In layers with experts one of this many tokens is not compared: those that differ most.

Of two experts with nearly the same weight, rounding may choose the other one.
"""
_MAX_LISTED = 9
"""Tensors that a message names: those of one layer."""


class LayerwiseRun(NamedTuple):
    """The results of the oracle and of jllama for a checkpoint, and the damage to the checkpoint.

    Attributes:
        oracle_logits: the float64 oracle's.
        jax_logits: those of jllama's model.
        layer_errors: the ``update_error`` of each layer.
        fingerprint: the SHA-256 of the weights.
        damage: a sentence about tensors that are not finite, and one about those of zeros.
    """

    oracle_logits: Float64[np.ndarray, "seq vocab"]
    jax_logits: Float32[np.ndarray, "seq vocab"]
    layer_errors: list[float]
    fingerprint: str
    damage: list[str]


def update_error(actual: Stream, expected: Stream, residual: Stream) -> float:
    """Compute the relative error of what a layer adds to the residual stream, in the worst channel.

    It is ``rms(actual - expected) / (rms(expected) + rms(residual) / 100)``, where ``rms`` is taken
    over positions. A trained Llama's stream has values of 1e4 in a few channels of its first token.
    Relative to these, doubling RoPE's base would be an error of 4e-5, and float32 itself cannot add
    to them exactly. So what is added is compared, each channel counts, and the rounding of the
    stream (2**-24 of its values) can amount to no more than about 1e-5.
    """
    error, added, before = (
        np.sqrt(np.mean(np.square(values), axis=0))
        for values in (actual - expected, expected, residual)
    )
    scale = added + 0.01 * before
    return float(np.max(np.divide(error, scale, out=error.copy(), where=scale != 0)))


class Reader:
    """A reader of a checkpoint's tensors in float32, which hashes them and looks for damage.

    The hash is of the values as stored, in the order in which they are read; values that are not
    finite are then replaced by 0.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._config = checkpoint.config
        self._specs = {spec.key: spec for spec in tensor_specs(checkpoint.config)}
        self._digest = hashlib.sha256()
        self._not_finite: list[str] = []
        self._zeros: list[str] = []

    def blocks(self, key: str) -> Iterator[tuple[slice, Float32[np.ndarray, "..."]]]:
        """Yield some rows of a tensor at a time, with their indices."""
        num_not_finite = 0
        start = 0
        is_zero = True
        shape = self._specs[key].shape
        self._digest.update(f"{key} {list(shape)}\n".encode())
        for block in blocks(self._tensors[key], np.float32):
            self._digest.update(block.data)
            finite = np.isfinite(block)
            is_zero = is_zero and not block.any()
            num_not_finite += int(np.count_nonzero(~finite))
            stop = start + len(block)
            yield slice(start, stop), np.where(finite, block, np.float32(0))
            start = stop
        if num_not_finite:
            size = math.prod(shape)
            self._not_finite.append(f"{key} ({num_not_finite:,} of {size:,} numbers)")
        if is_zero:
            self._zeros.append(key)

    def whole(self, key: str) -> Float32[np.ndarray, "..."]:
        """Read a tensor in the axes of its parameter, without that of the layers."""
        parameter = self._specs[key].parameter
        shape = shape_of(parameter, self._config)
        if parameter.axes[0] == "layers":
            shape = shape[1:]
        array = np.empty(shape, np.float32)
        matrix = as_matrix(parameter, array)
        for rows, block in self.blocks(key):
            matrix[rows] = block
        return array

    def embeddings(self, ids: Int[np.ndarray, "seq"]) -> Float32[np.ndarray, "seq embed"]:
        """Return what the first layer takes, read a block of the matrix at a time."""
        stream = np.empty((len(ids), self._config.embed_dim), np.float32)
        for rows, block in self.blocks("embed"):
            inside = (ids >= rows.start) & (ids < rows.stop)
            stream[inside] = block[ids[inside] - rows.start]
        return stream * np.float32(self._config.embedding_multiplier)

    def layer(self, index: int) -> dict[str, Float32[np.ndarray, "..."]]:
        """Return the weights of a layer by name."""
        prefix = f"layers/{index}/"
        keys = [key for key in self._specs if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.whole(key) for key in keys}

    @property
    def fingerprint(self) -> str:
        """The hash of all tensors that were read."""
        return self._digest.hexdigest()

    @property
    def damage(self) -> list[str]:
        """Sentences about the tensors that were read."""
        remedy = "fetch or convert the files again"
        messages = []
        if self._not_finite:
            names = _enumerate(self._not_finite)
            messages.append(f"NaN or infinity in {names}; all else here takes 0 for it: {remedy}")
        if self._zeros:
            messages.append(f"nothing but zeros in {_enumerate(self._zeros)}: {remedy}")
        return messages


def _enumerate(names: list[str]) -> str:
    text = ", ".join(names[:_MAX_LISTED])
    num_more = len(names) - _MAX_LISTED
    return f"{text} and {num_more} more" if num_more > 0 else text


def run_layerwise(
    checkpoint: Checkpoint, tokens: Sequence[int], on_stage: Callable[[str], None] = lambda _: None
) -> LayerwiseRun:
    """Run the oracle and jllama's layers on ``tokens``.

    Each of jllama's layers runs twice: on the oracle's input, for the layer's own error, and on the
    output of jllama's layers before it, for ``jax_logits``. After a layer with experts the few
    tokens that differ most go on as the oracle has them.

    Args:
        checkpoint: the weights.
        tokens: one row.
        on_stage: called with the name of each stage, such as ``layer 3 of 30``.
    """
    config = checkpoint.config
    reader = Reader(checkpoint)

    # 1) Read the embeddings of the tokens.
    on_stage("embedding")
    jax_stream = reader.embeddings(np.asarray(tokens))
    stream = jax_stream.astype(np.float64)

    # 2) Run each layer, first jllama's on two inputs, then the oracle's.
    errors = []
    kinds = config.layer_kinds
    for index in range(config.num_layers):
        on_stage(f"layer {index + 1} of {config.num_layers}")
        weights = reader.layer(index)
        rounded = stream.astype(np.float32)
        inputs = jnp.stack([rounded, jax_stream])
        first = kinds.index(kinds[index])  # compiled once for layers of one kind
        outputs = np.array(_layer(weights, inputs, config, first))
        after = oracle_layer(stream, weights, config, index)
        if config.num_experts:
            distances = np.nan_to_num(np.abs(outputs - after)).max(axis=(0, 2))
            farthest = np.argsort(-distances)[: len(tokens) // _DECIDED]
            outputs[:, farthest] = after[farthest]
        alone, jax_stream = outputs
        errors.append(update_error(alone - rounded.astype(np.float64), after - stream, stream))
        stream = after

    # 3) Compute the logits of both, a block of the vocabulary at a time.
    on_stage("head")
    norm = reader.whole("final_norm")
    hidden = oracle.rms_norm(stream, norm.astype(np.float64), config.norm_eps)
    jax_hidden = F.rms_norm(jnp.asarray(jax_stream), jnp.asarray(norm), config.norm_eps)
    hidden /= config.logits_scaling
    jax_hidden /= config.logits_scaling
    oracle_logits = np.empty((len(tokens), config.vocab_size), np.float64)
    jax_logits = np.empty((len(tokens), config.vocab_size), np.float32)
    project = jax.jit(F.project)  # as in ``Llama.logits``
    # Another reader reads a tied matrix again, so that its fingerprint and damage count once.
    head = Reader(checkpoint).blocks("embed")
    if not config.tie_embeddings:
        head = reader.blocks("lm_head")
    for rows, block in head:
        oracle_logits[:, rows] = hidden @ block.astype(np.float64).T
        jax_logits[:, rows] = project(jax_hidden, block.T)
    return LayerwiseRun(oracle_logits, jax_logits, errors, reader.fingerprint, reader.damage)


def oracle_layer(
    stream: Stream, weights: dict[str, np.ndarray], config: LlamaConfig, index: int
) -> Stream:
    """Run a layer of the float64 oracle; the weights are taken out of their dictionary."""
    seq = len(stream)
    return oracle.block(
        stream,
        # Popped one by one, so that neither copy of a matrix lives longer than needed.
        {name: weights.pop(name).astype(np.float64) for name in list(weights)},
        config,
        np.tri(seq, dtype=bool),
        np.arange(seq),
        oracle.rope_frequencies(config, seq),
        index,
    )


@functools.partial(jax.jit, static_argnames=("config", "index"))
def _layer(weights: Params, x: Array, config: LlamaConfig, index: int) -> Array:
    """Run one of jllama's layers on ``[batch, seq, embed]``."""
    length = x.shape[1]
    functions = functions_of("auto", "dots", length)
    positions = jnp.arange(length)[None]
    inputs = attention_inputs(config, positions, F.Mask(), length, len(x), functions=functions)
    return build_layer(config, weights)(x, inputs[index])[0]
