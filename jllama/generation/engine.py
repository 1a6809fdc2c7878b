"""The engine: one batch whose rows requests join and leave, driven by its caller, without threads.

``submit`` queues a request. Each ``step`` admits requests to free slots, computes chunks of their
prompts, dispatches the next block of decoding steps, and reads the block before it: the device
computes one block while the host reads the other. Scheduling depends on load; the result of a
request depends only on the request and the engine's sizes: every program has one shape, and prompts
are computed in chunks that begin at multiples of one length.
"""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jllama.core import UsageError
from jllama.core.model import KVCache
from jllama.generation import steps
from jllama.generation.decode_batch import DecodeBatch, make_batch, set_allowed, setting_types
from jllama.generation.requests import Answer, Piece, Request, Row, Token, make_tokens
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.steps import STEPS
from jllama.generation.text import TextDecoder
from jllama.kernels.shapes import power_of_two_at_least
from jllama.models.language_model import LanguageModel
from jllama.parallel.shards import batch_shardings

CHUNK_TOKENS = {"cpu": 512}
"""How many tokens of a prompt to compute at once, by platform; 4096 on others."""
TOGETHER_TOKENS = {"cpu": 0}
"""How many tokens of short prompts to compute in one program, by platform; 512 on others.

As many as take no longer than one prompt alone, because each program reads all weights. The program
always has the same number of rows, so no answer depends on which prompts were computed together.
"""
MIN_CHUNK = 16
"""The least number of tokens that a chunk is padded to; others are padded to a power of two."""
_MIN_CACHE = 128
_BLOCK_TOKENS = 256  # that attention over a cache reads at once
_ROOM_TOKENS = 512  # for new tokens, in a cache that can grow: two blocks take less
_EMPTY = Prompt([0], max_new_tokens=0)
# One program, not one for the arrays of each layer.
_zeros = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3))

Events = list[tuple[Row, Piece | Answer]]


class Dispatch(NamedTuple):
    """A block that the device computes."""

    rows: list[Row]
    num_steps: int
    start_s: float
    block: steps.Block


@dataclasses.dataclass
class Staged:
    """What the cache contains that prompts are computed in."""

    owner: tuple[str, str] | None = None  # who may reuse it: a model and a salt
    ids: list[int] = dataclasses.field(default_factory=list)

    def num_shared(self, request: Request, resumes: bool) -> int:
        """Return how many tokens of a prompt it has: all or none, unless an engine ``resumes``."""
        if self.owner is None or self.owner != _owner(request):
            return 0
        if not request.caches or request.pooling:
            return 0
        ids = [*request.prompt.ids[:-1]]
        if not resumes:
            return len(ids) if ids == self.ids else 0
        shared = 0
        while shared < min(len(ids), len(self.ids)) and ids[shared] == self.ids[shared]:
            shared += 1
        return shared


class Engine:
    """Generates many texts at once, as rows of one batch that requests join and leave.

    It has no threads: ``step`` does what is due, and one thread at a time may call it.
    ``generate``, ``stream``, ``Conversation`` and the server are loops around it. An engine that is
    passed to ``stream`` reuses what it has computed for the next prompt with the same beginning.

    Examples:
        >>> from jllama.generation.requests import Answer, Request
        >>> from jllama.generation.text import encode_prompt
        >>> model = jllama.load("smollm2/")
        >>> engine = jllama.Engine(model, num_slots=8)
        >>> prompts = [jllama.Prompt(text, max_new_tokens=4) for text in ("Once", "Twice")]
        >>> rows = [engine.submit(Request(encode_prompt(model, prompt))) for prompt in prompts]
        >>> while engine.busy:
        ...     for row, event in engine.step():
        ...         if isinstance(event, Answer):
        ...             print(rows.index(row), len(event.completion.ids))
        0 4
        1 4

    Args:
        models: a model, or several of the same shapes by name.
        num_slots: how many texts are generated at once. An answer's bits may depend on it.
        context: the maximum number of tokens of a prompt and its answer, for which memory is
            reserved; 0 is the model's context, and the memory grows with the texts.
        chunk_tokens: how many tokens of a prompt are computed at once, a power of two; 0 selects
            what suits the platform.
        prefix_tokens: how many tokens of prompts to cache for others with the same beginning.
        prefill_budget: how many tokens of prompts to compute between two blocks; 0 is no limit.
        block_s: how long a block should take, which is how long a new request waits; None runs as
            many steps as possible.
        draft_len: how many tokens each step drafts (prompt lookup).
        resumes: with one slot, reuse whatever the last text has in common with the next prompt; the
            bits are then those of a conversation, not of its last prompt alone.

    Raises:
        UsageError: the models differ in shape.
    """

    def __init__(
        self,
        models: LanguageModel | Mapping[str, LanguageModel],
        num_slots: int,
        *,
        context: int = 0,
        chunk_tokens: int = 0,
        prefix_tokens: int = 0,
        prefill_budget: int = 0,
        block_s: float | None = None,
        draft_len: int = 0,
        resumes: bool = False,
    ) -> None:
        named = {"": models} if isinstance(models, LanguageModel) else models
        self.models = {name: model.for_decoding() for name, model in named.items()}
        self._base = next(iter(self.models.values()))
        self._weights = {
            name: (model.decode_params, model.config) for name, model in self.models.items()
        }
        if any(model.config != self._base.config for model in self.models.values()):
            raise UsageError("the models differ in shape: serve each by a server of its own")
        self._num_slots = num_slots
        platform = jax.default_backend()
        self.chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(platform, 4096)
        # Whether the first chunk of a prompt is computed as a complete sequence, which has faster
        # kernels but programs of its own. A CPU gains nothing, so a server there, which compiles
        # all programs ahead, does without.
        self.first_chunk_is_whole = not context or platform != "cpu"
        self.together_tokens = TOGETHER_TOKENS.get(platform, 512) if num_slots > 1 else 0
        self._context = context or self._base.config.max_seq_len
        self.max_len = cache_len(context, self._context)
        self._prefix_tokens = prefix_tokens
        self._prefill_budget = prefill_budget or 2**60
        self._block_s = block_s
        self._draft_len = draft_len
        self._resumes = resumes
        self._sampling_types = {SamplingParams}  # of all requests so far
        self.reset()

    def reset(self) -> None:
        """Drop all rows and all device memory, for example after a fault.

        The next step reserves it again.
        """
        self.waiting = deque[Row]()
        self.rows: list[Row | None] = [None] * self._num_slots
        self._prefilling = list[Row]()  # rows in slots whose prompts are not computed, in order
        self._dispatches = list[Dispatch]()
        self._events: Events = []
        self._step_s = 0.0  # how long a step takes
        self._read_s = 0.0  # when the last block was read
        # Chunks of prompts by their keys, least recently used first.
        self._prefixes = dict[bytes, steps.Chunk]()
        # The batch, and a batch of one row whose cache prompts are computed in. With one slot both
        # are the same.
        self._batches = list[DecodeBatch]()
        self._staged = Staged()

    def replace_weights(self, model: LanguageModel, name: str = "") -> None:
        """Generate from now on with other weights of the same shapes; nothing compiles again.

        Computed prompts are forgotten, since they are those of the earlier weights.

        Raises:
            UsageError: a request is in a slot or in the queue, or the shapes differ.
        """
        if self.busy:
            raise UsageError("the engine is generating: let it end before its weights change")
        if model.config != self._base.config:
            raise UsageError("the new weights differ in shape: make a new engine")
        self.models[name] = model.for_decoding()
        self._base = next(iter(self.models.values()))
        self._weights[name] = self.models[name].decode_params, model.config
        self._prefixes.clear()
        self._staged = Staged()

    @property
    def busy(self) -> bool:
        """Whether a request is in a slot or in the queue."""
        return bool(self.waiting or any(self.rows))

    @property
    def num_free(self) -> int:
        """How many more requests would get a slot at once; negative if requests wait."""
        return self.rows.count(None) - len(self.waiting)

    # Queue and slots

    def submit(self, request: Request | Row) -> Row:
        """Queue a request, or the row that ``make_row`` made of it."""
        row = request if isinstance(request, Row) else self.make_row(request)
        self._sampling_types.add(type(row.request.prompt.sampling))
        self.waiting.append(row)
        return row

    def make_row(self, request: Request) -> Row:
        """Check a request from ``encode_prompt``, and prepare what takes time.

        Any thread may call this.
        """
        prompt = request.prompt
        if self._draft_len and prompt.grammar:
            raise UsageError(
                "speculate guesses several tokens, and a grammar allows one after the other: "
                "leave one out"
            )
        if self._draft_len and request.top:
            raise UsageError(
                "speculate guesses tokens, and of those the likeliest others are not kept: "
                "leave one out"
            )
        setting_types(type(prompt.sampling))  # raises if a setting is unknown
        keys = {}
        if self._prefix_tokens and request.caches and not request.pooling:
            owner = f"{request.model}\0{request.salt}"
            keys = chunk_keys(owner, prompt.ids[:-1], self.chunk_tokens)
        text = TextDecoder(self.models[request.model].tokenizer, prompt)
        row = Row(request, text, prompt.limit(self._context) - len(prompt.ids), keys)
        if request.prompt_log_probs:
            row.prompt_tokens.append(Token(prompt.ids[0], None))
        return row

    def cancel(self, row: Row) -> None:
        """End a row without an answer."""
        if row.ended:
            return
        row.ended = True
        for rows in (self.waiting, self._prefilling):
            if row in rows:
                rows.remove(row)
        if row not in self.rows:
            return
        self.rows[row.slot] = None
        if self._resumes and row.tokens:
            # The cache has all tokens but the last one.
            ids = [*row.request.prompt.ids, *(token.id for token in row.tokens[:-1])]
            self._staged = Staged(_owner(row.request), ids)

    def step(self) -> Events:
        """Admit requests, compute prompts, dispatch a block, and return the events of the last.

        An interrupted step (such as by Ctrl-C) has consumed the arrays on the device: the engine is
        then ``reset``.
        """
        try:
            self._admit()
            self._prefill()
            dispatches = self._dispatch()
            if not (dispatches or self._dispatches):
                # No block will be read, which would wait for what was computed.
                jax.block_until_ready(self._batches[-1].cache.lengths)
            for dispatch in self._dispatches:
                self._read(dispatch)
            self._dispatches = dispatches
        except BaseException:
            self.reset()
            raise
        events = self._events
        self._events = []
        return events

    def warm_up(self, request: Request) -> None:
        """Compile the programs of a request by running it; call ``reset`` afterwards.

        A prompt with whole chunks runs again after another prompt has taken its place in the cache
        that prompts are computed in: it then finds its chunks in the prefix cache.
        """
        requests = [request]
        if self.make_row(request).chunk_keys and not request.prompt_log_probs:
            other = dataclasses.replace(request, salt="other", caches=False)
            requests = [request, other, request]
        for request in requests:
            self.submit(request)
            while self.busy:
                self.step()

    def _admit(self) -> None:
        """Give free slots to requests from the queue, and make room for all rows."""
        for slot, row in enumerate(self.rows):
            if row is None and self.waiting:
                row = self.waiting.popleft()
                row.slot = slot
                self.rows[slot] = row
                self._prefilling.append(row)
        self.make_room(max((self._needed_len(row) for row in self.rows if row), default=0))
        self.reserve()

    def _needed_len(self, row: Row) -> int:
        """How many tokens a row may have before the engine looks at it again, and some more."""
        upcoming = len(row.tokens) + _ROOM_TOKENS * (self._draft_len + 1)
        return len(row.request.prompt.ids) + min(row.max_new_tokens, upcoming)

    def make_room(self, num_tokens: int) -> None:
        """Extend the rows to at least ``num_tokens`` tokens."""
        max_len = cache_len(num_tokens, self._context)
        if max_len > self.max_len:
            self.max_len = max_len
            self._batches = [steps.resize(batch, max_len) for batch in self._batches]

    def reserve(self) -> None:
        """Allocate the batch, unless it is there."""
        if self._batches:
            return
        for size in sorted({self._num_slots, 1}, reverse=True):
            dtype = self._base.decode_params.dtype
            cache = _zeros(self._base.config, size, self.max_len, dtype)
            self._batches.append(self._put(self._rows_of(self._base, [_EMPTY] * size, cache)))

    def _rows_of(
        self, model: LanguageModel, prompts: Sequence[Prompt], cache: KVCache
    ) -> DecodeBatch:
        """Return the rows of these prompts, with the shapes of the batch."""
        max_len = self.max_len
        return make_batch(model, prompts, cache, max_len, self._sampling_types, self._context)

    def _put(self, tree: Any) -> Any:
        """Put arrays of rows where the parameters are, as all programs expect it."""
        sharding = self._base.decode_params.weights["final_norm"].sharding
        if isinstance(sharding, NamedSharding):
            sharding = batch_shardings(sharding.mesh, tree)
        return jax.device_put(tree, sharding)

    # Prefill

    def _prefill(self) -> None:
        """Compute prompts within the budget, in order; short ones together, others in chunks."""
        budget = self._prefill_budget
        while self._prefilling:
            row = self._prefilling[0]
            length = self._short_len(row)
            if length:
                if budget <= 0:
                    return
                self._prefill_short(row.request.model, length)
                budget -= self.together_tokens
                continue
            if not row.num_prefilled:
                self._begin(row)
            while budget > 0 and row.num_prefilled < row.prefill_len:
                budget -= self._prefill_chunk(row)
            if row.num_prefilled < row.prefill_len:
                return
            self._join(row, self._batches[-1].cache, 0)

    def _short_len(self, row: Row) -> int:
        """Return the length that a prompt is padded to if it is computed with others.

        The length is 0 if the prompt is computed alone.
        """
        request = row.request
        num_tokens = row.prefill_len
        if num_tokens >= self.chunk_tokens or request.pooling or request.prompt_log_probs:
            return 0
        length = power_of_two_at_least(num_tokens, MIN_CHUNK)
        return length if 2 * length <= self.together_tokens else 0

    def _prefill_short(self, name: str, length: int) -> None:
        """Compute prompts of this model and padded length, as many as the program has rows."""
        num_rows = self.together_tokens // length
        group = name, length
        rows = [
            row for row in self._prefilling if (row.request.model, self._short_len(row)) == group
        ][:num_rows]
        tokens = np.zeros((num_rows, length), np.int32)
        counts = np.zeros(num_rows, np.int32)
        for index, row in enumerate(rows):
            row.num_prefilled = row.prefill_len
            tokens[index, : row.prefill_len] = row.request.prompt.ids[:-1]
            counts[index] = row.prefill_len
        args = *self._weights[name], self._put(tokens), self._put(counts)
        cache = steps.call_program(steps.prefill_short, *args)
        for index, row in enumerate(rows):
            self._join(row, cache, index)

    def _begin(self, row: Row) -> None:
        """Begin a prompt with what the cache already contains of it.

        That is all of an equal prompt, or if the engine ``resumes``, the tokens that the last text
        has in common with it.
        """
        shared = self._staged.num_shared(row.request, self._resumes)
        row.num_prefilled = shared
        row.num_cached = shared - shared % self.chunk_tokens  # as the prefix cache counts them
        self._staged = Staged(_owner(row.request), [*row.request.prompt.ids[:shared]])
        lengths = self._put(np.array([shared], np.int32))
        self._set_cache(self._batches[-1].cache._replace(lengths=lengths))

    def _prefill_chunk(self, row: Row) -> int:
        """Compute the next chunk of a prompt, or take it from the prefix cache.

        Return how many tokens were computed, padding included.
        """
        start = np.int32(row.num_prefilled)
        size = self.chunk_tokens
        end = min(row.num_prefilled // size * size + size, row.prefill_len)
        tokens = row.request.prompt.ids[row.num_prefilled : end]
        key = row.chunk_keys.get(row.num_prefilled)

        # 1) Take it from the prefix cache; prompts whose tokens are scored need its activations.
        chunk = None
        if key and not row.request.prompt_log_probs:
            chunk = self._prefixes.pop(key, None)
        num_computed = 0
        if chunk:
            row.num_cached += size
            self._set_cache(steps.write_chunk(self._batches[-1].cache, chunk, start))

        # 2) Or compute it.
        else:
            num_computed = self._compute_chunk(row, tokens)
            if key:
                chunk = steps.read_chunk(self._batches[-1].cache, start, size)

        # 3) Keep it for other prompts, as the most recently used one.
        if key and chunk:
            self._prefixes[key] = chunk
            if len(self._prefixes) * size > self._prefix_tokens:
                del self._prefixes[next(iter(self._prefixes))]
        row.num_prefilled += len(tokens)
        self._staged.ids.extend(tokens)
        return num_computed

    def _compute_chunk(self, row: Row, tokens: Sequence[int]) -> int:
        """Compute tokens of a prompt, and what else is asked of them; return how many, padded."""
        request = row.request
        num_computed = power_of_two_at_least(len(tokens), MIN_CHUNK)
        if request.prompt_log_probs:
            num_computed = self.chunk_tokens  # so that ``score_chunk`` has one shape
        padded = np.zeros((1, num_computed), np.int32)
        padded[0, : len(tokens)] = tokens
        count = np.array([len(tokens)], np.int32)
        cache_is_empty = self.first_chunk_is_whole and row.num_prefilled == 0
        cache = self._batches[-1].cache
        args = *self._weights[request.model], cache, padded, count, cache_is_empty
        hidden, cache = steps.call_program(steps.prefill_chunk, *args)
        self._set_cache(cache)
        if request.pooling:
            row.pool(hidden, len(tokens))
        if request.prompt_log_probs:
            self._score(row, hidden, len(tokens))
        return num_computed

    def _score(self, row: Row, hidden: Any, num_tokens: int) -> None:
        """Record log-probabilities of the tokens that follow a chunk's tokens in the prompt."""
        targets = np.zeros(hidden.shape[1], np.int32)
        following = row.request.prompt.ids[row.num_prefilled + 1 :][:num_tokens]
        targets[: len(following)] = following
        scores = steps.score_chunk(*self._weights[row.request.model], hidden, targets)
        log_probs, top = jax.device_get(scores)
        row.prompt_tokens += make_tokens(num_tokens, row.request.top, targets, log_probs, top)

    def _join(self, row: Row, cache: KVCache, computed_row: int) -> None:
        """Let a row decode whose prompt is in ``computed_row`` of a cache.

        A row that generates nothing ends instead.
        """
        self._prefilling.remove(row)
        if row.is_complete:
            self._end(row)
            return
        one = self._rows_of(self.models[row.request.model], [row.request.prompt], cache)
        if self._num_slots == 1:
            self._batches[0] = self._put(one)
            return
        batch = self._batches[0]
        if one.settings.keys() != batch.settings.keys():
            # This row is the first with such settings: the other rows get their defaults.
            empty = self._rows_of(self._base, [_EMPTY] * self._num_slots, batch.cache)
            batch = self._put(batch._replace(settings=empty.settings | batch.settings))
        self._batches[0] = steps.join(batch, one, np.int32(computed_row), np.int32(row.slot))

    def _set_cache(self, cache: KVCache) -> None:
        self._batches[-1] = self._batches[-1]._replace(cache=cache)

    # Decoding

    def _dispatch(self) -> list[Dispatch]:
        """Dispatch a block for the rows of each model.

        Rows under a grammar wait until their last token is read.
        """
        unread = [row for dispatch in self._dispatches for row in dispatch.rows]
        by_model: dict[str, list[Row]] = {}
        for row in self.rows:
            if row is None or row in self._prefilling or row.num_steps >= row.max_new_tokens:
                continue
            must_wait = row.request.prompt.grammar is not None and row in unread
            if not must_wait:
                by_model.setdefault(row.request.model, []).append(row)
        return [self._dispatch_block(name, rows) for name, rows in by_model.items()]

    def _dispatch_block(self, name: str, rows: list[Row]) -> Dispatch:
        """Dispatch a block for the rows of one model."""
        # 1) How many steps: one if a first token should be shown at once or a grammar waits for it
        num_steps = min(self._max_steps(), max(row.max_new_tokens - row.num_steps for row in rows))
        shows_first = self._block_s is not None and not all(row.num_steps for row in rows)
        if shows_first or any(row and row.request.prompt.grammar for row in self.rows):
            num_steps = 1
        # 2) What each row may take
        batch = self._batches[0]
        quotas = np.zeros(self._num_slots, np.int32)
        for row in rows:
            quotas[row.slot] = num_steps * (self._draft_len + 1)
            row.num_steps += num_steps
        if any(row.request.prompt.grammar for row in rows):
            batch = set_allowed(batch, {row.slot: row.text.allowed() for row in rows})
        # 3) The program, which returns before the device has computed it
        tops = np.bool_(any(row.request.top for row in rows))
        args = *self._weights[name], batch, quotas, np.int32(num_steps), tops, self._draft_len
        self._batches[0], block = steps.call_program(steps.decode_block, *args)
        return Dispatch(rows, num_steps, time.monotonic(), block)

    def _max_steps(self) -> int:
        """Return how many steps the next block may take."""
        if self._block_s is None:
            return STEPS
        if not self._step_s:
            return 1
        return max(1, min(STEPS, int(self._block_s / self._step_s)))

    def _read(self, dispatch: Dispatch) -> None:
        """Read a block, and emit what it brought to the rows that have not ended."""
        if all(row.ended for row in dispatch.rows):
            return  # it may have been computed long ago, which says nothing about ``_step_s``
        block: Any = dispatch.block
        if not any(row.request.top for row in dispatch.rows):
            block = block._replace(top=())
        block = jax.device_get(block)
        now_s = time.monotonic()
        step_s = (now_s - max(dispatch.start_s, self._read_s)) / dispatch.num_steps
        # The time may include a prompt: a step that seems slower is believed slowly.
        self._step_s = min(step_s, 1.25 * self._step_s) if self._step_s else step_s
        self._read_s = now_s
        for row in dispatch.rows:
            if row.ended:
                continue
            slot = row.slot
            ids = block.tokens[slot]
            top = [array[:, slot] for array in block.top]
            num_tokens = int(np.count_nonzero(ids >= 0))
            tokens = make_tokens(num_tokens, row.request.top, ids, block.log_probs[slot], top)
            self._events += [(row, piece) for piece in row.push(tokens)]
            if row.is_complete:
                self._end(row, int(block.drafted[slot]), int(block.accepted[slot]))

    def _end(self, row: Row, drafted: int = 0, accepted: int = 0) -> None:
        self._events += [(row, event) for event in row.finish(drafted, accepted)]
        self.cancel(row)


def _owner(request: Request) -> tuple[str, str] | None:
    """Return who may reuse a computed prompt: nobody if it is scored (other shapes)."""
    return None if request.prompt_log_probs else (request.model, request.salt)


def cache_len(num_tokens: int, context: int) -> int:
    """Return one of a few cache lengths for ``num_tokens``, so that few programs are compiled."""
    max_len = max(-(-context // _BLOCK_TOKENS) * _BLOCK_TOKENS, _MIN_CACHE)
    return min(power_of_two_at_least(num_tokens, _MIN_CACHE), max_len)


def chunk_keys(owner: str, ids: Sequence[int], size: int) -> dict[int, bytes]:
    """Return the keys of the whole chunks of a prompt, by the index of their first token.

    A key is a hash of the owner (the request's model and salt) and of all tokens up to the chunk's
    end, so the stored chunk is what computing it again would give.
    """
    running = hashlib.sha256(owner.encode())
    keys = {}
    for start in range(0, len(ids) - size + 1, size):
        running.update(np.array(ids[start : start + size], np.uint32).tobytes())
        keys[start] = running.digest()
    return keys
