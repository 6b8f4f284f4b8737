"""Clients that read, write or ask slowly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, parsed, post, request
from bench.chaos.row import Found
from bench.chaos.server import PATIENCE

BUFFERED = 2 * 64 * 1024
"""Bytes that may wait in one connection: the mark from which deltas are merged, and one merged event."""
OTHERS = 8
"""Streams beside the sleepers: as many more would be felt by a neighbour, whoever sleeps."""
HEADERS = 10.0
"""Seconds after which headers that do not come end a connection."""
DRIBBLE = {"prompt": "The readers sleep", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


async def slow(bench: Bench) -> Found:
    """Others stream on; what waits for a sleeper is bounded; a sleeper that wakes up has lost nothing."""
    found, count = Found(), bench.count(500, 6)
    whole = await post(bench.port, TEXT, {**DRIBBLE, "stream": True})

    async def attack() -> None:
        sleepers = [await _connect(bench) for _ in range(count)]
        body = request("POST", TEXT, {**DRIBBLE, "stream": True, "logprobs": 5})
        loop = asyncio.get_running_loop()
        try:
            for index, own in enumerate(sleepers):
                part = (body, b"POST /v1/completions HTTP/1.1\r\nHos", body[:-5])[index % 3]
                await loop.sock_sendall(own, part)
            short = {**DRIBBLE, "max_tokens": 40, "stream": True}
            most = 0
            others = [asyncio.create_task(post(bench.port, TEXT, short)) for _ in range(OTHERS)]
            while (await bench.server.tell("progress"))["running"] > 1 or not all(t.done() for t in others):
                most = max(most, (await bench.server.tell("progress"))["buffered"])
                await asyncio.sleep(0.02)
            good = sum(task.result().body.endswith(b"data: [DONE]\n\n") for task in others)
            found.figures |= {"slow": count, "others": good, "most_buffered": most}
            found.expect(good == len(others), f"{len(others) - good} of others' streams did not end")
            found.expect(most <= BUFFERED, f"{most} bytes waited for one reader")
            awake = parsed(await _rest(sleepers[0]))
            found.expect(awake.text == whole.text, "a reader that slept got another text")
            if bench.timed:
                await _headers_end(sleepers[1], found)
        finally:
            for own in sleepers:
                own.close()

    await bench.beside(found, attack())
    return found


async def _connect(bench: Bench) -> socket.socket:
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", bench.port))
    return own


async def _rest(own: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(PATIENCE):
        while part := await _or_end(loop.sock_recv(own, 65536)):
            received += part
    return received


async def _or_end(receiving: Coroutine[Any, Any, bytes]) -> bytes:
    try:
        return await receiving
    except ConnectionError:
        return b""


async def _headers_end(own: socket.socket, found: Found) -> None:
    begun = time.monotonic()
    try:
        async with asyncio.timeout(2 * HEADERS):
            await _or_end(asyncio.get_running_loop().sock_recv(own, 4096))
    except TimeoutError:
        found.wrong.append(f"headers that do not come hold a connection for more than {2 * HEADERS:g} s")
    found.figures["headers_s"] = round(time.monotonic() - begun, 1)
