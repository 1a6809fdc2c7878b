"""Prompts for training from rewards: what the model answers, and what rewards know of it."""

import dataclasses
import json
from collections import Counter
from typing import Any, NamedTuple

import grain

from jllama.core import JllamaError, UsageError
from jllama.data.chats import note_special_tokens, refuse_lost_fields
from jllama.data.config import DataConfig
from jllama.data.corpus import Findings, corpus_files, hash_fraction, read_rows
from jllama.data.tokens import cache_dir, held_out_limit, sha256
from jllama.system.files import errors_as
from jllama.system.progress import progress
from jllama.templates.messages import message_ids, openai_messages, with_tools
from jllama.tokenizers.base import Tokenizer


class PromptRow(NamedTuple):
    """A prompt of the data."""

    ids: tuple[int, ...]  # the tokens that generation starts from
    prompt: Any  # a text, or a list of messages
    fields: dict[str, Any]  # the whole record, which rewards get
    place: str  # the file and the line


@dataclasses.dataclass(frozen=True)
class PromptDataset:
    """Prompts to train on, and held-out ones."""

    tokenizer: Tokenizer
    train: tuple[PromptRow, ...]
    validation: tuple[PromptRow, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    rows_per_example = 1

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages."""
        return not isinstance(self.train[0].prompt, str)

    def training_prompts(
        self, num_prompts: int, seed: int
    ) -> grain.DatasetIterator[list[PromptRow]]:
        """Return an endless iterator over lists of prompts; every epoch shuffles them anew."""
        plan = grain.MapDataset.range(len(self.train)).seed(seed).shuffle().repeat(None)
        batches = plan.batch(
            num_prompts,
            drop_remainder=True,
            batch_fn=lambda indices: [self.train[int(index)] for index in indices],
        )
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0)))

    def size(self) -> str:
        """Describe the amount of training data."""
        return self.facts()["training prompts"]

    def facts(self) -> dict[str, str]:
        """Describe the data for the run's page."""
        lines = {}
        for title, rows in (("training", self.train), ("validation", self.validation)):
            num_tokens = sum(len(row.ids) for row in rows)
            lines[f"{title} prompts"] = f"{len(rows):,} prompts of {num_tokens:,} tokens"
        return lines


def prepare_prompts(
    config: DataConfig, tokenizer: Tokenizer, template: str | None, max_prompt_tokens: int
) -> PromptDataset:
    """Read prompts: records with ``messages``, or a ``prompt`` that is a text or messages.

    Messages go through the template, a text is continued as it is. A record is held out if its
    SHA-256, as a number in [0, 1), is at most ``config.validation_fraction``; at least the lowest
    one is held out, and at least the highest one is not. Prompts of over ``max_prompt_tokens`` are
    left out and counted.

    Raises:
        JllamaError: a record has no prompt, or there are too few.
    """
    if config.mixture:
        raise UsageError("data.mixture is of chats; it must be left out with reward")
    findings = Findings(config.bad_rows)
    rows = {}
    files = corpus_files(config.path, cache_dir(config), config.follow_links)
    with progress("reading prompts") as advance:
        for path in files.values():
            for place, fields in read_rows(path, findings=findings, new_names=config.fields):
                with findings.collect(), errors_as(place, JllamaError, TypeError, ValueError):
                    text = json.dumps(fields, sort_keys=True)
                    row = _prompt_row(place, fields, tokenizer, template, findings.notes)
                    if len(row.ids) > max_prompt_tokens:
                        findings.notes[f"left out, over {max_prompt_tokens} tokens"] += 1
                    else:
                        rows[hash_fraction([text])] = row  # equal records are one
            advance(1)
    notes = findings.finish()
    fractions = sorted(rows)
    if len(fractions) < 2:
        raise JllamaError(
            f"{config.path}: {len(fractions)} different prompts of at most {max_prompt_tokens} "
            "tokens; give at least 2, one of them to hold out"
        )
    limit = held_out_limit(config, fractions)
    train = tuple(row for fraction, row in rows.items() if fraction > limit)
    validation = tuple(row for fraction, row in rows.items() if fraction <= limit)
    options = [config.validation_fraction, max_prompt_tokens, template, tokenizer.fingerprint()]
    fingerprint = sha256(options, fractions, [row.ids for row in train])
    return PromptDataset(tokenizer, train, validation, fingerprint, tuple(notes))


def _prompt_row(
    place: str,
    fields: dict[str, Any],
    tokenizer: Tokenizer,
    template: str | None,
    notes: Counter[str],
) -> PromptRow:
    """Return the prompt of a record, with the tokens that an answer to it starts from."""
    prompt = fields.get("messages") or fields.get("prompt")
    refuse_lost_fields(fields, ("system", "history"), prompt)
    if isinstance(prompt, str) and prompt:
        note_special_tokens(prompt, tokenizer, notes)
        bos = [tokenizer.bos_id] if tokenizer.add_bos else []
        return PromptRow((*bos, *tokenizer.encode(prompt)), prompt, fields, place)
    if not isinstance(prompt, list) or not prompt:
        raise JllamaError("it has no messages, and no prompt that is a text or messages")
    if template is None:
        raise JllamaError("the model has no chat template: give a prompt that is a text")
    messages = openai_messages(prompt)
    if messages[-1]["role"] == "assistant":
        raise JllamaError("its messages end with an answer; they must end with a question")
    tools = fields.get("tools")
    if tools:
        template = with_tools(template)
    ids = message_ids(tokenizer, template, messages, True, tools)
    return PromptRow(tuple(ids), prompt, fields, place)
