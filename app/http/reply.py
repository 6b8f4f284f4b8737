"""JSON responses."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Iterator
from itertools import chain

import msgspec
import numpy as np
from aiohttp import web

from app.http.errors import Fault
from app.http.sse import patience

PIECE = 64 * 1024
"""Bytes of a long answer that are made and written in one turn of the loop: numbers of 0.3 ms."""
TRIPLES = PIECE // 4 * 3
"""Bytes that become `PIECE` of base64: whole groups of three, so that pieces joined are the whole encoded."""


def json_response(value: object, status: int = 200) -> web.Response:
    """`value` as JSON; NaN and infinities become null."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


async def long_response(request: web.Request, value: object) -> web.StreamResponse:
    """The same for an answer with vectors in it, numpy's, or bytes, which become base64: as one text, 50 MB
    of vectors held the loop for 0.35 s."""
    made = pieces(value)
    first = next(made)
    if len(first) < PIECE:  # and all
        return web.Response(body=first, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    for piece in chain((first,), made):
        async with patience(request):
            await response.write(piece)
        await asyncio.sleep(0)  # a reader that keeps up never makes `write` wait
    await response.write_eof()
    return response


def pieces(value: object) -> Iterator[bytes]:
    """JSON of `value` in pieces of about `PIECE` bytes, each made when it is asked for."""
    held = bytearray()
    for part in _parts(value):
        held += part
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _parts(value: object) -> Iterator[bytes]:
    if not _has_vectors(value):
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
    elif isinstance(value, np.ndarray) and not len(value):
        yield b"[]"
    elif isinstance(value, np.ndarray) and value.ndim == 1:
        yield msgspec.json.encode(value.tolist())
    else:
        assert isinstance(value, list | np.ndarray)
        mark = b"["
        for each in value:
            yield mark
            yield from _parts(each)
            mark = b","
        yield b"]"


def _has_vectors(value: object) -> bool:
    """By the first of a list: its items are alike."""
    if isinstance(value, dict):
        return any(map(_has_vectors, value.values()))
    if isinstance(value, list):
        return bool(value) and _has_vectors(value[0])
    return isinstance(value, np.ndarray | bytes)


def error_response(fault: Fault, body: bytes | None = None) -> web.Response:
    """An error in the nested shape, or in that of `body`, with the headers that tell clients whether to
    try again."""
    response = web.Response(
        body=fault.body() if body is None else body, status=fault.status, content_type="application/json"
    )
    response.headers.update(fault.headers)
    return response
