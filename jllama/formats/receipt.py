"""The fingerprints of weights, and the receipt of a run, by which damaged ones are noticed."""

import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, UInt32

from jllama.core import JllamaError
from jllama.core.parameters import Params
from jllama.models.language_model import LanguageModel
from jllama.system.files import Json, read_json_object

RECEIPT = "receipt.json"
_PRIMES = (0x9E3779B1, 0x85EBCA77)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes
_BLOCK = 1 << 20  # elements


@jax.jit
def fingerprints(params: Params) -> dict[str, UInt32[Array, "2"]]:
    """Compute two numbers of each array by its path, which change if any bit does.

    Each number is a sum, modulo 2**32, of the bits of each element times an odd number made of its
    place. It is the same in any order, and so on any mesh. It is no defense against forgery.
    """
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    pairs = {}
    for path, leaf in leaves.items():
        unsigned = jax.lax.bitcast_convert_type(leaf, _UNSIGNED[leaf.dtype.itemsize])
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            place = place * jnp.uint32(size) + index
        pairs[path] = _sums(unsigned.astype(jnp.uint32), place)
    return pairs


def _sums(bits: UInt32[Array, "..."], place: UInt32[Array, "..."]) -> UInt32[Array, "2"]:
    bits = (bits ^ (bits >> 16)) * jnp.uint32(_PRIMES[1])
    bits = bits ^ (bits >> 13)  # so that no bit of an element is changed without a trace
    factors = (place * jnp.uint32(prime) | 1 for prime in _PRIMES)
    return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in factors])


def fingerprint_of_parts(parts: Iterable[np.ndarray]) -> str:
    """Return the fingerprint of an array that comes in parts, in order of its first axis.

    One program serves all shapes: it takes a block of elements, of which zeros add nothing.
    """
    sums = np.zeros(2, np.uint32)
    start = 0
    for part in parts:
        bits = np.ascontiguousarray(part).reshape(-1).view(_UNSIGNED[part.itemsize])
        for first in range(0, len(bits), _BLOCK):
            values = bits[first : first + _BLOCK].astype(np.uint32)
            block = np.pad(values, (0, _BLOCK - len(values)))
            place = jnp.asarray((start + first) % 2**32, jnp.uint32)
            sums += np.asarray(_block_sums(jnp.asarray(block), place))
        start += len(bits)
    return as_text(sums)


@jax.jit
def _block_sums(block: UInt32[Array, "elements"], start: UInt32[Array, ""]) -> UInt32[Array, "2"]:
    return _sums(block, start + jnp.arange(_BLOCK, dtype=jnp.uint32))


def describe_weights(params: Params) -> dict[str, str]:
    """Return the fingerprint of each array as 16 hexadecimal digits, by its path."""
    values = jax.device_get(fingerprints(params))
    return {path: as_text(pair) for path, pair in values.items()}


def as_text(pair: UInt32[np.ndarray, "2"]) -> str:
    """Return the two numbers of a fingerprint as 16 hexadecimal digits."""
    return "".join(f"{number:08x}" for number in pair)


def check_weights(source: Path, expected: Json, actual: dict[str, str]) -> None:
    """Raise ``JllamaError`` if weights are not those of which the receipt has the fingerprints.

    Those of which it has none pass.

    Args:
        source: the folder of the checkpoint, for the message.
        expected: fingerprints of the receipt, by paths.
        actual: fingerprints of some of the weights.
    """
    differences = [path for path, text in actual.items() if expected.get(path, text) != text]
    if differences:
        names = ", ".join(differences[:3]) + (" and others" if len(differences) > 3 else "")
        raise JllamaError(
            f"the weights in {source} are not those that were saved ({names} differ from "
            f"{RECEIPT}): put the checkpoint back from a copy, or use another step"
        )


def read_receipt(folder: Path) -> Json:
    """Return a run's receipt; an empty one if it has none, as runs of version 0.2 and before.

    Raises:
        JllamaError: it is not what a run writes.
    """
    path = folder / RECEIPT
    empty: Json = {"config": {}, "data": "", "sessions": {}, "weights": {}}
    receipt = empty | (read_json_object(path) if path.is_file() else {})
    is_valid = all(type(receipt[name]) is type(value) for name, value in empty.items())
    is_valid = is_valid and all(
        step.isdecimal() and len(step) < 16 and isinstance(value, dict)
        for name in ("sessions", "weights")
        for step, value in receipt[name].items()
    )
    if not is_valid:
        raise JllamaError(f"{path} is not the receipt of a run: put it back from a copy")
    return receipt


def weights_fingerprint(model: LanguageModel) -> str:
    """Return the SHA-256, in hexadecimal, of all parameters' names, dtypes, shapes and CRC-32."""
    parts = []
    for path, leaf in jax.tree.leaves_with_path(model.params):
        array = np.asarray(leaf)
        checksum = zlib.crc32(array.ravel().view(np.uint8).data)
        parts.append((jax.tree_util.keystr(path), array.dtype.name, array.shape, checksum))
    return hashlib.sha256(repr(parts).encode()).hexdigest()
