"""The engine: one batch whose rows texts join and leave, driven by its caller, without threads.

``submit`` queues a row. Each ``step`` admits rows to free slots, computes their prompts, dispatches
the next block of decoding steps, and reads the block before it: the device computes one block while
the host reads the other. Scheduling depends on load; a text depends on its own row alone, and on
the engine's sizes: every program has one shape.

Here prompts are computed one by one, each whole. ``draw`` and ``step`` are arguments, and an engine
that computes prompts or groups rows in another way overrides a method.
"""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jllama.core import ops
from jllama.core.config import LlamaConfig
from jllama.core.model import KVCache, Llama, build_llama
from jllama.core.parameters import Params

STEPS = 16
"""The largest number of decoding steps between two reads by the host."""
MAX_STOPS = 16
"""The largest number of stop ids of a row."""

Logits = Float[Array, "batch vocab"]
Flags = Bool[Array, "batch"]


# What is on the device


class DecodeBatch(NamedTuple):
    """The rows of a batch on the device; only the host changes stops and limits.

    Attributes:
        cache: of all tokens but the last one of each row.
        tokens: of the prompt, and generated ones.
        log_probs: of generated tokens, in nats.
        finished: whether a row has ended.
        stop_ids: a row ends when it draws one; padded with -1.
        limits: the lengths at which the rows end.
        sampling: a tree of arrays ``[batch, ...]``: the settings and the state of the sampler.
    """

    cache: KVCache
    tokens: Int[Array, "batch max_len"]
    log_probs: Float[Array, "batch max_len"]
    finished: Bool[Array, "batch"]
    stop_ids: Int[Array, "batch stops"]
    limits: Int[Array, "batch"]
    sampling: Any


class Block(NamedTuple):
    """What a block of decoding steps gave each row."""

    tokens: Int[Array, "batch new"]  # new tokens in order, padded with -1
    log_probs: Float[Array, "batch new"]
    record: Any  # whatever else its steps have recorded


class Sampling(NamedTuple):
    """How a row's tokens are drawn."""

    temperature: float = 0.0  # 0 takes the likeliest token
    seed: int = 0


@dataclasses.dataclass(eq=False)
class Row:
    """A text from the queue to its end.

    Attributes:
        ids: the tokens of the prompt, one or more.
        max_new_tokens: how many tokens to generate at most; with those of the prompt, no more than
            the ``max_len`` of the engine.
        stop_ids: tokens that end the text, up to ``MAX_STOPS``.
        sampling: the settings of the sampler.
        slot: its row in the batch, once it is admitted.
        num_steps: decoding steps dispatched for it.
        ended: whether no more tokens come.
        tokens: the generated ones, with the one that ended the text.
    """

    ids: Sequence[int]
    max_new_tokens: int
    stop_ids: Sequence[int] = ()
    sampling: Any = dataclasses.field(default_factory=Sampling)
    slot: int = -1
    num_steps: int = 0
    ended: bool = False
    tokens: list[Any] = dataclasses.field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether a stop or the number of tokens ends the text."""
        is_stopped = any(id in self.stop_ids for id in self.tokens[-1:])
        return is_stopped or len(self.tokens) >= self.max_new_tokens

    def push(self, block: Any, count: int) -> list[Any]:
        """Add the first ``count`` tokens of a block to the row, and return events about them."""
        ids = block.tokens[self.slot, :count].tolist()
        self.tokens += ids
        return [ids]

    def finish(self) -> list[Any]:
        """Return the last events of the row."""
        return []


def make_batch(rows: Sequence[Row], cache: KVCache, max_len: int, sampling: Any) -> DecodeBatch:
    """Return the batch of rows whose tokens but the last are in a cache.

    ``max_len`` is the room for tokens in each row.
    """
    zeros: Any = np.zeros  # accepted in place of JAX arrays, unlike what their types say
    size = len(rows)
    tokens = zeros((size, max_len), np.int32)
    stop_ids = zeros((size, MAX_STOPS), np.int32) - 1
    for index, row in enumerate(rows):
        tokens[index, : len(row.ids)] = row.ids
        stop_ids[index, : len(row.stop_ids)] = row.stop_ids
    lengths = np.array([len(row.ids) for row in rows], np.int32)
    limits: Any = lengths + np.array([row.max_new_tokens for row in rows], np.int32)
    return DecodeBatch(
        cache,
        tokens,
        log_probs=zeros((size, max_len), np.float32),
        finished=limits <= lengths,
        stop_ids=stop_ids,
        limits=limits,
        sampling=sampling,
    )


def pad_prompts(rows: Sequence[Row], num_rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts but their last tokens, ``[num_rows, length]``, and their lengths."""
    tokens = np.zeros((num_rows, length), np.int32)
    counts = np.zeros(num_rows, np.int32)
    for index, row in enumerate(rows):
        counts[index] = len(row.ids) - 1
        tokens[index, : counts[index]] = row.ids[:-1]
    return tokens, counts


# The programs


def draw_tokens(
    logits: Logits, batch: DecodeBatch, takes: Flags
) -> tuple[Int[Array, "batch"], Float[Array, "batch"], Any]:
    """Draw a token for each row by its temperature, seed and length.

    Return the tokens, their log-probabilities, and the sampler's next state.
    """
    keys = jax.vmap(jax.random.key)(batch.sampling.seed)
    keys = jax.vmap(jax.random.fold_in)(keys, batch.cache.lengths)
    tokens = ops.sample(logits, keys, batch.sampling.temperature)
    return tokens, ops.target_log_probs(logits, tokens)[0], batch.sampling


def append_token(
    batch: DecodeBatch, logits: Logits, takes: Flags, draw: Callable[..., Any] = draw_tokens
) -> tuple[DecodeBatch, Int[Array, "batch"]]:
    """Draw a token for each row, and append it to the rows that ``takes`` says.

    Return the tokens as well.
    """
    rows = jnp.arange(len(takes))
    lengths = batch.cache.lengths
    token, log_prob, sampling = draw(logits, batch, takes)
    ends = jnp.any(token[:, None] == batch.stop_ids, axis=1) | (lengths + 1 >= batch.limits)
    # A slot out of range drops the token of a row that takes none.
    slot = jnp.where(takes, lengths, batch.tokens.shape[1])
    batch = batch._replace(
        tokens=batch.tokens.at[rows, slot].set(token, mode="drop"),
        log_probs=batch.log_probs.at[rows, slot].set(log_prob, mode="drop"),
        finished=batch.finished | (takes & ends),
        sampling=sampling,
    )
    return batch, token


def decode_step(
    llama: Llama, batch: DecodeBatch, takes: Flags, draw: Callable[..., Any] = draw_tokens
) -> tuple[DecodeBatch, Logits]:
    """Append a token to every row that ``takes`` one; return the logits as well."""
    last = jnp.take_along_axis(batch.tokens, batch.cache.lengths[:, None], axis=1)
    hidden, cache = llama.decode(last, batch.cache, takes.astype(jnp.int32))
    logits = llama.logits(hidden)[:, 0]
    return append_token(batch._replace(cache=cache), logits, takes, draw)[0], logits


def decode_steps(
    batch: DecodeBatch,
    quotas: Int[Array, "batch"],
    num_steps: Any,
    step: Callable[[Array, DecodeBatch, Array, Any], tuple[DecodeBatch, Any]],
    record: Any = (),
    max_new_tokens: int = STEPS,
) -> tuple[DecodeBatch, Block]:
    """Take up to ``num_steps`` decoding steps, in a loop that ends early when no row goes on.

    Args:
        batch: the rows.
        quotas: the most tokens that each row takes.
        num_steps: at most ``STEPS``.
        step: ``(index, batch, takes, record) -> (batch, record)``: one token or more for every row
            that ``takes`` one.
        record: what the steps record, at first.
        max_new_tokens: the most tokens that a row takes in all steps together.
    """
    first = batch.cache.lengths

    def takes(batch: DecodeBatch) -> Array:
        return ~batch.finished & (batch.cache.lengths - first < quotas)

    def goes_on(carry: Any) -> Array:
        index, batch, _ = carry
        return (index < num_steps) & jnp.any(takes(batch))

    def take_step(carry: Any) -> Any:
        index, batch, record = carry
        return index + 1, *step(index, batch, takes(batch), record)

    _, batch, record = jax.lax.while_loop(goes_on, take_step, (jnp.int32(0), batch, record))
    # The new tokens follow those that each row had before.
    slots = first[:, None] + 1 + jnp.arange(max_new_tokens, dtype=jnp.int32)
    is_new = slots <= batch.cache.lengths[:, None]
    slots = jnp.minimum(slots, batch.tokens.shape[1] - 1)
    tokens = jnp.where(is_new, jnp.take_along_axis(batch.tokens, slots, axis=1), -1)
    log_probs = jnp.take_along_axis(batch.log_probs, slots, axis=1)
    return batch, Block(tokens, log_probs, record)


def prefill(llama: Llama, tokens: Int[Array, "batch seq"], counts: Int[Array, "batch"]) -> KVCache:
    """Return a new cache with the first ``counts`` tokens of each prompt."""
    rows, seq = tokens.shape
    cache = KVCache.zeros(llama.config, rows, seq, llama.final_norm[...].dtype)
    return llama.decode(tokens, cache, counts, cache_is_empty=True)[1]


def copy_row(source: KVCache, computed_row: Any, target: KVCache, row: Any) -> KVCache:
    """Copy a row of one cache into a row of another, which has no fewer slots."""

    def copy(leaf: Array, source: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(source, computed_row, 1)
        return jax.lax.dynamic_update_slice_in_dim(leaf, part, row, axis=0)

    return jax.tree.map(copy, target, source)


def join(
    batch: DecodeBatch,
    one: DecodeBatch,
    computed_row: Any,
    row: Any,
    copy: Callable[..., KVCache] = copy_row,
) -> DecodeBatch:
    """Put a batch of one row, with row ``computed_row`` of its cache, into ``row`` of another."""
    cache = copy(one.cache, computed_row, batch.cache, row)
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
    return DecodeBatch(cache, *jax.tree.map(put, batch[1:], one[1:]))


_join = jax.jit(join, donate_argnames="batch")


@functools.partial(jax.jit, static_argnames="config")
def _prefill(params: Params, config: LlamaConfig, tokens: Any, counts: Any) -> KVCache:
    return prefill(build_llama(config, params), tokens, counts)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="batch")
def _decode(
    params: Params, config: LlamaConfig, batch: DecodeBatch, quotas: Any, num_steps: Any
) -> tuple[DecodeBatch, Block]:
    llama = build_llama(config, params)
    step = lambda _, batch, takes, record: (decode_step(llama, batch, takes)[0], record)  # noqa: E731
    return decode_steps(batch, quotas, num_steps, step)


# One program, not one for the arrays of each layer.
zeros: Any = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3))


# What is on the host


class Dispatch(NamedTuple):
    """A block that the device computes, or that the host has just read."""

    rows: list[Any]
    num_steps: int
    start_s: float
    block: Any


class Engine:
    """Generates many texts at once; ``step`` does what is due, and one thread at a time calls it.

    Args:
        config: the architecture.
        params: parameters with separate layers.
        num_slots: how many texts are generated at once. A text's bits may depend on it.
        max_len: the maximum number of tokens of a row, for which memory is reserved.
    """

    tokens_per_step = 1  # at most

    def __init__(
        self,
        config: LlamaConfig,
        params: Any,
        num_slots: int,
        max_len: int,
    ) -> None:
        self.config = config
        self.params = params
        self.num_slots = num_slots
        self.max_len = max_len
        self.reset()

    def reset(self) -> None:
        """Drop all rows and all device memory, for example after a fault.

        The next step reserves it again.
        """
        self.waiting = deque[Any]()
        self.rows: list[Any] = [None] * self.num_slots
        self.prefilling = list[Any]()  # rows in slots whose prompts are not computed, in order
        self.batch: Any = None
        self._dispatches = list[Dispatch]()
        self._events = list[tuple[Any, Any]]()

    @property
    def busy(self) -> bool:
        """Whether a row is in a slot or in the queue."""
        return bool(self.waiting or any(self.rows))

    def submit(self, row: Any) -> Any:
        """Queue a row, and return it."""
        self.waiting.append(row)
        return row

    def cancel(self, row: Any) -> None:
        """End a row without further events."""
        row.ended = True
        for rows in (self.waiting, self.prefilling):
            if row in rows:
                rows.remove(row)
        if row in self.rows:
            self.rows[row.slot] = None

    def step(self) -> list[tuple[Any, Any]]:
        """Do what is due, and return what the last block brought: ``(row, new tokens)``.

        An interrupted step (such as by Ctrl-C) has consumed the arrays on the device: the engine is
        then ``reset``.
        """
        try:
            self.admit()
            self.reserve()
            self.prefill()
            dispatches = [self._dispatch(rows) for rows in self.groups()]
            for dispatch in self._dispatches:
                if not all(row.ended for row in dispatch.rows):
                    self.read(dispatch)
            self._dispatches = dispatches
        except BaseException:
            self.reset()
            raise
        events = self._events
        self._events = []
        return events

    def admit(self) -> None:
        """Give free slots to rows from the queue."""
        for slot, row in enumerate(self.rows):
            if row is None and self.waiting:
                row = self.waiting.popleft()
                row.slot = slot
                self.rows[slot] = row
                self.prefilling.append(row)

    def reserve(self) -> None:
        """Allocate the batch, unless it is there."""
        if not self.batch:
            empty = [self.empty_row()] * self.num_slots
            self.batch = self.place(self.arrays_of(empty, self.new_cache(self.num_slots)))

    def arrays_of(self, rows: Sequence[Any], cache: KVCache) -> DecodeBatch:
        """Return the batch of rows whose prompts are in a cache."""
        return make_batch(rows, cache, self.max_len, self.sampling_of(rows))

    # What another engine may do in another way

    def empty_row(self) -> Any:
        """Return a row for a slot that nobody has."""
        return Row([0], 0)

    def new_cache(self, num_rows: int) -> KVCache:
        """Return an empty cache."""
        return zeros(self.config, num_rows, self.max_len, self.params["embed"].dtype)

    def place(self, tree: Any) -> Any:
        """Put arrays of rows where the parameters are, as all programs expect it."""
        return jax.device_put(tree)

    def sampling_of(self, rows: Sequence[Any]) -> Any:
        """Return the sampler's settings and state of new rows."""
        settings = [row.sampling for row in rows]
        return jax.tree.map(lambda *values: np.array(values), *settings)

    def prefill(self) -> None:
        """Compute all tokens but the last of new prompts, and let their rows decode."""
        for row in [*self.prefilling]:
            prompts = pad_prompts([row], 1, self.max_len)
            self.join(row, _prefill(self.params, self.config, *prompts), 0)

    def groups(self) -> list[list[Any]]:
        """Return the rows to decode now, those of a program together."""
        rows = [row for row in self.rows if row and row not in self.prefilling]
        rows = [row for row in rows if row.num_steps < row.max_new_tokens]
        return [rows] if rows else []

    def num_steps(self, rows: Sequence[Any]) -> int:
        """Return the most steps that the next block takes for these rows."""
        return STEPS

    def decode(self, rows: Sequence[Any], quotas: np.ndarray, num_steps: np.int32) -> Block:
        """Dispatch a block, which returns before the device has computed it."""
        self.batch, block = _decode(self.params, self.config, self.batch, quotas, num_steps)
        return block

    # Decoding

    def join(self, row: Any, cache: KVCache, computed_row: int) -> None:
        """Let a row decode whose prompt is in ``computed_row`` of a cache.

        A row that generates nothing ends instead.
        """
        self.prefilling.remove(row)
        if row.is_complete:
            self._end(row)
        else:
            self.insert(row, self.arrays_of([row], cache), computed_row)

    def insert(self, row: Any, one: DecodeBatch, computed_row: int) -> None:
        """Put a row into its slot."""
        self.batch = _join(self.batch, one, np.int32(computed_row), np.int32(row.slot))

    def _dispatch(self, rows: list[Any]) -> Dispatch:
        """Dispatch a block for some rows."""
        num_left = max(row.max_new_tokens - row.num_steps for row in rows)
        num_steps = min(self.num_steps(rows), num_left)
        quotas = np.zeros(self.num_slots, np.int32)
        for row in rows:
            quotas[row.slot] = num_steps * self.tokens_per_step
            row.num_steps += num_steps
        block = self.decode(rows, quotas, np.int32(num_steps))
        return Dispatch(rows, num_steps, time.monotonic(), block)

    def read(self, dispatch: Dispatch) -> None:
        """Read a block, and emit what it brought to the rows that have not ended."""
        block = jax.device_get(dispatch.block)
        for row in dispatch.rows:
            if row.ended:
                continue
            count = int(np.count_nonzero(block.tokens[row.slot] >= 0))
            self._events += [(row, event) for event in row.push(block, count)]
            if row.is_complete:
                self._end(row)

    def _end(self, row: Any) -> None:
        self._events += [(row, event) for event in row.finish()]
        self.cancel(row)
