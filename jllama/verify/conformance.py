"""The matrix: every variant through every file format, compared with the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jllama.checkpoints.registry import Layout
from jllama.config import LlamaConfig
from jllama.decode_params import DecodeParams, decode_layout
from jllama.model import KVCache
from jllama.parameters import Params
from jllama.verify.checks import Check, relative_error
from jllama.verify.implementation import Implementation
from jllama.verify.reference_writers import FORMAT_WRITERS, FormatWriter
from jllama.verify.variants import VARIANTS, reference_logits, tokens_and_positions, weights

_CHUNK = 16


def model_error(
    implementation: Implementation, config: LlamaConfig, params: Params | DecodeParams, variant: LlamaConfig
) -> float:
    """How far the implementation's logits for these parameters are from the oracle's for the variant.

    The worst of a forward pass over each row of positions, in the layout given, and of a few tokens through the cache:
    some at once, then one more.
    """
    tokens, positions = (jnp.asarray(rows) for rows in tokens_and_positions(variant))
    params = jax.tree.map(jnp.asarray, params)
    errors = []
    for row, expected in enumerate(reference_logits(variant)):
        logits = implementation.forward(config, params, tokens[row, None], None, positions[row, None])
        errors.append(relative_error(logits[0], expected))
    decode_params = params if isinstance(params, DecodeParams) else decode_layout(params, config)
    cache = KVCache.zeros(config, 1, 2 * _CHUNK)
    _, cache = implementation.extend(config, decode_params, tokens[:1, :_CHUNK], cache, jnp.array([_CHUNK]))
    last = tokens[:1, _CHUNK : 2 * _CHUNK]  # one more token; the rest of the chunk is padding
    decoded, _ = implementation.extend(config, decode_params, last, cache, jnp.array([1]))
    errors.append(relative_error(decoded[0, 0], reference_logits(variant, 1, _CHUNK + 1)[0, -1]))
    return float(np.max(errors))  # NaN if any is


def conformance_checks(
    implementation: Implementation,
    variants: Mapping[str, LlamaConfig] = VARIANTS,
    writers: Iterable[FormatWriter] = tuple(FORMAT_WRITERS.values()),
    folder: Path | None = None,
    layouts: Iterable[Layout] = ("decode", "training"),
) -> list[Check]:
    """For every variant and every format that can hold it: the error of the loaded model, in the worse layout.

    ``folder`` keeps the files, for further implementations to load; without it each is removed at once.
    """

    def error(name: str, writer: FormatWriter) -> float:
        variant = variants[name]
        with tempfile.TemporaryDirectory() as scratch:
            if not (path := (folder or Path(scratch)) / f"{name} {writer.name}").exists():
                writer.write(path, variant, weights(variant))
            rope_factor, errors = variant.rope_scaling and variant.rope_scaling.factor, []
            for layout in layouts:
                config, params = implementation.load(path, rope_factor if writer.rope_factor else None, layout)
                if writer.name.startswith("meta"):  # does not say it, and no logit of what it can hold depends on it
                    config = dataclasses.replace(config, max_seq_len=variant.max_seq_len)
                errors.append(model_error(implementation, config, params, variant))
        return float(np.max(errors))

    return [
        Check("conformance", name, writer.name, functools.partial(error, name, writer))
        for name, variant in variants.items()
        for writer in writers
        if writer.holds(variant)
    ]
