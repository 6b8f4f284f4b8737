"""Request bodies: decoded to a Struct; whatever is wrong with one is a 4xx that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from app.http.access import current_usage
from app.http.decoding import decode_json
from app.http.errors import HttpError
from app.http.intake import Reading
from app.http.keys import BODY, INTAKE, SERVE, SERVICE
from app.http.pieces import BodyWorker, assembled
from app.text.numbers import FEW_SLOW, slow_numbers
from app.warning import warn_of_near_fields
from core.errors import BodyTooLarge, RequestError, field_error
from core.helper import Exceeded, Helper, Task

T = TypeVar("T")

BODY_SECONDS = 120.0
"""Timeout for receiving a body: 8 MiB at 0.6 Mbit/s."""

MAX_DEPTH = 64
"""Nesting of values that are passed on (tools, template arguments): deeper ones would exhaust the stack of
code that recurses. The deepest real tool schema seen has 20 levels."""

MAX_PASSED = 100_000
"""Number of values nested in such a value, over all levels. Each costs the loop 0.1 to 0.5 µs: 2 million in a
body of 4 MB stopped every stream for 0.4 s. A conversation of 8 MB, full of calls and results, has some
80,000."""

INLINE = 32 * 1024
"""Bytes up to which a body is decoded on the loop."""
DECODE_SECONDS = 60.0
"""Wall time to decode one. 8 MB take one or two seconds of CPU, which may be busy."""


@asynccontextmanager
async def received(request: web.Request) -> AsyncIterator[bytes]:
    """The raw body, counted against the memory for bodies while this is open. Raises `BodyTooLarge`
    (before reading if Content-Length says so), `HttpError` 415 for a compressed body, which is not read, and
    408 when it does not arrive in time, `Unavailable` when the bodies of all clients take too much memory."""
    if BODY in request:
        yield request[BODY]
        return
    limit = _check_head(request)
    with request.app[INTAKE].reading() as reading:
        body = await _arrived(request, reading, limit)
        if (usage := current_usage()) is not None:
            usage.receive(body)
        yield body


def _check_head(request: web.Request) -> int:
    """Check the headers of a body. Returns the limit of its size; raises what `received` does before it
    reads."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    coding = request.headers.get("Transfer-Encoding", "chunked").strip().lower()
    if encoding not in ("identity", "") or coding != "chunked":
        raise HttpError(415, "Compressed request bodies are not accepted; send the JSON as it is.")
    limit = request.app[SERVE].max_body
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    return limit


async def _arrived(request: web.Request, reading: Reading, limit: int) -> bytes:
    body, intake, content = bytearray(), request.app[INTAKE], request.content
    try:
        if content.is_eof():  # it came with its head, as most do, and needs no timer
            whole = content.read_nowait()
            if len(whole) > limit:
                raise _too_large(limit)
            intake.take(reading, len(whole))
            return whole
        async with intake.arriving(reading, BODY_SECONDS):
            while chunk := await content.readany():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                intake.add(reading, len(chunk))
                body += chunk
    except TimeoutError:
        raise HttpError(408, "The request body did not arrive in time.") from None
    except web.RequestPayloadError:
        raise HttpError(400, "The request body is cut short or badly framed.") from None
    return bytes(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {limit} bytes, the most this server takes.")


async def decoded(request: web.Request, kind: type[T], empty: bytes = b"", again: bool = False) -> T:
    """The body of a request as a Struct. An empty body is decoded as `empty`; `again` keeps the body for
    another handler that decodes it too. Raises as `received` and `decode` do."""
    if (whole := _with_head(request)) is not None:
        if again:
            request[BODY] = whole
        if _small(whole):  # the memory of bodies need not count it: it is decoded at once
            return _decoded_here(kind, whole or empty)
        with request.app[INTAKE].reading() as reading:
            request.app[INTAKE].take(reading, len(whole))
            return await decode(kind, whole, request.app[SERVICE].loaded.bodies)
    async with received(request) as raw:
        if again:
            request[BODY] = raw
        body = raw or empty
        if _small(body):
            return _decoded_here(kind, body)
        return await decode(kind, body, request.app[SERVICE].loaded.bodies)


def _with_head(request: web.Request) -> bytes | None:
    """Return the body if it has up to `INLINE` bytes and arrived together with the request's head, as most
    do, else None. Raises as `received` does before it reads."""
    size = request.content_length
    if BODY in request or size is None or size > INLINE or not request.content.is_eof():
        return None
    _check_head(request)
    raw = request.content.read_nowait()
    if (usage := current_usage()) is not None:
        usage.receive(raw)
    return raw


async def decode(kind: type[T], body: bytes, bodies: Helper) -> T:
    """The body as a Struct. Raises `RequestError` with the JSON path of the error, or with the limit that was
    exceeded. Large ones are decoded in the helper process: msgspec holds the GIL, a thread would not help."""
    if _small(body):
        return _decoded_here(kind, body)
    task = Task(
        f"{BodyWorker.__module__}:{BodyWorker.__name__}", f"{kind.__module__}:{kind.__name__}".encode()
    )
    # Shielded: cancelling would kill the process, and others wait for it.
    work = asyncio.ensure_future(bodies.run(task, body, DECODE_SECONDS))
    try:
        data = await asyncio.shield(work)
    except Exceeded as error:
        raise RequestError(f"Decoding the request body {error}.") from error
    except asyncio.CancelledError:
        work.add_done_callback(_forgotten)
        raise
    return await assembled(kind, data)


def _forgotten(work: asyncio.Future[bytes]) -> None:
    """Retrieve the exception: no task awaits it any more."""
    if not work.cancelled():
        work.exception()


def _small(body: bytes) -> bool:
    return len(body) <= INLINE and slow_numbers(body) <= FEW_SLOW


def _decoded_here(kind: type[T], body: bytes) -> T:
    """Decode a body on the loop: 32 KB take at most 1 ms."""
    found: T = decode_json(_decoder(kind), body)
    warn_of_near_fields(kind, body)
    return found


_decoder: Callable[[Any], msgspec.json.Decoder[Any]] = cache(msgspec.json.Decoder)


def check_depth(value: object, param: str) -> None:
    """Raise `RequestError` when lists and objects in `value` nest deeper than `MAX_DEPTH`, or have more than
    `MAX_PASSED` values in all."""
    level: list[object] = [value]
    left = MAX_PASSED
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            if len(below) > left:
                raise field_error(param, f"has more than {MAX_PASSED:,} values")
        if not below:
            return
        left -= len(below)
        level = below
    raise field_error(param, f"is nested deeper than {MAX_DEPTH} levels")
