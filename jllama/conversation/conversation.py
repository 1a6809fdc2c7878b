"""Conversations: from messages to token ids by a chat template, and from there to an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from jllama.conversation.template import render
from jllama.errors import JllamaError, UsageError
from jllama.generation.prefill import PrefixCache
from jllama.generation.sampling_params import SamplingFields, SamplingParams
from jllama.generation.text import Completion, generate, stream
from jllama.language_model import LanguageModel
from jllama.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer

Message = Mapping[str, Any]
"""``{"role": "system", "user" or "assistant", "content": text}``, as in transformers."""

ROLES = ("system", "user", "assistant")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Special tokens with which templates end an answer, whether the checkpoint lists them as stop ids or not."""

_LLAMA_2 = """\
{%- if messages[0].role == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system, turns = '', messages %}
{%- endif %}
{%- for turn in turns %}
    {%- if turn.role != ('assistant' if loop.index0 % 2 else 'user') %}
        {{- raise_exception('user and assistant must take turns, the user first, after at most one system message') }}
    {%- endif %}
    {%- if turn.role == 'assistant' %}
        {{- ' ' + turn.content.strip() + ' ' + eos_token }}
    {%- else %}
        {{- bos_token + '[INST] ' + ((system if loop.first else '') + turn.content).strip() + ' [/INST]' }}
    {%- endif %}
{%- endfor %}
"""

_LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content.strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_CHATML = """\
{%- if add_bos %}
    {{- bos_token }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEMPLATES = {"llama2": _LLAMA_2, "llama3": _LLAMA_3, "chatml": _CHATML}
"""For checkpoints that come without one: what Meta's reference code does for Llama 2 and Llama 3, and ChatML.

(``add_bos``, whether a prompt begins with BOS, is set by ``chat_ids``, not by transformers.)
"""


def chat_template(model: LanguageModel, choice: str | None = None) -> str:
    """The Jinja template to converse with.

    Args:
        model: its own template comes first; without one, its tokenizer's special tokens decide between ``TEMPLATES``.
        choice: overrides that: one of ``TEMPLATES``, or a file's path.

    Raises:
        JllamaError: there is no such file, or nothing says how this model converses.
    """
    if choice is not None:
        if choice in TEMPLATES:
            return TEMPLATES[choice]
        try:
            return Path(choice).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            wrong = f"the template {choice!r} cannot be read ({reason})"
            raise JllamaError(f"{wrong}: give a file or one of {', '.join(TEMPLATES)}") from error
    if model.chat_template:
        return model.chat_template
    tokenizer = model.text_tokenizer
    if "<|start_header_id|>" in tokenizer.special_tokens:
        return _LLAMA_3
    if "<|im_start|>" in tokenizer.special_tokens:
        return _CHATML
    if isinstance(tokenizer, SentencePieceTokenizer) or (
        isinstance(tokenizer, HuggingFaceTokenizer) and not tokenizer.is_byte_level
    ):
        return _LLAMA_2
    raise JllamaError(
        f"the checkpoint has no chat template and its tokenizer no special tokens of a known one: "
        f"give a template, one of {', '.join(TEMPLATES)} or a file, if the model was trained to converse at all"
    )


def chat_ids(
    model: LanguageModel,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """The token ids of a conversation: those of transformers' ``apply_chat_template``.

    Special tokens in the text that the template makes become their ids, also those that a message spells out; BOS is
    there if the template puts it there.

    Args:
        model: gives the tokenizer, and the template if none is given.
        messages: at least one.
        template: Jinja; None is ``chat_template(model)``.
        add_generation_prompt: end with what begins an answer.

    Raises:
        JllamaError: a message is not as ``Message`` says, the model has no tokenizer, or the template fails.
    """
    check_messages(messages)
    text = chat_text(model, messages, template, add_generation_prompt=add_generation_prompt)
    return model.text_tokenizer.encode_with_special_tokens(text)


def chat_text(
    model: LanguageModel,
    messages: Sequence[Message],
    template: str | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """What the template makes of messages, whatever they hold; arguments as for ``chat_ids``."""
    tokenizer = model.text_tokenizer
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    return render(
        chat_template(model) if template is None else template,
        messages=[dict(message) for message in messages],
        tools=None,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        bos_token=texts[tokenizer.bos_id],
        eos_token=texts[tokenizer.eos_id],
        add_bos=tokenizer.add_bos,
    )


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

    Args:
        model: what ``jllama.load`` gives.
        messages: what was said; each has a ``role`` (``system``, ``user``, ``assistant``) and a ``content``, its text.
        sampling: as ``max_new_tokens``, ``stop`` and ``fields`` those of ``generate``.
        max_new_tokens: the most tokens of the answer.
        stop: a string that ends the answer, or several.
        template: Jinja; None is ``chat_template(model)``, the model's own where it has one.
        **fields: ``temperature``, ``seed`` and the like.

    Raises:
        JllamaError: a message is not as it should be, the conversation does not fit the context, the model has no
            tokenizer, or the template fails.
    """
    ids, most = _answerable(model, messages, template, max_new_tokens)
    stop_ids = chat_stop_ids(model)
    return generate(model, ids, sampling, max_new_tokens=most, stop=stop, stop_ids=stop_ids, **fields)[0]


@dataclasses.dataclass
class Conversation:
    """A conversation with a model. Its keys and values are kept, so an answer computes only what is new.

    Example::

        conversation = jllama.Conversation(model)
        for piece in conversation.answer("What is a llama?", max_new_tokens=200, temperature=0.7):
            print(piece, end="", flush=True)

    Args:
        model: with a tokenizer.
        template: Jinja; None is ``chat_template(model)``, the model's own where it has one.
        messages: what has been said, as in ``chat``.
        prefix: what has been computed.
    """

    model: LanguageModel
    template: str | None = None
    messages: list[Message] = dataclasses.field(default_factory=list)
    prefix: PrefixCache = dataclasses.field(default_factory=PrefixCache)

    def answer(
        self,
        text: str,
        sampling: SamplingParams | None = None,
        max_new_tokens: int | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[str, None, Completion]:
        """Say ``text`` to the model and hear its answer, in pieces as they are made; both become messages.

        Where the generator is closed before its end, what was heard until then is the answer. It returns the
        ``Completion``, whose reason is ``context`` if the answer filled the model's context. The other arguments are
        those of ``chat``.

        Raises:
            JllamaError: the conversation does not fit the context, or the template fails; ``text`` is not said then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, most = _answerable(self.model, messages, self.template, max_new_tokens)
        stop_ids = chat_stop_ids(self.model)
        pieces = stream(self.model, ids, sampling, max_new_tokens=most, stop_ids=stop_ids, prefix=self.prefix, **fields)
        heard, completion = "", None
        while completion is None:
            try:
                piece = next(pieces)
            except StopIteration as end:
                piece, completion = "", end.value
            heard += piece
            self.messages = [*messages, {"role": "assistant", "content": heard}]
            if completion is None:
                yield piece
        return completion

    def undo(self) -> str:
        """Take back the last question and its answer; returns the question.

        Raises:
            UsageError: nothing was said.
        """
        questions = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            raise UsageError("nothing was said that could be taken back")
        question = self.messages[questions[-1]]["content"]
        self.messages = self.messages[: questions[-1]]
        return question


def _answerable(
    model: LanguageModel, messages: Sequence[Message], template: str | None, max_new_tokens: int | None
) -> tuple[list[int], int | None]:
    """The conversation's ids, and the limit of its answer; None where the context ends sooner."""
    ids, context = chat_ids(model, messages, template), model.config.max_seq_len
    if len(ids) >= context:
        raise JllamaError(
            f"the conversation now has {len(ids)} tokens and the model's context is {context}: "
            f"begin a new one, or say less"
        )
    return ids, None if max_new_tokens is not None and len(ids) + max_new_tokens > context else max_new_tokens


def check_messages(messages: Sequence[Any]) -> None:
    """Raise ``UsageError`` unless there are messages and each is as ``Message`` says."""
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}; it must have a role and a content")
        if set(message) != {"role", "content"}:
            found = ", ".join(map(repr, message)) or "nothing"
            raise UsageError(f"message {number} has {found}; it must have just 'role' and 'content'")
        if message["role"] not in ROLES:
            raise UsageError(f"message {number} has the role {message['role']!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise UsageError(f"message {number} has a content of type {type(message['content']).__name__}, not text")
