"""Clients that read or write slowly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, parsed, post, request
from bench.chaos.row import Outcome
from bench.chaos.server import TIMEOUT

BUFFERED = 2 * 64 * 1024
"""Bytes that may be buffered for one connection: the threshold from which deltas are merged, and one merged
event."""
OTHERS = 8
"""Concurrent normal streams: few, because more would slow the neighbour by themselves."""
HEADERS = 10.0
"""Seconds after which a connection with incomplete headers is closed."""
DRIBBLE = {"prompt": "The readers sleep", "ignore_eos": True, "temperature": 0}


async def slow(bench: Bench) -> Outcome:
    """Other streams finish; the buffer of a slow reader is bounded; a reader that continues gets the whole
    text."""
    outcome, count = Outcome(), bench.count(500, 6)
    # Either way the text with its alternatives is some times what may be buffered.
    tokens, alternatives = (900, 5) if bench.timed else (300, 20)
    long = {**DRIBBLE, "max_tokens": tokens, "stream": True}
    whole = await post(bench.port, TEXT, long)

    async def attack() -> None:
        clients = [await _connect(bench) for _ in range(count)]
        body = request("POST", TEXT, {**long, "logprobs": alternatives})
        loop = asyncio.get_running_loop()
        try:
            for index, own in enumerate(clients):
                part = (body, b"POST /v1/completions HTTP/1.1\r\nHos", body[:-5])[index % 3]
                await loop.sock_sendall(own, part)
            short = {**DRIBBLE, "max_tokens": 40, "stream": True}
            most = 0
            others = [asyncio.create_task(post(bench.port, TEXT, short)) for _ in range(OTHERS)]
            while (await bench.server.call("progress"))["running"] > 1 or not all(t.done() for t in others):
                most = max(most, (await bench.server.call("progress"))["buffered"])
                await asyncio.sleep(0.02)
            good = sum(task.result().body.endswith(b"data: [DONE]\n\n") for task in others)
            outcome.figures |= {"slow": count, "others": good, "most_buffered": most}
            outcome.expect(good == len(others), f"{len(others) - good} other streams did not finish")
            outcome.expect(most <= BUFFERED, f"{most} bytes were buffered for one reader")
            awake = parsed(await _rest(clients[0]))
            outcome.expect(awake.text == whole.text, "a slow reader got another text")
            if bench.timed:
                await _headers_end(clients[1], outcome)
        finally:
            for own in clients:
                own.close()

    await bench.run_beside_neighbour(outcome, attack())
    return outcome


async def _connect(bench: Bench) -> socket.socket:
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", bench.port))
    return own


async def _rest(own: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    async with asyncio.timeout(TIMEOUT):
        while part := await _or_end(loop.sock_recv(own, 65536)):
            received += part
    return received


async def _or_end(receiving: Coroutine[Any, Any, bytes]) -> bytes:
    try:
        return await receiving
    except ConnectionError:
        return b""


async def _headers_end(own: socket.socket, outcome: Outcome) -> None:
    begun = time.monotonic()
    try:
        async with asyncio.timeout(2 * HEADERS):
            await _or_end(asyncio.get_running_loop().sock_recv(own, 4096))
    except TimeoutError:
        outcome.violations.append(
            f"a connection with incomplete headers stays open for more than {2 * HEADERS:g} s"
        )
    outcome.figures["headers_s"] = round(time.monotonic() - begun, 1)
