"""Conversations with a model: from messages to an answer."""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, Unpack

from jllama.errors import JllamaError, UsageError
from jllama.generation.engine import Engine
from jllama.generation.generate import BLOCK_S, generate, stream
from jllama.generation.sampling_params import SamplingFields, SamplingParams
from jllama.generation.text import Completion
from jllama.language_model import LanguageModel
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
    """The token ids of a conversation: those of transformers' ``apply_chat_template``.

    Special tokens in the text that the template makes become their ids, also those that a message spells out; BOS is
    there if the template puts it there. ``add_generation_prompt`` ends with what begins an answer. Raises
    ``JllamaError``: a message is not as ``Message`` says, the model has no tokenizer, or the template fails.
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
    """The model's answer to a conversation; ``Conversation`` keeps one, and what was computed for it.

    ``template`` is Jinja, None is ``find_template``'s; the other arguments are those of ``generate``. Raises
    ``JllamaError`` as ``chat_ids`` does, and where the conversation exceeds the context.
    """
    ids, ends = _answerable(model, messages, template, max_new_tokens)
    return generate(model, ids, sampling, stop=stop, **ends, **fields)[0]


@dataclasses.dataclass
class Conversation:
    """A conversation with a model. Its keys and values are kept, so an answer computes only what is new.

    Example::

        conversation = jllama.Conversation(model)
        for piece in conversation.answer("What is a llama?", max_new_tokens=200, temperature=0.7):
            print(piece, end="", flush=True)
    """

    model: LanguageModel
    template: str | None = None  # None is find_template's
    messages: list[Message] = dataclasses.field(
        default_factory=list
    )  # what has been said, as in ``chat``
    engine: Engine | None = None  # which keeps what has been computed

    def answer(
        self,
        text: str,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[str, None, Completion]:
        """Say ``text`` to the model and hear its answer, in pieces as they come; both become messages.

        Where the generator, which returns the ``Completion``, is closed before its end, what was heard until then is
        the answer. Arguments and errors are those of ``chat``; after an error, ``text`` has not been said.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, ends = _answerable(self.model, messages, self.template, max_new_tokens)
        if self.engine is None or self.engine.busy:  # with another answer that is not at its end
            self.engine = Engine(self.model, 1, block_s=BLOCK_S, resumes=True)
        heard = ""
        with contextlib.closing(
            stream(self.model, ids, sampling, engine=self.engine, **ends, **fields)
        ) as pieces:
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    self.messages = [*messages, {"role": "assistant", "content": heard}]
                    return end.value
                heard += piece
                self.messages = [*messages, {"role": "assistant", "content": heard}]
                yield piece

    def undo(self) -> str:
        """Take back the last question and its answer; returns the question (``UsageError`` if there is none)."""
        questions = [
            index for index, message in enumerate(self.messages) if message["role"] == "user"
        ]
        if not questions:
            raise UsageError("nothing was said that could be taken back")
        question = self.messages[questions[-1]]["content"]
        self.messages = self.messages[: questions[-1]]
        return question


def _answerable(
    model: LanguageModel,
    messages: Sequence[Message],
    template: str | None,
    max_new_tokens: int | None,
) -> tuple[list[int], dict[str, Any]]:
    """The conversation's ids, and what ends its answer: no number of tokens where the context ends sooner."""
    ids, context = chat_ids(model, messages, template), model.config.max_seq_len
    if len(ids) >= context:
        wrong = f"the conversation now has {len(ids)} tokens and the model's context is {context}"
        raise JllamaError(f"{wrong}: begin a new one, or say less")
    stop_ids = end_of_turn_ids(model.text_tokenizer, model.stop_ids)
    fits = max_new_tokens is None or len(ids) + max_new_tokens <= context
    return ids, {"max_new_tokens": max_new_tokens if fits else None, "stop_ids": stop_ids}
