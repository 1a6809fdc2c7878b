"""From a prompt to text: encode and check it, generate, decode as the tokens come, and stop where the text says so."""

import bisect
import dataclasses
import itertools
import numbers
import operator
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
from jaxtyping import Int32

from jllama.errors import ContextError, UsageError, unknown_name
from jllama.generation.decode import STEPS, decode, with_room
from jllama.generation.decode_batch import check_batch, restricted
from jllama.generation.prefill import PrefixCache, prefill
from jllama.generation.sampling_params import Prompt, SamplingFields, SamplingParams
from jllama.grammar import Grammar, Matcher
from jllama.language_model import LanguageModel
from jllama.tokenizers import Tokenizer

Prompts = Sequence[Prompt]
STEPS_SHOWN = 4  # decoding steps between two pieces of a stream
_CONTEXT_TOKENS = 8  # decoded again before new ones, as the first token of a text may lose its space


class Completion(NamedTuple):
    """What was generated from one prompt."""

    text: str  # what is new, without the prompt and the stop
    ids: list[int]  # what ``text`` came from, without a stop id; where a stop string cut a token, it is the last one
    finish_reason: str  # stop_id, stop_string, length (max_new_tokens, a grammar's limit) or context (the model's)
    log_probs: list[float]  # of each of ``ids``, by the model's raw logits, in nats
    drafted: int = 0  # tokens guessed, with ``speculate``
    accepted: int = 0  # how many of them were right
    prompt_tokens: int = 0

    new_tokens = property(lambda self: len(self.ids), doc="How many tokens were generated.")


def generate(
    model: LanguageModel,
    prompts: str | Sequence[int] | Prompt | Sequence[str | Sequence[int] | Prompt],
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    speculate: int = 0,
    batch_size: int = 0,
    **fields: Unpack[SamplingFields],
) -> list[Completion]:
    """Continue one prompt or several, each as it would come out alone and with any ``speculate``.

    In bfloat16 and float16, which round otherwise in another batch size, a near tie may fall otherwise.

    Example::

        model = jllama.load("runs/quickstart")
        (completion,) = jllama.generate(model, "Once upon", max_new_tokens=50, temperature=0.8, top_p=0.95, seed=1)
        print(completion.text, completion.finish_reason, completion.new_tokens)
        stories = jllama.generate(model, ["Once upon", "Long ago"], max_new_tokens=200, stop="The end")

    Args:
        model: what ``jllama.load`` gives.
        prompts: text, token ids, or a ``Prompt``, which brings all its settings; or a list of those.
        sampling: how tokens are chosen; None draws from the model as it is (temperature 1, nothing cut off).
        max_new_tokens: the most tokens to generate from each prompt; None goes on to the end of the model's context.
        stop: a string that ends a text, or several; they are not part of it.
        stop_ids: tokens that end a text; None takes the model's own.
        grammar: what the texts must match, such as ``Grammar("regex", "[0-9]+")`` (a stop id ends one that does).
        speculate: how many tokens to guess at each step from the text so far: what repeats itself comes faster.
        batch_size: how many to generate at once, those of like length together; 0 takes all at once.
        **fields: fields of ``SamplingParams``, which change ``sampling``: ``temperature`` (0 takes the likeliest
            token), ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``presence_penalty``,
            ``frequency_penalty``, ``logit_bias``, ``banned_ids``, ``seed`` (the same one gives the same text).

    Returns:
        A ``Completion`` of each prompt, in order.

    Raises:
        JllamaError: the model has no tokenizer, a prompt or a setting does not fit it, or there is no such setting.
    """
    settings = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar)
    batches = generate_batches(model, _encoded(model, prompts, settings, fields), speculate, batch_size)
    return [completion for _, completion in sorted(pair for batch in batches for pair in batch.items())]


def stream(
    model: LanguageModel,
    prompt: str | Sequence[int] | Prompt,
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    speculate: int = 0,
    prefix: PrefixCache | None = None,
    **fields: Unpack[SamplingFields],
) -> Generator[str, None, Completion]:
    """The continuation of one prompt in pieces as they come: together what ``generate`` gives.

    A piece is never half a character, nor the beginning of a stop string. The generator returns the ``Completion``;
    ``close()`` ends it early. Each thread may have its own. Arguments and errors (at the first piece) are those of
    ``generate``; with a ``prefix``, kept up to date, the next call computes only what is new in its prompt.

    Example::

        for piece in jllama.stream(model, "Once upon", max_new_tokens=50, temperature=0.8):
            print(piece, end="", flush=True)
    """
    settings, piece = Prompt("", sampling or SamplingParams(), max_new_tokens, stop, stop_ids, grammar), None
    for _, piece in generate_batch(model, _encoded(model, [prompt], settings, fields), speculate, STEPS_SHOWN, prefix):
        if isinstance(piece, str):
            yield piece
    return cast(Completion, piece)


def warm_up(
    model: LanguageModel,
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    max_new_tokens: int | None = None,
    speculate: int = 0,
) -> None:
    """Compile ahead what ``generate`` and ``stream`` will need (not the later turns of a ``Conversation``).

    Each of the ``lengths``, in tokens, stands for those padded to the same power of two (from 16; chunks of 512);
    ``batches`` are how many prompts at once, ``max_new_tokens`` the most asked for (None: to the end of the context).
    """
    model = model.for_decoding()
    prompts = [encode_prompt(model, Prompt([0] * length, max_new_tokens=max_new_tokens)) for length in lengths]
    longest = max((prompt.limit(model.config.max_seq_len) for prompt in prompts), default=0)
    ends = sorted({min(128 << doubled, longest) for doubled in range(longest.bit_length())})  # one for each cache
    for size, end, prompt in itertools.product(batches, ends, prompts):
        row = dataclasses.replace(prompt, max_new_tokens=max(end - len(prompt.ids), 0))
        batch, *_ = decode(model, prefill(model, [row] * size), 1, draft_len=speculate)
        while batch.tokens.shape[1] < end:
            batch = with_room(batch, batch.tokens.shape[1] + 1, model.config)
            batch, *_ = decode(model, batch, 1, draft_len=speculate)


def encode_prompt(model: LanguageModel, prompt: Prompt) -> Prompt:
    """The prompt as token ids, with tuples of its stops: the one place where requests are checked (``UsageError``)."""
    content, tokenizer, context = prompt.content, model.text_tokenizer, model.config.max_seq_len
    try:
        ids = prompt_ids(tokenizer, content) if isinstance(content, str) else [operator.index(each) for each in content]
    except TypeError as error:
        raise UsageError(f"a prompt is {str(content)[:50]!r}; it must be text, token ids or a Prompt") from error
    stop_ids = (model.stop_ids or (tokenizer.eos_id,)) if prompt.stop_ids is None else prompt.stop_ids
    new, sampling = 1 if prompt.max_new_tokens is None else prompt.max_new_tokens, prompt.sampling
    stop = (prompt.stop,) if isinstance(prompt.stop, str) else tuple(prompt.stop)
    if "" in stop:
        raise UsageError("a stop string is empty: it would end every text at once")
    if new < 0:
        raise UsageError(f"max_new_tokens is {new}; it must not be negative")
    if not ids:
        raise UsageError("a prompt has no tokens: it needs at least the BOS token")
    if len(ids) + new > context:
        less = f" or lower max_new_tokens to at most {context - len(ids)}" if context > len(ids) else ""
        wrong = f"the prompt's {len(ids)} tokens and {new} new ones exceed the model's context of {context}"
        raise ContextError(f"{wrong}: shorten the prompt{less}")
    given = {"prompt": ids, "stop_ids": stop_ids, "logit_bias": sampling.logit_bias, "banned_ids": sampling.banned_ids}
    for name, listed in given.items():
        if unknown := [id for id in listed if not 0 <= id < tokenizer.vocab_size]:
            has = "have" if name.endswith("ids") else "has"
            raise UsageError(f"the {name} {has} token {unknown[0]}; the ids run from 0 to {tokenizer.vocab_size - 1}")
    if len(set(sampling.banned_ids)) == tokenizer.vocab_size:
        raise UsageError("banned_ids bans every token: leave at least one")
    if prompt.grammar:
        if sampling.banned_ids:
            raise UsageError("banned_ids could leave nothing of what a grammar allows: use logit_bias")
        Matcher(prompt.grammar, tokenizer, stop_ids)  # it can be compiled
    return dataclasses.replace(prompt, content=ids, stop=stop, stop_ids=tuple(stop_ids))


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids a model is given for a prompt: BOS, if it was trained so or there is no text, then the text."""
    ids = tokenizer.encode(prompt)
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos or not ids else ids


def _encoded(model: LanguageModel, prompts: Any, settings: Prompt, fields: SamplingFields) -> list[Prompt]:
    """One prompt or a list of them, encoded; those that bring no settings of their own have these."""
    if unknown := fields.keys() - vars(settings.sampling):
        raise unknown_name("setting", min(unknown), [*vars(settings.sampling), "max_new_tokens", "stop", "stop_ids"])
    settings = dataclasses.replace(settings, sampling=dataclasses.replace(settings.sampling, **fields))
    if isinstance(prompts, str | Prompt) or (len(prompts) and isinstance(prompts[0], numbers.Integral)):
        prompts = [prompts]
    if settings != Prompt("") and len(prompts) and all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UsageError("a Prompt brings its own settings, and others are given beside it: set them in the Prompt")
    each = (one if isinstance(one, Prompt) else dataclasses.replace(settings, content=one) for one in prompts)
    return [encode_prompt(model, prompt) for prompt in each]


def generate_batches(
    model: LanguageModel, prompts: Prompts, speculate: int = 0, batch_size: int = 0
) -> Iterator[dict[int, Completion]]:
    """Generate from encoded prompts a batch at a time, the longest first: completions by the prompts' indices."""
    model = model.for_decoding()  # once, if it is not in that layout
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index].ids))
    size = batch_size or max(len(prompts), 1)
    for first in range(0, len(order), size):
        indices = order[first : first + size]
        batch = [prompts[index] for index in indices]
        batch += [Prompt(batch[0].ids[:1], max_new_tokens=0)] * (size - len(batch))  # so that nothing new compiles
        pieces = ((row, piece) for row, piece in generate_batch(model, batch, speculate) if row < len(indices))
        yield {indices[row]: piece for row, piece in pieces if isinstance(piece, Completion)}


def generate_batch(
    model: LanguageModel, prompts: Prompts, speculate: int = 0, steps: int = STEPS, prefix: PrefixCache | None = None
) -> Iterator[tuple[int, str | Completion]]:
    """Generate from encoded prompts together: ``(row, piece)`` every few ``steps``; a row's last piece is all of it."""
    model = model.for_decoding()
    check_batch(model.config, len(prompts), speculate)
    rows = [TextDecoder(model.text_tokenizer, prompt) for prompt in prompts]
    restricts = any(prompt.grammar for prompt in prompts)
    if speculate and restricts:
        raise UsageError("speculate guesses several tokens, and a grammar allows one after the other: leave one out")
    batch = prefill(model, prompts, prefix)
    prefix, cached_ids = prefix or PrefixCache(), list(prompts[0].ids)
    next_steps = 1  # the first token is shown as soon as it is there
    while not np.asarray(batch.finished).all():
        stopped = np.array([row.finish_reason != "" for row in rows])
        prefix.take()
        if restricts:
            batch = restricted(batch, [row.allowed() for row in rows])
        batch, tokens, log_probs = decode(model, batch, next_steps, stopped, speculate)
        cached_ids += tokens[0, tokens[0] >= 0].tolist()
        prefix.ids, prefix.cache = cached_ids[:-1], batch.cache  # the last token has not been through the model yet
        for index, (row, *new) in enumerate(zip(rows, tokens.tolist(), log_probs.tolist(), strict=True)):
            pieces = (row.push(token, log_prob) for token, log_prob in zip(*new, strict=True))
            yield from ((index, piece) for piece in pieces if piece)
        next_steps = 1 if restricts else steps
    for index, counts in enumerate(zip(batch.drafted.tolist(), batch.accepted.tolist(), strict=True)):
        yield from ((index, piece) for piece in (rows[index].end(), rows[index].completion(*counts)) if piece)


class TextDecoder:
    """Turns the tokens of one row into text as they come, and in the end into a ``Completion``.

    Held back are an unfinished character, which decodes to U+FFFD, and what may be the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._tokenizer, self._prompt = tokenizer, prompt
        self._matcher = Matcher(prompt.grammar, tokenizer, prompt.stop_ids or ()) if prompt.grammar else None
        self._ids = list(prompt.ids[-_CONTEXT_TOKENS:])
        self._num_decoded, self._num_shown = len(self._ids), 0
        self._tokens: list[tuple[int, float, int]] = []  # id, log-probability, and the length of the text before it
        self.text, self.finish_reason = "", ""  # the latter once it is stop_id or stop_string

    def push(self, token: int, log_prob: float = 0.0) -> str:
        """The text that is certain now and was not before."""
        if token in (self._prompt.stop_ids or ()):
            self.finish_reason = self.finish_reason or "stop_id"
        if token >= 0 and self._matcher:
            self._matcher.accept(token)
            self.finish_reason = "length" if self._matcher.failed else self.finish_reason
        if token < 0 or self.finish_reason:
            return ""
        self._ids.append(token)
        self._tokens.append((token, log_prob, len(self.text)))
        self._decode(is_last=False)
        beginnings = (_overlap(self.text, stop) for stop in self._prompt.stop)
        return self._show(0 if self.finish_reason else max(beginnings, default=0))

    def end(self) -> str:
        """What was held back, when there are no more tokens."""
        if self.finish_reason != "stop_string":
            self._decode(is_last=True)
        return self._show(0)

    def allowed(self) -> Int32[np.ndarray, "words"] | None:
        """A bit for each token that may come next, see ``Matcher``; None if there is no grammar."""
        return self._matcher.allowed() if self._matcher else None

    @property
    def num_tokens_shown(self) -> int:
        """How many tokens begin in the text that was shown."""
        return bisect.bisect_left(self._tokens, self._num_shown, key=lambda token: token[2])

    def completion(self, drafted: int, accepted: int) -> Completion:
        """All of it, at the end."""
        reason = self.finish_reason or ("context" if self._prompt.max_new_tokens is None else "length")
        kept = [token for token in self._tokens if reason != "stop_string" or token[2] < len(self.text)]
        ids, log_probs = [id for id, *_ in kept], [log_prob for _, log_prob, _ in kept]
        return Completion(self.text, ids, reason, log_probs, drafted, accepted, len(self._prompt.ids))

    def _show(self, num_held: int) -> str:
        piece = self.text[self._num_shown : len(self.text) - num_held]
        self._num_shown += len(piece)
        return piece

    def _decode(self, *, is_last: bool) -> None:
        """Add the text of new tokens, if it is certain; the text ends where a stop string begins."""
        start, searched = max(self._num_decoded - _CONTEXT_TOKENS, 0), len(self.text)
        before = self._tokenizer.decode(self._ids[start : self._num_decoded])
        new = self._tokenizer.decode(self._ids[start:])[len(before) :]
        if not new or (new.endswith("\ufffd") and not is_last):
            return
        self._num_decoded, self.text = len(self._ids), self.text + new
        found = (self.text.find(stop, max(searched - len(stop), 0)) for stop in self._prompt.stop)
        if ends := [index for index in found if index >= 0]:
            self.text, self.finish_reason = self.text[: min(ends)], "stop_string"


def _overlap(text: str, stop: str) -> int:
    """How long the longest end of a text is with which a stop string begins."""
    start = max(len(text) - len(stop) + 1, 0)
    while (start := text.find(stop[0], start)) >= 0 and not stop.startswith(text[start:]):
        start += 1
    return len(text) - start if start >= 0 else 0
