"""The engine: rows of one batch that requests come into and leave, driven from outside, without threads.

``submit`` queues a request, and each ``step`` lets requests in, computes chunks of their prompts, dispatches the next
block of decoding steps, and gives what the last block brought: the device computes one while the host reads the other.
What the engine does when depends on everything; what a request gets, on itself and the engine's sizes alone: every
program has one shape, and prompts are computed in chunks that begin at multiples of one length.
"""

import dataclasses
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jllama.errors import UsageError
from jllama.generation import programs, steps
from jllama.generation.decode_batch import DecodeBatch, make_batch, restricted, setting_types
from jllama.generation.requests import Answer, Piece, Request, Token
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.steps import STEPS
from jllama.generation.text import TextDecoder
from jllama.language_model import LanguageModel
from jllama.model import KVCache, power_of_two_at_least
from jllama.sharding import batch_shardings

MAX_STOPS = 16
"""Stop ids of a request, for which there is room from the start."""
CHUNK_TOKENS = {"cpu": 512}
"""How many tokens of a prompt to compute at once, by platform."""
_OTHER_CHUNK_TOKENS = 4096
_SHORTEST_CHUNK = 16
_SHORTEST_CACHE = 128
_BLOCK_TOKENS = 256  # that attention over a cache reads at once
_ROOM_TOKENS = 512  # for new ones, in a cache that can grow


@dataclasses.dataclass(eq=False)
class Row:
    """A request on its way, from the queue to the end of its answer."""

    request: Request
    text: TextDecoder
    keys: list[bytes]  # of the prompt's whole chunks
    number: int = -1  # in the order in which they were submitted
    slot: int = -1  # in the batch, once it has one
    num_computed: int = 0  # tokens of the prompt whose keys and values are there
    num_hits: int = 0  # those of them that were there already
    num_asked: int = 0  # decoding steps that were dispatched for it
    num_unread: int = 0  # those of them whose tokens are not here yet
    decodes: bool = False  # its prompt is computed
    ended: bool = False
    pooled: Any = ()  # of its prompt's activations, as ``Request.pooling`` says
    prompt_tokens: list[Token] = dataclasses.field(default_factory=list)
    tokens: list[Token] = dataclasses.field(default_factory=list)
    num_delivered: int = 0
    drafted: int = 0  # tokens that prompt lookup guessed
    accepted: int = 0  # those of them that were right


class _Dispatched(NamedTuple):
    """A block that the device computes."""

    rows: list[Row]
    num_steps: int
    start_s: float
    follows_prompt: bool  # which is part of the time until it is there
    block: steps.Block


Events = list[tuple[Row, Piece | Answer]]


class Engine:
    """Generates many texts at once: rows of one batch, which requests come into and leave while others go on.

    It has no threads: ``step`` does what is due, and one thread at a time may call it. ``generate``, ``stream``,
    ``Conversation`` and the server are loops around it; given to ``stream``, it keeps what the next prompt begins with.

    Example::

        from jllama.generation.requests import Answer, Request
        from jllama.generation.text import encode_prompt

        engine = jllama.Engine(model, num_slots=8)
        rows = [engine.submit(Request(encode_prompt(model, jllama.Prompt(text)))) for text in texts]
        while engine.busy:
            for row, event in engine.step():
                if isinstance(event, Answer):
                    print(rows.index(row), event.completion.text)

    Args:
        models: a model, or several of the same shapes by name.
        num_slots: how many texts are generated at once. An answer's bits may depend on it.
        context: the most tokens of a prompt and its answer, for which memory is reserved; 0: the model's, and it grows.
        chunk_tokens: how many tokens of a prompt are computed at once, a power of two; 0 is what suits the platform.
        prefix_tokens: how many tokens of prompts to keep for others that begin alike.
        prefill_budget: how many tokens of prompts to compute between two blocks; 0: all there are.
        block_s: how long a block should take; what joins waits for so long. None: as many steps as there may be.
        draft_len: how many tokens each step guesses (prompt lookup).
        resumes: of one slot, take what the last text left there as far as it goes: the bits are then those of a
            conversation, not of its last prompt alone.

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
        if any(model.config != self._base.config for model in self.models.values()):
            raise UsageError("the models differ in shape: serve each by a server of its own")
        self._num_slots = num_slots
        self._numbers = itertools.count()
        platform = jax.default_backend()
        self.chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(platform, _OTHER_CHUNK_TOKENS)
        self._grows = not context
        self._context = context or self._base.config.max_seq_len
        self._max_len = cache_len(context, self._context)
        self._prefix_tokens = prefix_tokens
        self._prefill_budget = prefill_budget or 2**60
        self._block_s = block_s
        self._draft_len = draft_len
        self._resumes = resumes
        self._num_stops = MAX_STOPS
        self._sampling_types: dict[type[SamplingParams], None] = {SamplingParams: None}
        self.reset()

    def reset(self) -> None:
        """Let go of all rows and of all memory, as after a fault; the next step reserves it anew."""
        self.waiting: deque[Row] = deque()
        self.rows: list[Row | None] = [None] * self._num_slots
        self._step_s = 0.0  # how long a step took lately
        self._read_s = 0.0  # when the last block was read
        self._computed = False  # whether this step has computed a chunk of a prompt
        self._prefixes: dict[bytes, steps.Chunk] = {}  # kept, by ``chunk_keys``; the one used longest ago goes first
        self._dispatched: list[_Dispatched] = []
        self._num_types = 1  # that the batch has settings of
        self._restricts = False  # whether the batch has masks of grammars
        self._batch: DecodeBatch | None = None
        self._staging: KVCache | None = None  # of the row whose prompt is computed; with one slot, the batch's
        self._staged: tuple[Any, list[int]] = None, []  # whose tokens are there, and which

    @property
    def busy(self) -> bool:
        """Whether a text is under way or waits."""
        return bool(self.waiting or any(self.rows))

    @property
    def num_free(self) -> int:
        """How many more requests would get a slot at once."""
        return self.rows.count(None) - len(self.waiting)

    def submit(self, request: Request | Row) -> Row:
        """Queue a request, or what ``row_of`` made of it."""
        row = request if isinstance(request, Row) else self.row_of(request)
        row.number = next(self._numbers)
        self.waiting.append(row)
        return row

    def row_of(self, request: Request) -> Row:
        """A request, encoded and checked by ``encode_prompt``, with all that takes long to make; any thread may."""
        if self._draft_len and request.prompt.grammar:
            said = "speculate guesses several tokens, and a grammar allows one after the other"
            raise UsageError(f"{said}: leave one out")
        if self._draft_len and request.top:
            raise UsageError("speculate guesses tokens, and of those the likeliest others are not kept: leave one out")
        setting_types(type(request.prompt.sampling))  # something applies each
        model = self.models[request.model]
        keys: list[bytes] = []
        if self._prefix_tokens and request.caches and not request.pooling:
            keys = [*chunk_keys(f"{request.model}\0{request.salt}", request.prompt.ids[:-1], self.chunk_tokens)]
        return Row(request, TextDecoder(model.tokenizer, request.prompt), keys)

    def cancel(self, row: Row) -> None:
        """End a row without an answer."""
        row.ended = True
        if row in self.waiting:
            self.waiting.remove(row)
        if row.slot < 0 or self.rows[row.slot] is not row:
            return
        self.rows[row.slot] = None
        if self._resumes and row.tokens:  # of the last one there are no keys and values yet
            ids = [*row.request.prompt.ids, *(token.id for token in row.tokens[:-1])]
            self._staged = _owner(row.request), ids

    def step(self) -> Events:
        """Let requests in, compute prompts, dispatch the next block, and return what the last one brought.

        What breaks off in it, as an interrupt does, has consumed what was on the device: the engine is then ``reset``.
        """
        events: Events = []
        try:
            self._computed = False
            self._let_in()
            self._prefill_rows(events)
            upcoming = self._dispatch()
            if not (upcoming or self._dispatched):  # there is nothing to read that would wait for what was computed
                jax.block_until_ready(self._cache_of_one().lengths)
            for dispatched in self._dispatched:
                self._read(dispatched, events)
            self._dispatched = upcoming
            if not upcoming:  # rows under a grammar waited for their last token
                self._dispatched = self._dispatch()
        except BaseException:
            self.reset()
            raise
        return events

    def _let_in(self) -> None:
        """Fill free slots from the queue, and let the batch have room for what comes in."""
        for slot, row in enumerate(self.rows):
            if row is None and self.waiting:
                row = self.rows[slot] = self.waiting.popleft()
                row.slot = slot
        rows = [row for row in self.rows if row and not row.decodes]
        if self._grows:
            self.make_room(max((self._first_room(row) for row in rows), default=0))
        for row in rows:
            prompt = row.request.prompt
            self._sampling_types[type(prompt.sampling)] = None
            self._num_stops = max(self._num_stops, len(prompt.stop_ids or ()))
        self.reserve()

    def reserve(self) -> None:
        """Make the batch, or give it what new rows need."""
        batch = self._batch
        if batch is None:
            cache = self._zeros(len(self.rows))
            batch = self._batch = self._put(self._rows_of(self._base, [_NOBODY] * len(self.rows), cache))
            if len(self.rows) > 1:
                self._staging = self._zeros(1)
        has_room = self._num_stops <= batch.stop_ids.shape[1]
        if has_room and self._num_types == len(self._sampling_types):
            return
        new = self._rows_of(self._base, [_NOBODY] * len(self.rows), batch.cache)
        stop_ids = np.array(new.stop_ids)
        old = np.asarray(batch.stop_ids)
        stop_ids[:, : old.shape[1]] = old
        settings = new.settings | batch.settings
        self._num_types = len(self._sampling_types)
        self._batch = self._put(batch._replace(settings=settings, stop_ids=stop_ids))

    def _first_room(self, row: Row) -> int:
        prompt = row.request.prompt
        return min(prompt.limit(self._context), len(prompt.ids) + _ROOM_TOKENS)

    def make_room(self, num_tokens: int) -> None:
        """Let the rows of an engine that grows have at least so many tokens."""
        needed = cache_len(num_tokens, self._context)
        if needed <= self._max_len:
            return
        self._max_len = needed
        if self._batch is not None:
            self._batch = steps.resized(self._batch, needed)
        if self._staging is not None:
            self._staging = steps.resized_cache(self._staging, needed)

    # Prompts

    def _prefill_rows(self, events: Events) -> None:
        """Compute chunks of prompts within the budget, one prompt after the other; rows that are ready join."""
        budget = self._prefill_budget
        # In the order in which they came; but one that has begun stays the first: there is one cache to compute in.
        rows = [row for row in self.rows if row and not row.decodes]
        rows.sort(key=lambda row: (-row.num_computed, row.number))
        for row in rows:
            if not row.num_computed:
                self._begin(row)
            end = len(row.request.prompt.ids) - (0 if row.request.pooling else 1)
            while budget > 0 and row.num_computed < end:
                budget -= self._prefill(row, end)
            if row.num_computed < end:
                return
            self._enter(row, events)

    def _begin(self, row: Row) -> None:
        """Take the cache to compute in, with what it holds of the prompt already."""
        request = row.request
        owner = _owner(request)
        ids = [*request.prompt.ids[:-1]]
        staged_owner, staged = self._staged
        shared = 0
        if staged_owner == owner and request.caches and not (request.pooling or request.prompt_log_probs):
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(staged, ids, strict=False))
            shared = sum(1 for _ in equal)
            if not self._resumes and shared < max(len(staged), len(ids)):
                shared -= shared % self.chunk_tokens  # as computing the prompt by itself would have it
        row.num_computed = shared
        row.num_hits = shared - (0 if self._resumes else shared % self.chunk_tokens)
        for key in row.keys[: shared // self.chunk_tokens]:
            if key in self._prefixes:
                self._prefixes[key] = self._prefixes.pop(key)  # used, though it need not be copied
        self._staged = owner, ids[:shared]
        self._set_cache_of_one(self._cache_of_one()._replace(lengths=self._put(np.array([shared], np.int32))))

    def _prefill(self, row: Row, end: int) -> int:
        """The next chunk of a row's prompt, kept or computed; returns how many tokens were computed."""
        request, start, size = row.request, row.num_computed, self.chunk_tokens
        model, ids = self.models[request.model], request.prompt.ids
        tokens = ids[start : min(start - start % size + size, end)]
        index = start // size
        key = row.keys[index] if index < len(row.keys) and len(tokens) == size else None
        chunk = self._prefixes.pop(key, None) if key and not request.prompt_log_probs else None
        computed = 0
        if chunk is not None:
            row.num_hits += len(tokens)
            self._set_cache_of_one(steps.write_chunk(self._cache_of_one(), chunk, np.int32(start)))
        else:
            computed = size if request.prompt_log_probs else power_of_two_at_least(len(tokens), _SHORTEST_CHUNK)
            padded = np.zeros((1, computed), np.int32)
            padded[0, : len(tokens)] = tokens
            counts = np.array([len(tokens)], np.int32)
            begins = self._grows and start == 0  # one program for each length, where all are compiled ahead
            args = model.decode_params, model.config, self._cache_of_one(), padded, counts, begins
            hidden, cache = programs.call(steps.prefill_chunk, *args)
            self._computed = True
            self._set_cache_of_one(cache)
            self._report(row, model, hidden, tokens, start)
            chunk = steps.read_chunk(cache, np.int32(start), size) if key else None
        if key and chunk:
            self._prefixes[key] = chunk  # the last one to go: the one used longest ago is the first
            if len(self._prefixes) * size > self._prefix_tokens:
                del self._prefixes[next(iter(self._prefixes))]
        row.num_computed += len(tokens)
        self._staged[1].extend(tokens)
        return computed

    def _report(self, row: Row, model: LanguageModel, hidden: Any, tokens: Sequence[int], start: int) -> None:
        """Keep what was asked for of a chunk's final activations."""
        request = row.request
        if request.pooling:
            states = np.asarray(hidden, np.float64)[0, : len(tokens)]
            before = row.pooled if start else 0
            row.pooled = states[-1] if request.pooling == "last" else before + states.sum(axis=0)
        if request.prompt_log_probs:
            targets = np.zeros(hidden.shape[1], np.int32)
            following = request.prompt.ids[start + 1 : start + 1 + len(tokens)]
            targets[: len(following)] = following
            scores = jax.device_get(steps.score_chunk(model.decode_params, model.config, hidden, targets))
            row.prompt_tokens += [_token(index, request.top, targets, *scores) for index in range(len(tokens))]

    def _enter(self, row: Row, events: Events) -> None:
        """A row whose prompt is computed begins to decode, or has its end already."""
        row.decodes = True
        prompt = row.request.prompt
        if row.request.prompt_log_probs:
            row.prompt_tokens.insert(0, Token(prompt.ids[0], None))
        if prompt.max_new_tokens == 0:
            return self._end(row, events)
        assert self._batch is not None
        cache = self._cache_of_one()
        if len(self.rows) == 1:  # it is there already
            cache = KVCache((), (), self._put(np.array([row.num_computed], np.int32)))
        one = self._rows_of(self.models[row.request.model], [prompt], cache)
        self._batch = steps.join(self._batch, one, np.int32(row.slot))

    def _cache_of_one(self) -> KVCache:
        """The cache that prompts are computed in."""
        assert self._batch is not None
        return self._batch.cache if self._staging is None else self._staging

    def _set_cache_of_one(self, cache: KVCache) -> None:
        assert self._batch is not None
        if self._staging is None:
            self._batch = self._batch._replace(cache=cache)
        else:
            self._staging = cache

    def _rows_of(self, model: LanguageModel, prompts: Sequence[Prompt], cache: KVCache) -> DecodeBatch:
        types = tuple(self._sampling_types)
        return make_batch(model, prompts, cache, self._max_len, self._num_stops, types, self._context)

    def _zeros(self, rows: int) -> KVCache:
        return self._put(_zeros(self._base.config, rows, self._max_len, self._base.decode_params.dtype))

    def _put(self, tree: Any) -> Any:
        """Arrays of rows on the devices of the parameters, split: where they are is part of what is compiled."""
        where = self._base.decode_params.weights["final_norm"].sharding
        return jax.device_put(tree, batch_shardings(where.mesh, tree) if isinstance(where, NamedSharding) else where)

    # Decoding

    def _dispatch(self) -> list[_Dispatched]:
        """The next block of each model's rows, but not of those that must wait for their last token."""
        unread = [row for dispatched in self._dispatched for row in dispatched.rows]
        rows = []
        for row in self.rows:
            if row is None or not row.decodes:
                continue
            is_asked = row.num_asked >= self._num_new(row)
            waits = row.request.prompt.grammar is not None and row in unread
            if not (is_asked or waits):
                rows.append(row)
        names = dict.fromkeys(row.request.model for row in rows)
        return [self._dispatch_rows([row for row in rows if row.request.model == name]) for name in names]

    def _dispatch_rows(self, rows: list[Row]) -> _Dispatched:
        """A block of one model's rows: one step where one has no token yet, or a row is under a grammar."""
        assert self._batch is not None
        model = self.models[rows[0].request.model]
        remaining = max(self._num_new(row) - row.num_asked for row in rows)
        num_steps = min(self._num_steps(), remaining)
        shows_first = self._block_s is not None and not all(row.num_asked for row in rows)
        if shows_first or any(row and row.decodes and row.request.prompt.grammar for row in self.rows):
            num_steps = 1  # a first token is shown as soon as it is there; and who has a grammar waits for this block
        most = num_steps * (self._draft_len + 1)
        quotas = np.zeros(len(self.rows), np.int32)
        for row in rows:
            quotas[row.slot] = 1 if row.request.prompt.grammar else most
            row.num_asked += 1 if row.request.prompt.grammar else num_steps
            row.num_unread += num_steps
        if self._grows:
            self.make_room(max(self._longest(row) for row in rows))
        if self._restricts or any(row.request.prompt.grammar for row in rows):
            masks: dict[int, Any] = {row.slot: row.text.allowed() for row in rows}
            self._batch = restricted(self._batch, [masks.get(slot) for slot in range(len(self.rows))])
            self._restricts = any(row.request.prompt.grammar for row in rows)
        tops = np.bool_(any(row.request.top for row in rows))
        args = model.decode_params, model.config, self._batch, quotas, np.int32(num_steps), tops, self._draft_len
        self._batch, block = programs.call(steps.decode_block, *args)
        return _Dispatched(rows, num_steps, time.monotonic(), self._computed, block)

    def _num_new(self, row: Row) -> int:
        """How many new tokens a row may have."""
        prompt = row.request.prompt
        return prompt.limit(self._context) - len(prompt.ids)

    def _longest(self, row: Row) -> int:
        """How long a row may be after all blocks that were dispatched."""
        prompt = row.request.prompt
        new = len(row.tokens) + row.num_unread * (self._draft_len + 1)
        return min(len(prompt.ids) + new, prompt.limit(self._context))

    def _num_steps(self) -> int:
        """How many steps the next block may take."""
        if self._block_s is None or not self._step_s:
            return STEPS
        return max(1, min(STEPS, int(self._block_s / self._step_s)))

    def _read(self, dispatched: _Dispatched, events: Events) -> None:
        """Give the rows that are still under way what a block brought them."""
        if all(row.ended for row in dispatched.rows):
            return  # it may have been computed long ago
        tops = any(row.request.top for row in dispatched.rows)
        block = dispatched.block
        arrays = block.tokens, block.log_probs, block.drafted, block.accepted, *(block.top if tops else ())
        tokens, log_probs, drafted, accepted, *top = jax.device_get(arrays)
        now_s = time.monotonic()
        took_s = (now_s - max(dispatched.start_s, self._read_s)) / dispatched.num_steps
        if not self._step_s:
            self._step_s = took_s
        elif not dispatched.follows_prompt:
            self._step_s = 0.8 * self._step_s + 0.2 * took_s
        self._read_s = now_s
        for row in dispatched.rows:
            slot, num_top = row.slot, row.request.top
            row.num_unread -= dispatched.num_steps
            row.drafted, row.accepted = int(drafted[slot]), int(accepted[slot])
            for index, id in enumerate(tokens[slot]):
                if row.ended or id < 0:
                    break
                likeliest = zip(*(each[index, slot, :num_top].tolist() for each in top), strict=True)
                self._take(row, Token(int(id), float(log_probs[slot, index]), tuple(likeliest)), events)

    def _take(self, row: Row, token: Token, events: Events) -> None:
        row.tokens.append(token)
        if piece := row.text.push(token.id, token.log_prob or 0.0):
            self._deliver(row, piece, row.text.num_tokens_shown, events)
        if row.text.finish_reason or len(row.tokens) >= self._num_new(row):
            self._end(row, events)

    def _deliver(self, row: Row, text: str, num_tokens: int, events: Events) -> None:
        tokens = tuple(row.tokens[row.num_delivered : num_tokens])
        row.num_delivered = max(num_tokens, row.num_delivered)
        if text or tokens:
            events.append((row, Piece(text, tokens)))

    def _end(self, row: Row, events: Events) -> None:
        rest, completion = row.text.end(), row.text.completion(row.drafted, row.accepted)
        self._deliver(row, rest, len(completion.ids), events)
        tokens = tuple(row.tokens[: len(completion.ids)])
        events.append((row, Answer(completion, tokens, tuple(row.prompt_tokens), row.num_hits, tuple(row.pooled))))
        self.cancel(row)


def _owner(request: Request) -> tuple[str, str, bool]:
    """Who may go on from what a prompt left in the cache; those that are scored are computed in other shapes."""
    return request.model, request.salt, request.prompt_log_probs


_NOBODY = Prompt([0], max_new_tokens=0)
_zeros = jax.jit(KVCache.zeros, static_argnums=(0, 1, 2, 3))  # one program, not one for each layer's arrays


def cache_len(num_tokens: int, context: int) -> int:
    """The cache length for so many tokens: one of a few, so that few programs are compiled."""
    whole = -(-context // _BLOCK_TOKENS) * _BLOCK_TOKENS
    return min(power_of_two_at_least(num_tokens, _SHORTEST_CACHE), max(whole, _SHORTEST_CACHE))


def chunk_keys(owner: str, ids: Sequence[int], size: int) -> Iterator[bytes]:
    """The key of each whole chunk of a prompt: a hash of its owner (the model and the salt of the request) and of all
    tokens up to the chunk's end, so what is kept under it is what computing it again would give.
    """
    running = hashlib.sha256(owner.encode())
    for start in range(0, len(ids) - size + 1, size):
        running.update(np.array(ids[start : start + size], np.uint32).tobytes())
        yield running.digest()


def _token(index: int, num_top: int, ids: Any, log_probs: Any, top: Any) -> Token:
    """One of arrays of ids and log-probabilities, with the likeliest ones beside it."""
    best = zip(*(each[index, :num_top].tolist() for each in top), strict=True)
    return Token(int(ids[index]), float(log_probs[index]), tuple(best))
