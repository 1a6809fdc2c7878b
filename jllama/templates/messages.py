"""Messages, the text and token ids that a chat template makes of them, and which of those fine-tuning learns from."""

import contextlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jllama.errors import JllamaError, UsageError
from jllama.files import fault_of
from jllama.templates.template import render, render_answers
from jllama.tokenizers import Tokenizer

Message = Mapping[str, Any]
"""``{"role": "system", "user", "assistant" or "tool", "content": text}``, as in transformers. An assistant's may have
``tool_calls``, a list of objects, and then no content; a tool's a ``name`` and a ``tool_call_id``."""

ROLES = ("system", "user", "assistant", "tool")
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Special tokens with which templates end an answer, whether the checkpoint lists them as stop ids or not."""

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.jinja"))}
"""For checkpoints that come without one: what Meta's reference code does for Llama 2 and Llama 3, and ChatML."""


def find_template(tokenizer: Tokenizer, own: str | None, choice: str | None = None) -> str:
    """The Jinja template to converse with: ``choice`` (one of ``TEMPLATES``, or a file's path), or the model's own.

    Of a model without one, its tokenizer decides between ``TEMPLATES``. Raises ``JllamaError`` if nothing does.
    """
    names = ", ".join(TEMPLATES)
    if choice is not None:
        with fault_of(f"the template {choice!r} cannot be read: give a file or one of {names}", OSError, ValueError):
            return TEMPLATES.get(choice) or Path(choice).read_text(encoding="utf-8")
    if own:
        return own
    for token, name in {"<|start_header_id|>": "llama3", "<|im_start|>": "chatml"}.items():
        if token in tokenizer.special_tokens:
            return TEMPLATES[name]
    if not tokenizer.is_byte_level:
        return TEMPLATES["llama2"]
    wrong = "the checkpoint has no chat template and its tokenizer no special tokens of a known one"
    raise JllamaError(f"{wrong}: give one of {names} or a file, if the model was trained to converse at all")


def end_of_turn_ids(tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end an answer: a model's stop ids, and those of ``END_OF_TURN`` that its tokenizer has."""
    special = tokenizer.special_tokens
    return tuple(dict.fromkeys([*stop_ids, *(special[text] for text in END_OF_TURN if text in special)]))


def conversing(tokenizer: Tokenizer, own: str | None, stop_ids: Sequence[int]) -> tuple[str | None, tuple[int, ...]]:
    """The template of ``find_template``, None if there is none, and the tokens that end an answer, EOS by default."""
    template = None
    with contextlib.suppress(JllamaError):
        template = find_template(tokenizer, own)
    return template, end_of_turn_ids(tokenizer, stop_ids or (tokenizer.eos_id,))


def template_variables(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool, tools: Any = None, more: Any = None
) -> dict[str, Any]:
    """What a template is given. ``add_generation_prompt`` asks it to end with what begins an answer.

    ``more`` are variables by their names, ``UsageError`` for one that every template is given.
    """
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    given = {"messages": [*map(dict, messages)], "add_generation_prompt": add_generation_prompt, "tools": tools}
    given |= {"bos_token": texts[tokenizer.bos_id], "eos_token": texts[tokenizer.eos_id], "documents": None}
    given["add_bos"] = tokenizer.add_bos  # whether a prompt begins with BOS: ours, not transformers'
    if taken := sorted(given.keys() & (more or {}).keys()):
        raise UsageError(f"the chat template is given {taken[0]!r} in any case: leave it out")
    return given | (more or {})


def message_ids(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], add_generation_prompt: bool
) -> list[int]:
    """The token ids of what a template makes of messages, whatever these hold; special tokens in it become theirs."""
    text = render(template, **template_variables(tokenizer, messages, add_generation_prompt))
    return tokenizer.encode_with_special_tokens(text)


def check_messages(messages: Sequence[Any], tools: Any = None) -> None:
    """Raise ``UsageError`` unless there are messages and each is as ``Message`` says, and tools are objects."""
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}; it must have a role and a content")
        role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
        is_call = role == "assistant" and "tool_calls" in message
        optional = {"tool_calls", "content"} if is_call else {"name", "tool_call_id"} if role == "tool" else set()
        if set(message) - optional != {"role", "content"} - optional:
            names = ", ".join(map(repr, message)) or "nothing"
            raise UsageError(f"message {number} has {names}; it must have just 'role' and 'content'")
        if role not in ROLES:
            raise UsageError(f"message {number} has the role {role!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (is_call and content is None):
            raise UsageError(f"message {number} has a content of type {type(content).__name__}, not text")
        if is_call and not _are_objects(calls):
            raise UsageError(f"message {number} has tool_calls that are not a list of objects")
    if not _are_objects(tools or []):
        raise UsageError("the tools must be a list of objects, each the JSON schema of a function")


def openai_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages of a request to OpenAI's API, as templates take them.

    A developer's are the system's, parts of text are joined by line breaks, the arguments of calls are objects and no
    longer JSON, and fields of null or an empty list are left out. Raises ``UsageError`` for a message that is not as
    ``Message`` says (any may have a ``name``), and for the result of a call that no message before it makes.
    """
    found, called = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is of type {type(message).__name__}; it must have a role and a content")
        given = {name: value for name, value in message.items() if value is not None and value != []}
        if "tool_calls" in given:
            given = {"content": "", **given, "tool_calls": _read_calls(number, given["tool_calls"])}
            called += [call["id"] for call in given["tool_calls"]]
        if isinstance(parts := given.get("content"), list):
            texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
            if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
                raise UsageError(f"message {number} has a part that is not text: leave out images, audio and files")
            given["content"] = "\n".join(map(str, texts))
        given |= {"role": "system"} if given.get("role") == "developer" else {}
        if given.get("role") == "tool" and given.get("tool_call_id") not in called:
            raise UsageError(f"message {number} answers no call: its tool_call_id must be that of an earlier tool call")
        found.append(given)
    check_messages([{key: each[key] for key in each if key != "name" or type(each[key]) is not str} for each in found])
    return found


def _read_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    with contextlib.suppress(LookupError, TypeError, ValueError, RecursionError):
        said = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
        read = [(id, name, json.loads(arguments) if arguments != "" else {}) for id, name, arguments in said]
        if all((type(id), type(name), type(arguments)) == (str, str, dict) for id, name, arguments in read):
            functions = [(id, {"name": name, "arguments": arguments}) for id, name, arguments in read]
            return [{"id": id, "type": "function", "function": function} for id, function in functions]
    wrong = f"message {number} has tool_calls that are none"
    raise UsageError(f"{wrong}: each must have an id and a function with a name and arguments, an object as JSON")


def _check_order(messages: Sequence[Message]) -> None:
    """Refuse what some templates would write all the same: a system message late, a result of a tool nobody called."""
    for number, (before, message) in enumerate(itertools.pairwise(messages), 1):
        if message["role"] == "system":
            said = f"message {number} is the system's"
            raise UsageError(f"{said}: the roles are out of order, since it must be the first")
        if message["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before:
            said = f"message {number} is a tool's and message {number - 1} calls none"
            raise UsageError(f"{said}: the roles are out of order, since the assistant's tool_calls must come first")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


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
    _check_order(messages)
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
