"""Requests to servers that nobody should trust: each ends in one sentence, in time, and the key
goes to one host.
"""

import contextlib
import http.server
import threading
import time

import pytest

from jllama.core import JllamaError
from jllama.system import web
from jllama.system.web import RefusalError, request_json


@contextlib.contextmanager
def serving(answer):
    """The address of a server that answers by ``answer(handler)``, and what it was sent."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            received.append((self.path, self.headers.get("Authorization")))
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, *_):
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


def sending(content, status=200, **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_get_the_key(status):
    with serving(sending(b"{}")) as (other, stolen):
        redirect = sending(b"", status, Location=f"{other}/steal")
        with serving(redirect) as (url, _), pytest.raises(RefusalError, match=f"status {status}"):
            request_json(f"{url}/v1/models", None, "SECRET")
        assert stolen == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "file:///etc/hostname", "127.0.0.1:80"])
def test_only_http_is_spoken(url):
    with pytest.raises(JllamaError, match="must begin with http"):
        request_json(url)


def test_an_answer_has_a_limit_in_bytes(monkeypatch):
    monkeypatch.setattr(web, "MAX_BYTES", 1 << 20)
    with (
        serving(sending(b" " * (3 << 20))) as (url, _),
        pytest.raises(JllamaError, match="it is over 1,048,576 bytes"),
    ):
        request_json(url)


def test_an_answer_that_drips_ends():
    """Each read would be in time."""

    def drip(handler):
        sending(b"")(handler)
        for _ in range(600):
            handler.wfile.write(b" ")
            time.sleep(0.1)

    with serving(drip) as (url, _), pytest.raises(JllamaError, match=r"within 0\.5 s"):
        request_json(url, timeout_s=0.5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (sending(b"[" * 200_000), "no JSON"),
        (sending(b"{"), "no JSON: Expecting"),
        (sending(b"\xff\xfe\x00"), "no JSON"),
        (sending(b'{"logprob": NaN}'), "no JSON: it has NaN"),
        (sending(b"9" * 5000), "no JSON"),
        (sending(b"ffffffffffffffff\r\nx", Transfer_Encoding="chunked"), "gave no answer"),
        (sending(b"x\r\nx", Transfer_Encoding="chunked"), "gave no answer"),
        (sending(b"{}", Content_Length="1000"), "gave no answer"),
    ],
)
def test_an_odd_answer_is_one_sentence(answer, message):
    with serving(answer) as (url, _), pytest.raises(JllamaError, match=message) as caught:
        request_json(url, timeout_s=5.0)
    assert "\n" not in str(caught.value)


def test_a_log_probability_may_be_infinite():
    with serving(sending(b'{"logprob": -Infinity}')) as (url, _):
        assert request_json(url) == {"logprob": -float("inf")}
