"""The memory that arrays and compiled programs take on a device."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def device_bytes(tree: Any) -> int:
    """Return the bytes that arrays, or abstract ones, take on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding else leaf.shape
        bits = 4 if leaf.dtype == jnp.uint4 else 8 * leaf.dtype.itemsize  # uint4's itemsize is 1
        total += math.prod(shape) * bits // 8
    return total


def program_bytes(compiled: Any) -> tuple[int, int]:
    """Return the bytes of a compiled program on one device: of its arguments, and of all else."""
    memory = compiled.memory_analysis()
    fresh = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes + fresh


def peak_bytes(devices: Iterable[Any]) -> int | None:
    """Return the largest memory use of any device so far; None on CPUs, which report none."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    return max(filter(None, peaks), default=None)
