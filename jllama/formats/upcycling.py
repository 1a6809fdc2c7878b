"""Models with experts that begin as copies of a dense model's feed-forward network."""

import dataclasses

import numpy as np

from jllama.core import UsageError
from jllama.core.config import LlamaConfig
from jllama.formats.tensors import Checkpoint, concatenate_rows, tensor_specs


def upcycle(dense: Checkpoint, model: LlamaConfig, seed: int) -> Checkpoint:
    """Return a checkpoint with the experts of ``model``, each with the matrices of ``dense``.

    The router is drawn with a standard deviation of 0.02. Since the weights of a token's experts
    sum to 1, the model computes what ``dense`` does until it is trained. Source: Komatsuzaki et al.
    2022, section 3 (arXiv:2212.05055).

    Raises:
        UsageError: a token has one expert, whose weight would always be 1.
    """
    if model.experts_per_token < 2:
        raise UsageError(
            f"experts_per_token is {model.experts_per_token}; it must be at least 2 with init_from "
            "a model without experts, as the weights of a token's experts sum to 1"
        )
    config = dataclasses.replace(
        dense.config,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        normalize_expert_weights=True,
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for spec in tensor_specs(config):
        dense_key = spec.key.replace("experts_", "w_")
        if spec.path == "layers/router":
            tensors[spec.key] = np.float32(0.02 * rng.standard_normal(spec.shape))
        elif "experts" in spec.parameter.axes:
            tensors[spec.key] = concatenate_rows([dense.tensors[dense_key]] * config.num_experts)
        else:
            tensors[spec.key] = dense.tensors[spec.key]
    return dataclasses.replace(dense, config=config, tensors=tensors)
