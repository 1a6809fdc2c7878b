"""Prefixes of prompts, kept as whole chunks that any later request with the same beginning takes."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from jllama.serve.slots import CHUNK, Chunk


class PrefixCache:
    """The keys and values of whole chunks; the one used longest ago goes first.

    A chunk's key is a hash of the model's name and of all tokens up to its end, so what it holds is what computing it
    again would give.
    """

    def __init__(self, max_tokens: int) -> None:
        self._most, self._chunks = max_tokens // CHUNK, OrderedDict[bytes, Chunk]()

    def get(self, key: bytes) -> Chunk | None:
        """A chunk that is kept, from now on the last one to go."""
        if key in self._chunks:
            self._chunks.move_to_end(key)
        return self._chunks.get(key)

    def put(self, key: bytes, chunk: Chunk) -> None:
        """Keep a chunk."""
        self._chunks[key] = chunk
        while len(self._chunks) > self._most:
            self._chunks.popitem(last=False)


def chunk_keys(model: str, ids: Sequence[int]) -> Iterator[bytes]:
    """The key of each whole chunk of a prompt."""
    running = hashlib.sha256(model.encode())
    for start in range(0, len(ids) - CHUNK + 1, CHUNK):
        running.update(np.array(ids[start : start + CHUNK], np.uint32).tobytes())
        yield running.digest()
