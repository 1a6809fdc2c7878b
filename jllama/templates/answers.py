"""Which tokens of a conversation are the assistant's own: what fine-tuning learns from."""

import os
from collections.abc import Sequence
from typing import Any

from jllama.errors import JllamaError
from jllama.templates.messages import Message, check_messages, template_variables
from jllama.templates.template import render_answers
from jllama.tokenizers import Tokenizer


def conversation_tokens(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], stop_ids: Sequence[int], tools: Any = None
) -> tuple[list[int], list[bool]]:
    """The token ids of a whole conversation, those of transformers' ``apply_chat_template``, and which of them count.

    Those of the assistant's answers count, and the one of ``stop_ids`` (``end_of_turn_ids``) that ends each; not what
    begins an answer, nor what follows its end. Where the template has ``{% generation %}`` tags, what is between them
    counts, as in transformers, and an end that directly follows it. ``tools`` is a list of JSON schemas. Raises
    ``JllamaError``: messages are not as ``Message`` says, none is an answer, or the template fails or leaves one out.
    """
    check_messages(messages, tools)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise JllamaError("no message is the assistant's, so there is nothing to learn: add an answer, or leave it out")
    text, spans, tagged = render_answers(template, template_variables(tokenizer, messages, False, tools), answers)
    ends = tuple(text for text, id in tokenizer.special_tokens.items() if id in stop_ids)
    ids = tokenizer.encode_with_special_tokens(text)
    counted = [False] * len(ids)
    for number, (start, end) in enumerate(spans, 1):
        rest = text[end:].lstrip()
        if rest.startswith(ends) and not (tagged and text[start:end].rstrip().endswith(ends)):
            end = len(text) - len(rest) + max(len(each) for each in ends if rest.startswith(each))
        begins = (tokenizer.encode_with_special_tokens(text[:cut]) for cut in (start, end))
        first, last = (len(os.path.commonprefix([begin, ids])) for begin in begins)  # noqa: RUF071 - it takes any lists
        if first >= last:
            remedy = "fill it, leave it out, or give a template with {% generation %} around answers"
            raise JllamaError(f"answer {number} is no part of its own in what the chat template writes: {remedy}")
        counted[first:last] = [True] * (last - first)
    return ids, counted
