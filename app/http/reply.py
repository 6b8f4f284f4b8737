"""JSON responses."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from app.http.errors import Fault
from app.http.sse import write_timeout

SERVER = "loom"
"""The header of every response: aiohttp's default names its version and Python's."""
PIECE = 64 * 1024
"""Bytes of a long answer encoded and written per turn of the loop: 0.3 ms for numbers."""
SLICE = 64
"""Items of a list encoded in one call: 64 positions with 20 alternatives each take 0.2 ms."""
NUMBERS = 8192
"""Numbers of an array encoded in one call: 0.3 ms."""
FREED = 1024
"""Items of a list freed in one turn of the loop: some 0.3 ms."""
TRIPLES = PIECE // 4 * 3
"""Bytes that become `PIECE` of base64: a multiple of three, so that encoded pieces can be joined."""


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON; NaN and infinities become null."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def long_response(request: web.Request, value: object) -> web.StreamResponse:
    """`value` as JSON where it may be long: with numpy arrays, bytes (sent as base64) or long lists.
    Encoded in one call, 50 MB of vectors held the loop for 0.35 s, and the log-probabilities of a prompt of
    5,000 tokens with 20 alternatives for 20 ms."""
    made = pieces(value)
    first = next(made)
    if len(first) < PIECE:  # that was everything
        return web.Response(body=first, content_type="application/json")
    try:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for piece in chain((first,), made):
            async with write_timeout(request):
                await response.write(piece)
            await asyncio.sleep(0)  # `write` does not suspend while the client keeps up
        await response.write_eof()
        return response
    finally:
        free_soon(value)


def free_soon(value: object) -> None:
    """Empty the long lists in `value`, which nobody uses any more, over several turns of the loop. Freed at
    once, the log-probabilities of 128 answers with 900 tokens each held the GIL for 22 ms."""
    loop, steps = asyncio.get_running_loop(), _emptied(value)

    def step() -> None:
        if next(steps, False):
            loop.call_soon(step)

    loop.call_soon(step)


def _emptied(value: object) -> Iterator[bool]:
    """Removes `FREED` items with each step, of inner lists first."""
    if not _is_long(value):
        return
    if isinstance(value, dict):
        for each in value.values():
            yield from _emptied(each)
    elif isinstance(value, list):
        if any(map(_is_long, value[:SLICE])):
            for each in value:
                yield from _emptied(each)
        while value:
            del value[-FREED:]
            yield True


def pieces(value: object) -> Iterator[bytes]:
    """JSON of `value` in pieces of about `PIECE` bytes, encoded lazily."""
    held = bytearray()
    for part in _parts(value):
        held += part
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def encode_long(value: object) -> bytes:
    """`msgspec.json.encode` in slices, for threads: one call does not release the GIL."""
    return b"".join(_parts(value))


def _parts(value: object) -> Iterator[bytes]:
    if not _is_long(value):
        yield msgspec.json.encode(value)
    elif isinstance(value, bytes):
        yield b'"'
        for at in range(0, len(value), TRIPLES):
            yield binascii.b2a_base64(value[at : at + TRIPLES], newline=False)
        yield b'"'
    elif isinstance(value, dict):
        mark = b"{"
        for key, each in value.items():
            yield mark + msgspec.json.encode(key) + b":"
            yield from _parts(each)
            mark = b","
        yield b"}"
    elif isinstance(value, np.ndarray) and (not len(value) or value.ndim == 1):
        mark = b"["
        for at in range(0, len(value), NUMBERS):
            yield mark + msgspec.json.encode(value[at : at + NUMBERS].tolist())[1:-1]
            mark = b","
        yield b"]" if len(value) else b"[]"
    else:
        assert isinstance(value, list | np.ndarray)
        yield from _listed(value)


def _listed(value: list[Any] | np.ndarray) -> Iterator[bytes]:
    """JSON of a long list, or one of long items."""
    mark = b"["
    if isinstance(value, list) and not any(map(_is_long, value[:SLICE])):
        for at in range(0, len(value), SLICE):
            yield mark + msgspec.json.encode(value[at : at + SLICE])[1:-1]
            mark = b","
    else:
        for each in value:
            yield mark
            yield from _parts(each)
            mark = b","
    yield b"]"


def _is_long(value: object) -> bool:
    """Whether one call would take long. All items of a list are taken to be like the first."""
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    if isinstance(value, list):
        return len(value) > SLICE or any(map(_is_long, value))
    return isinstance(value, np.ndarray | bytes)


def error_response(fault: Fault, body: bytes | None = None) -> web.Response:
    """An error, with the headers that tell clients whether to retry; `body` overrides OpenAI's shape."""
    response = web.Response(
        body=fault.body() if body is None else body, status=fault.status, content_type="application/json"
    )
    response.headers.update(fault.headers)
    return response
