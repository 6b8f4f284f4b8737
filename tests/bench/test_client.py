from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from bench.load.client import Client, Target
from bench.load.prompts import PreparedRequest, Source
from bench.load.records import Record
from bench.load.workloads import Workload
from tests.rigs.completions_server import Fake, proper, serving, text

WORK = Workload(input_len=4, output_len=3)


async def ask(url: str, work: Workload = WORK, timeout: float = 30.0) -> Record:
    client = Client(Target.of(url, "key", timeout), work.endpoint)
    record, _ = await client.send(Source(work, "m").request(0))
    client.close()
    return record


@contextlib.asynccontextmanager
async def raw(*answers: bytes) -> AsyncIterator[str]:
    """A server that answers the n-th connection with the n-th bytes and closes it; the last one repeats."""
    count = 0

    async def serve(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        answer = answers[min(count, len(answers) - 1)]
        count += 1
        head = await stream.readuntil(b"\r\n\r\n")
        await stream.readexactly(int(head.rpartition(b"Content-Length: ")[2]))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def chunked(*parts: bytes, last: bytes = b"0\r\n\r\n") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(f"{len(part):X};x=1\r\n".encode() + part + b"\r\n" for part in parts) + last


GOOD = [f"data: {event}\n\n".encode() for event in (text("a"), text("b"), text("c", "length"), "[DONE]")]


async def test_a_good_answer_from_a_real_server() -> None:
    fake = Fake()
    async with serving(fake) as url:
        record = await ask(url + "/v1/")
    assert record.bad is None
    assert (record.out, record.prompt, record.cached, len(record.times)) == (3, 4, 0, 3)
    assert record.sent <= record.times[0] <= record.times[-1] <= record.end
    assert fake.heads[0]["authorization"] == "Bearer key"


async def test_connections_are_reused_and_a_closed_one_is_not_a_failure() -> None:
    # The server closes the first connection without a "Connection: close" header; the second request must be
    # sent again on a new connection.
    async with raw(chunked(*GOOD)) as url:
        client = Client(Target.of(url), "completions")
        source = Source(WORK, "m")
        records = [(await client.send(source.request(i)))[0] for i in range(3)]
        client.close()
    assert [record.bad for record in records] == [None] * 3


async def test_a_connection_serves_many_requests() -> None:
    fake = Fake()
    async with serving(fake) as url:
        client = Client(Target.of(url), "completions")
        for i in range(3):
            assert (await client.send(Source(WORK, "m").request(i)))[0].bad is None
        assert len(client._idle) == 1
        client.close()


@pytest.mark.parametrize(
    ("answer", "bad"),
    [
        (chunked(*GOOD), None),
        (chunked(b"".join(GOOD)), None),
        (chunked(*GOOD, last=b"0\r\nTrailer: x\r\n\r\n"), None),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"".join(GOOD), None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % sum(map(len, GOOD)) + b"".join(GOOD), None),
        (chunked(*GOOD[:-1]), "no [DONE]"),
        (chunked(*GOOD[:-1], last=b""), "truncated"),
        (chunked(*GOOD[:2], last=b"40\r\ndata: {"), "truncated"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + GOOD[0], "truncated"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\noops", "http 500"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed answer"),
        (b"SMTP ready\r\n\r\n", "malformed answer"),
        (b"", "connection lost"),
    ],
)
async def test_framing_and_its_failures(answer: bytes, bad: str | None) -> None:
    async with raw(answer) as url:
        record = await ask(url)
    assert record.bad == bad, record.detail
    assert record.end >= record.sent


async def test_an_http_error_is_counted_by_status() -> None:
    fake = Fake()
    fake.refuse = lambda n: (429, "queue full")
    async with serving(fake) as url:
        record = await ask(url)
    assert (record.bad, record.detail, record.times) == ("http 429", "queue full", [])


async def test_connection_refused() -> None:
    async with raw(b"") as url:
        pass
    assert (await ask(url)).bad == "connect"


async def test_a_silent_server_times_out() -> None:
    gate = asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        record = await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout=0.05)
        gate.set()
    assert record.bad == "timeout"


async def test_chat_goes_to_its_endpoint_and_keeps_the_text() -> None:
    fake = Fake(proper)
    work = Workload(input_len=4, output_len=2, endpoint="chat", prompt_kind="text")
    async with serving(fake) as url:
        client = Client(Target.of(url), "chat")
        record, answer_text = await client.send(Source(work, "m").request(0), keep=True)
        client.close()
    assert (record.bad, answer_text, len(record.times)) == (None, " w0 w1", 2)


async def test_a_large_body_arrives_whole() -> None:
    fake = Fake()
    async with serving(fake) as url:
        client = Client(Target.of(url), "completions")
        body = Source(Workload(input_len=100_000, output_len=1), "m").request(0)
        record, _ = await client.send(PreparedRequest(0, 0, body.body, 1, 100_000))
        client.close()
    assert record.bad is None and record.prompt == 100_000


def test_target_parses_urls() -> None:
    target = Target.of("https://example.org/openai/v1")
    assert (target.host, target.port, target.tls, target.base) == ("example.org", 443, True, "/openai")
    assert Target.of("localhost:80").url == "http://localhost:80"
    assert b"Host: [::1]:8000\r\n" in Target.of("http://[::1]:8000").head("/v1/completions")
    with pytest.raises(ValueError, match="ftp"):
        Target.of("ftp://x")
