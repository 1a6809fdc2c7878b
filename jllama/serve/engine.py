"""The engine: a thread that owns the device and answers requests in the slots of one decoding program.

Between two decoding steps it lets requests in, computes chunks of their prompts within a budget, and lets go of those
that have finished or whose client left. What it does when depends on everything; what a request gets on itself alone.
"""

import dataclasses
import hashlib
import os
import platform
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

import jllama
from jllama.devices import device_bytes, device_memory_bytes
from jllama.errors import ContextError, UsageError
from jllama.generation import programs
from jllama.generation.decode_batch import restricted
from jllama.generation.sampling_params import Prompt
from jllama.generation.text import TextDecoder
from jllama.language_model import LanguageModel, weights_fingerprint
from jllama.serve import metrics, slots
from jllama.serve.config import EngineConfig
from jllama.serve.requests import Answer, Busy, Deliver, Failure, Piece, Request, Token
from jllama.serve.slots import CHUNK, CHUNK_SIZES, STOPS

CLIENTS = 4
"""So many times ``EngineConfig.queue`` may wait in all, so that one client's requests do not fill the queue."""
_STEPS = 4  # between two synchronizations with the host, where no row has a grammar
_SHARE_OF_MEMORY = 0.5  # of what weights leave, for keys and values where nobody says how much


@dataclasses.dataclass(eq=False)
class _Row:
    """A request on its way, from the queue to the end of its answer."""

    request: Request
    deliver: Deliver
    model: LanguageModel
    text: TextDecoder
    keys: list[bytes]  # of the prompt's whole chunks
    arrival_s: float
    first_s: float = 0.0  # when its first token came
    cancelled: bool = False
    slot: int = -1
    num_cached: int = 0  # tokens of the prompt whose keys and values are in the slot
    num_hits: int = 0  # those of them that the prefix cache had
    decodes: bool = False  # all of them are
    pooled: Any = ()  # of its prompt's activations, as ``Request.pooling`` says
    prompt_tokens: list[Token] = dataclasses.field(default_factory=list)
    tokens: list[Token] = dataclasses.field(default_factory=list)
    num_delivered: int = 0
    again: tuple[Request, Answer] | None = None  # what is made once more, to be compared


class Engine:
    """Answers requests; ``start`` compiles everything first. Any thread may submit.

    Args:
        models: those that are served, by name: the first is the base, the others have its shapes.
        config: sizes. ``UsageError`` where the memory does not hold one chunk a slot, or a model has other shapes.
    """

    def __init__(self, models: Mapping[str, LanguageModel], config: EngineConfig) -> None:
        self.models = {name: model.for_decoding() for name, model in models.items()}
        self.config, self._base = config, (base := next(iter(self.models.values())))
        if any(model.config != base.config for model in self.models.values()):
            raise UsageError("the models differ in shape: serve each by a server of its own")
        weights_bytes = sum(device_bytes(model.params) for model in self.models.values())
        self.context, self._max_len = _sizes(base, config, weights_bytes)
        self.kv_bytes = slots.kv_bytes(base, config.slots * self._max_len)
        self._queue: deque[_Row] = deque()  # first the rows of the client that got a slot longest ago
        self._rows: list[_Row | None] = [None] * config.slots
        self._again: deque[tuple[Request, Answer]] = deque(maxlen=64)  # answers to compare, where slots are idle
        self._prefixes: dict[bytes, slots.Chunk] = {}  # kept, by ``chunk_keys``; the one used longest ago goes first
        self._random, self._changed = random.Random(), threading.Condition()
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.loaded_s = int(time.time())  # since 1970
        metrics.SLOTS.set(config.slots)

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Reserve the memory, compile every program, and begin to serve in a thread of its own."""
        self._fingerprints = {name: self._fingerprint(model) for name, model in self.models.items()}
        name = next(iter(self.models))
        self._batch = slots.empty_batch(self._base, self.config.slots, self._max_len)
        for number, size in enumerate(CHUNK_SIZES, 1):
            say(f"compiling, program {number} of {len(CHUNK_SIZES)}")
            prompt = Prompt([0] * min(size + 1, self._max_len), max_new_tokens=1, stop_ids=())
            request = Request(prompt, name, prompt_log_probs=size == CHUNK, caches=False)
            self._queue.append(self._row(request, lambda _: None))
            self._let_in()
            while self._busy():
                self._work()
        self._thread.start()

    def check(self, request: Request) -> None:
        """Raise ``UsageError`` if the request can never be served."""
        num_ids, most = len(request.prompt.ids), request.prompt.max_new_tokens
        if num_ids + (new := 1 if most is None else most) > self.context:
            said = f"the prompt's {num_ids} tokens and {new} new ones exceed the context of {self.context} tokens"
            raise ContextError(f"{said} that this server has: shorten the prompt or ask for fewer")
        if len(request.prompt.stop_ids or ()) > STOPS:
            raise UsageError(f"stop_ids has {len(request.prompt.stop_ids or ())} tokens; at most {STOPS} are served")

    def check_text(self, model: LanguageModel, text: str) -> None:
        """Raise ``ContextError`` if a text is too long whatever its tokens are: to count them may take seconds."""
        if len(text) <= self.context:  # of a character each
            return
        tokenizer = model.text_tokenizer
        longest = max(int(tokenizer.token_bytes().max()), *map(len, tokenizer.special_tokens))
        most = self.context * longest
        if len(text) > most:
            said = (
                f"the prompt has {len(text)} characters, and {self.context} tokens, the context that this server has,"
            )
            raise ContextError(f"{said} hold at most {most}: shorten the prompt")

    def submit(self, request: Request, deliver: Deliver) -> Callable[[], None]:
        """Queue a request, whose events go to ``deliver``; returns what cancels it (no further event comes then).

        Clients take turns: the next free slot goes to the one that has the fewest, and of those to the one that got one
        longest ago. Raises ``UsageError`` as ``check`` does, ``Busy`` if the queue is full or the engine is closing.
        """
        self.check(request)
        row = self._row(request, deliver)

        def cancel() -> None:
            row.cancelled = True
            with self._changed:
                self._changed.notify()

        with self._changed:
            if self._closing:
                raise Busy("the server is shutting down: ask another one, or come again", 30)
            most = self.config.queue + self._rows.count(None)
            mine = sum(row.request.client == request.client for row in self._queue)
            if mine >= most or len(self._queue) >= CLIENTS * most:
                said = f"{len(self._queue)} requests are waiting already, {mine} of them yours"
                raise Busy(f"{said}, the most that this server lets wait")
            self._queue.append(row)
            self._changed.notify()
        return cancel

    def fingerprint(self, model: str) -> str:
        """Names all that an answer depends on besides its request: weights, programs, sizes, versions, device."""
        return self._fingerprints[model]

    def close(self, drain_s: float = 0.0) -> int:
        """Take no more requests, finish those under way within ``drain_s``; returns how many were broken off."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._busy(), drain_s)
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        left = [*self._queue, *filter(None, self._rows)]
        for row in left:
            row.deliver(Failure("the server is shutting down: the answer was broken off"))
        return len(left)

    def _row(self, request: Request, deliver: Deliver) -> _Row:
        model, ids = self.models[request.model], request.prompt.ids
        caches = request.caches and not request.pooling
        keys = [*chunk_keys(f"{request.model}\0{request.salt}", ids[:-1])] if caches else []
        return _Row(request, deliver, model, TextDecoder(model.text_tokenizer, request.prompt), keys, time.monotonic())

    def _busy(self) -> bool:
        return bool(self._queue or any(self._rows))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._let_in()
                self._changed.notify_all()  # who waits for the end
                if self._stopped:
                    return
                if not any(self._rows):
                    self._changed.wait()
                    continue
            try:
                self._work()
            except Exception:  # what nobody foresaw: these requests fail, and the next ones find new slots
                traceback.print_exc()
                for row in filter(None, self._rows):
                    row.deliver(Failure("the server failed at this request, and has said why in its log"))
                self._rows = [None] * len(self._rows)
                del self._batch  # there may be no room for two
                self._batch = slots.empty_batch(self._base, len(self._rows), self._max_len)

    def _let_in(self) -> None:
        """Free the slots of clients that left, and fill them from the queue; what is left idle compares answers."""
        waiting = deque(row for row in self._queue if not row.cancelled)
        metrics.CANCELLED.inc(len(self._queue) - len(waiting))
        self._queue = waiting
        for slot, row in enumerate(self._rows):
            if row and (row.cancelled or (row.again and self._queue)):  # who waits comes before what is made again
                self._again += [row.again] if row.again else []
                self._free(row)
            if self._rows[slot] is None and (self._queue or (self._again and not self._closing)):
                row = self._next() if self._queue else self._replay(*self._again.popleft())
                self._rows[slot], row.slot = row, slot
        metrics.QUEUED.set(len(self._queue))
        metrics.BUSY_SLOTS.set(len(self._rows) - self._rows.count(None))

    def _next(self) -> _Row:
        """Take the next row from the queue: of the client with the fewest slots, whose other rows go to the end."""
        clients = [row.request.client for row in self._rows if row]
        next_row = min(self._queue, key=lambda row: clients.count(row.request.client))
        self._queue.remove(next_row)
        self._queue = deque(sorted(self._queue, key=lambda row: row.request.client == next_row.request.client))
        return next_row

    def _work(self) -> None:
        """Chunks of prompts within the budget, then a few decoding steps of each model's rows."""
        budget = self.config.prefill_budget
        for row in sorted(filter(None, self._rows), key=lambda row: row.arrival_s):
            while budget > 0 and not row.decodes and not row.cancelled:
                budget -= self._prefill(row)
        jax.block_until_ready(self._batch.cache.keys[-1])  # not further ahead than what is decided now
        rows = [row for row in self._rows if row and row.decodes and not row.cancelled]
        for name in dict.fromkeys(row.request.model for row in rows):
            self._decode([row for row in rows if row.request.model == name])

    def _prefill(self, row: _Row) -> int:
        """The next chunk of a row's prompt, kept or computed, or its entrance; returns the tokens computed."""
        model, start, ids, at = row.model, row.num_cached, row.request.prompt.ids, np.int32(row.slot)
        pooling = row.request.pooling
        end = len(ids) if pooling else len(ids) - 1
        tokens = ids[start : min(start + CHUNK, end)]
        if not tokens:
            return self._enter(row)
        key = row.keys[start // CHUNK] if start // CHUNK < len(row.keys) else None
        scored, computed = row.request.prompt_log_probs, 0
        chunk = self._prefixes.pop(key, None) if key and not scored else None
        if chunk is None:
            computed = CHUNK if scored else next(size for size in CHUNK_SIZES if size >= len(tokens))
            padded = np.zeros((1, computed), np.int32)
            padded[0, : len(tokens)] = tokens
            args = model.decode_params, model.config, self._batch.cache, padded, at, np.int32(start)
            hidden, chunk = programs.call(slots.prefill_chunk, *args)
            if pooling:
                states = np.asarray(hidden, np.float64)[0, : len(tokens)]
                before = row.pooled if start else 0
                row.pooled = states[-1] if pooling == "last" else before + states.sum(axis=0)
            if scored:
                targets = np.zeros(CHUNK, np.int32)
                targets[: len(tokens)] = ids[start + 1 : start + 1 + len(tokens)]
                scores = jax.device_get(slots.score_chunk(model.decode_params, model.config, hidden, targets))
                row.prompt_tokens += [_token(index, row.request.top, targets, *scores) for index in range(len(tokens))]
        else:
            row.num_hits += len(tokens)
        if key:
            self._prefixes[key] = chunk  # the last one to go: the one used longest ago is the first
            if len(self._prefixes) > self.config.cache_tokens // CHUNK:
                del self._prefixes[next(iter(self._prefixes))]
        self._batch = slots.write_chunk(self._batch, chunk, at, np.int32(start))
        row.num_cached += len(tokens)
        return computed

    def _enter(self, row: _Row) -> int:
        """A row whose prompt is computed begins to decode, or has its end already; nothing is computed."""
        row.decodes, prompt = True, row.request.prompt
        if row.request.prompt_log_probs:
            row.prompt_tokens.insert(0, Token(prompt.ids[0], None))
        if prompt.max_new_tokens == 0:
            self._end(row)
        else:
            self._batch = slots.join(self._batch, row.model, prompt, row.slot)
        return 0

    def _decode(self, rows: list[_Row]) -> None:
        """A few steps of one model's rows; one where a row has no token yet, or a grammar: masks are made meanwhile."""
        model, active, steps = rows[0].model, np.zeros(len(self._rows), bool), []
        active[[row.slot for row in rows]] = True
        limited, tops = any(row.request.prompt.grammar for row in rows), any(row.request.top for row in rows)
        for _ in range(1 if limited or not all(row.tokens for row in rows) else _STEPS):
            logits, new = programs.call(slots.forward, model.decode_params, model.config, self._batch, active)
            if limited:
                masks = {row.slot: row.text.allowed() for row in rows}
                self._batch = restricted(self._batch, [masks.get(slot) for slot in range(len(self._rows))])
            self._batch, step = slots.choose(self._batch, new, logits, active, np.bool_(tops))
            steps.append(step)
        for step in jax.device_get(steps):
            for row in rows:
                if self._rows[row.slot] is row and step.tokens[row.slot] >= 0:
                    self._take(row, _token(row.slot, row.request.top, *step))

    def _take(self, row: _Row, token: Token) -> None:
        row.first_s = row.first_s or time.monotonic()
        row.tokens.append(token)
        if piece := row.text.push(token.id, token.log_prob or 0.0):
            self._deliver(row, piece, row.text.num_tokens_shown)
        new, full = row.request.prompt.max_new_tokens, len(row.request.prompt.ids) + len(row.tokens) >= self.context
        if row.text.finish_reason or full or len(row.tokens) == new:
            self._end(row)

    def _deliver(self, row: _Row, text: str, num_tokens: int) -> None:
        tokens = tuple(row.tokens[row.num_delivered : num_tokens])
        row.num_delivered = max(num_tokens, row.num_delivered)
        if (text or tokens) and not row.cancelled:
            row.deliver(Piece(text, tokens))

    def _end(self, row: _Row) -> None:
        rest, completion = row.text.end(), row.text.completion(0, 0)
        self._deliver(row, rest, len(completion.ids))
        tokens = tuple(row.tokens[: len(completion.ids)])
        answer = Answer(completion, tokens, tuple(row.prompt_tokens), row.num_hits, tuple(row.pooled))
        if not row.cancelled:
            row.deliver(answer)
        if row.request.caches and self._random.random() < self.config.replay:
            self._again.append((dataclasses.replace(row.request, caches=False), answer))
        self._free(row)

    def _free(self, row: _Row) -> None:
        """Free the slot, and count what was served; not what is made for the server's own sake."""
        self._rows[row.slot] = None
        if row.request.caches:
            metrics.CANCELLED.inc(row.cancelled)
            metrics.PROMPT_TOKENS.inc(min(row.num_cached + 1, len(row.request.prompt.ids)))
            metrics.CACHED_TOKENS.inc(row.num_hits)
            metrics.NEW_TOKENS.inc(len(row.tokens))
            if row.first_s:
                metrics.FIRST_TOKEN_S.observe(row.first_s - row.arrival_s)
            if len(row.tokens) > 1:
                metrics.BETWEEN_TOKENS_S.observe((time.monotonic() - row.first_s) / (len(row.tokens) - 1))

    def _replay(self, request: Request, before: Answer) -> _Row:
        """A request once more, without the cache, to be compared with its answer."""

        def compare(event: Any) -> None:
            if isinstance(event, Answer):
                if event._replace(cached_tokens=0) != before._replace(cached_tokens=0):
                    metrics.MISMATCHES.inc()
                    print("error: an answer came out otherwise when it was generated again", file=sys.stderr)
                metrics.REPLAYED.inc()

        row = self._row(request, compare)
        row.again = request, before
        return row

    def _fingerprint(self, model: LanguageModel) -> str:
        device = jax.devices()[0]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        parts = (
            *(weights_fingerprint(model), model.config, model.text_tokenizer.fingerprint(), model.chat_template),
            *(model.stop_ids, self.config.slots, self._max_len, CHUNK),
            *(jllama.__version__, jax.__version__, version("jaxlib"), os.environ.get("XLA_FLAGS")),
            *(device.platform, device.device_kind, platform.machine(), cores),
        )
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def chunk_keys(owner: str, ids: Sequence[int]) -> Iterator[bytes]:
    """The key of each whole chunk of a prompt: a hash of its owner (the model and the salt of the request) and of all
    tokens up to the chunk's end, so what is kept under it is what computing it again would give.
    """
    running = hashlib.sha256(owner.encode())
    for start in range(0, len(ids) - CHUNK + 1, CHUNK):
        running.update(np.array(ids[start : start + CHUNK], np.uint32).tobytes())
        yield running.digest()


def _token(index: int, num_top: int, ids: Any, log_probs: Any, top: Any) -> Token:
    """One of arrays of ids and log-probabilities, with the likeliest ones beside it."""
    best = zip(*(each[index, :num_top].tolist() for each in top), strict=True)
    return Token(int(ids[index]), float(log_probs[index]), tuple(best))


def _sizes(model: LanguageModel, config: EngineConfig, weights_bytes: int) -> tuple[int, int]:
    """The context that is served, and the length of a slot: that, in whole chunks, which the memory must hold."""
    context = min(config.context or model.config.max_seq_len, model.config.max_seq_len)
    chunk_bytes = config.slots * slots.kv_bytes(model, CHUNK)
    free_bytes = (device_memory_bytes(jax.devices()[0]) or 2**60) - weights_bytes
    have = config.memory_gib * 2**30 or _SHARE_OF_MEMORY * free_bytes
    chunks = -(-context // CHUNK)
    if (fits := int(have // chunk_bytes)) < chunks:
        least = chunks if config.context else 1
        if fits < least:
            said = f"{config.slots} slots of {least * CHUNK} tokens take {least * chunk_bytes / 2**30:.2f} GiB"
            raise UsageError(f"{said}, and there are {have / 2**30:.2f}: take fewer slots or a shorter context")
        chunks = fits
    return min(context, chunks * CHUNK), chunks * CHUNK
