"""The server's application: routes, keys, limits, streams, and a log line for each request."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import re
import sys
import time
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jllama
from jllama.core import JllamaError
from jllama.generation.requests import Answer, Piece
from jllama.generation.sampling_params import SamplingParams
from jllama.generation.text import prompt_ids
from jllama.serve import metrics, protocol
from jllama.serve.answers import Choice, embeddings, stream_event, totals
from jllama.serve.config import MAX_HEAD_BYTES, MAX_HEADERS, HttpConfig
from jllama.serve.engine import EngineThread
from jllama.serve.protocol import Chat, Continuation, Job, find_model, make_job, render_conversation
from jllama.serve.requests import Busy, Event, Failure
from jllama.serve.responses import Respond, ResponseStream, make_chat
from jllama.system.files import Json

PING_S = 10.0
"""A stream without events gets a comment after this time, so that no proxy takes it for dead."""
AT_ONCE = 3
"""How many requests of one client are prepared at once, in threads.

Others remain for other clients.
"""
OPEN = ("/", "/health", "/openapi.json")
"""Paths that need no key."""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
_PROBLEM = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
_PROBLEMS = {"description": "what was wrong", "content": {"application/json": {"schema": _PROBLEM}}}
_ERRORS = (HTTPException, RequestValidationError, JllamaError, Busy, RecursionError, Exception)
_Queue = asyncio.Queue[tuple[int, Event]]
_Put = Callable[[int, Event], None]
_Events = AsyncIterator[tuple[int, Piece | Answer]]
router = APIRouter()


def make_app(engine: EngineThread | None, config: HttpConfig, keys: Sequence[str] = ()) -> FastAPI:
    """Return the application.

    If there are ``keys``, a request needs one in its Authorization header.

    It answers 503 until ``app.state.engine`` is an engine, and while ``app.state.is_closing`` is
    set.
    """
    about = {"title": "jllama", "version": jllama.__version__, "docs_url": None, "redoc_url": None}
    app = FastAPI(**about, responses={"4XX": _PROBLEMS, 503: _PROBLEMS})
    app.state.engine = engine
    app.state.is_closing = False
    app.state.log_text = config.log_text
    app.state.preparing = weakref.WeakValueDictionary[str, asyncio.Semaphore]()
    neutral = vars(SamplingParams())
    app.state.defaults = {
        name: value for name, value in vars(config.default).items() if value != neutral[name]
    }
    authorizations = [f"Bearer {key}".encode() for key in keys]
    app.add_middleware(Gate, config=config, keys=authorizations)
    if config.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors, allow_methods=["*"], allow_headers=["*"]
        )
    for error in _ERRORS:
        app.add_exception_handler(error, _error_response)
    app.include_router(router)
    return app


# Routes


def _responses(required: str, *others: str) -> dict[int | str, Json]:
    """Describe an answer in the OpenAPI document: an object with these keys, or other media."""
    content = {"application/json": {"schema": {"type": "object", "required": required.split()}}}
    content |= {media: {} for media in others}  # a schema would be that of an event
    return {200: {"description": "as asked", "content": content}}


_EVENTS = "text/event-stream"
_COMPLETION = _responses("id object choices usage", _EVENTS)


def _engine(request: HttpRequest) -> EngineThread:
    engine = request.app.state.engine
    if engine is None:
        raise Busy("the model is still loading: come again soon", 5)
    return engine


def _preparing(request: HttpRequest) -> asyncio.Semaphore:
    """Return the semaphore that a client's requests hold while they are prepared."""
    semaphore = asyncio.Semaphore(AT_ONCE)
    return request.app.state.preparing.setdefault(request.state.client, semaphore)


async def _prepare(request: HttpRequest) -> AsyncIterator[None]:
    async with _preparing(request):
        yield


@router.post("/v1/chat/completions", responses=_COMPLETION)
async def chat(request: HttpRequest, body: Chat) -> Response:
    """Continue a conversation."""
    return await _generate(request, body)


@router.post("/v1/completions", responses=_COMPLETION)
async def completions(request: HttpRequest, body: Continuation) -> Response:
    """Continue texts."""
    return await _generate(request, body)


@router.post("/v1/responses", responses=_responses("id object output usage", _EVENTS))
async def responses(request: HttpRequest, body: Respond) -> Response:
    """Answer a text or a conversation."""
    response = ResponseStream(body)
    _engine(request)
    return await _generate(request, make_chat(body), response.whole, response.events)


@router.post("/v1/embeddings", responses=_responses("object data model usage"))
async def embed(request: HttpRequest, body: protocol.Embedding) -> Response:
    """Compute embeddings of texts."""
    fields = {"model": body.model, "prompt": body.input, "max_tokens": 0, "pooling": body.pooling}
    pooled = protocol.Pooled.model_validate(fields)
    return await _generate(request, pooled, functools.partial(embeddings, body))


def _describe_model(request: HttpRequest, name: str) -> Json:
    engine = _engine(request)
    return {
        "id": name,
        "object": "model",
        "created": engine.loaded_s,
        "owned_by": "jllama",
        "max_model_len": engine.context,
    }


@router.get("/v1/models", responses=_responses("object data"))
async def models(request: HttpRequest) -> Response:
    """List the models."""
    data = [_describe_model(request, name) for name in _engine(request).models]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}", responses=_responses("id object"))
async def model(request: HttpRequest, name: str) -> Response:
    """Describe a model."""
    return JSONResponse(_describe_model(request, find_model(_engine(request), name)[0]))


@router.post("/tokenize", dependencies=[Depends(_prepare)], responses=_responses("tokens count"))
def tokenize(request: HttpRequest, body: protocol.Text) -> Response:
    """Convert a text to tokens."""
    engine = _engine(request)
    tokenizer = find_model(engine, body.model)[1].text_tokenizer
    begin = body.add_special_tokens
    ids = prompt_ids(tokenizer, body.prompt, parse_special=body.parse_special, begin=begin)
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.context})


@router.post("/detokenize", dependencies=[Depends(_prepare)], responses=_responses("prompt"))
def detokenize(request: HttpRequest, body: protocol.Tokens) -> Response:
    """Convert tokens to a text."""
    tokenizer = find_model(_engine(request), body.model)[1].text_tokenizer
    return JSONResponse({"prompt": tokenizer.decode(body.tokens)})


@router.post(
    "/apply-template", dependencies=[Depends(_prepare)], responses=_responses("prompt tokens")
)
def apply_template(request: HttpRequest, body: protocol.Conversation) -> Response:
    """Render a conversation by the model's template."""
    model = find_model(_engine(request), body.model)[1]
    text, _ = render_conversation(model, body)
    ids = model.text_tokenizer.encode_with_special_tokens(text)
    return JSONResponse({"prompt": text, "tokens": ids})


@router.get("/health", responses=_responses("status"))
async def health(request: HttpRequest) -> Response:
    """Return whether requests are served."""
    if _engine(request) and request.app.state.is_closing:
        raise Busy("the server is shutting down")
    return JSONResponse({"status": "ok"})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics_page() -> Response:
    """Return metrics for Prometheus."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", response_class=HTMLResponse)
def page() -> Response:
    """Return the chat page."""
    return FileResponse(Path(__file__).with_name("page.html"), headers=_PAGE_HEADERS)


# Errors


def _problem(
    status: int, message: str, code: Any = None, param: Any = None, headers: Any = None
) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, headers)


def _error_response(request: HttpRequest, error: Exception) -> Response:
    """Convert an exception to the answer of a request."""
    match error:
        case Busy():
            headers = {"Retry-After": str(error.retry_after_s)}
            return _problem(503, str(error), "unavailable", headers=headers)
        case JllamaError():
            return _problem(getattr(error, "status", 400), str(error), getattr(error, "code", None))
        case HTTPException():
            path = urllib.parse.quote(request.url.path)[:200]
            message = f"{request.method} {path}: {error.detail}"
            return _problem(error.status_code, message, headers=error.headers)
        case RequestValidationError():
            return _validation_response(error.errors())
        case RecursionError():
            return _problem(400, "the body is nested too deep")
    return _problem(500, "the server made a mistake, which its log shows")


def _validation_response(errors: Sequence[Any]) -> Response:
    """Name the first field that is wrong, and everything that is wrong with it."""
    first = errors[0]
    place = first["loc"]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return _problem(400, f"the body is not JSON: {reason} at character {place[1]}")
    field = str(place[1])[:100] if len(place) > 1 else None
    reasons = dict.fromkeys(error["msg"] for error in errors if error["loc"][1:2] == place[1:2])
    subject = field or "the body, which must be JSON"
    return _problem(400, f"{subject}: {' or '.join(reasons)}", None, field)


# Every request


@dataclasses.dataclass
class Gate:
    """Middleware: refuses requests by their head, limits bodies, logs each request."""

    app: ASGIApp
    config: HttpConfig
    keys: Sequence[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        exchange = _Exchange(scope, receive, send, self.config)
        key = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        if not self.keys:
            key = ""
        address, _ = scope["client"] or ("", None)
        state = {"log": exchange.log, "ends": exchange.ends, "key": key, "client": key or address}
        scope["state"] = scope.get("state", {}) | state
        app = _refusal(scope, self.config, self.keys) or self.app
        try:
            return await app(scope, exchange.receive, exchange.send)
        finally:
            exchange.end()


class _Exchange:
    """One request and its answer, with the limits of its body and its line in the log."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: HttpConfig) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._config = config
        self._begin_s = time.monotonic()
        self._received_bytes = 0
        self._is_received = False
        self._ignored = set[str]() if config.ignore_unknown else None
        protocol.IGNORED_HERE.set(self._ignored)
        self.log = Json(status=0)  # logged at the end
        self.ends = list[Callable[[], Any]]()  # called at the end

    async def receive(self) -> Message:
        """Receive a part of the body, within the limits of size and time."""
        config = self._config
        remaining_s = None
        if not self._is_received:
            remaining_s = self._begin_s + config.body_timeout_s - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), remaining_s)
        except TimeoutError:
            problem = f"the body took over {config.body_timeout_s:g} seconds"
            raise HTTPException(408, problem, {"Connection": "close"}) from None
        self._received_bytes += len(message.get("body", b""))
        self._is_received = self._is_received or not message.get("more_body", False)
        if self._received_bytes > config.max_body_bytes:
            raise HTTPException(413, f"the body is larger than {config.max_body_bytes} bytes")
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the answer; its head names the fields that were ignored."""
        self.log["status"] = self.log["status"] or message.get("status", 0)
        if self._ignored and message["type"] == "http.response.start":
            names = urllib.parse.quote(", ".join(sorted(self._ignored)), ", ")[:1000]
            message["headers"] = [*message["headers"], (b"x-jllama-ignored", names.encode())]
        await self._send(message)

    def end(self) -> None:
        """Count and log the request."""
        for end in self.ends:
            end()
        scope = self._scope
        log = self.log
        log["status"] = log["status"] or 500  # an exception is answered outside of this class
        path = getattr(scope.get("route"), "path", "other")
        metrics.REQUESTS.labels(path, log["status"]).inc()
        if scope["path"] == "/health":  # which is requested every few seconds
            return
        log["seconds"] = f"{time.monotonic() - self._begin_s:.3f}"
        fields = " ".join(f"{name}={value}" for name, value in log.items())
        request = f"{scope['method']} {urllib.parse.quote(scope['path'])[:200]}"
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {request} {fields}\n"
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            sys.stderr.write(line)  # in one call, because other threads write there as well


def _refusal(scope: Scope, config: HttpConfig, keys: Sequence[bytes]) -> Response | None:
    """Return the answer to a request that its head disqualifies."""
    headers = scope["headers"]
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        problem = (
            f"there are {len(headers)} headers of {num_bytes} bytes; "
            f"send at most {MAX_HEADERS} of {MAX_HEAD_BYTES}"
        )
        return _problem(431, problem, headers={"Connection": "close"})
    values = dict(headers)
    if b"content-length" in values and b"transfer-encoding" in values:
        problem = "a body has Content-Length or Transfer-Encoding, not both: leave one out"
        return _problem(400, problem, headers={"Connection": "close"})
    host = values.get(b"host", b"").decode("latin-1")
    if not _is_served_host(scope, host, config.allowed_host):
        problem = (
            f"this server is not asked by the name {host[:100]!r}: "
            "use localhost, or start it with --allowed_host"
        )
        return _problem(421, problem)
    authorization = values.get(b"authorization", b"")
    # A list, so that all keys are compared and the time reveals nothing.
    is_allowed = any([hmac.compare_digest(authorization, key) for key in keys])  # noqa: C419
    if keys and not is_allowed and scope["path"] not in OPEN:
        problem = "give a key of this server in the header Authorization: Bearer KEY"
        return _problem(401, problem, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return None


def _is_served_host(scope: Scope, host: str, allowed: Sequence[str]) -> bool:
    """Return whether a request may address the server as ``host``, the value of its header Host.

    Any page can let its own name lead to 127.0.0.1; for a browser this server is then part of the
    page.
    """
    address, _ = scope["server"] or ("", None)
    is_loopback = address.startswith("127.") or address == "::1"
    parts = re.fullmatch(r"(\[[\w.:%]*\]|[\w.-]*)(:\d*)?", host)  # a name and a port
    if not parts or (not allowed and not is_loopback):
        return bool(parts)
    # Browsers always send a name.
    served = {"", "localhost", "127.0.0.1", "::1", address, *map(str.lower, allowed)}
    return parts[1].strip("[]").lower() in served


# Generation


async def _generate(
    request: HttpRequest,
    body: Chat | Continuation,
    convert: Callable[[Json], Json] = dict,
    show: Callable[[Json], str] = stream_event,
) -> Response:
    """Generate texts, and return the answer or a stream; a client that leaves ends them.

    Fields that the body leaves out have the server's defaults.

    Args:
        request: the HTTP request.
        body: its body.
        convert: converts a complete answer.
        show: converts a chunk of a stream to server-sent events.
    """
    engine = _engine(request)
    log = request.state.log
    begin_s = time.monotonic()
    defaults = request.app.state.defaults
    names = defaults.keys() - body.model_fields_set
    body = body.model_copy(update={name: defaults[name] for name in names})
    # 1) Submit the texts: tokenizing or compiling a grammar may take a while
    queue = _Queue()
    put = functools.partial(_put, asyncio.get_running_loop(), queue)
    async with _preparing(request):
        job = await run_in_threadpool(_submit, request, engine, body, put)
    log.update(prompt=totals(job, {})["usage"]["prompt_tokens"], new=0)
    # 2) Pass their events on
    choices = [Choice(job, index) for index in range(len(job.requests))]
    answers = dict[int, Answer]()
    events = _events(request, job, queue, answers, begin_s)
    if body.stream:  # Starlette sees when the client leaves
        stream = _stream(request, job, choices, events, answers, show)
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(stream, media_type=_EVENTS, headers=headers)
    # 3) Or collect them
    request.state.ends.append(asyncio.create_task(_watch(request, put)).cancel)
    async for _ in events:
        pass
    shown = [choice.whole(answers[index]) for index, choice in enumerate(choices)]
    return JSONResponse(convert(job.head | {"choices": shown} | totals(job, answers)))


def _put(loop: asyncio.AbstractEventLoop, queue: _Queue, index: int, event: Event) -> None:
    """Pass an event of a text from the engine's thread to the loop's."""
    with contextlib.suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(queue.put_nowait, (index, event))


def _submit(
    request: HttpRequest,
    engine: EngineThread,
    body: Chat | Continuation,
    put: _Put,
) -> Job:
    """Submit a request for each text; the end of the HTTP request cancels them."""
    job = make_job(engine, body)
    state = request.state
    salt = f"{state.key}\0{body.cache_salt}"
    for index, text in enumerate(job.requests):
        text = dataclasses.replace(text, client=state.client, salt=salt)
        state.ends.append(engine.submit(text, functools.partial(put, index)))
    return job


async def _events(
    request: HttpRequest, job: Job, queue: _Queue, answers: dict[int, Answer], begin_s: float
) -> _Events:
    """Yield events, and put answers into ``answers``, until all texts have ended.

    After ``PING_S`` without an event, yield an empty piece.

    Raises:
        Busy: the server cannot finish a text.
    """
    log = request.state.log
    while len(answers) < len(job.requests):
        try:
            index, event = await asyncio.wait_for(queue.get(), PING_S)
        except TimeoutError:
            yield 0, Piece("", ())
            continue
        if isinstance(event, Failure):
            raise Busy(event.message)
        log.setdefault("first_token", f"{time.monotonic() - begin_s:.3f}")
        if isinstance(event, Answer):
            answers[index] = event
            log["new"] += event.completion.new_tokens
            if request.app.state.log_text:
                prompt = job.model.text_tokenizer.decode(job.requests[index].prompt.ids)
                log[f"text_{index}"] = json.dumps([prompt, event.completion.text])
        yield index, event


async def _stream(
    request: HttpRequest,
    job: Job,
    choices: Sequence[Choice],
    events: _Events,
    answers: dict[int, Answer],
    show: Callable[[Json], str],
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events; a comment stands for an event without content."""
    log = request.state.log
    shows_usage = job.body.stream_options.get("include_usage")
    head = {**job.head}
    if isinstance(job.body, Chat):
        head["object"] = "chat.completion.chunk"
    if shows_usage:
        head["usage"] = None
    log["status"] = 499  # unless it comes to its end
    try:
        for choice in choices:
            yield show(head | {"choices": [choice.opening()]})
        async for index, event in events:
            parts = choices[index].parts(event)
            yield "".join(show(head | {"choices": [part]}) for part in parts) or ": ping\n\n"
        if shows_usage or job.body.receipt:
            yield show(head | {"choices": []} | totals(job, answers))
        if show is stream_event:
            yield "data: [DONE]\n\n"
        log["status"] = 200
    except Busy as error:
        log["status"] = 503
        problem = json.loads(bytes(_error_response(request, error).body))
        yield stream_event({"type": "error"} | problem)


async def _watch(request: HttpRequest, put: _Put) -> None:
    """Wait until the client leaves, and let its answer fail."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    request.state.log["status"] = request.state.log["status"] or 499
    put(0, Failure("the client left"))
