"""From a prompt to text: encode, generate, and decode as the tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jllama.config import LlamaConfig
from jllama.generation.engine import SamplingConfig, generate_tokens
from jllama.parameters import Params
from jllama.tokenizers import Tokenizer


class Completion(NamedTuple):
    """One row's result: the new text, its token ids (without the stop), and why it ended (``stop`` or ``length``)."""

    text: str
    ids: list[int]
    finish_reason: str


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids a model is given for a prompt: BOS, if it was trained so or there is no text, then the text."""
    ids = tokenizer.encode(prompt)
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos or not ids else ids


def stream(
    params: Params,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: SamplingConfig,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> Iterator[str]:
    """The continuation of one prompt, in pieces as they are made: together what ``complete`` gives."""
    start = prompt_ids(tokenizer, prompt)
    stops = stop_ids or (tokenizer.eos_id,)
    chunks = generate_tokens(params, config, [start], [sampling], max_new_tokens, stops, tokenizer.vocab_size)
    new = (int(token) for chunk in chunks for token in chunk[0] if token not in (-1, *stops))
    return text_pieces(tokenizer, start, new)


def complete(
    params: Params,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sequence[SamplingConfig],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
) -> list[Completion]:
    """The continuations of a batch of prompts, each with its own settings; each as it would be alone.

    ``stop_ids`` end a text; none given, the tokenizer's EOS does.
    """
    starts = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    rows: list[list[int]] = [[] for _ in prompts]
    stops = stop_ids or (tokenizer.eos_id,)
    for chunk in generate_tokens(params, config, starts, sampling, max_new_tokens, stops, tokenizer.vocab_size):
        for row, tokens in zip(rows, chunk.tolist(), strict=True):
            row.extend(token for token in tokens if token != -1)
    completions = []
    for start, row in zip(starts, rows, strict=True):
        stopped = row[-1] in stops if row else False
        ids = row[:-1] if stopped else row
        text = "".join(text_pieces(tokenizer, start, ids))
        completions.append(Completion(text, ids, "stop" if stopped else "length"))
    return completions


def text_pieces(tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Iterable[int]) -> Iterator[str]:
    """The text of ``new_ids`` after ``prompt``, never half a character, and with its leading spaces.

    A character's bytes may be spread over tokens, so a piece that ends in U+FFFD (what an unfinished character decodes
    to) is held back until it is whole or the ids end. Tokens are decoded behind a few earlier ones, as the first token
    of a text may lose its space.
    """
    context_tokens = 8  # the last tokens already shown, decoded again so that the first new one has a neighbour
    ids = list(prompt)
    shown_ids = len(ids)

    def decode_rest() -> str:
        start = max(shown_ids - context_tokens, 0)
        before = tokenizer.decode(ids[start:shown_ids])
        return tokenizer.decode(ids[start:])[len(before) :]

    for token in new_ids:
        ids.append(token)
        text = decode_rest()
        if text and not text.endswith("\ufffd"):
            yield text
            shown_ids = len(ids)
    rest = decode_rest()
    if rest:
        yield rest
