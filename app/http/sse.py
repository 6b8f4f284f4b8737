"""Server-sent events written straight to the transport. The one file with HTTP chunk framing.

aiohttp's own stream writer is a coroutine that keeps counts and drains; this formats, writes once and
returns, so that the engine's callback can do it for every row of a step. Measured with 512 streams
over loopback: 8 to 10 µs of CPU per event, 5 to 6 of them in the kernel's send. What is lost is
back-pressure by awaiting, so `congested` must be asked before every write, and `drained` awaited when it
says yes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from app.http.access import current_usage
from app.http.errors import Fault, fault
from app.http.keys import BEGUN, BURST, REQUEST_ID
from core.errors import LoomError

log = logging.getLogger(__name__)

HIGH_WATER = 64 * 1024
"""Bytes that may wait for a slow reader before its deltas are merged instead."""

LOW_WATER = HIGH_WATER // 4
"""A transport with at most so many bytes in its buffer is not paused by one more short write."""

KEPT = 4 * 1024
"""Maximum bytes of an answer's last events that wait for the end of its body."""

KEEP_ALIVE = 15.0
"""Seconds of silence within which a comment is written: proxies give up after 30 to 60."""

STALL = 300.0
"""Seconds a reader may take to make room for more before its connection is dropped (guessed: longer
than a laptop's nap, shorter than for ever)."""

DONE = b"data: [DONE]\n\n"

_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an API's event streams that are not its own events."""

    error: Callable[[Fault, str], bytes]
    """The event of a failure, for the request with that id."""
    keep_alive: bytes = b": keep-alive\n\n"
    """Sent during a long silence; empty: nothing is, where readers would take it for an answer."""
    done: bytes = b""
    """Sent after the last event."""
    media: str = "text/event-stream"


@asynccontextmanager
async def write_timeout(request: web.Request) -> AsyncIterator[None]:
    """Limit a wait for the reader to make room. Raises `ConnectionResetError` when it takes longer than
    `STALL`."""
    try:
        async with asyncio.timeout(STALL):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not read") from None


OPENAI = Dialect(error=lambda fault, id: b"data: %b\n\n" % fault.body(), done=DONE)


class _Response(web.StreamResponse):
    """A response whose head is sent with its first event. aiohttp sends the head at once, except where this
    attribute is False, as in its own `Response`."""

    _send_headers_immediately = False


class EventStream:
    """One response of events, as a context manager.

    Entering makes the head, which is sent with the first event or within `HEAD_SECONDS`. Leaving sends the
    dialect's end (`[DONE]`), after an error event when the block raised: the status is 200, so a failure must
    travel in the stream. A client that is gone raises `ConnectionResetError`; nothing is written.

    Owner: event loop.
    """

    __slots__ = (
        "_burst",
        "_chunked",
        "_dialect",
        "_headed",
        "_kept",
        "_loop",
        "_request",
        "_silent",
        "_timer",
        "_transport",
        "_waker",
        "congested",
        "keep_alive",
        "response",
    )

    def __init__(
        self, request: web.Request, keep_alive: float = KEEP_ALIVE, dialect: Dialect = OPENAI
    ) -> None:
        self.congested = False
        """More than `HIGH_WATER` bytes wait for the reader: write nothing more until `drained`. Set by each
        write, so that asking costs nothing."""
        self.response = _Response(headers={**_HEADERS, "Content-Type": dialect.media})
        self.keep_alive = keep_alive
        self._dialect = dialect
        self._request = request
        self._burst = request.app[BURST]
        self._transport = request.transport
        self._loop = asyncio.get_running_loop()
        # HTTP/1.0 has no chunks: the end of the connection ends the body.
        self._chunked = request.version >= HttpVersion11
        if not self._chunked:
            self.response.force_close()
        self._headed = False
        """Whether the head is sent."""
        self._silent = True
        self._kept = b""
        """Events to be sent with the end of the body."""
        self._waker: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._check_there().set_write_buffer_limits(HIGH_WATER)
        self._request[BEGUN] = True
        self._burst.head(self._send_head)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._burst.send()
        if error is not None:
            if isinstance(error, ConnectionError) or not isinstance(error, Exception):
                return False
            if not isinstance(error, LoomError):
                log.error("request %s failed mid-stream", self._request[REQUEST_ID], exc_info=error)
            answer = fault(error)
            if (usage := current_usage()) is not None:
                usage.fail(answer)
            self._kept += self._dialect.error(answer, self._request[REQUEST_ID])
        if self._transport is not None and not self._transport.is_closing():
            # One send with the end of the body. It waits for a reader that has fallen behind.
            paused, size = self._request.protocol.writing_paused, self._transport.get_write_buffer_size()
            behind = paused or size > LOW_WATER
            async with write_timeout(self._request) if behind else nullcontext():  # a timer takes 3 µs
                await self.response.write_eof(self._kept + self._dialect.done)
        return True

    def post(self, event: bytes) -> None:
        """`write`, but once this turn of the loop is over: the events of all streams are made first and
        sent then. What the write leaves `congested` shows after it."""
        self._burst.add(self._send, event)

    def write(self, event: bytes) -> None:
        """Send an event in one write, after all that was posted. Never blocks or raises; a client that is
        gone is found by `wait`."""
        self._burst.send()
        self._send(event)

    def keep(self, event: bytes) -> bool:
        """Send the last events of an answer with the end of its body, in one write. Only more of these may
        follow. Returns whether what was kept was long and has been posted: in the engine's callback a write
        would send the events of all other streams too."""
        self._kept += event
        if long := len(self._kept) > KEPT:
            kept, self._kept = self._kept, b""
            self.post(kept)
        return long

    def _send(self, event: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            self.wake()
            return
        if not self._headed:
            self._send_head()  # uvloop sends it with the event that follows
        transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event)
        self.congested = transport.get_write_buffer_size() > HIGH_WATER
        self._silent = False

    def _send_head(self) -> None:
        self._headed = True
        if self._transport is not None and not self._transport.is_closing():
            self._request.writer.send_headers()  # nothing, once they are sent

    def wake(self) -> None:
        """End the current or next `wait`."""
        if self._waker is None:
            self._waker = self._loop.create_future()
        if not self._waker.done():
            self._waker.set_result(None)

    async def wait(self) -> None:
        """Sleep until `wake`, with a comment into every silence.

        Raises `ConnectionResetError` when the client is gone.
        """
        if self._waker is None:
            self._waker = self._loop.create_future()
        if not self._waker.done():
            self._listen()
            try:
                await self._waker
            finally:
                self._timer.cancel()
        self._waker = None
        self._check_there()

    def _listen(self) -> None:
        """Schedule the next check for silence. With `asyncio.wait` instead, a wait takes 5.5 µs for 1.8."""
        self._silent = True
        self._timer = self._loop.call_later(self.keep_alive / 2, self._comment)

    def _comment(self) -> None:
        if self._silent and self._dialect.keep_alive:
            self.write(self._dialect.keep_alive)
        self._listen()

    def _check_there(self) -> asyncio.Transport:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        return transport

    async def drained(self) -> None:
        """Sleep until the reader has taken most of what waits for it.

        Raises `ConnectionResetError` when it goes away or takes longer than `STALL`.
        """
        if self.congested:  # else nothing waits, and a timer costs 5 µs
            async with write_timeout(self._request):
                await self._request.writer.drain()
            self.congested = False
        self._check_there()
