"""Client connections: their limit, the timeout of a request's head, and errors outside the middleware."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from app.http.errors import HttpError, fault
from app.http.keys import BEGUN
from app.http.reply import SERVER, error_response
from core.errors import Unavailable

log = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long the rest of a rejected body is read and discarded, so that the client can read the answer."""
HEAD_SECONDS = 10.0
"""Timeout of a request's head, from the connection or from its first byte."""
MAX_CONNECTIONS = 20_000
"""Maximum connections. Fewer if the limit on open files is lower: see `connection_limit`."""
OWN_FILES = 256
"""File descriptors reserved for everything but clients."""
REFUSALS = 256
"""Connections above the limit that get a 503; further ones are closed without an answer."""


def connection_limit() -> int:
    """Maximum connections: `MAX_CONNECTIONS`, or what the limit on open files allows."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else max(1, min(MAX_CONNECTIONS, files - OWN_FILES))


class ConnectionCount:
    """Open connections and their limit. Owner: event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.limit = connection_limit()
        self._warned = False

    def add(self) -> bool:
        """Count a connection; False when it is above the limit."""
        self.count += 1
        if self.count <= self.limit:
            return True
        if not self._warned:
            self._warned = True
            log.warning("%d clients are connected, the most this server takes; more are refused", self.limit)
        return False

    def remove(self) -> None:
        """Uncount one. The next warning is logged only after a tenth of the connections has gone."""
        self.count -= 1
        if self.count <= self.limit * 0.9:
            self._warned = False


class Connection(web.RequestHandler):
    """One client connection. Owner: event loop."""

    __slots__ = ("_head", "_open")

    def __init__(self, server: web.Server, connections: ConnectionCount, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._open = connections
        self._head: asyncio.TimerHandle | None = None
        """Closes a connection whose request has no complete head yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._open.add():
            super().connection_made(transport)
            self._await_head()
        else:
            self._refuse(cast(asyncio.Transport, transport))

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Answer 503 without reading, and close after the client had time to read that."""
        self.close()
        if self._open.count > self._open.limit + REFUSALS:
            transport.abort()
            return
        transport.write(_FULL)
        if transport.can_write_eof():  # TLS has no half-closed connections
            transport.write_eof()
        self._head = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._has_head()
        self._open.remove()
        if exc is not None:
            # The request's reader keeps it, and its traceback would keep the frame of the failed write, whose
            # stream holds the request: a cycle that only the collector frees.
            exc.__traceback__ = None
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        """Whether part of a response that has begun still has to be written to the socket: the handler
        streams, the response that it returned is being sent, or the transport's buffer is not empty."""
        request, transport = self._current_request, self.transport
        begun = request is None or request.writer.output_size > 0 or BEGUN in request
        held = transport is not None and transport.get_write_buffer_size() > 0
        return held or (self._request_in_progress and begun)

    def data_received(self, data: bytes) -> None:
        known = self._request_count
        super().data_received(data)
        if self._request_count > known:
            self._has_head()
        elif data and self._head is None and self._waiter is not None and not self._waiter.done():
            self._await_head()  # a head has begun

    def _await_head(self) -> None:
        self._head = self._loop.call_later(HEAD_SECONDS, self.force_close)

    def _has_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed HTTP, or an error outside all handlers, and close."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; it cannot become an error")
        if isinstance(exc, ConnectionError):
            raise exc  # the client has disconnected: aiohttp closes the connection and logs nothing
        if status >= 500:
            log.error("error outside a handler", exc_info=exc)
            response = error_response(fault(exc or RuntimeError()))
        else:
            status = 431 if isinstance(exc, LineTooLong) else status
            # The parser's message quotes the client's bytes over several lines: keep the first.
            reason = (message or "Bad request").split("\n", 1)[0]
            response = error_response(fault(HttpError(status, f"Malformed HTTP: {reason}", "bad_http")))
        response.headers["Server"] = SERVER  # no signal of the app sees this response
        response.force_close()
        return response


def _refusal() -> bytes:
    refusal = fault(Unavailable("Too many clients are connected; try again."))
    body = refusal.body()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **refusal.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body


_FULL = _refusal()
"""The answer above the limit."""
