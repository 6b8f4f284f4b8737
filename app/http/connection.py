"""One client's connection: how many there may be, how long a head may take, and our error body where no
middleware runs."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from app.http.errors import HttpError, fault
from app.http.reply import error_response
from core.errors import Unavailable

log = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long the rest of a refused body is read and thrown away, so that the client sees the answer."""
HEAD_SECONDS = 10.0
"""How long a request's head may take, from the connection or from its own first byte."""
MAX_CONNECTIONS = 20_000
"""Clients at once. Fewer where the process may not open so many files: see `connection_limit`."""
OWN_FILES = 256
"""Descriptors that are kept for everything but clients."""
REFUSALS = 256
"""Connections above the limit that are told so; those above these are cut off without a word."""


def connection_limit() -> int:
    """Clients at once: `MAX_CONNECTIONS`, or what the limit of open files leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files < 0 else max(1, min(MAX_CONNECTIONS, files - OWN_FILES))


class Places:
    """How many clients are connected, and may be. Owner: event loop."""

    __slots__ = ("_told", "limit", "taken")

    def __init__(self) -> None:
        self.taken = 0
        self.limit = connection_limit()
        self._told = False

    def take(self) -> bool:
        """One connection more. False when it is one too many."""
        self.taken += 1
        if self.taken <= self.limit:
            return True
        if not self._told:
            self._told = True
            log.warning("%d clients are connected, the most this server takes; more are refused", self.limit)
        return False

    def free(self) -> None:
        """One less. The limit is worth another line when it is reached after a tenth of them has gone."""
        self.taken -= 1
        if self.taken <= self.limit * 0.9:
            self._told = False


class Connection(web.RequestHandler):
    """One client connection. Owner: event loop."""

    __slots__ = ("_head", "_places")

    def __init__(self, server: web.Server, places: Places, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._places = places
        self._head: asyncio.TimerHandle | None = None
        """Ends a connection whose request has no whole head yet."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._places.take():
            super().connection_made(transport)
            self._await_head()
        else:
            self._refuse(cast(asyncio.Transport, transport))

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Nothing of it is read: it is told, and closed once the client can have seen that."""
        self.close()
        if self._places.taken > self._places.limit + REFUSALS:
            transport.abort()
            return
        transport.write(_FULL)
        transport.write_eof()
        self._head = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._has_head()
        self._places.free()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        known = self._request_count
        super().data_received(data)
        if self._request_count > known:
            self._has_head()
        elif data and self._head is None and self._waiter is not None and not self._waiter.done():
            self._await_head()  # what came belongs to no request yet

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
        """Answer what is not HTTP, or an error outside every handler, and close."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; it cannot become an error")
        if status >= 500:
            log.error("error outside a handler", exc_info=exc)
            response = error_response(fault(exc or RuntimeError()))
        else:
            status = 431 if isinstance(exc, LineTooLong) else status
            # The parser's message quotes the client's bytes over several lines: keep the first.
            reason = (message or "Bad request").split("\n", 1)[0]
            response = error_response(fault(HttpError(status, f"Malformed HTTP: {reason}", "bad_http")))
        response.force_close()
        return response


def _refusal() -> bytes:
    told = fault(Unavailable("Too many clients are connected; try again."))
    body = told.body()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **told.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + body


_FULL = _refusal()
"""What a client gets for which there is no room."""
