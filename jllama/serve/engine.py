"""The server's engine: a thread that drives an ``Engine``, and a queue for clients in turn."""

import dataclasses
import functools
import hashlib
import os
import platform
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax

import jllama
from jllama.core import UsageError
from jllama.core.engine import MAX_STOPS
from jllama.formats.receipt import weights_fingerprint
from jllama.generation.engine import MIN_CHUNK, Engine
from jllama.generation.generate import BLOCK_S
from jllama.generation.requests import Answer, Request, Row
from jllama.generation.sampling_params import Prompt
from jllama.generation.steps import kv_bytes
from jllama.generation.text import check_length
from jllama.models.language_model import LanguageModel
from jllama.serve import metrics
from jllama.serve.config import EngineConfig
from jllama.serve.requests import Busy, Deliver, Event, Failure
from jllama.system.devices import device_memory_bytes, num_cores
from jllama.system.errors import ContextError
from jllama.system.memory import device_bytes

CLIENTS = 4
"""The whole queue is this many times ``EngineConfig.queue``, so that no client can fill it."""
CHUNK = 256
"""How many tokens of a prompt a CPU computes at once; memory is reserved in this unit."""
_OTHER_CHUNK = 1024  # elsewhere: larger chunks are faster, smaller ones are more often shared
_MEMORY_SHARE = 0.5  # of the memory that weights leave, for keys and values unless configured


@dataclasses.dataclass(eq=False)
class Submission:
    """A row, and where its events go."""

    row: Row
    deliver: Deliver
    is_cancelled: bool = False


class EngineThread:
    """Answers requests; ``start`` compiles everything first. Any thread may submit.

    Args:
        models: the models to serve, by name; the first is the base, the others have its shapes.
        config: sizes.

    Raises:
        UsageError: the memory cannot hold one chunk for each slot, or a model has other shapes.
    """

    def __init__(self, models: Mapping[str, LanguageModel], config: EngineConfig) -> None:
        self.config = config
        self.models = {name: model.for_decoding() for name, model in models.items()}
        base = next(iter(self.models.values()))
        # One row for each slot, and one that prompts are computed in if there are several.
        num_rows = config.slots + 1 if config.slots > 1 else 1
        token_bytes = num_rows * kv_bytes(base.config, base.decode_params.dtype, 1)
        weights_bytes = sum(device_bytes(model.params) for model in self.models.values())
        max_context = base.config.max_seq_len
        self.context = _context_that_fits(config, max_context, token_bytes, weights_bytes)
        self._engine = Engine(
            self.models,
            config.slots,
            context=self.context,
            chunk_tokens=CHUNK if jax.default_backend() == "cpu" else _OTHER_CHUNK,
            prefix_tokens=config.cache_tokens,
            prefill_budget=config.prefill_budget,
            block_s=BLOCK_S,
        )
        self.kv_bytes = token_bytes * self._engine.max_len
        self._queue = deque[Submission]()  # clients that got a slot longest ago come first
        self._active = dict[Row, Submission]()  # in slots
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self.loaded_s = int(time.time())  # since 1970
        metrics.SLOTS.set(config.slots)

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Reserve the memory, compile every program, and begin to serve in a thread."""
        self._fingerprints = {name: self._fingerprint(model) for name, model in self.models.items()}
        requests = self._warm_up_requests()
        for number, request in enumerate(requests, 1):
            say(f"compiling, program {number} of {len(requests)}")
            self._engine.warm_up(request)
        self._engine.reset()  # forgets prefixes and how long a step took
        self._engine.reserve()
        self._thread.start()

    def _warm_up_requests(self) -> list[Request]:
        """Return requests that use every program: for prompts, tokens, scores, cached chunks."""
        chunk = self._engine.chunk_tokens
        sizes = [MIN_CHUNK << power for power in range((chunk // MIN_CHUNK).bit_length())]
        # Prompts computed alone, of all padded lengths; and a chunk behind the first one, if this
        # is another program.
        starts = (0, chunk) if self._engine.first_chunk_is_whole else (0,)
        lengths = {min(start + size, self.context) for start in starts for size in sizes}
        requests = [self._warm_up_request(length, pooling="last") for length in sorted(lengths)]
        # Short prompts computed together, and a generated token.
        max_short = min(self._engine.together_tokens // 2, self.context - 2)
        requests += [self._warm_up_request(size + 1, 1) for size in sizes if size <= max_short]
        requests.append(self._warm_up_request(1, min(1, self.context - 1), top=1))
        length = min(chunk + 2, self.context)
        requests.append(self._warm_up_request(length, prompt_log_probs=True))
        if self.context > chunk:
            requests.append(self._warm_up_request(chunk + 1))
        return requests

    def _warm_up_request(self, num_ids: int, max_new_tokens: int = 0, **options: Any) -> Request:
        prompt = Prompt([0] * num_ids, max_new_tokens=max_new_tokens, stop_ids=())
        return Request(prompt, next(iter(self.models)), **options)

    def check(self, request: Request) -> None:
        """Raise ``UsageError`` if the request can never be served."""
        prompt = request.prompt
        check_length(prompt.ids, prompt.max_new_tokens, self.context)
        num_stops = len(prompt.stop_ids or ())
        if num_stops > MAX_STOPS:
            raise UsageError(f"stop_ids has {num_stops} tokens; at most {MAX_STOPS} are served")

    def check_text(self, model: LanguageModel, text: str) -> None:
        """Raise ``ContextError`` if a text is too long for any tokens, without counting them.

        Counting may take seconds.
        """
        if len(text) <= self.context:  # at one character a token
            return
        tokenizer = model.text_tokenizer
        longest = max(int(tokenizer.token_bytes().max()), *map(len, tokenizer.special_tokens))
        max_characters = self.context * longest
        if len(text) > max_characters:
            raise ContextError(
                f"the prompt has {len(text)} characters, and {self.context} tokens, the context "
                f"that this server has, hold at most {max_characters}: shorten the prompt"
            )

    def submit(self, request: Request, deliver: Deliver) -> Callable[[], None]:
        """Queue a request whose events go to ``deliver``; return a function that cancels it.

        No event comes after cancelling. Clients take turns: the next free slot goes to the client
        with the fewest slots, and of those to the one that got a slot longest ago.

        Raises:
            UsageError: the request can never be served, see ``check``.
            Busy: the queue is full or the server is closing.
        """
        self.check(request)
        submission = Submission(self._engine.make_row(request), deliver)
        with self._changed:
            if self._is_closing:
                raise Busy("the server is shutting down: ask another one, or come again", 30)
            limit = self.config.queue + self.config.slots - len(self._active)
            num_waiting = len(self._queue)
            num_own = sum(other.row.request.client == request.client for other in self._queue)
            if num_own >= limit or num_waiting >= CLIENTS * limit:
                raise Busy(
                    f"{num_waiting} requests are waiting already, {num_own} of them yours, "
                    "the most that this server lets wait"
                )
            self._queue.append(submission)
            self._changed.notify()
        return functools.partial(self._cancel, submission)

    def _cancel(self, submission: Submission) -> None:
        submission.is_cancelled = True
        with self._changed:
            self._changed.notify()

    def fingerprint(self, model: str) -> str:
        """Return a hash of what answers depend on besides requests: weights, programs, device."""
        return self._fingerprints[model]

    def close(self, drain_s: float = 0.0) -> int:
        """Refuse new requests, and finish the others within ``drain_s``.

        Return how many were broken off.
        """
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not (self._queue or self._active), drain_s)
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        unfinished = [*self._queue, *self._active.values()]
        failure = Failure("the server is shutting down: the answer was broken off")
        for submission in unfinished:
            submission.deliver(failure)
        return len(unfinished)

    # The thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._admit()
                self._changed.notify_all()  # ``close`` waits for the end
                if self._is_stopped:
                    return
                if not self._active:
                    self._changed.wait()
                    continue
            try:
                for row, event in self._engine.step():
                    self._deliver(self._active[row], event)
            except Exception:
                # These requests fail; the next ones get new slots.
                traceback.print_exc()
                failure = Failure("the server failed at this request, and has said why in its log")
                for submission in self._active.values():
                    submission.deliver(failure)
                self._active = {}
                self._engine.reset()

    def _admit(self) -> None:
        """Drop cancelled requests, and fill free slots from the queue."""
        waiting = [submission for submission in self._queue if not submission.is_cancelled]
        metrics.CANCELLED.inc(len(self._queue) - len(waiting))
        self._queue = deque(waiting)
        for row, submission in [*self._active.items()]:
            if submission.is_cancelled:
                self._engine.cancel(row)
                self._remove(submission)
        while self._engine.num_free > 0 and self._queue:
            submission = self._next_submission()
            self._active[self._engine.submit(submission.row)] = submission
        metrics.QUEUED.set(len(self._queue))
        metrics.BUSY_SLOTS.set(len(self._active))

    def _next_submission(self) -> Submission:
        """Take a request of the client with the fewest slots.

        The client's others go to the queue's end.
        """
        clients = [row.request.client for row in self._active]
        chosen = min(self._queue, key=lambda other: clients.count(other.row.request.client))
        self._queue.remove(chosen)
        client = chosen.row.request.client
        ordered = sorted(self._queue, key=lambda other: other.row.request.client == client)
        self._queue = deque(ordered)
        return chosen

    def _deliver(self, submission: Submission, event: Event) -> None:
        """Deliver an event; after the last one, count what was served."""
        if not submission.is_cancelled:
            submission.deliver(event)
        if isinstance(event, Answer):
            self._remove(submission)

    def _remove(self, submission: Submission) -> None:
        """Remove a request from its slot, and count it."""
        row = self._active.pop(submission.row).row
        metrics.CANCELLED.inc(submission.is_cancelled)
        metrics.count_row(row)

    def _fingerprint(self, model: LanguageModel) -> str:
        device = jax.devices()[0]
        parts = (
            weights_fingerprint(model),
            model.config,
            model.text_tokenizer.fingerprint(),
            model.chat_template,
            model.stop_ids,
            self.config.slots,
            self._engine.max_len,
            self._engine.chunk_tokens,
            jllama.__version__,
            jax.__version__,
            version("jaxlib"),
            os.environ.get("XLA_FLAGS"),
            device.platform,
            device.device_kind,
            platform.machine(),
            num_cores(),
        )
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _context_that_fits(
    config: EngineConfig, max_context: int, token_bytes: int, weights_bytes: int
) -> int:
    """Return the context to serve: what fits in the memory of the configured or the model's own.

    Memory is counted in chunks of all rows, of ``token_bytes`` a token.
    """
    context = min(config.context or max_context, max_context)
    free_bytes = (device_memory_bytes(jax.devices()[0]) or 2**60) - weights_bytes
    available = config.memory_gib * 2**30 or _MEMORY_SHARE * free_bytes
    num_chunks = int(available // (CHUNK * token_bytes))
    # A configured context must fit completely; the model's own is shortened to what fits.
    min_tokens = CHUNK
    if config.context:
        min_tokens = -(-context // CHUNK) * CHUNK
    if num_chunks * CHUNK < min_tokens:
        raise UsageError(
            f"{config.slots} slots of {min_tokens} tokens take "
            f"{min_tokens * token_bytes / 2**30:.2f} GiB, and there are "
            f"{available / 2**30:.2f}: take fewer slots or a shorter context"
        )
    return min(context, num_chunks * CHUNK)
