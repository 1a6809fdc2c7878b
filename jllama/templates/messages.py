"""Messages, the text and token ids that a chat template makes of them, and which of those fine-tuning learns from."""

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jllama.errors import JllamaError, UsageError
from jllama.files import Json, fault_of
from jllama.templates.template import render, render_answers
from jllama.tokenizers import Tokenizer

Message = Mapping[str, Any]
"""``{"role": "system", "user", "assistant" or "tool", "content": text}``, as in transformers. An assistant's may have
``tool_calls``, a list of objects, and then no content; a tool's a ``name`` and a ``tool_call_id``."""

ROLES = ("system", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text")
"""What OpenAI's APIs call a part of a message that is text."""
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")
"""Special tokens with which templates end an answer, whether the checkpoint lists them as stop ids or not."""

SMOLLM2_TOOLS = (
    Path(__file__).with_name("tools").joinpath("smollm2.jinja").read_text(encoding="utf-8")
)
"""SmolLM2's own template, which takes no tools, and around it the prompt that its authors trained it with."""

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(Path(__file__).parent.glob("*.jinja"))
}
"""For checkpoints that come without one: what Meta's reference code does for Llama 2 and Llama 3, and ChatML."""


def find_template(tokenizer: Tokenizer, own: str | None, choice: str | None = None) -> str:
    """Return the Jinja template to converse with: ``choice`` (one of ``TEMPLATES``, or a file's path), or the model's.

    It is the one ``with_tools``. Of a model without one, its tokenizer decides between ``TEMPLATES``. Raises
    ``JllamaError`` if nothing does.
    """
    names = ", ".join(TEMPLATES)
    if choice is not None:
        with fault_of(
            f"the template {choice!r} cannot be read: give a file or one of {names}",
            OSError,
            ValueError,
        ):
            return with_tools(TEMPLATES.get(choice) or Path(choice).read_text(encoding="utf-8"))
    if own:
        return with_tools(own)
    for token, name in {"<|start_header_id|>": "llama3", "<|im_start|>": "chatml"}.items():
        if token in tokenizer.special_tokens:
            return TEMPLATES[name]
    if not tokenizer.is_byte_level:
        return TEMPLATES["llama2"]
    wrong = "the checkpoint has no chat template and its tokenizer no special tokens of a known one"
    raise JllamaError(
        f"{wrong}: give one of {names} or a file, if the model was trained to converse at all"
    )


def with_tools(template: str) -> str:
    """Return the template to use in place of a checkpoint's own: the same, or one that takes tools as well.

    SmolLM2's own takes none. Both write the same where there are no tools and no calls.
    """
    if "assistant named SmolLM" in template and "tools" not in template:
        return SMOLLM2_TOOLS
    return template


def end_of_turn_ids(tokenizer: Tokenizer, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end an answer: a model's stop ids, and those of ``END_OF_TURN`` that its tokenizer has."""
    special = tokenizer.special_tokens
    return tuple(
        dict.fromkeys([*stop_ids, *(special[text] for text in END_OF_TURN if text in special)])
    )


def conversing(
    tokenizer: Tokenizer, own: str | None, stop_ids: Sequence[int], choice: str = ""
) -> tuple[str | None, tuple[int, ...]]:
    """Return the template of ``find_template``, None if there is none, and the tokens that end an answer.

    Without stop ids these are EOS. Raises ``JllamaError`` for a ``choice`` that cannot be read.
    """
    template = None
    if choice:
        template = find_template(tokenizer, own, choice)
    else:
        with contextlib.suppress(JllamaError):
            template = find_template(tokenizer, own)
    return template, end_of_turn_ids(tokenizer, stop_ids or (tokenizer.eos_id,))


def template_variables(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Any = None,
    more: Any = None,
) -> Json:
    """What a template is given. ``add_generation_prompt`` asks it to end with what begins an answer.

    ``more`` are variables by their names, ``UsageError`` for one that every template is given.
    """
    texts = {id: text for text, id in tokenizer.special_tokens.items()}
    given = {
        "messages": [*map(dict, messages)],
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
    }
    given |= {
        "bos_token": texts[tokenizer.bos_id],
        "eos_token": texts[tokenizer.eos_id],
        "documents": None,
    }
    given["add_bos"] = (
        tokenizer.add_bos
    )  # whether a prompt begins with BOS: ours, not transformers'
    if taken := sorted(given.keys() & (more or {}).keys()):
        raise UsageError(f"the chat template is given {taken[0]!r} in any case: leave it out")
    return given | (more or {})


def message_ids(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], add_generation_prompt: bool
) -> list[int]:
    """The token ids of what a template makes of messages, whatever these hold; special tokens in it become theirs."""
    text = render(template, **template_variables(tokenizer, messages, add_generation_prompt))
    return tokenizer.encode_with_special_tokens(text)


def check_messages(messages: Sequence[Any], tools: Any = None, with_names: bool = False) -> None:
    """Raise ``UsageError`` unless there are messages and each is as ``Message`` says, and tools are objects.

    ``with_names`` lets every message have a ``name``.
    """
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"message {number} is of type {type(message).__name__}; it must have a role and a content"
            )
        role, content, calls = (message.get(name) for name in ("role", "content", "tool_calls"))
        is_call = role == "assistant" and "tool_calls" in message
        optional = set[str]()
        if is_call:
            optional = {"tool_calls", "content"}
        elif role == "tool":
            optional = {"name", "tool_call_id"}
        if with_names and isinstance(message.get("name"), str):
            optional.add("name")
        if message and role not in ROLES:
            found = f"the role {role!r}" if "role" in message else "no role"
            raise UsageError(f"message {number} has {found}; it must be one of {', '.join(ROLES)}")
        if set(message) - optional != {"role", "content"} - optional:
            names = ", ".join(map(repr, message)) or "nothing"
            raise UsageError(
                f"message {number} has {names}; it must have just 'role' and 'content'"
            )
        if not isinstance(content, str) and not (is_call and content is None):
            raise UsageError(
                f"message {number} has a content of type {type(content).__name__}, not text"
            )
        if is_call and not _are_objects(calls):
            raise UsageError(f"message {number} has tool_calls that are not a list of objects")
    if not _are_objects(tools or []):
        raise UsageError("the tools must be a list of objects, each the JSON schema of a function")


def openai_messages(messages: Sequence[Any], is_request: bool = True) -> list[Message]:
    """Return messages in OpenAI's form as templates take them.

    A developer's are the system's, parts of text are joined by line breaks, the arguments of calls are objects and no
    longer JSON, and fields of null or an empty list are left out; calls without content have an empty one. Raises
    ``UsageError`` for a message that is not as ``Message`` says (any may have a ``name``). In a request each call must
    have an id and arguments as JSON, and each result must answer an earlier call; files may differ there, and their
    calls keep a content of null.
    """
    found, called = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"message {number} is of type {type(message).__name__}; it must have a role and a content"
            )
        given = {
            name: value for name, value in message.items() if value is not None and value != []
        }
        if "tool_calls" in given:
            has_null = not is_request and message.get("content", "") is None
            calls = _read_calls(number, given["tool_calls"], is_request)
            given = {"content": None if has_null else "", **given, "tool_calls": calls}
            called += [call.get("id") for call in calls]
        if isinstance(parts := given.get("content"), list):
            texts = [
                part.get("text")
                for part in parts
                if isinstance(part, Mapping) and part.get("type") in TEXTS
            ]
            if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
                raise UsageError(
                    f"message {number} has a part that is not text: leave out images, audio and files"
                )
            given["content"] = "\n".join(map(str, texts))
        if given.get("role") == "developer":
            given["role"] = "system"
        if is_request and given.get("role") == "tool" and given.get("tool_call_id") not in called:
            raise UsageError(
                f"message {number} answers no call: its tool_call_id must be that of an earlier tool call"
            )
        found.append(given)
    check_messages(found, with_names=True)
    return found


def _read_calls(number: int, calls: Any, is_request: bool) -> list[Json]:
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return [_read_call(call, is_request) for call in calls]
    wrong = f"message {number} has tool_calls that are none"
    raise UsageError(
        f"{wrong}: each must have an id and a function with a name and arguments, an object as JSON"
    )


def _read_call(call: Any, is_request: bool) -> Json:
    """A call whose arguments are an object and no longer JSON; LookupError, TypeError or ValueError if it is none."""
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


def _check_order(messages: Sequence[Message]) -> None:
    """Refuse what some templates would write all the same: a system message late, a result of a tool nobody called."""
    for number, (before, message) in enumerate(itertools.pairwise(messages), 1):
        if message["role"] == "system":
            said = f"message {number} is the system's"
            raise UsageError(f"{said}: the roles are out of order, since it must be the first")
        if message["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before:
            said = f"message {number} is a tool's and message {number - 1} calls none"
            raise UsageError(
                f"{said}: the roles are out of order, since the assistant's tool_calls must come first"
            )


def _special_at(tokenizer: Tokenizer, text: str) -> str:
    """The special token that a text begins with, behind white space, or nothing."""
    return max(filter(text.lstrip().startswith, tokenizer.special_tokens), key=len, default="")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


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

    The ids are those of transformers' ``apply_chat_template``. Those of the assistant's answers count, of the messages
    ``learned`` (by index) where given, and the token that ends each: one of ``stop_ids`` (``end_of_turn_ids``), or the
    special token behind the conversation's last answer. Not what begins an answer, nor what follows its end. Where the
    template has ``{% generation %}`` tags, what is between them counts, as in transformers, and an end that directly
    follows it. ``tools`` is a list of JSON schemas. ``notes`` counts what is learned and may not be meant.

    Raises ``JllamaError``: messages are not as ``Message`` says, none is an answer, or the template fails or leaves a
    part of the conversation out.
    """
    check_messages(messages, tools, with_names=True)
    _check_order(messages)
    notes = Counter() if notes is None else notes
    # 1. What is to be learned
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [index for index in answers if learned is None or index in learned]
    if not chosen:
        said = "no answer has a weight of 1" if answers else "no message is the assistant's"
        raise JllamaError(f"{said}, so there is nothing to learn: add an answer, or leave it out")
    # 2. The text, and where the answers are in it
    variables = template_variables(tokenizer, messages, False, tools)
    text, spans, tagged, left_out = render_answers(template, variables, chosen)
    # 3. The tokens that count
    ids = tokenizer.encode_with_special_tokens(text)
    counted = [False] * len(ids)
    last = _special_at(tokenizer, text[spans[-1][1] :]) if chosen[-1] == len(messages) - 1 else ""
    ends = {text for text, id in tokenizer.special_tokens.items() if id in stop_ids or text == last}
    for number, (start, end, written, is_open) in enumerate(spans):
        rest = text[end:].lstrip()
        if is_open:
            rest = rest[min((rest.find(each) for each in ends if each in rest), default=0) :]
        following = _special_at(tokenizer, rest)
        is_ended = tagged and text[start:end].rstrip().endswith(tuple(ends))
        if following in ends and not is_ended:
            end = len(text) - len(rest) + len(following)
        elif following and not tagged:
            notes[f"answers followed by {following!r}, which is no stop id and is not learned"] += 1
        begins = (tokenizer.encode_with_special_tokens(text[:cut]) for cut in (start, end))
        first, last = (len(os.path.commonprefix([begin, ids])) for begin in begins)  # noqa: RUF071 - it takes any lists
        if first >= last:
            remedy = (
                "fill it, leave it out, or give a template with {% generation %} around answers"
            )
            raise JllamaError(
                f"answer {number + 1} is no part of its own in what the chat template writes: {remedy}"
            )
        counted[first:last] = [True] * (last - first)
        if written:
            notes[f"answers behind {written!r}, which the template writes and is not learned"] += 1
    # 4. What may not be meant
    if left_out:
        remedy = "leave that out of the file, too, or give another template (data.chat_template)"
        raise JllamaError(
            f"the chat template leaves out {' and '.join(left_out)}, which would be lost: {remedy}"
        )
    for answer in (messages[index] for index in chosen):
        content = (answer.get("content") or "").strip()
        if not content and not answer.get("tool_calls"):
            notes["answers that are empty"] += 1
        if content not in text:
            notes["answers of which the template leaves out or changes a part"] += 1
    if messages[-1]["role"] != "assistant":
        notes["conversations that end without an answer"] += 1
    return ids, counted
