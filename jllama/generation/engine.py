"""The engine of requests: that of the core, with text, several models, and faster prompts.

Prompts are computed in chunks that begin at multiples of one length and are cached for others with
the same beginning, or if they are short, several at once. The memory of rows grows with the texts.
"""

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jllama.core import UsageError
from jllama.core import engine as core
from jllama.core.config import LlamaConfig
from jllama.core.engine import MAX_STOPS, STEPS, DecodeBatch
from jllama.core.model import KVCache
from jllama.generation import steps
from jllama.generation.requests import Request, Row, Token, make_tokens
from jllama.generation.sampler import SamplerState, make_sampler_state, set_allowed, setting_types
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import TextDecoder
from jllama.kernels.shapes import power_of_two_at_least
from jllama.models.decode_params import DecodeParams
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


class Engine(core.Engine):
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
        base = next(iter(self.models.values()))
        if any(model.config != base.config for model in self.models.values()):
            raise UsageError("the models differ in shape: serve each by a server of its own")
        platform = jax.default_backend()
        self.chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(platform, 4096)
        # Whether the first chunk of a prompt is computed as a complete sequence, which has faster
        # kernels but programs of its own. A CPU gains nothing, so a server there, which compiles
        # all programs ahead, does without.
        self.first_chunk_is_whole = not context or platform != "cpu"
        self.together_tokens = TOGETHER_TOKENS.get(platform, 512) if num_slots > 1 else 0
        self.tokens_per_step = draft_len + 1
        self._context = context or base.config.max_seq_len
        self._prefix_tokens = prefix_tokens
        self._prefill_budget = prefill_budget or 2**60
        self._block_s = block_s
        self._draft_len = draft_len
        self._resumes = resumes
        self._sampling_types = {SamplingParams}  # of all requests so far
        max_len = cache_len(context, self._context)
        super().__init__(base.config, base.decode_params, num_slots, max_len)

    def reset(self) -> None:
        """Drop all rows and all device memory, for example after a fault.

        The next step reserves it again.
        """
        super().reset()
        self._step_s = 0.0  # how long a step takes
        self._read_s = 0.0  # when the last block was read
        # Chunks of prompts by their keys, least recently used first.
        self._prefixes = dict[bytes, steps.Chunk]()
        # The cache that prompts are computed in; with one slot it is the batch's own.
        self._prompt_cache: KVCache | None = None
        self._staged = Staged()

    def replace_weights(self, model: LanguageModel, name: str = "") -> None:
        """Generate from now on with other weights of the same shapes; nothing compiles again.

        Computed prompts are forgotten, since they are those of the earlier weights.

        Raises:
            UsageError: a request is in a slot or in the queue, or the shapes differ.
        """
        if self.busy:
            raise UsageError("the engine is generating: let it end before its weights change")
        if model.config != self.config:
            raise UsageError("the new weights differ in shape: make a new engine")
        self.models[name] = model.for_decoding()
        self.params = self.models[name].decode_params
        self._prefixes.clear()
        self._staged = Staged()

    @property
    def num_free(self) -> int:
        """How many more requests would get a slot at once; negative if requests wait."""
        return self.rows.count(None) - len(self.waiting)

    def _weights(self, name: str) -> tuple[DecodeParams, LlamaConfig]:
        return self.models[name].decode_params, self.config

    # Queue and slots

    def submit(self, row: Request | Row) -> Row:
        """Queue a request, or the row that ``make_row`` made of it."""
        row = row if isinstance(row, Row) else self.make_row(row)
        self._sampling_types.add(type(row.sampling))
        return super().submit(row)

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
        row = Row(
            prompt.ids,
            prompt.limit(self._context) - len(prompt.ids),
            (prompt.stop_ids or ())[:MAX_STOPS],  # the host stops at others, some steps later
            prompt.sampling,
            request=request,
            text=text,
            chunk_keys=keys,
        )
        if request.prompt_log_probs:
            row.prompt_tokens.append(Token(prompt.ids[0], None))
        return row

    def cancel(self, row: Row) -> None:
        """End a row without an answer."""
        if row.ended:
            return
        was_in_slot = row in self.rows
        super().cancel(row)
        if not was_in_slot:
            return
        if self._resumes and row.tokens:
            # The cache has all tokens but the last one.
            ids = [*row.request.prompt.ids, *(token.id for token in row.tokens[:-1])]
            self._staged = Staged(_owner(row.request), ids)

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

    def admit(self) -> None:
        """Give free slots to requests from the queue, and make room for all rows."""
        super().admit()
        self.make_room(max((self._needed_len(row) for row in self.rows if row), default=0))

    def _needed_len(self, row: Row) -> int:
        """How many tokens a row may have before the engine looks at it again, and some more."""
        upcoming = len(row.tokens) + _ROOM_TOKENS * self.tokens_per_step
        return len(row.ids) + min(row.max_new_tokens, upcoming)

    def make_room(self, num_tokens: int) -> None:
        """Extend the rows to at least ``num_tokens`` tokens."""
        max_len = cache_len(num_tokens, self._context)
        if max_len <= self.max_len:
            return
        self.max_len = max_len
        if self._prompt_cache:
            self._prompt_cache = _extended(self._prompt_cache, max_len)
        if self.batch:
            tokens, log_probs = steps.extend((self.batch.tokens, self.batch.log_probs), max_len)
            cache = _extended(self.batch.cache, max_len)
            self.batch = self.batch._replace(cache=cache, tokens=tokens, log_probs=log_probs)

    def reserve(self) -> None:
        """Allocate the batch and the cache that prompts are computed in, unless they are there."""
        super().reserve()
        if self.num_slots > 1 and not self._prompt_cache:
            self._prompt_cache = self.new_cache(1)

    def place(self, tree: Any) -> Any:
        """Put arrays of rows where the parameters are, as all programs expect it."""
        sharding = self.params.weights["final_norm"].sharding
        if isinstance(sharding, NamedSharding):
            sharding = batch_shardings(sharding.mesh, tree)
        return jax.device_put(tree, sharding)

    def new_cache(self, num_rows: int) -> KVCache:
        """Return an empty cache."""
        return self.place(core.zeros(self.config, num_rows, self.max_len, self.params.dtype))

    def empty_row(self) -> Row:
        """Return a row for a slot that nobody has."""
        return self.make_row(Request(_EMPTY, next(iter(self.models))))

    def sampling_of(self, rows: Sequence[Row]) -> SamplerState:
        """Return the settings of new rows of one model, with the state of their samplers."""
        model = self.models[rows[0].request.model]
        prompts = [row.request.prompt for row in rows]
        return make_sampler_state(model, prompts, self._sampling_types)

    # Prefill

    def prefill(self) -> None:
        """Compute prompts within the budget, in order; short ones together, others in chunks."""
        budget = self._prefill_budget
        while self.prefilling:
            row = self.prefilling[0]
            length = self._short_len(row)
            if length:
                if budget <= 0:
                    break
                self._prefill_short(row.request.model, length)
                budget -= self.together_tokens
                continue
            if not row.num_prefilled:
                self._begin(row)
            while budget > 0 and row.num_prefilled < row.prefill_len:
                budget -= self._prefill_chunk(row)
            if row.num_prefilled < row.prefill_len:
                break
            self.join(row, self._cache, 0)
        if not (self._dispatches or super().groups()):
            # No block will be read, which would wait for what was computed.
            jax.block_until_ready(self._cache.lengths)

    def _short_len(self, row: Row) -> int:
        """Return the length that a prompt is padded to if it is computed with others.

        The length is 0 if the prompt is computed alone.
        """
        request = row.request
        if request.pooling or request.prompt_log_probs or row.prefill_len >= self.chunk_tokens:
            return 0
        length = power_of_two_at_least(row.prefill_len, MIN_CHUNK)
        return length if 2 * length <= self.together_tokens else 0

    def _prefill_short(self, name: str, length: int) -> None:
        """Compute prompts of this model and padded length, as many as the program has rows."""
        num_rows = self.together_tokens // length
        group = name, length
        rows = [
            row for row in self.prefilling if (row.request.model, self._short_len(row)) == group
        ][:num_rows]
        prompts = self.place(core.pad_prompts(rows, num_rows, length))
        cache = steps.call_program(steps.prefill_short, *self._weights(name), *prompts)
        for index, row in enumerate(rows):
            row.num_prefilled = row.prefill_len
            self.join(row, cache, index)

    def _begin(self, row: Row) -> None:
        """Begin a prompt with what the cache already contains of it.

        That is all of an equal prompt, or if the engine ``resumes``, the tokens that the last text
        has in common with it.
        """
        shared = self._staged.num_shared(row.request, self._resumes)
        row.num_prefilled = shared
        row.num_cached = shared - shared % self.chunk_tokens  # as the prefix cache counts them
        self._staged = Staged(_owner(row.request), [*row.request.prompt.ids[:shared]])
        lengths = self.place(np.array([shared], np.int32))
        self._cache = self._cache._replace(lengths=lengths)

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
            self._cache = steps.write_chunk(self._cache, chunk, start)

        # 2) Or compute it.
        else:
            num_computed = self._compute_chunk(row, tokens)
            if key:
                chunk = steps.read_chunk(self._cache, start, size)

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
        args = *self._weights(request.model), self._cache, padded, count, cache_is_empty
        hidden, self._cache = steps.call_program(steps.prefill_chunk, *args)
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
        scores = steps.score_chunk(*self._weights(row.request.model), hidden, targets)
        log_probs, top = jax.device_get(scores)
        row.prompt_tokens += make_tokens(num_tokens, row.request.top, targets, log_probs, top)

    @property
    def _cache(self) -> KVCache:
        """The cache that prompts are computed in; with one slot it is the batch's own."""
        return self._prompt_cache or self.batch.cache

    @_cache.setter
    def _cache(self, cache: KVCache) -> None:
        if self._prompt_cache:
            self._prompt_cache = cache
        else:
            self.batch = self.batch._replace(cache=cache)

    def insert(self, row: Row, one: DecodeBatch, computed_row: int) -> None:
        """Put a row into its slot."""
        if self.num_slots == 1:
            self.batch = self.place(one)
            return
        state = self.batch.sampling
        if one.sampling.settings.keys() != state.settings.keys():
            # This row is the first with such settings: the other rows get their defaults.
            empty = self.sampling_of([self.empty_row()] * self.num_slots)
            state = state._replace(settings=empty.settings | state.settings)
            self.batch = self.place(self.batch._replace(sampling=state))
        self.batch = steps.join(self.batch, one, np.int32(computed_row), np.int32(row.slot))

    # Decoding

    def groups(self) -> list[list[Row]]:
        """Return the rows to decode now, by model.

        Rows under a grammar wait until their last token is read.
        """
        unread = [row for dispatch in self._dispatches for row in dispatch.rows]
        by_model: dict[str, list[Row]] = {}
        for row in itertools.chain(*super().groups()):
            if row.request.prompt.grammar is None or row not in unread:
                by_model.setdefault(row.request.model, []).append(row)
        return [*by_model.values()]

    def num_steps(self, rows: Sequence[Row]) -> int:
        """Return the most steps that the next block takes.

        It takes one if a first token should be shown at once or a grammar waits for it.
        """
        shows_first = self._block_s is not None and not all(row.num_steps for row in rows)
        if shows_first or any(row and row.request.prompt.grammar for row in self.rows):
            return 1
        if self._block_s is None:
            return STEPS
        if not self._step_s:
            return 1
        return max(1, min(STEPS, int(self._block_s / self._step_s)))

    def decode(self, rows: Sequence[Row], quotas: np.ndarray, num_steps: np.int32) -> core.Block:
        """Dispatch a block for rows of one model."""
        batch = self.batch
        if any(row.request.prompt.grammar for row in rows):
            batch = set_allowed(batch, {row.slot: row.text.allowed() for row in rows})
        has_top = any(row.request.top for row in rows)
        weights = self._weights(rows[0].request.model)
        args = *weights, batch, quotas, num_steps, np.bool_(has_top), self._draft_len
        self.batch, block = steps.call_program(steps.decode_block, *args)
        # What nobody asked for is not copied to the host.
        return block if has_top else block._replace(record=block.record._replace(top=()))

    def read(self, dispatch: core.Dispatch) -> None:
        """Read a block, and learn from its time how many steps the next ones should take."""
        block = jax.device_get(dispatch.block)
        now_s = time.monotonic()
        step_s = (now_s - max(dispatch.start_s, self._read_s)) / dispatch.num_steps
        # The time may include a prompt: a step that seems slower is believed slowly.
        self._step_s = min(step_s, 1.25 * self._step_s) if self._step_s else step_s
        self._read_s = now_s
        super().read(dispatch._replace(block=block))


def _extended(cache: KVCache, max_len: int) -> KVCache:
    """Return a cache with more slots in each row."""
    keys, values = steps.extend((cache.keys, cache.values), max_len)
    return KVCache(keys, values, cache.lengths)


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
