"""From a prompt to text: encode, generate, decode as the tokens come, and stop where the text says so."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jllama.checkpoints.formats import Model
from jllama.errors import UsageError
from jllama.generation.engine import STEPS, PrefixCache, advance, start
from jllama.generation.settings import Request, SamplingConfig, check_requests
from jllama.tokenizers import Tokenizer

_STEPS_SHOWN = 4
"""Decoding steps between two pieces of a stream."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What one text is to be made of.

    Args:
        content: text, which gets BOS in front where the tokenizer wants it; or token ids, taken as they are.
        sampling: how tokens are chosen.
        max_new_tokens: the most tokens to make; None goes on to the end of the model's context.
        stop: a string that ends the text, or several; they are not part of it.
        stop_ids: tokens that end the text; None takes the model's own.
    """

    content: str | Sequence[int]
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    max_new_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))


class Completion(NamedTuple):
    """One row's result.

    Args:
        text: what is new, without the prompt and the stop.
        ids: the tokens that ``text`` came from, without a stop id; of a text that a stop string cut within a token, the
            last id says more than the text.
        finish_reason: ``stop_id``, ``stop_string``, ``length`` (``max_new_tokens``) or ``context`` (the end of it).
        log_probs: of each of ``ids``, by the model's raw logits, in nats.
        drafted, accepted: with ``speculate``: how many tokens were guessed, and how many of them were right.
    """

    text: str
    ids: list[int]
    finish_reason: str
    log_probs: list[float]
    drafted: int = 0
    accepted: int = 0


def generate(
    model: Model,
    prompts: str | Sequence[int] | Prompt | Sequence[str | Sequence[int] | Prompt],
    sampling: SamplingConfig | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    speculate: int = 0,
    batch_size: int = 0,
) -> list[Completion]:
    """Continue each prompt; each as it would be alone.

    Args:
        model: what ``jllama.load`` gives.
        prompts: text, token ids, or a ``Prompt``, which brings its own settings; or a list of those.
        sampling: as ``max_new_tokens``, ``stop`` and ``stop_ids`` for the prompts that do not bring their own.
        max_new_tokens: as in ``Prompt``.
        stop: as in ``Prompt``.
        stop_ids: as in ``Prompt``.
        speculate: how many tokens to guess at each step from the text so far. The result is the same; where the text
            repeats itself it comes faster.
        batch_size: how many to make at once, those of like length together; 0 makes all at once.

    Raises:
        UsageError: a prompt or a setting does not fit the model.
        JllamaError: the model has no tokenizer.
    """
    if isinstance(prompts, str | Prompt) or (len(prompts) and isinstance(prompts[0], numbers.Integral)):
        prompts = [prompts]  # pyright: ignore[reportAssignmentType] - text, a Prompt, or the ids of one
    wanted = [_prompt(prompt, sampling, max_new_tokens, stop, stop_ids) for prompt in prompts]  # pyright: ignore
    completions: dict[int, Completion] = {}
    for done in generate_batches(model, wanted, speculate=speculate, batch_size=batch_size):
        completions |= done
    return [completions[place] for place in range(len(wanted))]


def generate_batches(
    model: Model, prompts: Sequence[Prompt], *, speculate: int = 0, batch_size: int = 0
) -> Iterator[dict[int, Completion]]:
    """As ``generate``, a batch at a time: the completions of those prompts by their places, longest prompts first.

    Every prompt is checked before the first batch is made.
    """
    requests = [request_of(model, prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda place: -len(requests[place].ids))
    size = batch_size or max(len(prompts), 1)
    for first in range(0, len(order), size):
        places = order[first : first + size]
        filling = [Request(requests[places[0]].ids[:1], max_new_tokens=0)] * (
            size - len(places)
        )  # nothing new compiles
        stops = [prompts[place].stop for place in places] + [()] * len(filling)
        run = _run(model, [requests[place] for place in places] + filling, stops, speculate, None, STEPS)
        yield dict(zip(places, _result(run), strict=False))


def stream(
    model: Model,
    prompt: str | Sequence[int] | Prompt,
    sampling: SamplingConfig | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    speculate: int = 0,
    prefix: PrefixCache | None = None,
) -> Generator[str, None, Completion]:
    """The continuation of one prompt in pieces as they are made: together what ``generate`` gives.

    A piece is never half a character, and never the beginning of a stop string. The generator returns the whole
    ``Completion``. Arguments and errors as those of ``generate``; ``prefix`` is kept up to date, so that the next call
    computes only what is new in its prompt.
    """
    wanted = _prompt(prompt, sampling, max_new_tokens, stop, stop_ids)
    (completion,) = yield from _run(model, [request_of(model, wanted)], [wanted.stop], speculate, prefix, _STEPS_SHOWN)
    return completion


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids a model is given for a prompt: BOS, if it was trained so or there is no text, then the text."""
    ids = tokenizer.encode(prompt)
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos or not ids else ids


class TextDecoder:
    """Turns the tokens of one row into text as they come.

    A character's bytes may be spread over tokens, so text that ends in U+FFFD (what an unfinished character decodes
    to) is held back until it is whole or the tokens end; so is what may be the beginning of a stop string. Tokens are
    decoded behind a few earlier ones, as the first token of a text may lose its space.

    Args:
        tokenizer: the model's.
        prompt: the ids that come before.
        stop: strings at which the text ends.
    """

    _CONTEXT_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = list(prompt[-self._CONTEXT_TOKENS :])
        self._shown_ids = len(self._ids)
        self._shown = 0
        self.text = ""
        self.ends: list[int] = []
        """After each token, how long the text was."""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._ids.append(token)
        rest = self._rest()
        if rest and not rest.endswith("\ufffd"):
            self._add(rest)
        self.ends.append(len(self.text))
        return self._show(len(self.text) - self._held())

    def end(self) -> str:
        """What was held back, when there are no more tokens."""
        self._add(self._rest())
        if self.ends:
            self.ends[-1] = len(self.text)
        return self._show(len(self.text))

    def _rest(self) -> str:
        start = max(self._shown_ids - self._CONTEXT_TOKENS, 0)
        before = self._tokenizer.decode(self._ids[start : self._shown_ids])
        return self._tokenizer.decode(self._ids[start:])[len(before) :]

    def _add(self, rest: str) -> None:
        if self.stopped:
            return
        self._shown_ids = len(self._ids)
        searched = max(len(self.text) - max(map(len, self._stop), default=0), 0)
        self.text += rest
        found = [place for stop in self._stop if (place := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        if self.stopped:
            return 0
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _result(run: Generator[str, None, list[Completion]]) -> list[Completion]:
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def _run(
    model: Model,
    requests: Sequence[Request],
    stops: Sequence[Sequence[str]],
    speculate: int,
    prefix: PrefixCache | None,
    steps: int,
) -> Generator[str, None, list[Completion]]:
    """Generate a batch; yields the first row's text as it comes, returns all rows."""
    tokenizer, params, config = model.text_tokenizer, model.decoding_params, model.config
    decoders = [TextDecoder(tokenizer, request.ids, stop) for request, stop in zip(requests, stops, strict=True)]
    made: list[list[tuple[int, float]]] = [[] for _ in requests]
    decoding = start(params, config, requests, vocab_size=tokenizer.vocab_size, drafts=speculate, prefix=prefix)
    count = 1  # the first token is shown as soon as it is there
    while not decoding.finished.all():
        stopped = np.array([decoder.stopped for decoder in decoders])
        decoding, new = advance(params, config, decoding, count, stopped)
        count = steps
        for row, (tokens, log_probs) in enumerate(zip(new.tokens.tolist(), new.log_probs.tolist(), strict=True)):
            made[row] += [pair for pair in zip(tokens, log_probs, strict=True) if pair[0] != -1]
        if prefix is not None:
            prefix.ids = [*requests[0].ids, *(token for token, _ in made[0][:-1])]  # the last is not in the cache yet
            prefix.cache = decoding.state.cache
        for row, (decoder, request) in enumerate(zip(decoders, requests, strict=True)):
            for token, _ in made[row][len(decoder.ends) :]:
                if decoder.stopped or token in request.stop_ids:
                    break
                piece = decoder.push(token)
                if row == 0 and piece:
                    yield piece
    drafted, accepted = (np.asarray(counts).tolist() for counts in (decoding.state.drafted, decoding.state.accepted))
    if rest := decoders[0].end():
        yield rest
    for decoder in decoders[1:]:
        decoder.end()
    return [_completion(*parts) for parts in zip(decoders, requests, made, drafted, accepted, strict=True)]


def _completion(
    decoder: TextDecoder, request: Request, made: Sequence[tuple[int, float]], drafted: int, accepted: int
) -> Completion:
    if decoder.stopped:
        reason = "stop_string"
        kept = next((place + 1 for place, end in enumerate(decoder.ends) if end >= len(decoder.text)), 0)
        kept = kept if decoder.text else 0
    elif made and made[-1][0] in request.stop_ids:
        reason, kept = "stop_id", len(made) - 1
    else:
        reason, kept = "context" if request.max_new_tokens is None else "length", len(made)
    ids, log_probs = [token for token, _ in made[:kept]], [log_prob for _, log_prob in made[:kept]]
    return Completion(decoder.text, ids, reason, log_probs, drafted, accepted)


def _prompt(
    prompt: str | Sequence[int] | Prompt,
    sampling: SamplingConfig | None,
    max_new_tokens: int | None,
    stop: str | Sequence[str],
    stop_ids: Sequence[int] | None,
) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    return Prompt(prompt, sampling or SamplingConfig(), max_new_tokens, stop, stop_ids)


def request_of(model: Model, prompt: Prompt) -> Request:
    """What the engine is asked for; raises ``UsageError`` if the model cannot do it."""
    content, tokenizer = prompt.content, model.text_tokenizer
    if "" in prompt.stop:
        raise UsageError("a stop string is empty: it would end every text at once")
    ids = prompt_ids(tokenizer, content) if isinstance(content, str) else [int(token) for token in content]
    stop_ids = (model.stop_ids or (tokenizer.eos_id,)) if prompt.stop_ids is None else tuple(prompt.stop_ids)
    request = Request(ids, prompt.sampling, prompt.max_new_tokens, stop_ids)
    check_requests([request], model.config.max_seq_len, tokenizer.vocab_size)
    return request
