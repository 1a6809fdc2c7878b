"""The matrix: every variant through every file format, held against the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jllama.config import LlamaConfig
from jllama.model import KVCache, unstack_layers
from jllama.parameters import Params
from jllama.verify.compare import Check, relative_error, worst_error
from jllama.verify.subject import Subject
from jllama.verify.variants import VARIANTS, judged, judged_last, tokens_and_positions, weights
from jllama.verify.writers import ROUTES, Route

_CHUNK = 16


def model_error(subject: Subject, config: LlamaConfig, params: Params, variant: LlamaConfig) -> float:
    """How far the subject's logits for these parameters are from the oracle's for the variant.

    Compared are one forward pass over all positions, each row by itself, and a few tokens through the cache: some at
    once, then one more. The worst counts.
    """
    tokens, positions = tokens_and_positions(variant)
    params = unstack_layers(jax.tree.map(jnp.asarray, params))
    logits = subject.forward(config, params, jnp.asarray(tokens), None, jnp.asarray(positions))
    cache = KVCache.zeros(config, 1, 2 * _CHUNK)
    first = jnp.asarray(tokens[:1, :_CHUNK])
    last = jnp.asarray(tokens[:1, _CHUNK : 2 * _CHUNK])
    _, cache = subject.extend(config, params, first, cache, jnp.array([_CHUNK]))
    decoded, _ = subject.extend(config, params, last, cache, jnp.array([1]))  # the rest of the chunk is padding
    cached_error = relative_error(decoded[0, 0], judged_last(variant, _CHUNK + 1))
    return float(jnp.maximum(worst_error(logits, judged(variant)), cached_error))  # NaN if either is


def conformance_checks(
    subject: Subject,
    variants: Mapping[str, LlamaConfig] = VARIANTS,
    routes: Iterable[Route] = tuple(ROUTES.values()),
    folder: Path | None = None,
) -> list[Check]:
    """For every variant and every route that can hold it: the error of the model that the subject loads.

    ``folder`` keeps the files, for further subjects to load; without it each is removed at once.
    """

    def error(name: str, route: Route) -> float:
        with tempfile.TemporaryDirectory() as scratch:
            path = (folder or Path(scratch)) / f"{name} {route.name}"
            if not path.exists():
                route.write(path, variants[name], weights(variants[name]))
            return _loaded_error(subject, path, route, variants[name])

    return [
        Check("conformance", name, route.name, functools.partial(error, name, route))
        for name, variant in variants.items()
        for route in routes
        if route.holds(variant)
    ]


def _loaded_error(subject: Subject, path: Path, route: Route, variant: LlamaConfig) -> float:
    scaling = variant.rope_scaling
    config, params = subject.load(path, scaling.factor if scaling and route.rope_factor else None)
    if route.name.startswith("meta"):  # does not say it, and no logit of what it can hold depends on it
        config = dataclasses.replace(config, max_seq_len=variant.max_seq_len)
    return model_error(subject, config, params, variant)
