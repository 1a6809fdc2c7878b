"""OpenAI's API: requests, from JSON to what the engine takes.

Rules for the fields of a request:

- A field that is null counts as left out.
- A field that is served is checked: its type and range.
- A field of OpenAI's that is not served and could change the answer (``NOT_SERVED``) is refused,
  unless its value requests the default behavior. One that cannot change it (``IGNORED``) is
  ignored.
- Any other field is refused, with a suggestion of the nearest name.
- The same holds for the fields of mappings in a request (``Fields.nested``).
- ``--ignore_unknown`` ignores the last two kinds as well, except for ``ESSENTIAL`` fields.
- The fields of ``SamplingParams`` have the same names and ranges here; a seed that is left out is
  drawn.
"""

import dataclasses
import functools
import json
import secrets
import time
import uuid
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from jllama.core import UsageError
from jllama.generation.requests import MAX_TOP, Pooling, Request
from jllama.generation.sampling_params import Grammar, GrammarKind, Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.models.language_model import LanguageModel
from jllama.serve.engine import EngineThread
from jllama.serve.tools import Dialect, call_grammar, check_tools, find_dialect
from jllama.system.errors import unknown_name
from jllama.system.files import Json, errors_as
from jllama.templates.messages import (
    chat_format,
    find_template,
    openai_messages,
    template_variables,
)
from jllama.templates.template import render

NOT_SERVED = {
    "audio": [],
    "prediction": [],
    "verbosity": [],
    "web_search_options": [],
    "suffix": [""],
    "best_of": [1],
    "function_call": ["none"],
    "functions": [[]],
    "modalities": [["text"]],
    "reasoning_effort": ["none"],
    "background": [False],
    "include": [[]],
    "reasoning": [{}],
    "truncation": ["disabled"],
    "annotations": [[]],
}
"""Fields of OpenAI's that are refused, and the values of each that change no answer."""
IGNORED = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields of OpenAI's that cannot change an answer."""
# Names of what OpenAI's servers store between requests.
_STORED = {"conversation", "previous_response_id"}
ESSENTIAL = _STORED | {"audio", "function_call", "functions", "modalities", "suffix"}
"""Fields of OpenAI's that are part of the question: ``--ignore_unknown`` refuses them as well."""
_TO_THE_END = "0 or more: leave it out to go on to the end of the context"
_MINUS_ONE = {"seed": "between 0 and 2**32 - 1: leave it out to have one drawn"}
_MINUS_ONE |= dict.fromkeys(
    ["max_tokens", "max_completion_tokens", "max_output_tokens"], _TO_THE_END
)
_NESTED = {
    "messages": "role content reasoning_content name tool_calls tool_call_id",
    "messages.content text": "type text prompt_cache_breakpoint",
    "messages.content input_text": "type text prompt_cache_breakpoint",
    "messages.content output_text": "type text annotations logprobs",
    "messages.tool_calls": "index id type function",
    "messages.tool_calls.function": "name arguments",
    "tools function": "type function",
    "tools.function": "name description strict parameters",
    "tool_choice function": "type function",
    "tool_choice.function": "name",
    "response_format text": "type",
    "response_format json_object": "type schema",
    "response_format json_schema": "type json_schema",
    "response_format.json_schema": "name description strict schema",
    "stream_options": "include_usage include_obfuscation",
}
# Behind a message to continue; the last character shows whether a template trims messages.
_MARK = "\ufffc the message goes on here "
# JSON has neither tuples nor keys that are numbers.
_LOOSE = Field(strict=False)
_JSON_TYPES: dict[Any, Any] = {
    tuple[int, ...]: Annotated[tuple[int, ...], _LOOSE],
    Mapping[int, float]: dict[Annotated[int, _LOOSE], float],
}
_SAMPLING: Json = {
    field.name: (
        _JSON_TYPES.get(field.type, field.type) | None,
        Field(None, description=field.metadata.get("check", [""])[-1]),
    )
    for field in dataclasses.fields(SamplingParams)
}
_SAMPLING["seed"] = (
    int,
    Field(default_factory=lambda: secrets.randbits(32), description="drawn if it is left out"),
)
_PARSE_SPECIAL = Field(True, description="special tokens that the text spells out become their ids")
_Stop = Annotated[str, Field(max_length=1000)]


IGNORED_HERE: ContextVar[set[str] | None] = ContextVar("IGNORED_HERE", default=None)
"""Collects the names of ignored fields of the current request; None refuses such fields."""


class UnknownModelError(UsageError):
    """The request names a model that is not served."""

    code = "model_not_found"
    status = 404


def select_fields(value: Any, nested: Mapping[str, str], place: str = "") -> Any:
    """Return a value; of a mapping the fields that are served and not null, and so in these.

    Args:
        value: any JSON.
        nested: the fields that are served by the place of their mapping, see ``Fields.nested``.
        place: where the value is; empty for a whole request.

    Raises:
        UsageError: a field is neither served nor to be ignored.
    """
    if not isinstance(value, dict):
        return value
    served = (nested.get(place) or nested.get(f"{place} {value.get('type')}", "")).split()
    if not served:
        return value
    where = f"{place}." if place else ""
    selected = {}
    ignored = IGNORED_HERE.get()
    for name, field in value.items():
        changes_nothing = field in NOT_SERVED.get(name, []) or (name in IGNORED and not place)
        if field is None or (changes_nothing and name not in served):
            continue
        if field == -1 and name in _MINUS_ONE:
            raise UsageError(f"{name} is -1; it must be {_MINUS_ONE[name]}")
        if name in served:
            select = functools.partial(select_fields, nested=nested, place=where + name)
            selected[name] = [*map(select, field)] if isinstance(field, list) else select(field)
        elif ignored is not None and name not in ESSENTIAL:
            ignored.add(where + name)
        elif name in _STORED:
            raise UsageError(
                f"{name} is not served here, where nothing is kept: send the whole conversation"
            )
        elif name in NOT_SERVED:
            raise UsageError(f"{name} is not served here: leave it out")
        else:
            raise unknown_name(f"{place} field".lstrip(), name[:100], served)
    return selected


class Fields(BaseModel):
    """A request or a part of it, whose fields follow the rules of this module."""

    model_config = ConfigDict(strict=True, extra="forbid")
    nested: ClassVar[dict[str, str]] = _NESTED
    """The fields of the mappings in a field, by its name and perhaps their type.

    Others have keys of their own, such as schemas, or are refused for their type.
    """

    @model_validator(mode="before")
    @classmethod
    def _select(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise UsageError(
                "the body must be a JSON object, sent with the header "
                "Content-Type: application/json"
            )
        with errors_as("the body is not of text and finite numbers", ValueError, RecursionError):
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        return select_fields(fields, {"": " ".join(cls.model_fields)} | cls.nested)


class Body(Fields):
    """The fields of all requests."""

    model: str = Field("", description="the name of a served model; the first if left out")


class Tools(Body):
    """The tools that a model may call."""

    tools: list[Json] = Field(default_factory=list)
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True


Settings = create_model("Settings", __base__=Body, **_SAMPLING)


class Generation(Settings):
    """The fields of chats and completions besides ``SamplingParams``.

    Not all of them are OpenAI's.
    """

    n: int = Field(1, ge=1, le=128, description="how many texts, each with the next seed")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="the maximum number of new tokens; to the end of the context if left out",
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(
        default_factory=dict
    )
    response_format: Json = Field({"type": "text"}, description="text, json_object or json_schema")
    regex: str | None = Field(None, description="a regular expression that the text must match")
    grammar: str | None = Field(
        None, description="a grammar that it must match, in llguidance's dialect of Lark"
    )
    cache_salt: str = Field(
        "", max_length=1000, description="prefixes are shared by requests with the same salt"
    )
    receipt: bool = Field(
        False, description="add what is needed to generate the answer again and compare it"
    )


class Conversation(Tools):
    """Messages, and other inputs of the model's template."""

    messages: list[Json] = Field(min_length=1)
    chat_template_kwargs: Json = Field(default_factory=dict)
    add_generation_prompt: bool | None = Field(
        None, description="true unless continue_final_message is"
    )
    continue_final_message: bool = Field(
        False, description="continue the last message, which is the assistant's"
    )


class Chat(Generation, Conversation):
    """A conversation to continue."""

    max_completion_tokens: int | None = Field(None, ge=0, description="the same as max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)


class Continuation(Generation):
    """A text or token ids to continue, or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    parse_special: bool = _PARSE_SPECIAL
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def prompts(self) -> list[Any]:
        """``prompt`` as a list of texts or of token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if is_one else [*self.prompt]


class Embedding(Body):
    """A text or token ids to embed, or several; ``pooling`` is not OpenAI's."""

    input: str | list[int] | list[str] | list[list[int]]
    pooling: Pooling = Field(
        "mean", description="of the final activations: the mean of all tokens, or the last token"
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, description="the number of dimensions of the model's embeddings"
    )


class Pooled(Continuation):
    """Prompts to compute embeddings of, without new tokens."""

    pooling: Pooling


class Text(Body):
    """A text to convert to tokens."""

    prompt: str
    add_special_tokens: bool = Field(True, description="begin with BOS if the model's prompts do")
    parse_special: bool = _PARSE_SPECIAL


class Tokens(Body):
    """Tokens to convert to text."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Job(NamedTuple):
    """A request that can be served."""

    body: Chat | Continuation
    model: LanguageModel
    requests: list[Request]  # the ``n`` texts of the first prompt, then those of the next
    head: Json  # the first fields of the answer
    dialect: Dialect | None = None  # how the model calls tools, if it may


def find_model(engine: EngineThread, name: str) -> tuple[str, LanguageModel]:
    """Return the name and the model, for an empty name the first.

    Raises:
        UnknownModelError: the model is not served.
    """
    name = name or next(iter(engine.models))
    if name not in engine.models:
        raise UnknownModelError(str(unknown_name("model", name[:100], engine.models)))
    return name, engine.models[name]


def render_conversation(model: LanguageModel, body: Conversation) -> tuple[str, Dialect | None]:
    """Render a conversation by the model's template; return how the model calls tools, if it may.

    Raises:
        UsageError: the template does not support the request.
    """
    # 1) Tools
    template = find_template(model.text_tokenizer, model.chat_template)
    dialect = find_dialect(template)
    if body.tools or body.tool_choice not in ("auto", "none"):
        check_tools(body.tools, body.tool_choice)
        if dialect is None:
            raise UsageError(
                "the model's chat template takes no tools: leave them out, or serve another model"
            )
    shows_tools = bool(body.tools) and body.tool_choice != "none"
    # 2) Messages; a mark shows where the template puts the end of the one to continue
    messages = openai_messages(body.messages)
    begun = ""  # of the answer
    continues = body.continue_final_message
    if continues:
        *earlier, last = messages
        if body.add_generation_prompt or last["role"] != "assistant" or "tool_calls" in last:
            raise UsageError(
                "continue_final_message goes on with the messages: the last one must be text of "
                "the assistant's, and add_generation_prompt left out"
            )
        begun = last["content"]
        messages = [*earlier, {**last, "content": begun + _MARK}]
    # 3) The text
    variables = template_variables(
        model.text_tokenizer,
        messages,
        not continues and body.add_generation_prompt is not False,
        body.tools if shows_tools else None,
        body.chat_template_kwargs,
    )
    text = render(dialect.template if dialect else template, **variables)
    if continues:
        text, mark, after = text.rpartition(_MARK.rstrip())
        if not mark:
            raise UsageError(
                "the chat template leaves the last message out, so continue_final_message is not "
                "served"
            )
        if not after.startswith(" "):
            text = text.rstrip()
    if not dialect or not shows_tools:
        return text, None
    begun = begun or text.rstrip()[-len("<think>") :]
    return text, dialect._replace(thinks=begun.rfind("<think>") > begun.rfind("</think>"))


def make_job(engine: EngineThread, body: Chat | Continuation) -> Job:
    """Convert a body to requests of the engine.

    Raises:
        UsageError: it cannot be served.
    """
    # 1) Read the prompts: a chat, or texts to continue.
    name, model = find_model(engine, body.model)
    if body.stream_options and not body.stream:
        raise UsageError("stream_options are for a stream: set stream to true, or leave them out")
    dialect = None
    if isinstance(body, Chat):
        drafts, dialect = _chat_request(engine, model, name, body)
        kind = "chat.completion"
        prefix = "chatcmpl"
    else:
        drafts = _text_requests(name, body)
        kind = "text_completion"
        prefix = "cmpl"

    # 2) Check that slots and queue can take all texts.
    num_texts = len(drafts) * body.n
    max_texts = engine.config.queue + engine.config.slots
    if num_texts > max_texts:
        raise UsageError(
            f"{num_texts} texts are asked for at once, and {max_texts} fit here: ask for fewer"
        )

    # 3) Encode each prompt, and make a request for each text.
    sampling = SamplingParams(**body.model_dump(include={*_SAMPLING}, exclude_none=True))
    requests = []
    for draft in drafts:
        if isinstance(draft.prompt.content, str):
            engine.check_text(model, draft.prompt.content)
        grammar = _grammar(body, draft.prompt.grammar)
        prompt = dataclasses.replace(
            draft.prompt, sampling=sampling, stop=body.stop, grammar=grammar
        )
        prompt = encode_prompt(model, prompt, engine.context)
        for number in range(body.n):
            seeded = dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**32)
            request = dataclasses.replace(
                draft, prompt=dataclasses.replace(prompt, sampling=seeded)
            )
            engine.check(request)
            requests.append(request)

    # 4) Fill in the fields that every response begins with.
    head = {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": engine.fingerprint(name),
    }
    return Job(body, model, requests, head, dialect)


def _chat_request(
    engine: EngineThread, model: LanguageModel, name: str, body: Chat
) -> tuple[list[Request], Dialect | None]:
    """Return the request of a conversation, and how the model calls tools, if it may."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise UsageError(
            "max_tokens and max_completion_tokens mean the same and differ: give one of them"
        )
    if body.top_logprobs and not body.logprobs:
        raise UsageError("top_logprobs are asked for without logprobs: set logprobs to true")
    text, dialect = render_conversation(model, body)
    calls = None
    if dialect:
        calls = call_grammar(body.tools, body.tool_choice, dialect, body.parallel_tool_calls)
        # A grammar lets no thoughts come before calls.
        dialect = dialect._replace(thinks=dialect.thinks and not calls)
    _, stop_ids = chat_format(model.text_tokenizer, model.chat_template, model.stop_ids)
    engine.check_text(model, text)
    ids = model.text_tokenizer.encode_with_special_tokens(text)
    limit = next(iter(limits), None)
    prompt = Prompt(ids, max_new_tokens=limit, stop_ids=stop_ids, grammar=calls)
    return [Request(prompt, name, body.top_logprobs)], dialect


def _text_requests(name: str, body: Continuation) -> list[Request]:
    """Return a request for each prompt."""
    is_scored = body.echo and body.logprobs is not None
    if is_scored and body.stream:
        raise UsageError("echo with logprobs is not served as a stream: leave one of the three out")
    if not body.prompts:
        raise UsageError(
            "prompt is an empty list, or input is an empty list: give a text, token ids or several"
        )
    pooling = body.pooling if isinstance(body, Pooled) else None
    return [
        Request(
            Prompt(content, max_new_tokens=body.max_tokens, parse_special=body.parse_special),
            name,
            body.logprobs or 0,
            is_scored,
            pooling=pooling,
        )
        for content in body.prompts
    ]


def _grammar(body: Generation, calls: Grammar | None) -> Grammar | None:
    """Return what a text must match: calls of required tools, or the body's own grammar."""
    texts: dict[GrammarKind, str | None] = {"regex": body.regex, "lark": body.grammar}
    match {"schema": {}} | body.response_format:
        case {"type": "text"}:
            pass
        case {"type": "json_object", "schema": dict(schema)}:
            texts["json_schema"] = json.dumps({"type": "object"} | schema)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            texts["json_schema"] = json.dumps(schema)
        case _:
            raise UsageError(
                'response_format must be {"type": "text"}, {"type": "json_object"}, perhaps with a '
                '"schema", or {"type": "json_schema", "json_schema": {"schema": {...}}}'
            )
    grammars = [calls] if calls else []
    grammars += [Grammar(kind, text) for kind, text in texts.items() if text is not None]
    if len(grammars) > 1:
        raise UsageError(
            "a text can match one of response_format, regex, grammar and calls of tools: "
            "leave out the others"
        )
    return grammars[0] if grammars else None
