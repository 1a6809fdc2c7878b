"""The engine of a server: a thread that drives it, a queue in which clients take turns, and what is counted."""

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
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax

import jllama
from jllama.devices import device_bytes, device_memory_bytes
from jllama.errors import ContextError, UsageError
from jllama.generation.engine import MAX_STOPS, SHORTEST_CHUNK, Engine, Row, cache_len
from jllama.generation.requests import Answer, Piece, Request
from jllama.generation.sampling_params import Prompt
from jllama.generation.steps import kv_bytes
from jllama.language_model import LanguageModel, weights_fingerprint
from jllama.serve import metrics
from jllama.serve.config import EngineConfig
from jllama.serve.requests import Busy, Deliver, Failure

CLIENTS = 4
"""So many times ``EngineConfig.queue`` may wait in all, so that one client's requests do not fill the queue."""
CHUNK = 256
"""How many tokens of a prompt are computed at once on a CPU; memory is reserved for so many at once."""
_OTHER_CHUNK = 1024  # elsewhere: the more at once the faster, and the fewer beginnings are found among those kept
_BLOCK_S = 0.025  # who comes in waits for so long
_SHARE_OF_MEMORY = 0.5  # of what weights leave, for keys and values where nobody says how much


@dataclasses.dataclass(eq=False)
class _Asked:
    """Who asked for a row of the engine, from the queue to the end of the answer."""

    row: Row
    deliver: Deliver
    arrival_s: float
    first_s: float = 0.0  # when its first token came
    cancelled: bool = False
    again: tuple[Request, Answer] | None = None  # what is made once more, to be compared

    request = property(lambda self: self.row.request)


class EngineThread:
    """Answers requests; ``start`` compiles everything first. Any thread may submit.

    Args:
        models: those that are served, by name: the first is the base, the others have its shapes.
        config: sizes. ``UsageError`` where the memory does not hold one chunk a slot, or a model has other shapes.
    """

    def __init__(self, models: Mapping[str, LanguageModel], config: EngineConfig) -> None:
        self.config = config
        self.models = {name: model.for_decoding() for name, model in models.items()}
        base = next(iter(self.models.values()))
        weights_bytes = sum(device_bytes(model.params) for model in self.models.values())
        self.context, self._max_len = _sizes(base, config, weights_bytes)
        self.kv_bytes = kv_bytes(
            base.config, base.decode_params.dtype, _num_rows(config) * self._max_len
        )
        self._engine = Engine(
            self.models,
            config.slots,
            context=self.context,
            chunk_tokens=CHUNK if jax.default_backend() == "cpu" else _OTHER_CHUNK,
            prefix_tokens=config.cache_tokens,
            prefill_budget=config.prefill_budget,
            block_s=_BLOCK_S,
        )
        self._queue: deque[_Asked] = (
            deque()
        )  # first those of the client that got a slot longest ago
        self._asked: dict[Row, _Asked] = {}  # in slots
        self._again: deque[tuple[Request, Answer]] = deque(
            maxlen=64
        )  # answers to compare, where slots are idle
        self._random, self._changed = random.Random(), threading.Condition()
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.loaded_s = int(time.time())  # since 1970
        metrics.SLOTS.set(config.slots)

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Reserve the memory, compile every program, and begin to serve in a thread of its own."""
        self._fingerprints = {name: self._fingerprint(model) for name, model in self.models.items()}
        requests = [*self._warm_up()]
        for number, request in enumerate(requests, 1):
            say(f"compiling, program {number} of {len(requests)}")
            self._engine.submit(request)
            while self._engine.busy:
                self._engine.step()
        self._engine.reset()  # nothing is left of it, neither prefixes nor how long a step took
        self._engine.reserve()
        self._thread.start()

    def _warm_up(self) -> Iterator[Request]:
        """What makes use of every program: prompts of all lengths that there may be, a token, scores, a kept chunk."""
        name = next(iter(self.models))

        def request(num_ids: int, num_new: int = 0, **more: Any) -> Request:
            return Request(Prompt([0] * num_ids, max_new_tokens=num_new, stop_ids=()), name, **more)

        chunk = self._engine.chunk_tokens
        # Lengths of the first chunk, padded to powers of two; and of those behind it, where they are other programs.
        starts = (0, chunk) if self._engine.begins_whole else (0,)
        for start in starts:
            longest = min(start + chunk, self.context)
            length = start + SHORTEST_CHUNK
            while length < longest:
                yield request(length, pooling="last")
                length = start + 2 * (length - start)
            if start < longest:
                yield request(longest, pooling="last")
        length = SHORTEST_CHUNK
        while 2 * length <= self._engine.together_tokens and length + 2 <= self.context:
            yield request(length + 1, 1)
            length *= 2
        yield request(1, min(1, self.context - 1), top=1)
        yield request(min(chunk + 2, self.context), prompt_log_probs=True)
        if self.context > chunk:
            yield request(chunk + 1)  # is kept
            yield request(1)  # takes its place where prompts are computed
            yield request(chunk + 1)

    def check(self, request: Request) -> None:
        """Raise ``UsageError`` if the request can never be served."""
        num_ids, most = len(request.prompt.ids), request.prompt.max_new_tokens
        if num_ids + (new := 1 if most is None else most) > self.context:
            said = f"the prompt's {num_ids} tokens and {new} new ones exceed the context of {self.context} tokens"
            raise ContextError(f"{said} that this server has: shorten the prompt or ask for fewer")
        if len(request.prompt.stop_ids or ()) > MAX_STOPS:
            raise UsageError(
                f"stop_ids has {len(request.prompt.stop_ids or ())} tokens; at most {MAX_STOPS} are served"
            )

    def check_text(self, model: LanguageModel, text: str) -> None:
        """Raise ``ContextError`` if a text is too long whatever its tokens are: to count them may take seconds."""
        if len(text) <= self.context:  # of a character each
            return
        tokenizer = model.text_tokenizer
        longest = max(int(tokenizer.token_bytes().max()), *map(len, tokenizer.special_tokens))
        most = self.context * longest
        if len(text) > most:
            said = f"the prompt has {len(text)} characters, and {self.context} tokens, the context that this server has,"
            raise ContextError(f"{said} hold at most {most}: shorten the prompt")

    def submit(self, request: Request, deliver: Deliver) -> Callable[[], None]:
        """Queue a request, whose events go to ``deliver``; returns what cancels it (no further event comes then).

        Clients take turns: the next free slot goes to the one that has the fewest, and of those to the one that got one
        longest ago. Raises ``UsageError`` as ``check`` does, ``Busy`` if the queue is full or the engine is closing.
        """
        self.check(request)
        asked = _Asked(self._engine.row_of(request), deliver, time.monotonic())

        def cancel() -> None:
            asked.cancelled = True
            with self._changed:
                self._changed.notify()

        with self._changed:
            if self._closing:
                raise Busy("the server is shutting down: ask another one, or come again", 30)
            most = self.config.queue + self.config.slots - len(self._asked)
            mine = sum(each.request.client == request.client for each in self._queue)
            if mine >= most or len(self._queue) >= CLIENTS * most:
                said = f"{len(self._queue)} requests are waiting already, {mine} of them yours"
                raise Busy(f"{said}, the most that this server lets wait")
            self._queue.append(asked)
            self._changed.notify()
        return cancel

    def fingerprint(self, model: str) -> str:
        """Names all that an answer depends on besides its request: weights, programs, sizes, versions, device."""
        return self._fingerprints[model]

    def close(self, drain_s: float = 0.0) -> int:
        """Take no more requests, finish those under way within ``drain_s``; returns how many were broken off."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not (self._queue or self._asked), drain_s)
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        left = [*self._queue, *self._asked.values()]
        for asked in left:
            asked.deliver(Failure("the server is shutting down: the answer was broken off"))
        return len(left)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._let_in()
                self._changed.notify_all()  # who waits for the end
                if self._stopped:
                    return
                if not self._asked:
                    self._changed.wait()
                    continue
            try:
                events = self._engine.step()
                now_s = time.monotonic()
                for row, asked in self._asked.items():
                    if row.tokens and not asked.first_s:
                        asked.first_s = now_s
                for row, event in events:
                    if row in self._asked:
                        self._deliver(self._asked[row], event)
            except (
                Exception
            ):  # what nobody foresaw: these requests fail, and the next ones find new slots
                traceback.print_exc()
                for asked in self._asked.values():
                    asked.deliver(
                        Failure("the server failed at this request, and has said why in its log")
                    )
                self._asked = {}
                self._engine.reset()

    def _let_in(self) -> None:
        """Let go of clients that left, and fill free slots from the queue; what is left idle compares answers."""
        waiting = deque(asked for asked in self._queue if not asked.cancelled)
        metrics.CANCELLED.inc(len(self._queue) - len(waiting))
        self._queue = waiting
        for row, asked in [*self._asked.items()]:
            gives_way = asked.again is not None and bool(
                self._queue
            )  # who waits comes before what is made again
            if asked.cancelled or gives_way:
                self._again += [asked.again] if asked.again else []
                self._engine.cancel(row)
                self._count(asked)
                del self._asked[row]
        while self._engine.num_free > 0 and (self._queue or (self._again and not self._closing)):
            asked = self._next() if self._queue else self._replay(*self._again.popleft())
            self._asked[self._engine.submit(asked.row)] = asked
        metrics.QUEUED.set(len(self._queue))
        metrics.BUSY_SLOTS.set(len(self._asked))

    def _next(self) -> _Asked:
        """Take the next request from the queue: of the client with the fewest slots, whose others go to the end."""
        clients = [asked.request.client for asked in self._asked.values()]
        chosen = min(self._queue, key=lambda asked: clients.count(asked.request.client))
        self._queue.remove(chosen)
        self._queue = deque(
            sorted(self._queue, key=lambda asked: asked.request.client == chosen.request.client)
        )
        return chosen

    def _deliver(self, asked: _Asked, event: Piece | Answer) -> None:
        """Hand an event to who asked; with the last one, count what was served."""
        if not asked.cancelled:
            asked.deliver(event)
        if isinstance(event, Answer):
            if asked.request.caches and self._random.random() < self.config.replay:
                self._again.append((dataclasses.replace(asked.request, caches=False), event))
            del self._asked[asked.row]
            self._count(asked)

    def _count(self, asked: _Asked) -> None:
        """Count what was served; not what is made for the server's own sake."""
        row = asked.row
        if not asked.request.caches:
            return
        metrics.CANCELLED.inc(asked.cancelled)
        metrics.PROMPT_TOKENS.inc(min(row.num_computed + 1, len(asked.request.prompt.ids)))
        metrics.CACHED_TOKENS.inc(row.num_hits)
        metrics.NEW_TOKENS.inc(len(row.tokens))
        if asked.first_s:
            metrics.FIRST_TOKEN_S.observe(asked.first_s - asked.arrival_s)
        if len(row.tokens) > 1:
            metrics.BETWEEN_TOKENS_S.observe(
                (time.monotonic() - asked.first_s) / (len(row.tokens) - 1)
            )

    def _replay(self, request: Request, before: Answer) -> _Asked:
        """A request once more, without the cache, to be compared with its answer."""

        def compare(event: Any) -> None:
            if isinstance(event, Answer):
                if event._replace(cached_tokens=0) != before._replace(cached_tokens=0):
                    metrics.MISMATCHES.inc()
                    print(
                        "error: an answer came out otherwise when it was generated again",
                        file=sys.stderr,
                    )
                metrics.REPLAYED.inc()

        return _Asked(
            self._engine.row_of(request), compare, time.monotonic(), again=(request, before)
        )

    def _fingerprint(self, model: LanguageModel) -> str:
        device = jax.devices()[0]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        parts = (
            *(
                weights_fingerprint(model),
                model.config,
                model.text_tokenizer.fingerprint(),
                model.chat_template,
            ),
            *(model.stop_ids, self.config.slots, self._max_len, self._engine.chunk_tokens),
            *(jllama.__version__, jax.__version__, version("jaxlib"), os.environ.get("XLA_FLAGS")),
            *(device.platform, device.device_kind, platform.machine(), cores),
        )
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _num_rows(config: EngineConfig) -> int:
    """Rows of keys and values: one a slot, and one that prompts are computed in, if there are several."""
    return config.slots + (config.slots > 1)


def _sizes(model: LanguageModel, config: EngineConfig, weights_bytes: int) -> tuple[int, int]:
    """The context that is served, and how long the rows are for it: whole chunks of all of them fit in the memory."""
    context = min(config.context or model.config.max_seq_len, model.config.max_seq_len)
    chunk_bytes = kv_bytes(model.config, model.decode_params.dtype, _num_rows(config) * CHUNK)
    free_bytes = (device_memory_bytes(jax.devices()[0]) or 2**60) - weights_bytes
    have = config.memory_gib * 2**30 or _SHARE_OF_MEMORY * free_bytes
    chunks = -(-context // CHUNK)
    if (fits := int(have // chunk_bytes)) < chunks:
        least = chunks if config.context else 1
        if fits < least:
            said = f"{config.slots} slots of {least * CHUNK} tokens take {least * chunk_bytes / 2**30:.2f} GiB"
            raise UsageError(
                f"{said}, and there are {have / 2**30:.2f}: take fewer slots or a shorter context"
            )
        chunks = fits
    context = min(context, chunks * CHUNK)
    return context, cache_len(context, context)
