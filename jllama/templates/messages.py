"""Messages, the token ids that a chat template makes of them, and which of these are learned."""

import contextlib
import datetime
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jllama.core import JllamaError, UsageError
from jllama.system.files import Json, errors_as
from jllama.templates.template import AnswerSpan, Rendered, render, render_answers
from jllama.tokenizers.base import Tokenizer

Message = Mapping[str, Any]
"""``{"role": "system", "user", "assistant" or "tool", "content": text}``, as in transformers. An
assistant's may have ``reasoning_content``, its thoughts as text, and ``tool_calls``, a list of
objects, and then no content. A tool's may have a ``name`` and a ``tool_call_id``."""

ROLES = ("system", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text")
"""The types of a text part of a message in OpenAI's APIs."""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>")
"""Special tokens with which templates end an answer, even if the checkpoint does not list them as
stop ids."""

_TOOLS = {
    path.stem: path.read_text(encoding="utf-8")
    for path in Path(__file__).with_name("tools").glob("*.jinja")
}
SMOLLM2_TOOLS = _TOOLS["smollm2"]
"""SmolLM2's own template, which takes no tools, with the tool prompt of its training around it."""
_BEGINNINGS = {
    "smollm3": ("xml_tools", "tool_calls"),
    "granite": ("<|tool_call|>", "tool_calls"),
    "phi4_mini": ("<|/tool|>", "tool_calls"),
    "mistral": ("length != 9", "short_id"),
}
"""Beginnings for templates that take no calls, or only calls with ids of nine characters: a text
that such a template has, and one that it lacks."""

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
"""Templates for checkpoints without one: what Meta's reference code does for Llama 2 and Llama 3,
ChatML, and those of Mistral's third tokenizer, of Phi-4 and of Granite 3 without tools."""
_TEMPLATE_OF = {
    "<|start_header_id|>": "llama3",
    "<|im_sep|>": "phi4",
    "<|im_start|>": "chatml",
    "<|start_of_role|>": "granite",
    "[INST]": "mistral",
}
"""The template of a tokenizer by a special token, the first that it has."""


def find_template(tokenizer: Tokenizer, own: str | None, choice: str | None = None) -> str:
    """Return the Jinja template to converse with, as ``with_tools`` and ``with_date`` return it.

    Args:
        tokenizer: decides between ``TEMPLATES`` if there is neither a choice nor an own template.
        own: the template of the checkpoint.
        choice: one of ``TEMPLATES``, or the path of a file.

    Raises:
        JllamaError: there is no template, or the file cannot be read.
    """
    names = ", ".join(TEMPLATES)
    if choice is not None:
        advice = f"the template {choice!r} cannot be read: give a file or one of {names}"
        with errors_as(advice, OSError, ValueError):
            own = TEMPLATES.get(choice) or Path(choice).read_text(encoding="utf-8")
    if own:
        return with_date(with_tools(own))
    for token, name in _TEMPLATE_OF.items():
        if token in tokenizer.special_tokens:
            return TEMPLATES[name]
    if not tokenizer.is_byte_level:
        return TEMPLATES["llama2"]
    raise JllamaError(
        "the checkpoint has no chat template and its tokenizer no special tokens of a known one: "
        f"give one of {names} or a file, if the model was trained to converse at all"
    )


def with_date(template: str) -> str:
    """Put today's date in front of a template that asks for it and has none, as a comment.

    A rendering then depends on nothing but the template and its variables. Other programs pass over
    the comment.
    """
    if "strftime_now" not in template or "{# date: " in template:
        return template
    return f"{{# date: {datetime.date.today()} #}}{template}"


def with_tools(template: str) -> str:
    """Return a template that takes tools and their calls, for one that does not.

    SmolLM2's own is replaced, others get a beginning. All write the same if there are no tools and
    no calls.
    """
    if "assistant named SmolLM" in template and not re.search("tools|Reasoning", template):
        return SMOLLM2_TOOLS
    for name, (part, missing) in _BEGINNINGS.items():
        if part in template and missing not in template:
            return _TOOLS[name] + template
    return template


def end_of_turn_ids(tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end an answer: the stop ids, and ``END_OF_TURN`` of the tokenizer."""
    special = tokenizer.special_tokens
    ends = (special[text] for text in END_OF_TURN if text in special)
    return tuple(dict.fromkeys([*stop_ids, *ends]))


def chat_format(
    tokenizer: Tokenizer, own: str | None, stop_ids: Sequence[int], choice: str = ""
) -> tuple[str | None, tuple[int, ...]]:
    """Return the template of ``find_template``, or None, and the tokens that end an answer.

    If there are no stop ids, EOS is one.

    Raises:
        JllamaError: ``choice`` cannot be read.
    """
    template = None
    try:
        template = find_template(tokenizer, own, choice or None)
    except JllamaError:
        if choice:
            raise
    return template, end_of_turn_ids(tokenizer, tokenizer.stops_or_eos(stop_ids))


def template_variables(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Any = None,
    more: Any = None,
) -> Json:
    """Return the variables of a template.

    Args:
        tokenizer: provides the special tokens.
        messages: the conversation.
        add_generation_prompt: whether the text ends with what begins an answer.
        tools: a list of JSON schemas, or None.
        more: further variables by their names.

    Raises:
        UsageError: ``more`` has a variable that every template receives.
    """
    more = more or {}
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    variables = {
        "messages": [*map(dict, messages)],
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "bos_token": texts[tokenizer.bos_id],
        "eos_token": texts[tokenizer.eos_id],
        "documents": None,
        # Whether a prompt begins with BOS: jllama's own variable, not one of transformers.
        "add_bos": tokenizer.add_bos,
    }
    for name in sorted(variables.keys() & more):
        raise UsageError(f"the chat template is given {name!r} in any case: leave it out")
    return variables | more


def message_ids(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Any = None,
) -> list[int]:
    """Return the token ids of the text that a template makes of messages, which are not checked.

    Special tokens in the text become their ids.
    """
    variables = template_variables(tokenizer, messages, add_generation_prompt, tools)
    text = render(template, **variables)
    return tokenizer.encode_with_special_tokens(text)


def check_messages(messages: Sequence[Any], tools: Any = None, with_names: bool = False) -> None:
    """Raise ``UsageError`` unless the messages are ``Message`` objects and the tools are objects.

    There must be at least one message. ``with_names`` allows every message a ``name``.
    """
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    for number, message in enumerate(messages):
        problem = _message_problem(message, with_names)
        if problem:
            raise UsageError(f"message {number} {problem}")
    if not _are_objects(tools or []):
        raise UsageError("the tools must be a list of objects, each the JSON schema of a function")


def _message_problem(message: Any, with_names: bool) -> str:
    """Return what is wrong with a message, or an empty text."""
    if not isinstance(message, Mapping):
        return f"is of type {type(message).__name__}; it must have a role and a content"
    role = message.get("role")
    content = message.get("content")
    is_call = role == "assistant" and "tool_calls" in message
    optional = set[str]()
    if is_call:
        optional = {"tool_calls", "content"}
    elif role == "tool":
        optional = {"name", "tool_call_id"}
    if role == "assistant" and isinstance(message.get("reasoning_content"), str):
        optional.add("reasoning_content")
    if with_names and isinstance(message.get("name"), str):
        optional.add("name")
    if message and role not in ROLES:
        actual = f"the role {role!r}" if "role" in message else "no role"
        return f"has {actual}; it must be one of {', '.join(ROLES)}"
    if set(message) - optional != {"role", "content"} - optional:
        names = ", ".join(map(repr, message)) or "nothing"
        return f"has {names}; it must have just 'role' and 'content'"
    if not isinstance(content, str) and not (is_call and content is None):
        return f"has a content of type {type(content).__name__}, not text"
    if is_call and not _are_objects(message["tool_calls"]):
        return "has tool_calls that are not a list of objects"
    return ""


def openai_messages(messages: Sequence[Any], is_request: bool = True) -> list[Message]:
    """Return messages in OpenAI's form as templates take them.

    - A developer's message becomes the system's.
    - Parts of text are joined by line breaks.
    - The arguments of calls become objects, no longer JSON.
    - Fields of null or an empty list are left out. Calls without content get an empty one, and so
      does null of an assistant; in a file a content of null stays.

    In a request each call must have an id and arguments as JSON, and each result must answer an
    earlier call. In files this is not required.

    Raises:
        UsageError: a message is not a ``Message``; any message may have a ``name``.
    """
    converted = []
    call_ids = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} {_message_problem(message, with_names=True)}")
        fields = {
            name: value for name, value in message.items() if value is not None and value != []
        }
        if "tool_calls" in fields:
            has_null = not is_request and message.get("content", "") is None
            calls = _read_calls(number, fields["tool_calls"], is_request)
            fields = {"content": None if has_null else "", **fields, "tool_calls": calls}
            call_ids += [call.get("id") for call in calls]
        elif is_request and fields.get("role") == "assistant" and "content" in message:
            fields.setdefault("content", "")
        if isinstance(fields.get("content"), list):
            fields["content"] = "\n".join(_part_text(number, part) for part in fields["content"])
        if fields.get("role") == "developer":
            fields["role"] = "system"
        is_result = is_request and fields.get("role") == "tool"
        if is_result and fields.get("tool_call_id") not in call_ids:
            raise UsageError(
                f"message {number} answers no call: "
                "its tool_call_id must be that of an earlier tool call"
            )
        converted.append(fields)
    check_messages(converted, with_names=True)
    return converted


def _part_text(number: int, part: Any) -> str:
    """Return the text of a part of a message."""
    if isinstance(part, Mapping) and part.get("type") in TEXTS:
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise UsageError(
        f"message {number} has a part that is not text: leave out images, audio and files"
    )


def _read_calls(number: int, calls: Any, is_request: bool) -> list[Json]:
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return [_read_call(call, is_request) for call in calls]
    raise UsageError(
        f"message {number} has tool_calls that are none: each must have an id and a function with "
        "a name and arguments, an object as JSON"
    )


def _read_call(call: Any, is_request: bool) -> Json:
    """Return a call whose arguments are an object, no longer JSON.

    If it is not a call, raise one of the errors that ``_read_calls`` suppresses.
    """
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    is_json = isinstance(function.get("arguments"), str)
    if is_json:
        arguments = json.loads(function["arguments"] or "{}")
    is_right = isinstance(function["name"], str) and isinstance(arguments, dict)
    if not is_right or (is_request and not (is_json and isinstance(call["id"], str))):
        raise TypeError
    return {
        **call,
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _special_at(tokenizer: Tokenizer, text: str) -> str:
    """Return the special token that a text begins with, after white space, or an empty text."""
    return max(filter(text.lstrip().startswith, tokenizer.special_tokens), key=len, default="")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def conversation_tokens(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    stop_ids: Sequence[int],
    tools: Any = None,
    *,
    learned: Collection[int] | None = None,
    notes: Counter[str] | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a whole conversation, and which of them count.

    The ids are those of transformers' ``apply_chat_template``. The answers of the assistant count,
    each with the token that ends it: one of ``stop_ids``, or the special token after the
    conversation's last answer. The text that begins an answer, or follows its end, does not count.
    If the template has ``{% generation %}`` tags, the text between them counts, as in transformers,
    and an end that directly follows it.

    Args:
        tokenizer: the model's tokenizer.
        template: a Jinja template.
        messages: the conversation, with at least one answer.
        stop_ids: the tokens that end an answer, see ``end_of_turn_ids``.
        tools: a list of JSON schemas.
        learned: the indices of the answers that count; by default all.
        notes: counts what is learned and may be a mistake.

    Raises:
        JllamaError: messages are not ``Message`` objects, none is an answer, or the template fails
            or leaves out a part of the conversation.
    """
    # 1. Render the text, and find the answers in it.
    check_messages(messages, tools, with_names=True)
    # Some templates would accept a system message that is not the first, or the result of a tool
    # that nobody called.
    for number, (before, message) in enumerate(itertools.pairwise(messages), 1):
        if message["role"] == "system":
            raise UsageError(
                f"message {number} is the system's: "
                "the roles are out of order, since it must be the first"
            )
        if message["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before:
            raise UsageError(
                f"message {number} is a tool's and message {number - 1} calls none: the roles are "
                "out of order, since the assistant's tool_calls must come first"
            )
    chosen = _learned_answers(messages, learned)
    variables = template_variables(tokenizer, messages, False, tools)
    rendered = render_answers(template, variables, chosen)

    # 2. Collect the texts that end an answer.
    text = rendered.text
    ends = {token for token, id in tokenizer.special_tokens.items() if id in stop_ids}
    if chosen[-1] == len(messages) - 1:
        ends.add(_special_at(tokenizer, text[rendered.spans[-1].end :]))
    ends.discard("")

    # 3. Mark the tokens that count.
    notes = Counter() if notes is None else notes
    ids = tokenizer.encode_with_special_tokens(text)
    counted = [False] * len(ids)
    for number, span in enumerate(rendered.spans, 1):
        end = _end_of_answer(tokenizer, rendered, span, ends, notes)
        first = _num_shared_tokens(tokenizer, text[: span.start], ids)
        last = _num_shared_tokens(tokenizer, text[:end], ids)
        if first >= last:
            raise JllamaError(
                f"answer {number} is no part of its own in what the chat template writes: fill "
                "it, leave it out, or give a template with {% generation %} around answers"
            )
        counted[first:last] = [True] * (last - first)
        if span.written:
            written = f"answers behind {span.written!r}"
            notes[f"{written}, which the template writes and is not learned"] += 1

    # 4. Refuse or note what may be a mistake.
    _note_doubts([messages[index] for index in chosen], rendered, notes)
    if messages[-1]["role"] != "assistant":
        notes["conversations that end without an answer"] += 1
    return ids, counted


def _learned_answers(messages: Sequence[Message], learned: Collection[int] | None) -> list[int]:
    """Return the indices of the answers that count; ``JllamaError`` if there are none."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [index for index in answers if learned is None or index in learned]
    if not chosen:
        problem = "no answer has a weight of 1" if answers else "no message is the assistant's"
        raise JllamaError(
            f"{problem}, so there is nothing to learn: add an answer, or leave it out"
        )
    return chosen


def _end_of_answer(
    tokenizer: Tokenizer,
    rendered: Rendered,
    span: AnswerSpan,
    ends: Collection[str],
    notes: Counter[str],
) -> int:
    """Return where an answer ends in the text, with the one of ``ends`` that follows it, if any."""
    text = rendered.text
    rest = text[span.end :].lstrip()
    if span.is_open:
        # The template writes text of its own before the token that ends the answer.
        rest = rest[min((rest.find(token) for token in ends if token in rest), default=0) :]
    following = _special_at(tokenizer, rest)
    answer = text[span.start : span.end].rstrip()
    is_ended = rendered.is_tagged and answer.endswith(tuple(ends))
    if following in ends and not is_ended:
        return len(text) - len(rest) + len(following)
    if following and not rendered.is_tagged:
        notes[f"answers followed by {following!r}, which is no stop id and is not learned"] += 1
    return span.end


def _note_doubts(answers: Sequence[Message], rendered: Rendered, notes: Counter[str]) -> None:
    """Note what may be a mistake; ``JllamaError`` if the template leaves out a part."""
    lost = []
    for part in rendered.left_out:
        if part.startswith("the thoughts"):
            notes["answers whose thoughts the template leaves out"] += 1
        else:
            lost.append(part)
    if lost:
        raise JllamaError(
            f"the chat template leaves out {' and '.join(lost)}, which would be lost: leave "
            "that out of the file, too, or give another template (data.chat_template)"
        )
    for message in answers:
        content = (message.get("content") or "").strip()
        if not content and not message.get("tool_calls"):
            notes["answers that are empty"] += 1
        if content not in rendered.text:
            notes["answers of which the template leaves out or changes a part"] += 1


def _num_shared_tokens(tokenizer: Tokenizer, text: str, ids: list[int]) -> int:
    """Return how many first tokens the beginning of a text has in common with the whole text."""
    begin = tokenizer.encode_with_special_tokens(text)
    return len(os.path.commonprefix([begin, ids]))  # noqa: RUF071 - it takes any lists
