"""What a server bears before anybody has shown a key: heads, connections, names. Through sockets to
127.0.0.1."""

import contextlib
import json
import time

import httpx
import pytest
from helpers_serve import connection_to, listening

from jllama.commands.serve import _keys
from jllama.serve.app import _is_served_host
from jllama.serve.config import MAX_HEAD_BYTES, MAX_HEADERS

KEY = "secret"


def loading(**config):
    """A server with a key, whose model is still loading."""
    return listening(None, [KEY], **config)


@pytest.fixture(scope="module")
def url():
    with loading() as (url, _):
        yield url


def reply_to(url, parts):
    """What comes until the server closes; what is sent may be cut off before."""
    with connection_to(url) as connection:
        reply = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(10_000):
                reply += part
    return reply


def get(connection, path="/", method="GET", more=""):
    """The status of one more request on a connection."""
    connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
    head = b""
    while b"\r\n\r\n" not in head:
        head += some(connection, 1)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length:
        length -= len(some(connection, length))
    return int(head.split()[1])


def some(connection, most):
    if part := connection.recv(most):
        return part
    raise ConnectionError


def connection_with_answer(url, status=200, **request):
    """A connection with one request answered.

    A new one if the test was too slow for the server's patience.
    """
    while True:
        connection = connection_to(url)
        try:
            assert get(connection, **request) == status
        except ConnectionError:
            connection.close()
        else:
            return connection


def drip_until_closed(connection):
    with contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(b"G")
            time.sleep(0.01)


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = HEAD.replace(b"GET /", b"POST /v1/completions")


@pytest.mark.parametrize(
    "part", [b"a: b\r\n" * 10_000, b"a" * 60_000], ids=["many headers", "one long header"]
)
def test_headers_without_end_are_cut_off(part, url):
    """60 MB of them: the connection ends long before."""
    sent = 0

    def parts():
        nonlocal sent
        yield HEAD
        for _ in range(1000):
            yield part
            sent += len(part)

    reply = reply_to(url, parts())
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4")
    assert sent < 20_000_000  # what the system's buffers take, too


@pytest.mark.parametrize(
    "headers",
    [{f"a{number}": "b" for number in range(MAX_HEADERS)}, {"a": "b" * MAX_HEAD_BYTES}],
    ids=["count", "bytes"],
)
def test_a_head_that_comes_at_once_has_the_same_limits(headers, url):
    """Before a key is asked for."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = HEAD.replace(b"/ ", b"/v1/models ") + lines.encode() + b"\r\n"
    reply = reply_to(url, [head])
    if reply.startswith(b"HTTP/1.1 431 "):
        assert message_of(reply).endswith(f"send at most {MAX_HEADERS} of {MAX_HEAD_BYTES}")
    else:  # it came in two pieces
        assert b"with a head of at most 16384 bytes" in reply


def message_of(reply):
    return json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_usual_heads_are_read(url):
    lines = "".join(f"a{number}: {'b' * 100}\r\n" for number in range(MAX_HEADERS - 2))
    reply = reply_to(url, [HEAD + lines.encode() + b"Connection: close\r\n\r\n"])
    assert reply.startswith(b"HTTP/1.1 200 ")


def test_a_body_has_one_length(url):
    """Programs on the way may take the other one: the connection ends."""
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = reply_to(url, [POST + lengths + b"0\r\n\r\n" + HEAD + b"\r\n"])
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert reply.count(b"HTTP/1.1") == 1
    said = "a body has Content-Length or Transfer-Encoding, not both"
    assert message_of(reply).startswith(said)


@pytest.mark.parametrize(
    "request_parts",
    [
        [HEAD.replace(b"\r\n", b"\n") + b"\n"],
        [HEAD.replace(b"/1.1\r", b"/1.1") + b"\r\n"],
        [HEAD + b"\n"],
        [HEAD + b"a: b\nc: d\r\n\r\n"],
        [HEAD + b"a: b", b"\n\n"],
        [HEAD + b"\r\n" + HEAD + b"\n"],  # the second one
    ],
)
def test_lines_end_in_cr_and_lf(request_parts, url):
    before, _, reply = reply_to(url, request_parts).partition(b"HTTP/1.1 400 ")
    assert b"A line ends in LF without CR. Send HTTP/1.1" in reply
    assert before.count(b"HTTP/1.1 200 ") == b"".join(request_parts).count(b"GET") - 1


def test_a_body_may_have_any_line_ends(url):
    head = POST + b"Connection: close\r\nContent-Length: 6\r\n\r\n"
    for parts in ([head + b"{\n\n\n}"], [head, b"{\n\n\n}"], [head[:-1], b"\n{\n\n\n", b"}"]):
        assert b"give a key of this server" in reply_to(url, parts)


@pytest.mark.parametrize("connect", [connection_to, connection_with_answer])
def test_who_sends_nothing_or_drips_a_head_is_cut_off(connect):
    with loading(idle_timeout_s=0.3) as (url, _), connect(url) as silent, connect(url) as dripping:
        assert is_closed(silent)
        drip_until_closed(dripping)


def test_a_body_that_nobody_reads_is_cut_off():
    """Without a key the answer comes at once.

    What is dripped after it does not keep the connection.
    """
    request = {"path": "/v1/completions", "method": "POST", "more": "Content-Length: 100000\r\n"}
    with (
        loading(idle_timeout_s=0.3) as (url, _),
        connection_with_answer(url, 401, **request) as connection,
    ):
        drip_until_closed(connection)


def test_another_connection_closes_the_one_that_was_idle_for_longest():
    with (
        loading(max_connections=10, idle_timeout_s=60) as (url, server),
        contextlib.ExitStack() as stack,
    ):
        silent, answered = [], []
        for _ in range(10):
            silent.append(stack.enter_context(connection_to(url)))
            answered.append(stack.enter_context(connection_to(url)))
            # It also keeps the order: the server tells connections apart by milliseconds.
            assert get(answered[-1]) == 200
        with connection_to(url) as another:
            assert get(another) == 200
        assert len(server.server_state.connections) <= 10
        assert all(is_closed(connection) for connection in (*silent[:5], *answered[:5]))
        assert get(answered[-1]) == 200


def test_many_idle_connections_do_not_hold_up_anybody():
    with loading(idle_timeout_s=0.3) as (url, _), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connection_to(url)) for _ in range(200)]
        connection_with_answer(url, 503, path="/health").close()  # as it is still loading
        assert all(is_closed(connection) for connection in idle)


# Names


def reply_by(url, host, path="/", **headers):
    # Reading the system's certificates takes most of the time.
    return httpx.get(url + path, headers={"Host": host} | headers, verify=False)


OWN_NAMES = "localhost LOCALHOST:80 127.0.0.1 127.0.0.1:8731 [::1] [::1]:9 127.0.0.1:"


@pytest.mark.parametrize("host", OWN_NAMES.split())
def test_names_of_this_machine_are_served(host, url):
    assert reply_by(url, host).status_code == 200


OTHER_NAMES = """evil.example evil.example:8731 localhost.evil.example [::1 127.0.0.1.x
@localhost:80 evil@127.0.0.1 127.0.0.1/evil 127.0.0.1?evil localhost#evil"""
PATHS = "/ /health /metrics /v1/models /openapi.json"


@pytest.mark.parametrize("host", [*OTHER_NAMES.split(), "127.0\t.0.1"])
def test_a_page_whose_name_leads_to_this_machine_is_not_served(host, url):
    for path in PATHS.split():
        reply = reply_by(url, host, path, Origin=f"http://{host}", Authorization=f"Bearer {KEY}")
        assert reply.status_code == 421
        message = reply.json()["error"]["message"]
        assert "--allowed_host" in message
        assert repr(host)[1:-1] in message


def test_names_that_are_given_are_served():
    with loading(allowed_host=["Model.example"]) as (url, _):
        statuses = [
            reply_by(url, host).status_code
            for host in ("model.example:443", "localhost", "other.example")
        ]
    assert statuses == [200, 200, 421]


def test_a_request_without_a_name_comes_from_no_browser(url):
    assert reply_to(url, [b"GET / HTTP/1.0\r\n\r\n"]).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("address", "host", "is_served"),
    [
        ("::1", "[::1]:8000", True),
        ("::1", "evil.example", False),
        ("127.0.1.1", "127.0.1.1", True),
        ("127.0.1.1", "evil.example", False),
        ("192.168.1.5", "llama.lan", True),
        ("192.168.1.5", "evil@llama.lan", False),
        ("fe80::1", "[fe80::1%25eth0]:80", True),
    ],
)
def test_names_at_other_addresses(address, host, is_served):
    assert _is_served_host({"server": (address, 8000)}, host, []) is is_served


def test_keys_that_others_may_read(tmp_path, capsys):
    file = tmp_path / "keys"
    file.write_text("one\ntwo")
    warning = f"other users may read or write the api_key_file {file}: chmod 600"
    for mode, is_warned in ((0o644, True), (0o600, False)):
        file.chmod(mode)
        assert _keys(str(file)) == ["one", "two"]
        assert (warning in capsys.readouterr().err) is is_warned
