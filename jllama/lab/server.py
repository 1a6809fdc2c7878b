"""Log-probabilities of a server with OpenAI's API, in whichever way it gives them."""

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jllama.core import JllamaError
from jllama.lab.rows import Observed, Row, cut_row
from jllama.system.files import Json
from jllama.system.web import RefusalError, request_json
from jllama.tokenizers.base import Tokenizer

TOP = 5
"""How many log-probabilities of each token are requested: some servers refuse more."""
MAX_PLACES = 24
"""Places of a row that are requested if each needs a request of its own."""
_LONG = 1024  # tokens of a prompt of which fewer places are requested
_AGREES = 0.2  # nats between two answers about one token
_SHARE_EQUAL = 0.9  # of the tokens of an echo, which must be those that were sent
_MIN_ECHOED = 16  # tokens of an echo, which may be cut
_NO_METHOD = AttributeError, LookupError, OverflowError, TypeError, ValueError

Likely = dict[int, float]
"""Log-probabilities by token; the actual token comes first."""


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


ECHO = Method(
    "echo with logprobs", "/v1/completions", {"echo": True, "logprobs": TOP}, is_whole=True
)
PROMPT = Method("prompt_logprobs", "/v1/completions", {"prompt_logprobs": TOP}, is_whole=True)
N_PROBS = Method("n_probs", "/completion", {"n_probs": TOP}, "n_predict")
ONE_TOKEN = Method("logprobs of one token", "/v1/completions", {"logprobs": TOP})
CHOICE = Method("the choice of one token", "/v1/completions", {})
CHAT = Method("chats", "/v1/chat/completions", {"logprobs": True, "top_logprobs": TOP})
METHODS = (ECHO, PROMPT, N_PROBS, ONE_TOKEN, CHOICE)
"""In the order in which they are tried."""


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and how it is asked.

    Attributes:
        url: the address, without ``/v1``.
        tokenizer: of the checkpoint.
        num_ids: the size of its vocabulary, which may be larger than the tokenizer's.
        served_name: the name of the model; if it is empty, ``connect`` takes the first.
        api_key: sent with each request, if set.
        timeout_s: how long an answer may take.
        parallel: how many requests there are at once, at most.
        names: the ids of tokens by the names that servers use; None if two have the same.
        method: how it is asked for log-probabilities.
        takes_ids: whether it takes token ids as a prompt.
        remarks: what was noticed of it.
    """

    url: str
    tokenizer: Tokenizer
    num_ids: int
    served_name: str = ""
    api_key: str = ""
    timeout_s: float = 120.0
    parallel: int = 4
    names: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    method: Method = CHOICE
    takes_ids: bool = True
    remarks: tuple[str, ...] = ()


def connect(server: Server, ids: Sequence[int]) -> Server:
    """Return the server with the name of its model and how it can be asked.

    The methods are tried on a prompt, with token ids and as text.

    Raises:
        JllamaError: it lists no model, or no method works; the message has its last reason.
    """
    # 1) Find the model's name.
    served_name = server.served_name
    if not served_name:
        models = request_json(f"{server.url}/v1/models", None, server.api_key, server.timeout_s)
        try:
            served_name = str(models["data"][0]["id"])
        except _NO_METHOD:
            raise JllamaError(
                f"{server.url}/v1/models lists no models: give the address of a server with "
                "OpenAI's API, without /v1, or the model's name with served_name"
            ) from None

    # 2) Map the names that a server may give to tokens to their ids.
    names: dict[str, int | None] = {}
    for id, piece in enumerate(server.tokenizer.pieces):
        names[f"token_id:{id}"] = id  # vLLM's form
        # Servers name parts of characters in one of these ways, as other tokens are called.
        forms = {piece.decode(errors=errors) for errors in ("ignore", "replace")}
        for name in forms:
            is_certain = len(forms) == 1 and name not in names
            names[name] = id if is_certain else None
    names |= server.tokenizer.special_tokens
    server = dataclasses.replace(server, served_name=served_name, names=names)

    # 3) Choose the first method that works.
    reason: object = ""
    remarks: list[str] = []
    row = Row("probe", tuple(ids), (len(ids) - 1,), len(ids))
    for method in METHODS:
        for takes_ids in (True, False):
            candidate = dataclasses.replace(server, method=method, takes_ids=takes_ids)
            try:
                answers = ask(candidate, row)
            except RefusalError as error:
                reason = error
                continue
            if method.is_whole and not _agrees_with_itself(candidate, row, answers):
                remarks.append(
                    f"with {method.about} the server's log-probabilities are not those of its own "
                    "next token, so it is asked token by token"
                )
                continue
            if method is CHOICE:
                remarks.append(
                    "the server gives no log-probabilities: only the tokens that it prefers at "
                    "temperature 0 are compared"
                )
            return dataclasses.replace(candidate, remarks=tuple(dict.fromkeys(remarks)))
    raise JllamaError(f"{server.url} gives neither log-probabilities nor tokens: {reason}")


def _agrees_with_itself(server: Server, row: Row, answers: Mapping[int, Likely]) -> bool:
    """Return whether a token of a prompt has the log-probabilities that it has as the next one."""
    place = len(row.ids) - 2
    echoed = answers.get(place, {})
    try:
        single = ask(dataclasses.replace(server, method=ONE_TOKEN), cut_row(row, place))[place]
    except (RefusalError, KeyError):
        return True  # it cannot be asked
    gaps = [abs(echoed[id] - single[id]) for id in echoed.keys() & single.keys()]
    if not gaps:
        return len(echoed) == 1  # it may tell the actual token's alone, which is unlikely
    return float(np.median(gaps)) < _AGREES


def ask(server: Server, row: Row, new_tokens: int = 1) -> dict[int, Likely]:
    """Return log-probabilities by place: of the prompt, where there are any, and of new tokens.

    Raises:
        RefusalError: the server does not answer as the method needs.
        JllamaError: there is no server any more.
    """
    method = CHAT if row.messages else server.method
    body: Json = {"model": server.served_name, "temperature": 0.0, method.new_tokens: new_tokens}
    if row.messages:
        body["messages"] = list(row.messages)
    elif server.takes_ids and not row.is_text:
        body["prompt"] = list(row.ids)
    else:
        body["prompt"] = prompt_text(server.tokenizer, row)
    url = server.url + method.path
    answer = request_json(url, body | method.fields, server.api_key, server.timeout_s)
    try:
        return _read(server, method, answer, row)
    except _NO_METHOD:
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


def _read(server: Server, method: Method, answer: Json, row: Row) -> dict[int, Likely]:
    """Return the log-probabilities of an answer by place."""
    choice = answer if method is N_PROBS else answer["choices"][0]
    if method is PROMPT:
        entries = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
        first = len(row.ids) - len(entries) - 1
        likely = [
            {_checked_id(server, id): float(one["logprob"]) for id, one in (entry or {}).items()}
            for entry in entries
        ]
        return dict(enumerate(likely, first))
    if method is N_PROBS:
        entries = choice["completion_probabilities"]
    elif choice.get("logprobs"):
        entries = _entries(choice["logprobs"])
    elif method in (CHOICE, CHAT):
        text = choice["message"]["content"] if row.messages else choice["text"]
        entries = [{"token": text, "logprob": np.nan}]
        may_lack_space = not server.tokenizer.is_byte_level and f" {text}" in server.names
        if may_lack_space:  # which decoding SentencePiece's tokens drops
            entries = []
    else:
        raise LookupError
    likely = [_likely(server, entry) for entry in entries]
    first = row.num_prompt - 1
    if method.is_whole:
        first = _first_echoed([next(iter(one), None) for one in likely], row.ids) - 1
    return dict(enumerate(likely, first))


def _entries(log_probs: Json) -> list[Json]:
    """Return OpenAI's ``logprobs`` of completions in the form of those of chats."""
    if log_probs.get("content"):
        return log_probs["content"]
    columns = (log_probs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [
        {
            "token": name,
            "logprob": log_prob,
            "top_logprobs": [
                {"token": other, "logprob": value} for other, value in (top or {}).items()
            ],
        }
        for name, log_prob, top in zip(*columns, strict=True)
    ]


def _likely(server: Server, entry: Json) -> Likely:
    """Return the log-probabilities in a place; none if the name of the token is not known."""
    likely: Likely = {}
    for one in [entry, *(entry.get("top_logprobs") or [])]:
        id = _checked_id(server, one["id"]) if "id" in one else server.names.get(one["token"])
        if one is entry and id is None:
            break
        if id is not None and one["logprob"] is not None:
            likely[id] = float(one["logprob"])
    return likely


def _checked_id(server: Server, id: object) -> int:
    """Return the id of a token; raise ``ValueError`` if the vocabulary has none of this id."""
    number = int(str(id))
    if not 0 <= number < server.num_ids:
        raise ValueError
    return number


def _first_echoed(echoed: Sequence[int | None], ids: Sequence[int]) -> int:
    """Return the index in ``ids`` of the first token of an echo, which may lack BOS or be cut.

    Raises:
        ValueError: the tokens are not those that were sent.
    """
    usual = len(ids) - len(echoed) + 1  # there is one new token
    for first in (usual, usual - 1, usual + 1, usual - 2):
        pairs = [
            (token, ids[index])
            for index, token in enumerate(echoed, first)
            if token is not None and 0 <= index < len(ids)
        ]
        num_equal = sum(token == id for token, id in pairs)
        is_long = len(pairs) > min(len(ids) // 4, _MIN_ECHOED)
        if is_long and num_equal >= _SHARE_EQUAL * len(pairs):
            return first
    raise ValueError


def observe(
    server: Server,
    rows: Sequence[Row],
    on_progress: Callable[..., object] = lambda **_: None,
) -> list[Observed]:
    """Ask for the log-probabilities of all rows; those that the server refuses are left out."""
    jobs = []
    for index, row in enumerate(rows):
        if row.messages or server.method.is_whole:
            jobs.append((index, row))
            continue
        num_places = MAX_PLACES if len(row.ids) <= _LONG else MAX_PLACES // 3
        step = -(-len(row.places) // num_places)
        jobs += [(index, cut_row(row, place)) for place in row.places[::-step]]
    answers: list[dict[int, Likely]] = [{} for _ in rows]
    with concurrent.futures.ThreadPoolExecutor(server.parallel) as pool:
        futures = {pool.submit(ask, server, row): index for index, row in jobs}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                with contextlib.suppress(RefusalError):
                    answers[futures[future]] |= future.result()
                on_progress(completed=done, total=len(jobs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    collected = [collect(row, answer) for row, answer in zip(rows, answers, strict=True)]
    return [observed for observed in collected if observed]


def collect(row: Row, answer: Mapping[int, Likely]) -> Observed | None:
    """Return what was observed in the places of a row; None if that is nothing."""
    places = tuple(place for place in row.places if answer.get(place))
    if not places:
        return None
    shape = len(places), max(len(answer[place]) for place in places)
    ids = np.full(shape, -1)
    log_probs = np.zeros(shape)
    for index, place in enumerate(places):
        likely = answer[place]
        ids[index, : len(likely)] = list(likely)
        log_probs[index, : len(likely)] = list(likely.values())
    return Observed(row._replace(places=places), ids, log_probs)


def generate(server: Server, row: Row, new_tokens: int) -> Observed | None:
    """Let the server continue a prompt; return what was observed of the new tokens.

    Raises:
        RefusalError: the server does not answer as the method needs.
    """
    if server.method.is_whole:
        server = dataclasses.replace(server, method=ONE_TOKEN)
    answer = ask(server, row, new_tokens)
    ids = list(row.ids)
    while answer.get(len(ids) - 1):
        ids.append(next(iter(answer[len(ids) - 1])))
    places = range(len(row.ids) - 1, len(ids) - 1)
    return collect(row._replace(ids=tuple(ids), places=tuple(places)), answer)
