"""The server as an application: routes, keys, limits, streams, a line in the log for each request."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import sys
import time
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jllama
from jllama.errors import JllamaError
from jllama.files import Json
from jllama.generation.requests import Answer, Piece
from jllama.generation.sampling_params import SamplingParams
from jllama.generation.text import prompt_ids
from jllama.serve import metrics, protocol
from jllama.serve.answers import Choice, embeddings, stream_event, totals
from jllama.serve.config import MAX_HEAD_BYTES, MAX_HEADERS, HttpConfig
from jllama.serve.engine import EngineThread
from jllama.serve.protocol import Chat, Continuation, Job, conversation_text, job_of, served
from jllama.serve.requests import Busy, Event, Failure
from jllama.serve.responses import Respond, Responding, chat_of

PING_S = 10.0
"""After so long without news a stream gets a comment, so that nobody between server and client takes it for dead."""
AT_ONCE = 3
"""For so many requests of a client at once prompts are made, in threads; there are more, for other clients."""
OPEN = ("/", "/health", "/openapi.json")
"""Paths that need no key."""
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
_PROBLEM = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}
_PROBLEMS = {"description": "what was wrong", "content": {"application/json": {"schema": _PROBLEM}}}


def make_app(engine: EngineThread | None, config: HttpConfig, keys: Sequence[str] = ()) -> FastAPI:
    """The application; with ``keys``, for those who have one of them in an Authorization header.

    Until ``app.state.engine`` is an engine, and while ``app.state.is_closing``, it answers 503.
    """
    about = {"title": "jllama", "version": jllama.__version__, "docs_url": None, "redoc_url": None}
    app = FastAPI(**about, responses={"4XX": _PROBLEMS, 503: _PROBLEMS})
    app.state.engine, app.state.is_closing, app.state.log_text = engine, False, config.log_text
    app.state.turns = weakref.WeakValueDictionary[str, asyncio.Semaphore]()
    usual = vars(SamplingParams())
    app.state.defaults = {
        name: value for name, value in vars(config.default).items() if value != usual[name]
    }
    app.add_middleware(_front, config=config, keys=[f"Bearer {key}".encode() for key in keys])  # type: ignore[arg-type]
    if config.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors, allow_methods=["*"], allow_headers=["*"]
        )
    for kind in (
        HTTPException,
        RequestValidationError,
        JllamaError,
        Busy,
        RecursionError,
        Exception,
    ):
        app.add_exception_handler(kind, _problem_of)

    def ready() -> EngineThread:
        if app.state.engine is None:
            raise Busy("the model is still loading: come again soon", 5)
        return app.state.engine

    @app.post(
        "/v1/chat/completions", responses=_responses("id object choices usage", "text/event-stream")
    )
    async def chat(request: HttpRequest, body: Chat) -> Response:
        return await _generate(request, ready(), body)

    @app.post(
        "/v1/completions", responses=_responses("id object choices usage", "text/event-stream")
    )
    async def completions(request: HttpRequest, body: Continuation) -> Response:
        return await _generate(request, ready(), body)

    @app.post("/v1/responses", responses=_responses("id object output usage", "text/event-stream"))
    async def responses(request: HttpRequest, body: Respond) -> Response:
        response = Responding(body)
        return await _generate(request, ready(), chat_of(body), response.whole, response.events)

    @app.post("/v1/embeddings", responses=_responses("object data model usage"))
    async def embed(request: HttpRequest, body: protocol.Embedding) -> Response:
        given = {
            "model": body.model,
            "prompt": body.input,
            "max_tokens": 0,
            "pooling": body.pooling,
        }
        pooled = protocol.Pooled.model_validate(given)
        return await _generate(request, ready(), pooled, functools.partial(embeddings, body))

    def about_model(name: str) -> Json:
        about = {"id": name, "object": "model", "created": ready().loaded_s, "owned_by": "jllama"}
        return about | {"max_model_len": ready().context}

    @app.get("/v1/models", responses=_responses("object data"))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [*map(about_model, ready().models)]})

    @app.get("/v1/models/{name:path}", responses=_responses("id object"))
    async def model(name: str) -> Response:
        return JSONResponse(about_model(served(ready(), name)[0]))

    @app.post("/tokenize", dependencies=[Depends(_in_turn)], responses=_responses("tokens count"))
    def tokenize(body: protocol.Text) -> Response:
        tokenizer = served(ready(), body.model)[1].text_tokenizer
        ids = (
            prompt_ids(tokenizer, body.prompt)
            if body.add_special_tokens
            else tokenizer.encode(body.prompt)
        )
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": ready().context})

    @app.post("/detokenize", dependencies=[Depends(_in_turn)], responses=_responses("prompt"))
    def detokenize(body: protocol.Tokens) -> Response:
        return JSONResponse(
            {"prompt": served(ready(), body.model)[1].text_tokenizer.decode(body.tokens)}
        )

    @app.post(
        "/apply-template", dependencies=[Depends(_in_turn)], responses=_responses("prompt tokens")
    )
    def apply_template(body: protocol.Conversation) -> Response:
        model = served(ready(), body.model)[1]
        text, _ = conversation_text(model, body)
        return JSONResponse(
            {"prompt": text, "tokens": model.text_tokenizer.encode_with_special_tokens(text)}
        )

    @app.get("/health", responses=_responses("status"))
    async def health() -> Response:
        if ready() and app.state.is_closing:
            raise Busy("the server is shutting down")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics_page() -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", response_class=HTMLResponse)
    def page() -> Response:
        return FileResponse(Path(__file__).with_name("page.html"), headers=_PAGE_HEADERS)

    return app


def _responses(required: str, *others: str) -> dict[int | str, Json]:
    """A route's answer, for the OpenAPI document: an object with these keys, or text of other media."""
    content = {"application/json": {"schema": {"type": "object", "required": required.split()}}}
    content |= {media: {} for media in others}  # a schema would be that of an event
    return {200: {"description": "as asked", "content": content}}


def _problem(
    status: int, message: str, code: Any = None, param: Any = None, headers: Any = None
) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers
    )


def _problem_of(request: HttpRequest, error: Exception) -> Response:
    match error:
        case Busy():
            return _problem(
                503, str(error), "unavailable", None, {"Retry-After": str(error.retry_after_s)}
            )
        case JllamaError():
            return _problem(getattr(error, "status", 400), str(error), getattr(error, "code", None))
        case HTTPException():
            said = f"{request.method} {urllib.parse.quote(request.url.path)[:200]}: {error.detail}"
            return _problem(error.status_code, said, None, None, error.headers)
        case RequestValidationError():
            first, *_ = errors = error.errors()
            if first["type"] == "json_invalid":
                return _problem(
                    400,
                    f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][1]}",
                )
            field = str(first["loc"][1])[:100] if len(first["loc"]) > 1 else None
            said = dict.fromkeys(
                each["msg"] for each in errors if each["loc"][1:2] == first["loc"][1:2]
            )
            return _problem(
                400, f"{field or 'the body, which must be JSON'}: {' or '.join(said)}", None, field
            )
        case RecursionError():
            return _problem(400, "the body is nested too deep")
    return _problem(500, "the server made a mistake, which its log shows")


def _front(app: ASGIApp, config: HttpConfig, keys: Sequence[bytes]) -> ASGIApp:
    """Around all routes: what ``_refusal`` refuses, limits of a body, fields ignored, and a line in the log."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        begin_s, received, is_whole = time.monotonic(), 0, False
        log, ends = (
            Json(status=0),
            list[Callable[[], Any]](),
        )  # what is said and called when it has ended
        key = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1") if keys else ""
        address, _ = scope["client"] or ("", None)
        about = {"log": log, "ends": ends, "key": key, "client": key or address}
        scope["state"] = scope.get("state", {}) | about
        ignored = set[str]() if config.ignore_unknown else None
        protocol.IGNORED_HERE.set(ignored)

        async def receive_limited() -> Message:
            nonlocal received, is_whole
            rest_s = None if is_whole else begin_s + config.body_timeout_s - time.monotonic()
            try:
                message = await asyncio.wait_for(receive(), rest_s)
            except TimeoutError:
                said = f"the body took over {config.body_timeout_s:g} seconds"
                raise HTTPException(408, said, {"Connection": "close"}) from None
            received += len(message.get("body", b""))
            is_whole = is_whole or not message.get("more_body", False)
            if received > config.max_body_bytes:
                raise HTTPException(413, f"the body is larger than {config.max_body_bytes} bytes")
            return message

        async def send_noted(message: Message) -> None:
            log["status"] = log["status"] or message.get("status", 0)
            if ignored and message["type"] == "http.response.start":
                names = urllib.parse.quote(", ".join(sorted(ignored)), ", ")[:1000]
                message["headers"] = [*message["headers"], (b"x-jllama-ignored", names.encode())]
            await send(message)

        try:
            await (_refusal(scope, config, keys) or app)(scope, receive_limited, send_noted)
        finally:
            for end in ends:
                end()
            log["status"] = log["status"] or 500  # the answer to what raised is not sent from here
            metrics.REQUESTS.labels(
                getattr(scope.get("route"), "path", "other"), log["status"]
            ).inc()
            if scope["path"] != "/health":  # which is asked every few seconds
                asked = f"{scope['method']} {urllib.parse.quote(scope['path'])[:200]}"
                log["seconds"] = f"{time.monotonic() - begin_s:.3f}"
                counts = " ".join(f"{name}={value}" for name, value in log.items())
                line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {asked} {counts}\n"
                with contextlib.suppress(OSError, ValueError):  # it may be closed
                    sys.stderr.write(line)  # at once: other threads write there, too

    return handle


def _refusal(scope: Scope, config: HttpConfig, keys: Sequence[bytes]) -> Response | None:
    """What answers a request whose head says already that it is not served."""
    headers = scope["headers"]
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        said = f"there are {len(headers)} headers of {num_bytes} bytes; send at most {MAX_HEADERS} of {MAX_HEAD_BYTES}"
        return _problem(431, said, headers={"Connection": "close"})
    values = dict(headers)
    host = values.get(b"host", b"").decode("latin-1")
    if not _is_served_host(scope, host, config.allowed_host):
        said = f"this server is not asked by the name {host[:100]!r}: use localhost, or start it with --allowed_host"
        return _problem(421, said)
    given = values.get(b"authorization", b"")
    may = any([hmac.compare_digest(given, key) for key in keys])  # noqa: C419 - all, so that time tells nothing
    if keys and not may and scope["path"] not in OPEN:
        said = "give a key of this server in the header Authorization: Bearer KEY"
        return _problem(401, said, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return None


def _is_served_host(scope: Scope, host: str, allowed: Sequence[str]) -> bool:
    """Whether a request may ask for ``host``, its header Host.

    A page from anywhere can have its own name lead to 127.0.0.1; for a browser this server is then part of the page.
    """
    address, _ = scope["server"] or ("", None)
    if not allowed and not address.startswith("127.") and address != "::1":
        return True
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    served = {"localhost", "127.0.0.1", "::1", address, *map(str.lower, allowed)}
    return name is None or name in served  # browsers always give a name


def _turn(request: HttpRequest) -> asyncio.Semaphore:
    """What a client must hold while its prompt is made."""
    return request.app.state.turns.setdefault(request.state.client, asyncio.Semaphore(AT_ONCE))


async def _in_turn(request: HttpRequest) -> AsyncIterator[None]:
    async with _turn(request):
        yield


async def _generate(
    request: HttpRequest,
    engine: EngineThread,
    body: Chat | Continuation,
    whole: Callable[[Json], Json] = dict,
    show: Callable[[Json], str] = stream_event,
) -> Response:
    """Have the texts generated: the answer, as it is shown ``whole``, or as each of its chunks is in a stream.

    What the body leaves out is the server's default. A client that leaves ends it.
    """
    defaults = request.app.state.defaults
    body = body.model_copy(
        update={name: defaults[name] for name in defaults.keys() - body.model_fields_set}
    )
    loop, queue, begin_s = (
        asyncio.get_running_loop(),
        asyncio.Queue[tuple[int, Event]](),
        time.monotonic(),
    )
    log, ends, answers = request.state.log, request.state.ends, dict[int, Answer]()

    def put(index: int, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(queue.put_nowait, (index, event))

    def submit() -> Job:
        job = job_of(engine, body)
        for index, each in enumerate(job.requests):
            owned = dataclasses.replace(
                each, client=request.state.client, salt=f"{request.state.key}\0{body.cache_salt}"
            )
            ends.append(engine.submit(owned, functools.partial(put, index)))
        return job

    async def events() -> AsyncIterator[tuple[int, Piece | Answer]]:
        """Until all texts have ended; an empty piece after a while without news. ``Failure`` raises ``Busy``."""
        while len(answers) < len(choices):
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

    async def stream() -> AsyncIterator[str]:
        """A comment stands where there is nothing to say of an event."""
        shows_usage = body.stream_options.get("include_usage")
        head = job.head | ({"object": "chat.completion.chunk"} if isinstance(body, Chat) else {})
        head |= {"usage": None} if shows_usage else {}
        log["status"] = 499  # unless it comes to its end
        try:
            for choice in choices:
                yield show(head | {"choices": [choice.opening()]})
            async for index, event in events():
                parts = choices[index].parts(event)
                yield "".join(show(head | {"choices": [part]}) for part in parts) or ": ping\n\n"
            if shows_usage or body.receipt:
                yield show(head | {"choices": []} | totals(job, answers))
            if show is stream_event:
                yield "data: [DONE]\n\n"
            log["status"] = 200
        except Busy as error:
            log["status"] = 503
            yield stream_event(
                {"type": "error"} | json.loads(bytes(_problem_of(request, error).body))
            )

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        log["status"] = log["status"] or 499
        put(0, Failure("the client left"))

    async with _turn(request):
        job = await run_in_threadpool(
            submit
        )  # to tokenize a text or to compile a grammar may take a while
    choices = [Choice(job, index) for index in range(len(job.requests))]
    log.update(prompt=totals(job, {})["usage"]["prompt_tokens"], new=0)
    if body.stream:  # which sees itself when its client leaves
        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    ends.append(asyncio.create_task(watch()).cancel)
    async for _ in events():
        pass
    shown = [choice.whole(answers[index]) for index, choice in enumerate(choices)]
    return JSONResponse(whole(job.head | {"choices": shown} | totals(job, answers)))
