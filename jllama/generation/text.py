"""From a prompt to text: encode, generate, decode as the tokens come, and stop where the text says so."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import numbers
import operator
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np

from jllama.errors import UsageError
from jllama.generation.decode import STEPS, PrefixCache, advance, start
from jllama.generation.sampling_arrays import Request, SamplingParams, check_requests
from jllama.language_model import LanguageModel
from jllama.tokenizers import Tokenizer

T = TypeVar("T")

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
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
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
        prompt_tokens: how many the prompt had; ``new_tokens`` is how many ``ids`` has.
    """

    text: str
    ids: list[int]
    finish_reason: str
    log_probs: list[float]
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        """How many tokens were made."""
        return len(self.ids)


class SamplingFields(TypedDict, total=False):
    """The fields of ``SamplingParams`` as arguments of their own."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    banned_ids: tuple[int, ...]
    seed: int


def generate(
    model: LanguageModel,
    prompts: str | Sequence[int] | Prompt | Sequence[str | Sequence[int] | Prompt],
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    speculate: int = 0,
    batch_size: int = 0,
    **fields: Unpack[SamplingFields],
) -> list[Completion]:
    """Continue one prompt or several.

    In float32 and int8 each comes out as it would alone, and with any ``speculate``: the same tokens. In bfloat16 and
    float16, which round otherwise in another batch size, a near tie may fall otherwise.

    Example::

        model = jllama.load("runs/quickstart")
        (completion,) = jllama.generate(model, "Once upon", max_new_tokens=50, temperature=0.8, top_p=0.95, seed=1)
        print(completion.text, completion.finish_reason, completion.new_tokens)
        stories = jllama.generate(model, ["Once upon", "Long ago"], max_new_tokens=200, stop="The end")

    Args:
        model: what ``jllama.load`` gives.
        prompts: text, token ids, or a ``Prompt``, which brings all its settings; or a list of those.
        sampling: how tokens are chosen; None draws from the model as it is (temperature 1, nothing cut off).
        max_new_tokens: the most tokens to make of each prompt; None goes on to the end of the model's context.
        stop: a string that ends a text, or several; they are not part of it.
        stop_ids: tokens that end a text; None takes the model's own.
        speculate: how many tokens to guess at each step from the text so far: what repeats itself comes faster.
        batch_size: how many to make at once, those of like length together; 0 makes all at once.
        **fields: fields of ``SamplingParams``, which change ``sampling``: ``temperature`` (0 takes the likeliest
            token), ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``presence_penalty``,
            ``frequency_penalty``, ``logit_bias``, ``banned_ids``, ``seed`` (the same one gives the same text).

    Returns:
        A ``Completion`` of each prompt, in order; of a single prompt a list of one. It has the new ``text`` and its
        ``ids``, ``finish_reason``, ``log_probs``, ``prompt_tokens`` and ``new_tokens``.

    Raises:
        UsageError: a prompt or a setting does not fit the model, or there is no such setting.
        JllamaError: the model has no tokenizer.
    """
    wanted = _prompts(prompts, sampling, fields, max_new_tokens=max_new_tokens, stop=stop, stop_ids=stop_ids)
    completions: dict[int, Completion] = {}
    for done in generate_batches(model, wanted, speculate=speculate, batch_size=batch_size):
        completions |= done
    return [completions[place] for place in range(len(wanted))]


def generate_batches(
    model: LanguageModel, prompts: Sequence[Prompt], *, speculate: int = 0, batch_size: int = 0
) -> Iterator[dict[int, Completion]]:
    """As ``generate``, a batch at a time: the completions of those prompts by their places, longest prompts first.

    Every prompt is checked before the first batch is made.
    """
    requests = [request_of(model, prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda place: -len(requests[place].ids))
    size = batch_size or max(len(prompts), 1)
    for first in range(0, len(order), size):
        places = order[first : first + size]
        rows = [requests[place] for place in places]
        rows += [Request(rows[0].ids[:1], max_new_tokens=0)] * (size - len(rows))  # so that nothing new compiles
        stops = [prompts[place].stop for place in places] + [()] * (size - len(places))
        run = _run(model, rows, stops, speculate, None, STEPS)
        yield dict(zip(places, exhaust(run), strict=False))


def stream(
    model: LanguageModel,
    prompt: str | Sequence[int] | Prompt,
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    speculate: int = 0,
    prefix: PrefixCache | None = None,
    **fields: Unpack[SamplingFields],
) -> Generator[str, None, Completion]:
    """The continuation of one prompt in pieces as they are made: together what ``generate`` gives.

    A piece is never half a character, and never the beginning of a stop string. The generator returns the whole
    ``Completion``; its ``close()`` ends it early, and nothing more is computed. Each thread may have streams of its
    own. Arguments and errors as those of ``generate``, these when the first piece is asked for; ``prefix`` is kept up
    to date, so that the next call computes only what is new in its prompt.

    Example::

        for piece in jllama.stream(model, "Once upon", max_new_tokens=50, temperature=0.8):
            print(piece, end="", flush=True)
    """
    (wanted,) = _prompts([prompt], sampling, fields, max_new_tokens=max_new_tokens, stop=stop, stop_ids=stop_ids)
    (completion,) = yield from _run(model, [request_of(model, wanted)], [wanted.stop], speculate, prefix, _STEPS_SHOWN)
    return completion


def warm_up(
    model: LanguageModel,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    max_new_tokens: int | None = None,
    speculate: int = 0,
) -> None:
    """Compile ahead what ``generate`` and ``stream`` will need, so that nothing compiles while people wait.

    Prompts are padded to powers of two (at least 16 tokens; beyond 512, in chunks of 512), so a length stands for those
    that are padded alike. Settings are data: changing one compiles nothing. (The later turns of a ``Conversation`` are
    computed from what is kept, by programs of their own.)

    Example::

        jllama.warm_up(model, lengths=[16, 64, 512], batches=[1, 4], max_new_tokens=256)

    Args:
        model: the one that will be used.
        lengths: of the prompts, in tokens.
        batches: how many prompts at once.
        max_new_tokens: the most that a call will ask for; None is up to the end of the context, and takes longest.
        speculate: as in the calls to come.

    Raises:
        UsageError: a length does not fit the model's context.
    """
    params, config, vocab_size = model.decode_params, model.config, model.text_tokenizer.vocab_size
    requests = [Request([0] * length, max_new_tokens=max_new_tokens) for length in lengths]
    check_requests(requests, config.max_seq_len, vocab_size)
    longest = max(request.limit(config.max_seq_len) for request in requests)
    ends = sorted({min(128 << doublings, longest) for doublings in range(longest.bit_length())})  # one for each cache
    for batch, end, request in itertools.product(batches, ends, requests):
        new = dataclasses.replace(request, max_new_tokens=max(end - len(request.ids), 0))
        decoding = start(params, config, [new] * batch, vocab_size=vocab_size, drafts=speculate)
        while not decoding.finished.all():
            decoding, _ = advance(params, config, decoding, 1, np.zeros(batch, bool))
            room = decoding.state.tokens.shape[1]
            if room >= end:
                break
            decoding = dataclasses.replace(decoding, lengths=np.full(batch, room))  # as if so much had been written


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


def exhaust(pieces: Generator[str, None, T], show: Callable[[str], object] = lambda piece: None) -> T:
    """Give each piece to ``show`` as it comes; what the generator returns."""
    while True:
        try:
            show(next(pieces))
        except StopIteration as end:
            return end.value


def _run(
    model: LanguageModel,
    requests: Sequence[Request],
    stops: Sequence[Sequence[str]],
    speculate: int,
    prefix: PrefixCache | None,
    steps: int,
) -> Generator[str, None, list[Completion]]:
    """Generate a batch; yields the first row's text as it comes, returns all rows."""
    tokenizer, params, config = model.text_tokenizer, model.decode_params, model.config
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
    rests = [decoder.end() for decoder in decoders]
    if rests[0]:
        yield rests[0]
    return [_completion(*parts) for parts in zip(decoders, requests, made, drafted, accepted, strict=True)]


def _completion(
    decoder: TextDecoder, request: Request, made: Sequence[tuple[int, float]], drafted: int, accepted: int
) -> Completion:
    if decoder.stopped:
        reason, length = "stop_string", len(decoder.text)
        kept = next(count for count, end in enumerate([0, *decoder.ends]) if end >= length)
    elif made and made[-1][0] in request.stop_ids:
        reason, kept = "stop_id", len(made) - 1
    else:
        reason, kept = "context" if request.max_new_tokens is None else "length", len(made)
    ids, log_probs = [token for token, _ in made[:kept]], [log_prob for _, log_prob in made[:kept]]
    return Completion(decoder.text, ids, reason, log_probs, drafted, accepted, len(request.ids))


def _prompts(prompts: Any, sampling: SamplingParams | None, fields: SamplingFields, **ends: Any) -> list[Prompt]:
    """One prompt or a list of them as a list, where those that bring no settings of their own have these."""
    known = [*(field.name for field in dataclasses.fields(SamplingParams)), *ends]
    for name in set(fields).difference(known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f": the settings are {', '.join(known)}"
        raise UsageError(f"there is no setting {name!r}{hint}")
    settings = Prompt("", dataclasses.replace(sampling or SamplingParams(), **fields), **ends)
    if isinstance(prompts, str | Prompt) or (len(prompts) and isinstance(prompts[0], numbers.Integral)):
        prompts = [prompts]
    if settings != Prompt("") and len(prompts) and all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UsageError("a Prompt brings its own settings, and others are given beside it: set them in the Prompt")
    return [each if isinstance(each, Prompt) else dataclasses.replace(settings, content=each) for each in prompts]


def request_of(model: LanguageModel, prompt: Prompt) -> Request:
    """What the engine is asked for; raises ``UsageError`` if the model cannot do it."""
    content, tokenizer = prompt.content, model.text_tokenizer
    if "" in prompt.stop:
        raise UsageError("a stop string is empty: it would end every text at once")
    try:
        ids = prompt_ids(tokenizer, content) if isinstance(content, str) else [operator.index(each) for each in content]
    except TypeError as error:
        raise UsageError(f"a prompt is {str(content)[:50]!r}; it must be text, token ids or a Prompt") from error
    stop_ids = (model.stop_ids or (tokenizer.eos_id,)) if prompt.stop_ids is None else tuple(prompt.stop_ids)
    request = Request(ids, prompt.sampling, prompt.max_new_tokens, stop_ids)
    check_requests([request], model.config.max_seq_len, tokenizer.vocab_size)
    return request
