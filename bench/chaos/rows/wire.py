"""Raw HTTP: request smuggling, chunks, and sets of headers."""

from __future__ import annotations

import asyncio
import json

from bench.chaos.bench import Bench
from bench.chaos.clients import TEXT, exchange
from bench.chaos.row import Outcome
from bench.chaos.server import TIMEOUT

GOOD = {"prompt": "The neighbours sing", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def framed(head: str = "", body: bytes = json.dumps(GOOD).encode(), length: bool = True) -> bytes:
    framing = f"Content-Length: {len(body)}\r\n" if length else ""
    return f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{framing}{head}\r\n".encode() + body


CHUNKED = b"".join(b"1\r\n%c\r\n" % byte for byte in json.dumps(GOOD).encode()) + b"0\r\n\r\n"
END = "Connection: close\r\n"
WIRE: list[tuple[bytes, int]] = [
    (framed(END + "Transfer-Encoding: chunked\r\n", CHUNKED, False), 200),
    (framed(END + "Transfer-Encoding: gzip, chunked\r\n", CHUNKED, False), 415),
    (framed(END + "Content-Encoding: gzip\r\n"), 415),
    (framed(END + "Content-Length: 999999999999\r\n", b"", False), 413),
    (framed("Transfer-Encoding: chunked\r\n", b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"), 400),
    (framed("Content-Length: 5\r\n"), 400),
    (framed("Content-Length: -1\r\n", b"", False), 400),
    (framed("X: " + "a" * 65536 + "\r\n"), 431),
    (b"FOO /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"\x16\x03\x01\x00\xf8" + b"a" * 100, 400),
    (b"GET http://x/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    (b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    (b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
    (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
]


async def wire(bench: Bench) -> Outcome:
    """Every request gets exactly one answer, with the status of the table and, for an error, an error
    body."""
    outcome = Outcome()
    for data, status in WIRE:
        async with asyncio.timeout(TIMEOUT):
            # The server waits two seconds for the rest of a body that it refuses, unless there is none.
            answer = await exchange(bench.port, data, end=status == 413)
        outcome.expect(answer.status == status, f"{data[:120]!r}: {answer.status}, expected {status}")
        outcome.expect(answer.body.count(b"HTTP/1.1 ") == 0, f"{data[:120]!r}: answered twice")
        if status >= 400:
            outcome.expect(_is_error(answer.body), f"{data[:120]!r}: {answer.body[:200]!r}")
    chunks = bench.count(1_000_000, 3_000)
    outcome.figures |= {"cases": len(WIRE), "chunks": chunks}
    body = json.dumps({**GOOD, "user": "x" * chunks}).encode()
    framing = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    answer = await exchange(bench.port, framed(END + "Transfer-Encoding: chunked\r\n", framing, False))
    outcome.expect(answer.status in (200, 400, 413), f"{chunks} chunks of a byte: {answer.status}")
    return outcome


def _is_error(body: bytes) -> bool:
    try:
        return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False
