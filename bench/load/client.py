"""A minimal HTTP/1.1 client: one POST at a time per connection, answers parsed as they arrive.

aiohttp's client costs 30 to 40 µs per event for its parser, streams and wake-ups; a protocol that
parses in `data_received` costs a few, so that six client processes are not the bottleneck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import cast
from urllib.parse import urlsplit

import msgspec

from bench.load.prompts import PreparedRequest
from bench.load.records import Record
from bench.load.stream import Stream

_MAX_ERROR_BODY = 65_536
"""Bytes kept of an error body: enough for any message, not for a page of HTML per request."""
_MAX_HEAD = 65_536

_clock = time.perf_counter


class Target(msgspec.Struct, frozen=True):
    """The server that requests go to."""

    host: str
    port: int
    tls: bool
    base: str
    """Path before `/v1`, without a trailing slash."""
    api_key: str = ""
    timeout: float = 600.0
    """Seconds that one request may take."""

    @classmethod
    def of(cls, url: str, api_key: str = "", timeout: float = 600.0) -> Target:
        """The target of `http://host:port`, with or without `/v1`. ValueError for anything else."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url} is not an http:// or https:// address")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, base, api_key, timeout)

    @property
    def url(self) -> str:
        """The base as one string."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.base}"

    def head(self, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """The request head up to and including `Content-Length: `, with more `headers`."""
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        host = self.url.split("/")[2]
        return (
            f"POST {self.base}{path} HTTP/1.1\r\nHost: {host}\r\n{key}Accept: text/event-stream\r\n{more}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()


class Reply:
    """Framing of one HTTP answer: head, then a chunked, counted or unbounded body.

    Owner: event loop of a client process.
    """

    __slots__ = ("_chunked", "_error_body", "_left", "_rest", "_stream", "keep_alive", "status")

    def __init__(self, stream: Stream) -> None:
        self.status = 0
        self.keep_alive = True
        self._stream = stream
        self._chunked = False
        self._left = -1  # bytes of a counted body still to come; -1: until the connection closes
        self._rest = b""
        self._error_body = bytearray()

    def feed(self, data: bytes, now: float) -> bool:
        """Take what arrived; True when the answer is complete. ValueError when it is not HTTP."""
        if self.status and self._chunked:
            return self._chunks(data, now)
        if not self.status:
            data = self._rest + data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise ValueError("no end of the response head")
                self._rest = data
                return False
            self._rest = b""
            self._head(data[:end])
            data = data[end + 4 :]
            if self._chunked:
                return self._chunks(data, now)
        return self._counted(data, now)

    def close(self, now: float, whole: bool) -> None:
        """The body is complete or cut off: close the stream."""
        if self.status != 200:
            self._stream.reject(self.status, bytes(self._error_body), now)
        else:
            self._stream.close(now, whole)

    def lost(self, now: float) -> None:
        """The connection closed before the answer was complete."""
        if not self.status:
            self._stream.fail("connection lost", "no answer", now)
        else:
            self.close(now, whole=not self._chunked and self._left < 0)

    def fail(self, detail: str, now: float) -> None:
        """Fail the stream: what arrived is not HTTP."""
        self._stream.fail("malformed answer", detail, now)

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, status = first.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"not an HTTP/1 answer: {first[:80]!r}")
        self.status = int(status)
        self.keep_alive = version != b"HTTP/1.0"
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"transfer-encoding":
                self._chunked = b"chunked" in value
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"connection":
                self.keep_alive = value != b"close"

    def _chunks(self, data: bytes, now: float) -> bool:
        if self._rest:
            data = self._rest + data
        at = 0
        while (eol := data.find(b"\r\n", at)) >= 0:
            size = data[at:eol]
            length = int(size.partition(b";")[0] if b";" in size else size, 16)
            if length == 0:
                if data.find(b"\r\n\r\n", eol) < 0:
                    break  # trailers still to come
                return True
            end = eol + 2 + length
            if end + 2 > len(data):
                break
            self._take(data[eol + 2 : end], now)
            at = end + 2
        self._rest = data[at:]
        return False

    def _counted(self, data: bytes, now: float) -> bool:
        self._take(data, now)
        if self._left < 0:
            self.keep_alive = False
            return False
        self._left -= len(data)
        return self._left <= 0

    def _take(self, data: bytes, now: float) -> None:
        if self.status == 200:
            self._stream.feed(data, now)
        elif len(self._error_body) < _MAX_ERROR_BODY:
            self._error_body += data


class Connection(asyncio.Protocol):
    """One connection, kept open between requests. Owner: event loop of a client process."""

    __slots__ = ("_done", "_reply", "_transport")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the connection is open, so that another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without inheriting it

    def data_received(self, data: bytes) -> None:
        now = _clock()
        if self._reply is None:
            self.abort()  # unexpected bytes: the framing is lost
            return
        try:
            complete = self._reply.feed(data, now)
        except ValueError as error:
            self._reply.fail(str(error), now)
            self.abort()
            return
        if complete:
            self._reply.close(now, whole=True)
            keep = self._reply.keep_alive
            self._settle()
            if not keep:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._reply is not None:
            self._reply.lost(_clock())
            self._settle()

    def abort(self) -> None:
        """Close at once; a running request ends with "connection lost"."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, stream: Stream) -> int:
        """Send, and wait until `stream` has been closed. Returns the HTTP status, 0 for no answer."""
        if self._transport is None:
            raise ConnectionError("closed before it was used")
        reply = self._reply = Reply(stream)
        done = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await done
        except asyncio.CancelledError:
            self._reply = None
            self.abort()
            raise
        return reply.status

    def _settle(self) -> None:
        self._reply = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests, each done an idle or a new connection. Owner: event loop."""

    __slots__ = ("_endpoint", "_head", "_idle", "_target")

    def __init__(self, target: Target, endpoint: str) -> None:
        self._target = target
        self._endpoint = endpoint
        self._head = target.head("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")
        self._idle: list[Connection] = []

    async def send(
        self, request: PreparedRequest, planned: float | None = None, keep: bool = False
    ) -> tuple[Record, str]:
        """Send `request` and read its whole answer. Errors of the server are in the record, not raised.

        Returns the record and, with `keep`, the text. The time to open a connection is included, as for a
        user.
        """
        now = _clock()
        record = Record(
            index=request.index, turn=request.turn, sent=now, planned=now if planned is None else planned
        )
        stream = Stream(record, self._endpoint, (request.out, request.prompt), keep)
        await self.post(self._head, request.body, stream)
        return record, "".join(stream.pieces)

    async def post(self, head: bytes, body: bytes, stream: Stream) -> None:
        """Send a body with a head of `Target.head`; `stream` reads the answer. Raises nothing."""
        try:
            async with asyncio.timeout(self._target.timeout):
                await self._send(head, body, stream)
        except TimeoutError:
            stream.fail("timeout", f"{self._target.timeout:g} s", _clock())
        except OSError as error:
            stream.fail("connect", str(error), _clock())

    async def _send(self, head: bytes, body: bytes, stream: Stream) -> None:
        request = head + str(len(body)).encode() + b"\r\n\r\n" + body
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            # A server may close an idle connection just as it is used again. That is not a failure of
            # the request: it is sent again on a new connection.
            if await connection.exchange(request, stream):
                self._put(connection)
                return
            stream.record.bad, stream.record.detail, stream.record.end = None, "", 0.0
            break
        connection = await self._open()
        await connection.exchange(request, stream)
        self._put(connection)

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, self._target.host, self._target.port, ssl=self._target.tls or None
        )
        return connection

    def _put(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections; those in use end with their requests."""
        while self._idle:
            self._idle.pop().abort()
