"""A client process that opens streams and discards the data, with minimal CPU time.

Bias: it counts events by a substring and checks only that each stream ends with [DONE].
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import uvloop


class Reader(asyncio.Protocol):
    """One streamed completion. Owner: the client's loop."""

    def __init__(self, body: bytes, done: asyncio.Future[int]) -> None:
        self._body = body
        self.done = done
        self._events = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        # uvloop's transports are not subclasses of asyncio's.
        cast(asyncio.WriteTransport, transport).write(
            head + b"Content-Length: %d\r\n\r\n" % len(self._body) + self._body
        )

    def data_received(self, data: bytes) -> None:
        """Count events."""
        data = self._tail + data
        self._events += data.count(b'"text":')
        if b"data: [DONE]" in data and not self.done.done():
            self.done.set_result(self._events)
        self._tail = data[-6:]

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream that ends early is a failure."""
        if not self.done.done():
            self.done.set_exception(ConnectionResetError("the stream ended early"))


def start(port: int, streams: int, tokens: int) -> tuple[multiprocessing.Process, Connection]:
    """Start a client process; when all streams have ended, it sends the number of events it received."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(port, streams, tokens, theirs), daemon=True)
    process.start()
    return process, ours  # type: ignore[return-value]


def _main(port: int, streams: int, tokens: int, pipe: Connection) -> None:
    uvloop.run(_read(port, streams, tokens, pipe))


async def _read(port: int, streams: int, tokens: int, pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    done: list[asyncio.Future[int]] = []
    for index in range(streams):
        prompt = [300 + index % 4000, 5, 6, 7]
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        reader = Reader(json.dumps(body).encode(), loop.create_future())
        done.append(reader.done)
        await loop.create_connection(partial(_same, reader), "127.0.0.1", port)
    pipe.send(sum(await asyncio.gather(*done)))


def _same(reader: Reader) -> Reader:
    return reader
