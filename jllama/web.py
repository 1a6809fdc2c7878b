"""Requests to servers, with JSON in and out."""

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from jllama.errors import JllamaError
from jllama.files import Json, errors_as

_BUSY = (429, 503)
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class RefusalError(JllamaError):
    """The server answered, with a status of 400 or more or not as expected."""


@contextlib.contextmanager
def open_url(
    url: str, body: Json | None = None, api_key: str = "", timeout_s: float | None = None
) -> Iterator[Any]:
    """Yield the reply to a request, which is a POST if it has a body.

    A server that is busy is asked again after a pause.

    Raises:
        RefusalError: the status is 400 or more.
        JllamaError: there is no answer, or the block cannot read it.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    errors = (OSError, ValueError, http.client.HTTPException)
    limit = f" within {timeout_s:g} s" if timeout_s else ""
    with errors_as(f"{url} gave no answer{limit}", *errors):
        message = urllib.request.Request(url, data, headers)
        with _open_patiently(message, timeout_s) as reply:
            yield reply


def _open_patiently(message: urllib.request.Request, timeout_s: float | None) -> Any:
    """Open a URL; ask a busy server again, after longer and longer pauses."""
    pauses_s = list(_PAUSES_S)
    while True:
        try:
            return urllib.request.urlopen(message, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            if error.code not in _BUSY or not pauses_s:
                details = " ".join(error.read(1000).decode(errors="replace").split())
                problem = f"{message.full_url}: status {error.code}, {details}"
                raise RefusalError(problem) from error
        time.sleep(pauses_s.pop(0))


def request_json(
    url: str, body: Json | None = None, api_key: str = "", timeout_s: float | None = None
) -> Any:
    """Return the JSON of a reply; see ``open_url``."""
    with open_url(url, body, api_key, timeout_s) as reply:
        return json.load(reply)
