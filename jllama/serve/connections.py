"""Connections of clients: how many there may be, and how long one may take to send a request."""

import re
import time
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from jllama.serve.config import MAX_HEAD_BYTES, HttpConfig


class Connection(H11Protocol):
    """HTTP/1.1 on one connection, closed if it is idle for too long or another needs its place.

    ``H11Protocol`` limits the size of a head, but not the time that a client takes to send it. It
    takes LF for the end of a line, which other programs on the way read as a part of it.
    """

    limit_concurrency: int
    last_check: object = None
    """The last request at the last check; the connection itself if it was being answered."""

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are not asyncio's
        """Make room if there are too many connections, and begin to watch this one."""
        super().connection_made(transport)
        self.opened_s = time.monotonic()  # uvloop's own is of an iteration
        self.loop.call_later(self.timeout_keep_alive, self.close_if_idle)
        others: set[Any] = self.connections - {self}
        idle = [connection for connection in others if connection.is_idle()]
        if idle and len(others) >= self.limit_concurrency - 1:
            oldest = min(idle, key=lambda connection: connection.opened_s)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def close_if_idle(self) -> None:
        """Close the connection if it has been idle since the last check.

        Otherwise check again later.
        """
        if self.transport.is_closing():
            return
        if self.is_idle() and self.last_check is self.cycle:
            self.transport.abort()
            return
        self.last_check = self.cycle if self.is_idle() else self
        self.loop.call_later(self.timeout_keep_alive, self.close_if_idle)

    def handle_events(self) -> None:
        """Refuse a head with a bare LF; else let h11 read it."""
        unread, _ = self.conn.trailing_data
        head, _, _ = unread.partition(b"\r\n\r\n")
        if self.conn.their_state is h11.IDLE and re.search(rb"(?<!\r)\n", head):
            self.send_400_response("A line ends in LF without CR.")
        else:
            super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Answer a head that h11 cannot parse."""
        super().send_400_response(
            f"{msg} Send HTTP/1.1 with a head of at most {MAX_HEAD_BYTES} bytes.\n"
        )


def make_server(app: FastAPI, config: HttpConfig) -> uvicorn.Server:
    """Return a server of an application; run in a thread, it does not handle signals."""
    limits = {
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
        "limit_concurrency": config.max_connections,
        "timeout_keep_alive": config.idle_timeout_s,
        "timeout_graceful_shutdown": 5,
    }
    quiet = {"log_config": None, "log_level": "warning", "access_log": False, "lifespan": "off"}
    return uvicorn.Server(uvicorn.Config(app, http=Connection, ws="none", **limits, **quiet))
