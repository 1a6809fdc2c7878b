"""Conversations: from messages to token ids by a chat template, and from there to an answer."""

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from jllama.conversation.template import render
from jllama.errors import JllamaError, UsageError
from jllama.files import fault_of
from jllama.generation.prefill import PrefixCache
from jllama.generation.sampling_params import SamplingFields, SamplingParams
from jllama.generation.text import Completion, generate, stream
from jllama.language_model import LanguageModel

Message = Mapping[str, Any]
"""``{"role": "system", "user" or "assistant", "content": text}``, as in transformers."""

ROLES, _ABSENT = ("system", "user", "assistant"), ("tools", "documents")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Special tokens with which templates end an answer, whether the checkpoint lists them as stop ids or not."""

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.jinja"))}
"""For checkpoints that come without one: what Meta's reference code does for Llama 2 and Llama 3, and ChatML."""


def chat_template(model: LanguageModel, choice: str | None = None) -> str:
    """The Jinja template to converse with: ``choice`` (one of ``TEMPLATES``, or a file's path), or the model's own.

    Of a model without one, its tokenizer decides between ``TEMPLATES``. Raises ``JllamaError`` if nothing does.
    """
    names = ", ".join(TEMPLATES)
    if choice is not None:
        with fault_of(f"the template {choice!r} cannot be read: give a file or one of {names}", OSError, ValueError):
            return TEMPLATES.get(choice) or Path(choice).read_text(encoding="utf-8")
    if model.chat_template:
        return model.chat_template
    tokenizer = model.text_tokenizer
    for token, name in {"<|start_header_id|>": "llama3", "<|im_start|>": "chatml"}.items():
        if token in tokenizer.special_tokens:
            return TEMPLATES[name]
    if not tokenizer.is_byte_level:
        return TEMPLATES["llama2"]
    wrong = "the checkpoint has no chat template and its tokenizer no special tokens of a known one"
    raise JllamaError(f"{wrong}: give one of {names} or a file, if the model was trained to converse at all")


def chat_text(
    model: LanguageModel, messages: Sequence[Message], template: str | None = None, add_generation_prompt: bool = True
) -> str:
    """What the template makes of messages, whatever they hold; arguments as for ``chat_ids``."""
    tokenizer = model.text_tokenizer
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    given = {"messages": [*map(dict, messages)], "add_generation_prompt": add_generation_prompt}
    given |= {"bos_token": texts[tokenizer.bos_id], "eos_token": texts[tokenizer.eos_id]} | dict.fromkeys(_ABSENT)
    given["add_bos"] = tokenizer.add_bos  # whether a prompt begins with BOS: ours, not transformers'
    return render(chat_template(model) if template is None else template, **given)


def chat_ids(
    model: LanguageModel, messages: Sequence[Message], template: str | None = None, add_generation_prompt: bool = True
) -> list[int]:
    """The token ids of a conversation: those of transformers' ``apply_chat_template``.

    Special tokens in the text that the template makes become their ids, also those that a message spells out; BOS is
    there if the template puts it there. ``add_generation_prompt`` ends with what begins an answer. Raises
    ``JllamaError``: a message is not as ``Message`` says, the model has no tokenizer, or the template fails.
    """
    check_messages(messages)
    text = chat_text(model, messages, template, add_generation_prompt)
    return model.text_tokenizer.encode_with_special_tokens(text)


def chat_stop_ids(model: LanguageModel) -> tuple[int, ...]:
    """The tokens that end an answer: the model's stop ids, and those of ``END_OF_TURN`` that its tokenizer has."""
    special = model.text_tokenizer.special_tokens
    return tuple(dict.fromkeys([*model.stop_ids, *(special[text] for text in END_OF_TURN if text in special)]))


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

    Example::

        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a llama?"}]
        print(jllama.chat(model, messages, max_new_tokens=200, temperature=0.7).text)

    ``template`` is Jinja, None is ``chat_template(model)``; the other arguments are those of ``generate``. Raises
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
    template: str | None = None  # None is chat_template(model)
    messages: list[Message] = dataclasses.field(default_factory=list)  # what has been said, as in ``chat``
    prefix: PrefixCache = dataclasses.field(default_factory=PrefixCache)  # what has been computed

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
        pieces, heard = stream(self.model, ids, sampling, prefix=self.prefix, **ends, **fields), ""
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
        questions = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            raise UsageError("nothing was said that could be taken back")
        question = self.messages[questions[-1]]["content"]
        self.messages = self.messages[: questions[-1]]
        return question


def _answerable(
    model: LanguageModel, messages: Sequence[Message], template: str | None, max_new_tokens: int | None
) -> tuple[list[int], dict[str, Any]]:
    """The conversation's ids, and what ends its answer: no number of tokens where the context ends sooner."""
    ids, context = chat_ids(model, messages, template), model.config.max_seq_len
    if len(ids) >= context:
        wrong = f"the conversation now has {len(ids)} tokens and the model's context is {context}"
        raise JllamaError(f"{wrong}: begin a new one, or say less")
    fits = max_new_tokens is None or len(ids) + max_new_tokens <= context
    return ids, {"max_new_tokens": max_new_tokens if fits else None, "stop_ids": chat_stop_ids(model)}


def check_messages(messages: Sequence[Any]) -> None:
    """Raise ``UsageError`` unless there are messages and each is as ``Message`` says."""
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}; it must have a role and a content")
        if set(message) != {"role", "content"}:
            names = ", ".join(map(repr, message)) or "nothing"
            raise UsageError(f"message {number} has {names}; it must have just 'role' and 'content'")
        if message["role"] not in ROLES:
            raise UsageError(f"message {number} has the role {message['role']!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise UsageError(f"message {number} has a content of type {type(message['content']).__name__}, not text")
