"""Conversations with a model: from messages to an answer."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Unpack

from jllama.core import JllamaError, UsageError
from jllama.generation.engine import Engine
from jllama.generation.generate import BLOCK_S, generate, stream
from jllama.generation.sampling_params import SamplingFields, SamplingParams
from jllama.generation.text import Completion
from jllama.models.language_model import LanguageModel
from jllama.templates.messages import (
    Message,
    check_messages,
    end_of_turn_ids,
    find_template,
    message_ids,
)


def chat_ids(
    model: LanguageModel,
    messages: Sequence[Message],
    template: str | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return a conversation's token ids, the same as transformers' ``apply_chat_template``.

    Special tokens in the template's text become their ids, also those that a message spells out.
    BOS is added only by the template.

    Args:
        model: a model with a tokenizer.
        messages: the conversation.
        template: Jinja; None: that of ``find_template``.
        add_generation_prompt: whether to end with the beginning of an answer.

    Raises:
        JllamaError: a message is not a ``Message``, the model has no tokenizer, or the template
            fails.
    """
    check_messages(messages)
    tokenizer = model.text_tokenizer
    template = find_template(tokenizer, model.chat_template) if template is None else template
    return message_ids(tokenizer, template, messages, add_generation_prompt)


def chat(
    model: LanguageModel,
    messages: Sequence[Message],
    sampling: SamplingParams | None = None,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    template: str | None = None,
    **fields: Unpack[SamplingFields],
) -> Completion:
    """Return the model's answer to a conversation; ``Conversation`` reuses earlier computations.

    ``template`` is Jinja, None that of ``find_template``; the other arguments are those of
    ``generate``.

    Raises:
        JllamaError: as ``chat_ids``, and if the conversation exceeds the context.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> messages = [{"role": "user", "content": "Hello!"}]
        >>> answer = jllama.chat(model, messages, max_new_tokens=4).text
    """
    ids, limits = _prepare(model, messages, template, max_new_tokens)
    return generate(model, ids, sampling, stop=stop, **limits, **fields)[0]


@dataclasses.dataclass
class Conversation:
    """A conversation with a model; keys and values are cached, so an answer computes what is new.

    Args:
        model: a model with a tokenizer.
        template: Jinja; None: that of ``find_template``.
        messages: the conversation so far, as in ``chat``.
        engine: the engine that caches keys and values; None: made for the first answer.

    Examples:
        >>> model = jllama.load("smollm2/")
        >>> conversation = jllama.Conversation(model)
        >>> pieces = conversation.answer("Hello!", max_new_tokens=4, temperature=0.7)
        >>> text = "".join(pieces)  # or show each piece as it comes
    """

    model: LanguageModel
    template: str | None = None
    messages: list[Message] = dataclasses.field(default_factory=list)
    engine: Engine | None = None

    def answer(
        self,
        text: str,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[str, None, Completion]:
        """Send a message and yield the model's answer in pieces; both are added to ``messages``.

        The generator returns the ``Completion``. If it is closed early, the answer is what it has
        yielded. Arguments and errors are those of ``chat``; after an error nothing is added.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, limits = _prepare(self.model, messages, self.template, max_new_tokens)
        if self.engine is None or self.engine.busy:  # another answer has not ended
            self.engine = Engine(self.model, 1, block_s=BLOCK_S, resumes=True)
        answer = ""
        pieces = stream(self.model, ids, sampling, engine=self.engine, **limits, **fields)
        with contextlib.closing(pieces):
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    self.messages = [*messages, {"role": "assistant", "content": answer}]
                    return end.value
                answer += piece
                self.messages = [*messages, {"role": "assistant", "content": answer}]
                yield piece

    def undo(self) -> str:
        """Remove the last question and its answer, and return the question.

        Raises:
            UsageError: there is no question.
        """
        for index in reversed(range(len(self.messages))):
            if self.messages[index]["role"] == "user":
                question = self.messages[index]["content"]
                self.messages = self.messages[:index]
                return question
        raise UsageError("there is no question to take back")


def _prepare(
    model: LanguageModel,
    messages: Sequence[Message],
    template: str | None,
    max_new_tokens: int | None,
) -> tuple[list[int], dict[str, Any]]:
    """Return a conversation's ids, and the limits of its answer as arguments of ``generate``.

    If ``max_new_tokens`` exceeds the context, the answer ends with the context.
    """
    ids = chat_ids(model, messages, template)
    context = model.config.max_seq_len
    if len(ids) >= context:
        raise JllamaError(
            f"the conversation now has {len(ids)} tokens and the model's context is {context}: "
            "begin a new one, or say less"
        )
    stop_ids = end_of_turn_ids(model.text_tokenizer, model.stop_ids)
    fits = max_new_tokens is None or len(ids) + max_new_tokens <= context
    return ids, {"max_new_tokens": max_new_tokens if fits else None, "stop_ids": stop_ids}
