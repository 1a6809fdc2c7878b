"""Requests to servers, with JSON in and out."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from jllama.core import JllamaError
from jllama.system.files import Json, errors_as

MAX_BYTES = 1 << 28
"""Of an answer."""
_BUSY = (429, 503)
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_ERRORS = (OSError, ValueError, OverflowError, http.client.HTTPException)


class RefusalError(JllamaError):
    """The server answered, with a status of 300 or more or not as expected."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key is for one host."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        """Return no further request."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def request_bytes(
    url: str, body: Json | None = None, api_key: str = "", timeout_s: float | None = None
) -> bytes:
    """Return the answer to a request, which is a POST if it has a body.

    A server that is busy is asked again after a pause. ``timeout_s`` limits the time until the
    answer begins, and the time that it takes.

    Raises:
        RefusalError: the status is 300 or more.
        JllamaError: there is no answer, or it is too late or too long.
    """
    if not url.startswith(("http://", "https://")):
        raise JllamaError(
            f"{url} is no address of a server: it must begin with http:// or https://"
        )
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    limit = f" within {timeout_s:g} s" if timeout_s else ""
    with errors_as(f"{url} gave no answer{limit}", *_ERRORS):
        message = urllib.request.Request(url, data, headers)
        with _open_patiently(message, timeout_s) as reply:
            return _read(reply, timeout_s)


def _read(reply: Any, timeout_s: float | None) -> bytes:
    """Read an answer; raise ``ValueError`` if it is too long, ``TimeoutError`` if too late."""
    answer = bytearray()
    start_s = time.monotonic()
    while part := reply.read1(1 << 16):
        answer += part
        if len(answer) > MAX_BYTES:
            raise ValueError(f"it is over {MAX_BYTES:,} bytes")
        if timeout_s and time.monotonic() - start_s > timeout_s:
            raise TimeoutError("it did not end")
    if reply.length:
        raise ValueError("it ends too early")
    return bytes(answer)


def _open_patiently(message: urllib.request.Request, timeout_s: float | None) -> Any:
    """Open a URL; ask a busy server again, after longer and longer pauses."""
    pauses_s = list(_PAUSES_S)
    while True:
        try:
            return _OPENER.open(message, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            if error.code not in _BUSY or not pauses_s:
                details = " ".join(error.read(1000).decode(errors="replace").split())
                problem = f"{message.full_url}: status {error.code}, {details}"
                raise RefusalError(problem) from error
        time.sleep(pauses_s.pop(0))


def request_json(
    url: str, body: Json | None = None, api_key: str = "", timeout_s: float | None = None
) -> Any:
    """Return the JSON of an answer; see ``request_bytes``.

    Raises:
        JllamaError: there is no answer, or it is no JSON; NaN is none.
    """
    answer = request_bytes(url, body, api_key, timeout_s)
    with errors_as(f"{url} answered something that is no JSON", ValueError, RecursionError):
        return json.loads(answer, parse_constant=_constant)


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it has NaN")
    return float(name)
