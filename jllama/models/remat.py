"""Rematerialization: what each layer saves for the backward pass, and what is computed again."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jllama.core.ops import EXPERT_PRODUCT
from jllama.functional import ATTENDED

BLOCK_INPUT = "block_input"
"""The name, for ``jax.checkpoint``, of a layer's input."""
_policies = jax.checkpoint_policies


def _saves_product(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Return whether to save a result: that of a product with a weight.

    An exception is a product (of an adapter) that costs less to compute again than to save.
    """
    if not _policies.dots_with_no_batch_dims_saveable(primitive, *operands, **params):
        return False
    weight = operands[1].shape
    (_, summed_axes), _ = params["dimension_numbers"]
    num_inputs = math.prod(weight[axis] for axis in summed_axes)
    num_outputs = math.prod(weight) // num_inputs
    return 8 * num_inputs >= num_outputs


REMAT: dict[str, Callable[..., Any] | None] = {
    "none": _policies.everything_saveable,
    "dots": _policies.save_from_both_policies(
        _saves_product, _policies.save_only_these_names(ATTENDED, EXPERT_PRODUCT)
    ),
    "block": None,
    "offload": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What is saved of each layer for the backward pass.

``none`` saves everything; ``dots`` the results of products with weights, and what attention in
blocks needs; ``block`` the layer's input; ``offload`` its input, moved to the host's memory in the
meantime. The results of elementwise operations and of attention are cheaper to compute again than
to stack for every layer: with ``dots`` a training step on a CPU is 1.2 to 1.6 times as fast as with
``none``.
"""


def rematerialize(name: str, layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer, ``(x, weights) -> results``, of which ``REMAT[name]`` is saved."""

    def run(x: Array, weights: Any) -> Any:
        return layer(checkpoint_name(x, BLOCK_INPUT), weights)

    if name == "none":
        return run
    return jax.checkpoint(run, policy=REMAT[name], prevent_cse=False)
