"""The engine: rows of one batch that requests come into and leave, driven from outside, without threads.

``submit`` queues a request, and each ``step`` lets requests in, computes chunks of their prompts, dispatches the next
block of decoding steps, and gives what the last block brought: the device computes one while the host reads the other.
What the engine does when depends on everything; what a request gets, on itself and the engine's sizes alone: every
program has one shape, and prompts are computed in chunks that begin at multiples of one length.
"""

import dataclasses
import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jllama import programs
from jllama.errors import UsageError
from jllama.generation import steps
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
TOGETHER_TOKENS = {"cpu": 0}
"""How many tokens of short prompts to compute in one program, by platform: as many as take no longer than one prompt,
since all weights are read for each. A program has always as many rows, so no answer depends on who came with it.
"""
_OTHER_TOGETHER_TOKENS = 512
SHORTEST_CHUNK = 16
"""How many tokens a chunk of a prompt is padded to at least, and else to a power of two."""
_SHORTEST_CACHE = 128
_BLOCK_TOKENS = 256  # that attention over a cache reads at once
_ROOM_TOKENS = 512  # for new ones, in a cache that can grow: two blocks take less


@dataclasses.dataclass(eq=False)
class Row:
    """A request on its way, from the queue to the end of its answer."""

    request: Request
    text: TextDecoder
    keys: list[bytes]  # of the prompt's whole chunks
    slot: int = -1  # in the batch, once it has one
    num_computed: int = 0  # tokens of the prompt whose keys and values are there
    num_hits: int = 0  # those of them that were there already
    num_asked: int = 0  # decoding steps that were dispatched for it
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
        platform = jax.default_backend()
        self.chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(platform, _OTHER_CHUNK_TOKENS)
        # Whether a prompt's first chunk is a whole sequence, which kernels are made for, with programs of its own: not
        # where all are compiled ahead for a CPU, which computes them all alike.
        self.begins_whole = not context or platform != "cpu"
        together_tokens = TOGETHER_TOKENS.get(platform, _OTHER_TOGETHER_TOKENS)
        self.together_tokens = together_tokens if num_slots > 1 else 0
        self._context = context or self._base.config.max_seq_len
        self._max_len = cache_len(context, self._context)
        self._prefix_tokens = prefix_tokens
        self._prefill_budget = prefill_budget or 2**60
        self._block_s = block_s
        self._draft_len = draft_len
        self._resumes = resumes
        self._kinds: tuple[frozenset[type[SamplingParams]], int] = (
            frozenset([SamplingParams]),
            MAX_STOPS,
        )
        self.reset()

    def reset(self) -> None:
        """Let go of all rows and of all memory, as after a fault; the next step reserves it anew."""
        self.waiting: deque[Row] = deque()
        self.rows: list[Row | None] = [None] * self._num_slots
        self._prompts: list[
            Row
        ] = []  # of the rows, those whose prompts are not computed yet, in their order
        self._step_s = 0.0  # how long a step takes
        self._read_s = 0.0  # when the last block was read
        self._prefixes: dict[
            bytes, steps.Chunk
        ] = {}  # kept, by ``chunk_keys``; the one used longest ago goes first
        self._dispatched: list[_Dispatched] = []
        # The batch, and one row beside it that prompts are computed in; with one slot that is the batch itself.
        self._batches: list[DecodeBatch] = []
        self._made_for = (
            self._kinds
        )  # the settings and the number of stop ids that the batch has room for
        self._staged: tuple[Any, list[int]] = (
            None,
            [],
        )  # whose tokens are where prompts are computed, and which

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
        prompt = row.request.prompt
        types, num_stops = self._kinds
        self._kinds = types | {type(prompt.sampling)}, max(num_stops, len(prompt.stop_ids or ()))
        self.waiting.append(row)
        return row

    def row_of(self, request: Request) -> Row:
        """A request, encoded and checked by ``encode_prompt``, with all that takes long to make; any thread may."""
        if self._draft_len and request.prompt.grammar:
            said = "speculate guesses several tokens, and a grammar allows one after the other"
            raise UsageError(f"{said}: leave one out")
        if self._draft_len and request.top:
            raise UsageError(
                "speculate guesses tokens, and of those the likeliest others are not kept: leave one out"
            )
        setting_types(type(request.prompt.sampling))  # something applies each
        model = self.models[request.model]
        keys: list[bytes] = []
        if self._prefix_tokens and request.caches and not request.pooling:
            keys = [
                *chunk_keys(
                    f"{request.model}\0{request.salt}", request.prompt.ids[:-1], self.chunk_tokens
                )
            ]
        return Row(request, TextDecoder(model.tokenizer, request.prompt), keys)

    def cancel(self, row: Row) -> None:
        """End a row without an answer."""
        if row.ended:
            return
        row.ended = True
        for rows in (self.waiting, self._prompts):
            if row in rows:
                rows.remove(row)
        if row not in self.rows:
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
            self._let_in()
            self._prefill_rows(events)
            upcoming = self._dispatch()
            if not (
                upcoming or self._dispatched
            ):  # there is nothing to read that would wait for what was computed
                jax.block_until_ready(self._batches[-1].cache.lengths)
            for dispatched in self._dispatched:
                self._read(dispatched, events)
            self._dispatched = (
                upcoming or self._dispatch()
            )  # rows under a grammar waited for their last token
        except BaseException:
            self.reset()
            raise
        return events

    def _let_in(self) -> None:
        """Fill free slots from the queue, and let the batch have room for all rows."""
        for slot, row in enumerate(self.rows):
            if row is None and self.waiting:
                row = self.rows[slot] = self.waiting.popleft()
                row.slot = slot
                self._prompts.append(row)
        self.make_room(max((self._room(row) for row in self.rows if row), default=0))
        self.reserve()

    def _room(self, row: Row) -> int:
        """How many tokens a row may have before the engine looks at it again, and some more."""
        prompt = row.request.prompt
        upcoming = _ROOM_TOKENS * (self._draft_len + 1)
        return min(prompt.limit(self._context), len(prompt.ids) + len(row.tokens) + upcoming)

    def make_room(self, num_tokens: int) -> None:
        """Let the rows have at least so many tokens."""
        needed = cache_len(num_tokens, self._context)
        if needed > self._max_len:
            self._max_len = needed
            self._batches = [steps.resized(batch, needed) for batch in self._batches]

    def reserve(self) -> None:
        """Make the batch, or give it what new rows need."""
        if not self._batches:
            self._batches = [
                self._nobody(size) for size in sorted({len(self.rows), 1}, reverse=True)
            ]
        elif self._made_for != self._kinds:
            batch = self._batches[0]
            new = self._rows_of(self._base, [_NOBODY] * len(self.rows), batch.cache)
            stop_ids = np.array(new.stop_ids)
            stop_ids[:, : batch.stop_ids.shape[1]] = batch.stop_ids
            self._batches[0] = self._put(
                batch._replace(settings=new.settings | batch.settings, stop_ids=stop_ids)
            )
        self._made_for = self._kinds

    # Prompts

    def _prefill_rows(self, events: Events) -> None:
        """Compute chunks of prompts within the budget, short ones together and each other by itself; rows then join."""
        budget = self._prefill_budget
        while self._prompts:
            row = self._prompts[0]
            if length := self._short_length(row):
                if budget <= 0:
                    return
                self._prefill_short(row.request.model, length, events)
                budget -= self.together_tokens
                continue
            if not row.num_computed:
                self._begin(row)
            end = len(row.request.prompt.ids) - (0 if row.request.pooling else 1)
            while budget > 0 and row.num_computed < end:
                budget -= self._prefill(row, end)
            if row.num_computed < end:
                return
            self._prompts.remove(row)
            self._enter(row, self._batches[-1].cache, 0, events)

    def _short_length(self, row: Row) -> int:
        """The length that a prompt is padded to, to be computed beside others; 0 if it is computed by itself."""
        request = row.request
        num_tokens = len(request.prompt.ids) - 1
        if num_tokens >= self.chunk_tokens or request.pooling or request.prompt_log_probs:
            return 0
        length = power_of_two_at_least(num_tokens, SHORTEST_CHUNK)
        return length if 2 * length <= self.together_tokens else 0

    def _prefill_short(self, name: str, length: int, events: Events) -> None:
        """Compute the first prompts of this model and length, as many as a program has rows."""
        num_rows = self.together_tokens // length
        alike = [
            row
            for row in self._prompts
            if row.request.model == name and self._short_length(row) == length
        ]
        tokens, counts = np.zeros((num_rows, length), np.int32), np.zeros(num_rows, np.int32)
        for index, row in enumerate(alike[:num_rows]):
            ids = row.request.prompt.ids[:-1]
            tokens[index, : len(ids)] = ids
            counts[index] = row.num_computed = len(ids)
        model = self.models[name]
        args = model.decode_params, model.config, self._put(tokens), self._put(counts)
        cache = programs.call(steps.prefill_short, *args)
        for index, row in enumerate(alike[:num_rows]):
            self._prompts.remove(row)
            self._enter(row, cache, index, events)

    def _begin(self, row: Row) -> None:
        """Take the row to compute in, with what it holds of the prompt already.

        That is an equal prompt, or where the engine ``resumes``, what a text before has in common with this one.
        """
        request = row.request
        ids = [*request.prompt.ids[:-1]]
        owner, held = self._staged
        shared = 0
        if (
            owner == _owner(request)
            and request.caches
            and not (request.pooling or request.prompt_log_probs)
        ):
            if self._resumes:
                while shared < min(len(ids), len(held)) and ids[shared] == held[shared]:
                    shared += 1
            elif held == ids:
                shared = len(ids)
        row.num_computed = shared
        row.num_hits = shared - shared % self.chunk_tokens  # as if they were among those kept
        self._staged = _owner(request), ids[:shared]
        cache = self._batches[-1].cache
        self._set_cache(cache._replace(lengths=self._put(np.array([shared], np.int32))))

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
            self._set_cache(steps.write_chunk(self._batches[-1].cache, chunk, np.int32(start)))
        else:
            computed = (
                size
                if request.prompt_log_probs
                else power_of_two_at_least(len(tokens), SHORTEST_CHUNK)
            )
            padded = np.zeros((1, computed), np.int32)
            padded[0, : len(tokens)] = tokens
            counts = np.array([len(tokens)], np.int32)
            begins = self.begins_whole and start == 0
            args = (
                model.decode_params,
                model.config,
                self._batches[-1].cache,
                padded,
                counts,
                begins,
            )
            hidden, cache = programs.call(steps.prefill_chunk, *args)
            self._set_cache(cache)
            self._report(row, model, hidden, tokens, start)
            chunk = steps.read_chunk(cache, np.int32(start), size) if key else None
        if key and chunk:
            self._prefixes[key] = chunk  # the last one to go: the one used longest ago is the first
            if len(self._prefixes) * size > self._prefix_tokens:
                del self._prefixes[next(iter(self._prefixes))]
        row.num_computed += len(tokens)
        self._staged[1].extend(tokens)
        return computed

    def _report(
        self, row: Row, model: LanguageModel, hidden: Any, tokens: Sequence[int], start: int
    ) -> None:
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
            scores = jax.device_get(
                steps.score_chunk(model.decode_params, model.config, hidden, targets)
            )
            row.prompt_tokens += [
                _token(index, request.top, targets, *scores) for index in range(len(tokens))
            ]

    def _enter(self, row: Row, cache: KVCache, computed_row: int, events: Events) -> None:
        """A row whose prompt is computed, in a row of this cache, begins to decode, or has its end already."""
        prompt = row.request.prompt
        if row.request.prompt_log_probs:
            row.prompt_tokens.insert(0, Token(prompt.ids[0], None))
        if prompt.max_new_tokens == 0:
            return self._end(row, events)
        one = self._rows_of(self.models[row.request.model], [prompt], cache)
        where = np.int32(computed_row), np.int32(row.slot)
        self._batches[0] = (
            self._put(one) if len(self.rows) == 1 else steps.join(self._batches[0], one, *where)
        )

    def _set_cache(self, cache: KVCache) -> None:
        self._batches[-1] = self._batches[-1]._replace(cache=cache)

    def _nobody(self, size: int) -> DecodeBatch:
        """A batch of so many rows that nobody has yet."""
        cache = _zeros(self._base.config, size, self._max_len, self._base.decode_params.dtype)
        return self._put(self._rows_of(self._base, [_NOBODY] * size, cache))

    def _rows_of(
        self, model: LanguageModel, prompts: Sequence[Prompt], cache: KVCache
    ) -> DecodeBatch:
        types, num_stops = self._kinds
        return make_batch(model, prompts, cache, self._max_len, num_stops, types, self._context)

    def _put(self, tree: Any) -> Any:
        """Arrays of rows on the devices of the parameters, split: where they are is part of what is compiled."""
        where = self._base.decode_params.weights["final_norm"].sharding
        return jax.device_put(
            tree, batch_shardings(where.mesh, tree) if isinstance(where, NamedSharding) else where
        )

    # Decoding

    def _dispatch(self) -> list[_Dispatched]:
        """The next block of each model's rows, but not of those that must wait for their last token."""
        unread = [row for dispatched in self._dispatched for row in dispatched.rows]
        by_model: dict[str, list[Row]] = {}
        for row in self.rows:
            if row is None or row in self._prompts or row.num_asked >= self._num_new(row):
                continue
            must_wait = row.request.prompt.grammar is not None and row in unread
            if not must_wait:
                by_model.setdefault(row.request.model, []).append(row)
        return [self._dispatch_rows(*pair) for pair in by_model.items()]

    def _dispatch_rows(self, name: str, rows: list[Row]) -> _Dispatched:
        """A block of one model's rows: one step where one has no token yet, or a row is under a grammar."""
        remaining = max(self._num_new(row) - row.num_asked for row in rows)
        num_steps = min(self._num_steps(), remaining)
        shows_first = self._block_s is not None and not all(row.num_asked for row in rows)
        if shows_first or any(row and row.request.prompt.grammar for row in self.rows):
            num_steps = 1  # a first token is shown as soon as it is there; and who has a grammar waits for this block
        quotas = np.zeros(len(self.rows), np.int32)
        for row in rows:
            quotas[row.slot] = num_steps * (self._draft_len + 1)
            row.num_asked += num_steps
        batch = self._batches[0]
        if any(row.request.prompt.grammar for row in rows):
            masks = {row.slot: row.text.allowed() for row in rows}
            batch = restricted(batch, [masks.get(slot) for slot in range(len(self.rows))])
        model = self.models[name]
        tops = np.bool_(any(row.request.top for row in rows))
        args = (
            model.decode_params,
            model.config,
            batch,
            quotas,
            np.int32(num_steps),
            tops,
            self._draft_len,
        )
        self._batches[0], block = programs.call(steps.decode_block, *args)
        return _Dispatched(rows, num_steps, time.monotonic(), block)

    def _num_new(self, row: Row) -> int:
        """How many new tokens a row may have."""
        prompt = row.request.prompt
        return prompt.limit(self._context) - len(prompt.ids)

    def _num_steps(self) -> int:
        """How many steps the next block may take."""
        if self._block_s is None:
            return STEPS
        if not self._step_s:
            return 1
        return max(1, min(STEPS, int(self._block_s / self._step_s)))

    def _read(self, dispatched: _Dispatched, events: Events) -> None:
        """Give the rows that are still under way what a block brought them."""
        if all(row.ended for row in dispatched.rows):
            return  # it may have been computed long ago
        has_top = any(row.request.top for row in dispatched.rows)
        block = dispatched.block
        arrays = (
            block.tokens,
            block.log_probs,
            block.drafted,
            block.accepted,
            *(block.top if has_top else ()),
        )
        tokens, log_probs, drafted, accepted, *top = jax.device_get(arrays)
        now_s = time.monotonic()
        took_s = (now_s - max(dispatched.start_s, self._read_s)) / dispatched.num_steps
        # A prompt before it may be a part of that: what is slower than it was is believed slowly.
        self._step_s = min(took_s, 1.25 * self._step_s) if self._step_s else took_s
        self._read_s = now_s
        for row in dispatched.rows:
            if row.ended:
                continue
            slot = row.slot
            row.drafted, row.accepted = int(drafted[slot]), int(accepted[slot])
            text = ""
            for index in range(np.count_nonzero(tokens[slot] >= 0)):
                if row.text.finish_reason:
                    break
                tops = [each[:, slot] for each in top]
                token = _token(index, row.request.top, tokens[slot], log_probs[slot], tops)
                row.tokens.append(token)
                text += row.text.push(token.id, token.log_prob or 0.0)
            self._deliver(row, text, row.text.num_tokens_shown, events)
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
        events.append(
            (
                row,
                Answer(
                    completion, tokens, tuple(row.prompt_tokens), row.num_hits, tuple(row.pooled)
                ),
            )
        )
        self.cancel(row)


def _owner(request: Request) -> tuple[str, str, bool]:
    """Who may go on from what a prompt left in the cache; those that are scored are computed in other shapes."""
    return request.model, request.salt, request.prompt_log_probs


_NOBODY = Prompt([0], max_new_tokens=0)
_zeros = jax.jit(
    KVCache.zeros, static_argnums=(0, 1, 2, 3)
)  # one program, not one for each layer's arrays


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
