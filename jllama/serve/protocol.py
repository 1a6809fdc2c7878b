"""OpenAI's protocol: requests, from JSON to what the engine takes.

What becomes of a request's fields: one that is null counts as left out. One that is served is checked, in type and
range. One of OpenAI's that is not served and could change the answer (``NOT_SERVED``) is refused, unless its value asks
for what is done anyhow; one that cannot change it (``IGNORED``) is ignored. Any other name is refused, with the nearest
one named. Under ``--ignore_unknown`` both are ignored, but for those that are ``ESSENTIAL``. The fields of
``SamplingParams`` go by their own names and have its ranges; a seed that is left out is drawn.
"""

import dataclasses
import json
import secrets
import time
import uuid
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from jllama.config import Grammar, GrammarKind
from jllama.errors import UsageError, unknown_name
from jllama.files import Json, fault_of
from jllama.generation.requests import MOST_TOP, Pooling, Request
from jllama.generation.sampling_params import Prompt, SamplingParams
from jllama.generation.text import encode_prompt
from jllama.language_model import LanguageModel
from jllama.serve.engine import EngineThread
from jllama.serve.tools import Dialect, check_tools, dialect
from jllama.serve.tools import grammar as grammar_of_tools
from jllama.templates.messages import conversing, find_template, openai_messages, template_variables
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
"""Fields of OpenAI's that are refused, and the values of each that change nothing."""
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
_KEPT = {"conversation", "previous_response_id"}  # name what OpenAI's servers keep between requests
ESSENTIAL = _KEPT | {"audio", "function_call", "functions", "modalities", "suffix"}
"""Fields of OpenAI's that are part of what is asked: these are refused under ``--ignore_unknown``, too."""
_TO_THE_END = "0 or more: leave it out to go on to the end of the context"
_MINUS_ONE = {"seed": "between 0 and 2**32 - 1: leave it out to have one drawn"}
_MINUS_ONE |= dict.fromkeys(
    ["max_tokens", "max_completion_tokens", "max_output_tokens"], _TO_THE_END
)
_MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
_MARK = (
    "\ufffc the message goes on here "  # its last character shows whether a template trims messages
)
_LOOSE = Field(strict=False)  # JSON has neither tuples nor keys that are numbers
_JSON: dict[Any, Any] = {tuple[int, ...]: Annotated[tuple[int, ...], _LOOSE]}
_JSON[Mapping[int, float]] = dict[Annotated[int, _LOOSE], float]
_SAMPLING: Json = {
    field.name: (
        _JSON.get(field.type, field.type) | None,
        Field(None, description=field.metadata.get("check", [""])[-1]),
    )
    for field in dataclasses.fields(SamplingParams)
}
_Stop = Annotated[str, Field(max_length=1000)]
_SAMPLING["seed"] = (
    int,
    Field(default_factory=lambda: secrets.randbits(32), description="drawn if it is left out"),
)


IGNORED_HERE: ContextVar[set[str] | None] = ContextVar("IGNORED_HERE", default=None)
"""Collects the names of the fields that are ignored in the request under way; None refuses them."""


class UnknownModelError(UsageError):
    """There is no such model here."""

    code, status = "model_not_found", 404


def served_fields(fields: Json, served: Collection[str], where: str = "") -> Json:
    """Those of a request's fields that count; ``UsageError`` for one that is neither ``served`` nor to be ignored."""
    kept = {}
    ignored = IGNORED_HERE.get()
    for name, value in fields.items():
        if value is None or (
            name not in served and (name in IGNORED or value in NOT_SERVED.get(name, []))
        ):
            continue
        if value == -1 and name in _MINUS_ONE:
            raise UsageError(f"{name} is -1; it must be {_MINUS_ONE[name]}")
        if name in served:
            kept[name] = value
        elif ignored is not None and name not in ESSENTIAL:
            ignored.add(where + name)
        elif name in _KEPT:
            raise UsageError(
                f"{name} is not served here, where nothing is kept: send the whole conversation"
            )
        elif name in NOT_SERVED:
            raise UsageError(f"{name} is not served here: leave it out")
        else:
            raise unknown_name("field", where + name[:100], served)
    return kept


class Fields(BaseModel):
    """What a request has, or a part of one: the rules of what becomes of its fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            raise UsageError(
                "the body must be a JSON object, sent with the header Content-Type: application/json"
            )
        with fault_of("the body is not of text and finite numbers", ValueError, RecursionError):
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        return served_fields(fields, cls.model_fields)


class Body(Fields):
    """What all requests have in common."""

    model: str = Field("", description="the name of a model that is served; without it the first")


class Tools(Body):
    """The tools that a model may call."""

    tools: list[Json] = Field(default_factory=list)
    tool_choice: str | Json = "auto"
    parallel_tool_calls: bool = True


Settings = create_model("Settings", __base__=Body, **_SAMPLING)


class Generation(Settings):
    """What both kinds of generation take beside ``SamplingParams``; regex, grammar and receipt are not OpenAI's."""

    n: int = Field(1, ge=1, le=128, description="how many texts, each with the next seed")
    max_tokens: int | None = Field(
        None, ge=0, description="the most new tokens; without it to the end of the context"
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = Field(default_factory=list)
    stream: bool = False
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool] = Field(
        default_factory=dict
    )
    response_format: Json = Field({"type": "text"}, description="text, json_object or json_schema")
    regex: str | None = Field(None, description="what the text must match")
    grammar: str | None = Field(
        None, description="what it must match, in llguidance's dialect of Lark"
    )
    cache_salt: str = Field(
        "", max_length=1000, description="prefixes are shared by requests with the same one"
    )
    receipt: bool = Field(
        False, description="add what it takes to make the answer again and to compare it"
    )


class Conversation(Tools):
    """Messages, and what else the model's template is given."""

    messages: list[Json] = Field(min_length=1)
    chat_template_kwargs: Json = Field(default_factory=dict)
    add_generation_prompt: bool | None = Field(
        None, description="true unless continue_final_message is"
    )
    continue_final_message: bool = Field(
        False, description="go on with the last message, which is the assistant's"
    )


class Chat(Generation, Conversation):
    """A conversation to be continued."""

    max_completion_tokens: int | None = Field(None, ge=0, description="the same as max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)


class Continuation(Generation):
    """A text or token ids to be continued, or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def prompts(self) -> list[Any]:
        """``prompt`` as a list, each text or ids."""
        is_one = isinstance(self.prompt, str) or any(
            isinstance(each, int) for each in self.prompt[:1]
        )
        return [self.prompt] if is_one else [*self.prompt]


class Embedding(Body):
    """A text or token ids whose embedding is asked for, or several; pooling is not OpenAI's."""

    input: str | list[int] | list[str] | list[list[int]]
    pooling: Pooling = Field(
        "mean", description="of the final activations of all tokens; or the last token's"
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="as many as the model's have")


class Pooled(Continuation):
    """No token behind the prompts, and their embeddings."""

    pooling: Pooling


class Text(Body):
    """A text whose tokens are asked for."""

    prompt: str
    add_special_tokens: bool = Field(
        True, description="begin with BOS where the model's prompts do"
    )


class Tokens(Body):
    """Tokens whose text is asked for."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class Job(NamedTuple):
    """A request that can be served."""

    body: Chat | Continuation
    model: LanguageModel
    requests: list[Request]  # the ``n`` texts of the first prompt, those of the next, ...
    head: Json  # with which the answer begins
    dialect: Dialect | None = None  # how the model calls tools, if it may


def served(engine: EngineThread, name: str) -> tuple[str, LanguageModel]:
    """A model by its name, the first without one; ``UnknownModelError`` if there is none."""
    name = name or next(iter(engine.models))
    if name not in engine.models:
        raise UnknownModelError(str(unknown_name("model", name[:100], engine.models)))
    return name, engine.models[name]


def conversation_text(model: LanguageModel, body: Conversation) -> tuple[str, Dialect | None]:
    """What the model's template makes of a conversation, and how the model calls tools, if it may."""
    template = find_template(model.text_tokenizer, model.chat_template)
    way, may = dialect(template), bool(body.tools) and body.tool_choice != "none"
    if body.tools or body.tool_choice not in ("auto", "none"):
        check_tools(body.tools, body.tool_choice)
        if way is None:
            raise UsageError(
                "the model's chat template takes no tools: leave them out, or serve another model"
            )
    messages = openai_messages(
        [served_fields(each, _MESSAGE_FIELDS, "messages.") for each in body.messages]
    )
    continues = body.continue_final_message
    begins_answer = not continues and body.add_generation_prompt is not False
    if continues:
        *earlier, last = messages
        if body.add_generation_prompt or last["role"] != "assistant" or "tool_calls" in last:
            expected = (
                "the last one must be text of the assistant's, and add_generation_prompt left out"
            )
            raise UsageError(f"continue_final_message goes on with the messages: {expected}")
        messages = [*earlier, {**last, "content": last["content"] + _MARK}]
    about = begins_answer, body.tools if may else None, body.chat_template_kwargs
    given = template_variables(model.text_tokenizer, messages, *about)
    text = render(way.template if way else template, **given)
    if continues:
        text, mark, after = text.rpartition(_MARK.rstrip())
        if not mark:
            raise UsageError(
                "the chat template leaves the last message out, so continue_final_message is not served"
            )
        if not after.startswith(" "):
            text = text.rstrip()
    return text, way if may else None


def job_of(engine: EngineThread, body: Chat | Continuation) -> Job:
    """What a body asks of the engine; ``UsageError`` if it cannot be served."""
    name, model = served(engine, body.model)
    if body.stream_options and not body.stream:
        raise UsageError("stream_options are for a stream: set stream to true, or leave them out")
    like, way = (
        _of_chat(engine, model, name, body)
        if isinstance(body, Chat)
        else (_of_texts(name, body), None)
    )
    if len(like) * body.n > (most := engine.config.queue + engine.config.slots):
        raise UsageError(
            f"{len(like) * body.n} texts are asked for at once, and {most} fit here: ask for fewer"
        )
    sampling, requests = (
        SamplingParams(**body.model_dump(include={*_SAMPLING}, exclude_none=True)),
        [],
    )
    for request in like:
        if isinstance(request.prompt.content, str):
            engine.check_text(model, request.prompt.content)
        given = {
            "sampling": sampling,
            "stop": body.stop,
            "grammar": _grammar(body, request.prompt.grammar),
        }
        prompt = encode_prompt(model, dataclasses.replace(request.prompt, **given))
        for number in range(body.n):
            seeded = dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**32)
            requests.append(
                dataclasses.replace(request, prompt=dataclasses.replace(prompt, sampling=seeded))
            )
            engine.check(requests[-1])
    kind, prefix = (
        ("chat.completion", "chatcmpl") if isinstance(body, Chat) else ("text_completion", "cmpl")
    )
    head = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
    return Job(
        body,
        model,
        requests,
        head | {"model": name, "system_fingerprint": engine.fingerprint(name)},
        way,
    )


def _of_chat(
    engine: EngineThread, model: LanguageModel, name: str, body: Chat
) -> tuple[list[Request], Dialect | None]:
    """What is particular to a conversation, and how the model calls tools, if it may."""
    most = {each for each in (body.max_tokens, body.max_completion_tokens) if each is not None}
    if len(most) > 1:
        raise UsageError(
            "max_tokens and max_completion_tokens mean the same and differ: give one of them"
        )
    if body.top_logprobs and not body.logprobs:
        raise UsageError("top_logprobs are asked for without logprobs: set logprobs to true")
    text, way = conversation_text(model, body)
    calls = (
        grammar_of_tools(body.tools, body.tool_choice, way, body.parallel_tool_calls)
        if way
        else None
    )
    _, ends = conversing(model.text_tokenizer, model.chat_template, model.stop_ids)
    engine.check_text(model, text)
    ids = model.text_tokenizer.encode_with_special_tokens(text)
    prompt = Prompt(ids, max_new_tokens=max(most, default=None), stop_ids=ends, grammar=calls)
    return [Request(prompt, name, body.top_logprobs)], way


def _of_texts(name: str, body: Continuation) -> list[Request]:
    scored = body.echo and body.logprobs is not None
    if scored and body.stream:
        raise UsageError("echo with logprobs is not served as a stream: leave one of the three out")
    if not body.prompts:
        raise UsageError(
            "prompt is an empty list, or input is an empty list: give a text, token ids or several"
        )
    prompts = (Prompt(content, max_new_tokens=body.max_tokens) for content in body.prompts)
    pooling = body.pooling if isinstance(body, Pooled) else None
    return [
        Request(prompt, name, body.logprobs or 0, scored, pooling=pooling) for prompt in prompts
    ]


def _grammar(body: Generation, calls: Grammar | None) -> Grammar | None:
    """What a text must match: calls of tools that must be called, or what the body says."""
    given: dict[GrammarKind, str | None] = {"regex": body.regex, "lark": body.grammar}
    match body.response_format:
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            given["json_schema"] = '{"type": "object"}'
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            given["json_schema"] = json.dumps(schema)
        case _:
            kinds = '"text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
            raise UsageError(f'response_format must be {{"type": {kinds}')
    found = [
        *filter(None, [calls]),
        *(Grammar(kind, text) for kind, text in given.items() if text is not None),
    ]
    if len(found) > 1:
        said = "a text can match one of response_format, regex, grammar and calls of tools"
        raise UsageError(f"{said}: leave out the others")
    return found[0] if found else None
