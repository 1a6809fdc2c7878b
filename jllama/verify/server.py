"""Log-probabilities of a server with OpenAI's API, in whichever way it gives them."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jllama.errors import JllamaError
from jllama.files import Json
from jllama.tokenizers import Tokenizer
from jllama.verify.rows import Observed, Row

TOP = 5
"""How many log-probabilities of each token are requested: more than this many some refuse."""
MAX_PLACES = 24
"""Places of a row that are requested if each needs a request of its own."""
_LONG = 1024  # tokens of a prompt of which fewer places are requested
_BUSY = (429, 503)
_MAX_TRIES = 6
_AGREES = 0.2  # nats between two answers about one token
_SHARE_EQUAL = 0.9  # of the tokens of an echo, which must be those that were sent

_MIN_ECHOED = 16  # tokens, of a prompt that may have been cut

Likely = dict[int, float]
"""Log-probabilities by token."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and how it is asked.

    Attributes:
        url: the address, without ``/v1``.
        model: the name of the model.
        tokenizer: of the checkpoint; it reads the names of tokens.
        api_key: sent with each request, if set.
        timeout_s: how long an answer may take.
        parallel: how many requests there are at once, at most.
    """

    url: str
    tokenizer: Tokenizer
    model: str = ""
    api_key: str = ""
    timeout_s: float = 120.0
    parallel: int = 4


class RefusalError(JllamaError):
    """The server answered that it does not serve this request."""


class Method(NamedTuple):
    """A way to ask for log-probabilities.

    Attributes:
        about: in words.
        path: of the endpoint.
        fields: of the request, besides the prompt and the number of new tokens.
        new_tokens: the name of the field with their number.
        is_whole: whether an answer has the log-probabilities of the prompt's tokens, too.
    """

    about: str
    path: str
    fields: Json
    new_tokens: str = "max_tokens"
    is_whole: bool = False


METHODS = (
    Method("echo with logprobs", "/v1/completions", {"echo": True, "logprobs": TOP}, is_whole=True),
    Method("prompt_logprobs", "/v1/completions", {"prompt_logprobs": TOP}, is_whole=True),
    Method("n_probs", "/completion", {"n_probs": TOP, "cache_prompt": True}, "n_predict"),
    Method("logprobs of one token", "/v1/completions", {"logprobs": TOP}),
    Method("the choice of one token", "/v1/completions", {}),
)
"""In the order in which they are tried."""


class Asking(NamedTuple):
    """How a server is asked, as ``find_method`` found."""

    method: Method
    takes_ids: bool
    remarks: list[str]


def request(server: Server, path: str, body: Json | None = None) -> Any:
    """Return the JSON of an answer; a busy server is asked again, later and later.

    Raises:
        RefusalError: the status is 4xx, or 5xx with a reason.
        JllamaError: there is no answer, or it is not JSON.
    """
    with _open(server, path, body) as reply, _errors(server):
        return json.load(reply)


@contextlib.contextmanager
def _errors(server: Server) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise JllamaError(
            f"{server.url} gave no answer within {server.timeout_s:g} s: "
            "see what it is doing, or raise timeout_s"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, TimeoutError):
            raise JllamaError(
                f"{server.url} gave no answer within {server.timeout_s:g} s"
            ) from None
        raise JllamaError(
            f"{server.url} gave no answer: {reason or type(error).__name__}"
        ) from error


@contextlib.contextmanager
def _open(server: Server, path: str, body: Json | None) -> Iterator[Any]:
    headers = {"Content-Type": "application/json"}
    if server.api_key:
        headers["Authorization"] = f"Bearer {server.api_key}"
    data = json.dumps(body).encode() if body is not None else None
    for number in range(1, _MAX_TRIES + 1):
        message = urllib.request.Request(server.url + path, data, headers)
        try:
            with _errors(server):
                reply = urllib.request.urlopen(message, timeout=server.timeout_s)
            with reply:
                yield reply
            return
        except JllamaError as error:
            status = error.__cause__
            if not isinstance(status, urllib.error.HTTPError):
                raise
            if status.code in _BUSY and number < _MAX_TRIES:
                time.sleep(2.0**number / 4)
                continue
            details = " ".join(status.read(300).decode(errors="replace").split())
            raise RefusalError(f"{server.url}{path}: status {status.code}, {details}") from None


def connect(server: Server) -> Server:
    """Return the server with the name of its model, which is the first if it was not given."""
    if server.model:
        return server
    models = request(server, "/v1/models")
    try:
        return dataclasses.replace(server, model=str(models["data"][0]["id"]))
    except (LookupError, TypeError):
        raise JllamaError(
            f"{server.url}/v1/models lists no models: give the address of a server with OpenAI's "
            "API, without /v1, and the model's name with served_name"
        ) from None


def find_method(server: Server, ids: Sequence[int]) -> Asking:
    """Try the methods on a short prompt, with token ids and as text, until one works.

    Raises:
        JllamaError: none works; the message has the server's last reason.
    """
    remarks = []
    reason: object = "it takes no prompts"
    row = Row("probe", tuple(ids), (len(ids) - 1,), len(ids))
    for method in METHODS:
        for takes_ids in (True, False):
            asking = Asking(method, takes_ids, remarks)
            try:
                answers = ask(server, asking, row, 1)
            except RefusalError as error:
                reason = error
                continue
            if method.is_whole and not _agrees_with_itself(server, takes_ids, row, answers):
                remarks.append(
                    f"with {method.about} the server's log-probabilities are not those of its own "
                    "next token, so it is asked token by token"
                )
                continue
            if method is METHODS[-1]:
                remarks.append(
                    "the server gives no log-probabilities, so that only the tokens it prefers at "
                    "temperature 0 are compared"
                )
            return asking
    raise JllamaError(f"{server.url} gives neither log-probabilities nor tokens: {reason}")


def _agrees_with_itself(
    server: Server, takes_ids: bool, row: Row, answers: Mapping[int, Likely]
) -> bool:
    """Whether a token of the prompt has the log-probabilities that it has as the next token."""
    place = len(row.ids) - 2
    shorter = row._replace(ids=row.ids[: place + 1], num_prompt=place + 1)
    try:
        single = ask(server, Asking(METHODS[3], takes_ids, []), shorter, 1)[place]
    except (RefusalError, KeyError):
        return True  # it cannot be asked
    echoed = answers.get(place, {})
    gaps = [abs(echoed[id] - single[id]) for id in echoed.keys() & single.keys()]
    has_only_the_actual = len(echoed) == 1
    return (has_only_the_actual and not gaps) or bool(gaps and np.median(gaps) < _AGREES)


def ask(server: Server, asking: Asking, row: Row, new_tokens: int) -> dict[int, Likely]:
    """Return log-probabilities by place: of the prompt, where there are any, and of new tokens.

    Raises:
        RefusalError: the server does not answer, or not as the method needs.
        JllamaError: there is no server any more.
    """
    method = asking.method
    prompt: Any = list(row.ids)
    if not asking.takes_ids or row.is_text:
        prompt = prompt_text(server.tokenizer, row)
    body = {"model": server.model, "prompt": prompt, "temperature": 0.0, **method.fields}
    answer = request(server, method.path, body | {method.new_tokens: new_tokens})
    try:
        return _read(server.tokenizer, method, answer, row)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise RefusalError(f"{server.url} does not give {method.about}") from None


def prompt_text(tokenizer: Tokenizer, row: Row) -> str:
    """Return the text of a row, to which the server adds BOS.

    Raises:
        RefusalError: the text would not become these tokens.
    """
    bos = [tokenizer.bos_id] * tokenizer.add_bos
    text = tokenizer.decode([id for id in row.ids if id != tokenizer.bos_id])
    if [*bos, *tokenizer.encode(text)] != [*row.ids]:
        raise RefusalError("the tokens of a prompt cannot be sent as text")
    return text


def ask_chat(server: Server, row: Row) -> dict[int, Likely]:
    """Return log-probabilities of the first token of the answer to a conversation."""
    body = {"model": server.model, "messages": list(row.messages), "temperature": 0.0}
    body |= {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
    answer = request(server, "/v1/chat/completions", body)
    place = len(row.ids) - 1
    try:
        choice = answer["choices"][0]
        if choice.get("logprobs"):
            return {place: _likely(server.tokenizer, choice["logprobs"])[0][1]}
        return {place: _preferred(server.tokenizer, choice["message"]["content"])}
    except (KeyError, IndexError, TypeError, ValueError):
        raise RefusalError(f"{server.url} gives no log-probabilities of chats") from None


def _read(tokenizer: Tokenizer, method: Method, answer: Json, row: Row) -> dict[int, Likely]:
    """Return the log-probabilities of an answer by place."""
    last = row.num_prompt - 1
    if method.path == "/completion":
        entries = answer["completion_probabilities"]
        return {last + n: _of_entry(tokenizer, entry) for n, entry in enumerate(entries)}
    choice = answer["choices"][0]
    if "prompt_logprobs" in method.fields:
        entries = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
        shift = len(row.ids) - len(entries) - 1
        return {
            place + shift: {int(id): float(one["logprob"]) for id, one in entry.items()}
            for place, entry in enumerate(entries)
            if entry
        }
    if method is METHODS[-1]:
        return {last: _preferred(tokenizer, choice["text"])}
    likely = _likely(tokenizer, choice["logprobs"])
    if not method.is_whole:
        return {last + n: one for n, (_, one) in enumerate(likely)}
    shift = _find_shift([id for id, _ in likely], row.ids)
    return {n + shift - 1: one for n, (_, one) in enumerate(likely) if one}


def _find_shift(echoed: Sequence[int | None], ids: Sequence[int]) -> int:
    """Return the index in ``ids`` of the first token of an echo, which may lack BOS or be cut.

    Raises:
        ValueError: the tokens are not those that were sent.
    """
    guess = len(ids) - len(echoed)
    for shift in (guess + 1, guess, guess + 2, guess - 1):
        pairs = [
            (token, ids[n + shift])
            for n, token in enumerate(echoed)
            if token is not None and 0 <= n + shift < len(ids)
        ]
        num_equal = sum(one == other for one, other in pairs)
        if len(pairs) > min(len(ids) // 4, _MIN_ECHOED) and num_equal >= _SHARE_EQUAL * len(pairs):
            return shift
    raise ValueError("other tokens")


def _likely(tokenizer: Tokenizer, log_probs: Json) -> list[tuple[int | None, Likely]]:
    """Return each token of OpenAI's ``logprobs``, of chats or completions, with the likely ones.

    The token itself comes first. If its name is not known, there are none.
    """
    entries = log_probs.get("content")
    if entries is None:
        columns = (log_probs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
        entries = [
            {
                "token": name,
                "logprob": log_prob,
                "top_logprobs": [
                    {"token": other, "logprob": value} for other, value in (top or {}).items()
                ],
            }
            for name, log_prob, top in zip(*columns, strict=True)
        ]
    return [(token_id(tokenizer, entry), _of_entry(tokenizer, entry)) for entry in entries]


def _of_entry(tokenizer: Tokenizer, entry: Json) -> Likely:
    """Return the log-probabilities of a token and of the likely ones in its place."""
    likely: Likely = {}
    if token_id(tokenizer, entry) is None:
        return likely
    for one in [entry, *(entry.get("top_logprobs") or [])]:
        id = token_id(tokenizer, one)
        if id is not None and one.get("logprob") is not None:
            likely[id] = float(one["logprob"])
    return likely


def _preferred(tokenizer: Tokenizer, text: str) -> Likely:
    """Return the token that a text is, with an unknown log-probability."""
    id = token_id(tokenizer, {"token": text})
    return {} if id is None else {id: np.nan}


def token_id(tokenizer: Tokenizer, entry: Mapping[str, Any]) -> int | None:
    """Return the id of a token that a server names; None if several tokens have the name."""
    if isinstance(entry.get("id"), int):
        return entry["id"]
    name = entry["token"]
    number = name.removeprefix("token_id:")
    if number != name and number.isdecimal():
        return int(number)
    return _ids_by_name(tokenizer).get(name)


_NAMES: dict[str, dict[str, int | None]] = {}


def _ids_by_name(tokenizer: Tokenizer) -> dict[str, int | None]:
    key = tokenizer.fingerprint()
    if key not in _NAMES:
        names: dict[str, int | None] = {}
        for id, piece in enumerate(tokenizer.pieces):
            with contextlib.suppress(UnicodeDecodeError):
                name = piece.decode()
                names[name] = None if name in names else id
        _NAMES[key] = names | tokenizer.special_tokens
    return _NAMES[key]


def observe(
    server: Server, asking: Asking, rows: Sequence[Row], on_done: Callable[[int], object]
) -> list[Observed]:
    """Ask for the log-probabilities of all rows; those that the server refuses are left out."""
    jobs = []
    for index, row in enumerate(rows):
        if row.messages or asking.method.is_whole:
            jobs.append((index, row))
        else:
            most = MAX_PLACES if len(row.ids) <= _LONG else MAX_PLACES // 3
            step = -(-len(row.places) // most)
            places = row.places[::-step][::-1]
            jobs += [
                (index, row._replace(ids=row.ids[: place + 1], num_prompt=place + 1))
                for place in places
            ]
    answers: list[dict[int, Likely]] = [{} for _ in rows]
    with concurrent.futures.ThreadPoolExecutor(server.parallel) as pool:
        futures = {pool.submit(_ask_row, server, asking, row): index for index, row in jobs}
        try:
            for future in concurrent.futures.as_completed(futures):
                with contextlib.suppress(RefusalError):
                    answers[futures[future]] |= future.result()
                on_done(1)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    pairs = zip(rows, answers, strict=True)
    return [one for row, answer in pairs if (one := collect(row, answer))]


def _ask_row(server: Server, asking: Asking, row: Row) -> dict[int, Likely]:
    return ask_chat(server, row) if row.messages else ask(server, asking, row, 1)


def collect(row: Row, answer: Mapping[int, Likely]) -> Observed | None:
    """Return what was observed in the places of a row; None if that is nothing."""
    places = [place for place in row.places if answer.get(place)]
    if not places:
        return None
    width = max(len(answer[place]) for place in places)
    ids = np.full((len(places), width), -1)
    log_probs = np.zeros(ids.shape)
    for index, place in enumerate(places):
        for column, (id, log_prob) in enumerate(answer[place].items()):
            ids[index, column] = id
            log_probs[index, column] = log_prob
    return Observed(row._replace(places=tuple(places)), ids, log_probs)


def generate(server: Server, asking: Asking, row: Row, new_tokens: int) -> tuple[Row, Any]:
    """Let the server continue a prompt at temperature 0.

    Return the row with the new tokens, as far as they are known, and what was observed of them.
    """
    method = asking.method
    if method.is_whole:
        asking = asking._replace(method=METHODS[3])
    answer = ask(server, asking, row, new_tokens)
    ids = list(row.ids)
    last = len(ids) - 1
    while answer.get(len(ids) - 1):
        ids.append(next(iter(answer[len(ids) - 1])))  # the actual token comes first
    places = tuple(range(last, len(ids) - 1))
    longer = row._replace(ids=tuple(ids), places=places)
    return longer, collect(longer, answer)


def stream(server: Server, text: str, new_tokens: int, is_stream: bool) -> str:
    """Return a continuation at temperature 0, in one piece or joined from a stream."""
    body = {"model": server.model, "prompt": text, "temperature": 0.0, "max_tokens": new_tokens}
    if not is_stream:
        return str(request(server, "/v1/completions", body)["choices"][0]["text"])
    parts = []
    with _open(server, "/v1/completions", body | {"stream": True}) as reply, _errors(server):
        for line in reply:
            content = line.decode().removeprefix("data:").strip()
            if line.startswith(b"data:") and content != "[DONE]":
                choices = json.loads(content).get("choices") or [{}]
                parts.append(choices[0].get("text") or "")
    return "".join(parts)
