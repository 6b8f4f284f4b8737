"""How many events per second a client process can read: `python -m bench.load.blast`.

A child process writes prepared events as fast as the client reads them, one write and one chunk
per event like a real server. This is the upper limit of the client; `client_cpu` of a result shows
how close to it a run was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop

from bench.load.client import Client, Target
from bench.load.prompts import PreparedRequest
from bench.load.records import Record
from bench.load.stream import Stream


def frame(data: str) -> bytes:
    """One event as one HTTP chunk."""
    event = f"data: {data}\n\n".encode()
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = frame(
    '{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    '"model":"model","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}'
)


def tail(out: int) -> bytes:
    """The end of an answer of `out` tokens: finish, usage, `[DONE]`."""
    usage = f'{{"prompt_tokens":1,"completion_tokens":{out},"total_tokens":{out + 1}}}'
    return (
        frame('{"choices":[{"index":0,"text":"","finish_reason":"length"}]}')
        + frame(f'{{"choices":[],"usage":{usage}}}')
        + frame("[DONE]")
        + b"0\r\n\r\n"
    )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            out = int(await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2])))
            writer.write(_HEAD)
            for _ in range(out):
                writer.write(_TOKEN)
                await writer.drain()
                await asyncio.sleep(0)  # let other connections run, so that events do not arrive in batches
            writer.write(tail(out))
    writer.close()


def _serve(pipe: Connection[Any, Any]) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


class Rate(msgspec.Struct):
    """Events read, and how many per second: by wall clock, and per second of the client's CPU time."""

    events: int
    wall: float
    cpu: float


def parse(events: int) -> Rate:
    """The parser alone, one event per call."""
    payload = _TOKEN.split(b"\r\n")[1]
    stream = Stream(Record(index=0), "completions", (None, None), keep=False)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(events):
        stream.feed(payload, 0.0)
    wall, busy = time.perf_counter() - began, time.process_time() - cpu
    return Rate(len(stream.record.times), events / wall, events / busy)


async def _receive(port: int, connections: int, out: int) -> Rate:
    client = Client(Target("127.0.0.1", port, False, ""), "completions")
    requests = [PreparedRequest(i, 0, str(out).encode(), out, None) for i in range(connections)]
    began, cpu = time.perf_counter(), time.process_time()
    answers = await asyncio.gather(*(client.send(request) for request in requests))
    wall, busy = time.perf_counter() - began, time.process_time() - cpu
    client.close()
    assert all(record.bad is None for record, _ in answers), answers[0][0].detail
    events = sum(len(record.times) for record, _ in answers)
    return Rate(events, events / wall, events / busy)


def receive(connections: int, out: int) -> Rate:
    """Client and kernel: this process reads `connections` answers of `out` tokens at once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        return uvloop.run(_receive(ours.recv(), connections, out))
    finally:
        server.terminate()
        server.join()


def main(argv: list[str] | None = None) -> int:
    """Print the limits of the client."""
    options = argparse.ArgumentParser("python -m bench.load.blast", description=__doc__)
    options.add_argument("--connections", type=int, default=64)
    options.add_argument("--out", type=int, default=4_000, help="events per connection")
    args = options.parse_args(argv)
    alone, whole = parse(200_000), receive(args.connections, args.out)
    print(f"parser alone            {alone.cpu:>10,.0f} events per CPU second")
    print(f"one client process      {whole.cpu:>10,.0f} events per CPU second")
    print(f"with this small server  {whole.wall:>10,.0f} events per second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
