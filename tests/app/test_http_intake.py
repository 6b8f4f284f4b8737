"""Limits on clients before they are served: connections, heads, bodies."""

from __future__ import annotations

import asyncio
import logging

import pytest

from app.http import body, connection, intake
from app.http.intake import Intake, Reading
from core.config import ServeConfig
from core.errors import Unavailable
from tests.rigs.server import Server, Start
from tests.rigs.wait import until

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(server: Server, data: bytes = b"") -> Pipe:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    return reader, writer


def posted(sent: int, of: int) -> bytes:
    """A request whose body has arrived so far."""
    return f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {of}\r\n\r\n".encode() + b" " * sent


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def status(reader: asyncio.StreamReader) -> int:
    """Status of the next answer, whose body is left unread."""
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1])


# -- bodies ----------------------------------------------------------------------------------------


async def test_bodies_that_stand_still_make_room_the_oldest_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(body, "INLINE", 100)
    server = await start(ServeConfig(max_body=4096))
    held = server.limit_bodies(10_000)
    silent = []
    for number in range(1, 4):
        silent.append(await connect(server, posted(3000, 4000)))
        await until(lambda number=number: held.held == 3000 * number)
    sent = b'{"input_ids": [1, 2], "pad": "' + b"x" * 3000 + b'"}'
    answered, answer = await server.post("/generate", data=sent)
    assert answered == 200, answer
    assert await status(silent[0][0]) == 408
    assert held.held == 6000
    for reader, writer in silent[1:]:
        writer.write(b" " * 999 + b"x")
        assert await status(reader) == 400  # its own fault, found after it was read
    await until(lambda: held.held == 0)
    for _, writer in silent:
        writer.close()


async def test_without_room_a_newcomer_is_told_to_come_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short body that arrives together with its head needs no room: it is decoded at once."""
    monkeypatch.setattr(body, "INLINE", 100)
    server = await start(ServeConfig(max_body=4096))
    held = server.limit_bodies(5000)
    _, writer = await connect(server, posted(4000, 4096))
    await until(lambda: held.held == 4000)
    async with server.http.post("/generate", data=b" " * 2000) as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
    assert (await server.post("/generate", {"input_ids": [1, 2]}))[0] == 200
    assert held.held == 4000
    writer.close()
    await until(lambda: held.held == 0)


async def test_the_one_idle_for_longest_is_ended_and_none_that_moves() -> None:
    now, ended = [0.0], list[str]()
    bodies = Intake(100, lambda: now[0])

    async def arrive(name: str, reading: Reading) -> None:
        try:
            async with bodies.arriving(reading, 1000.0):
                bodies.add(reading, 40)
                await asyncio.Event().wait()
        except TimeoutError:
            ended.append(name)

    async def newcomer() -> None:
        with bodies.reading() as reading:
            async with bodies.arriving(reading, 1000.0):
                bodies.add(reading, 40)

    with bodies.reading() as first, bodies.reading() as second:
        tasks = [asyncio.create_task(arrive(*each)) for each in (("a", first), ("b", second))]
        await until(lambda: bodies.held == 80)
        now[0] = intake.IDLE_SECONDS / 2
        with pytest.raises(Unavailable):
            await newcomer()
        bodies.add(first, 10)  # it moves
        now[0] = intake.IDLE_SECONDS
        await newcomer()
        await until(lambda: ended == ["b"])
        assert bodies.held == 50
        tasks[0].cancel()
        await asyncio.wait(tasks)
    assert (bodies.held, ended) == (0, ["b"])


async def test_a_whole_body_is_counted_and_never_ended_for_others() -> None:
    now = [0.0]
    bodies = Intake(100, lambda: now[0])
    with bodies.reading() as whole, bodies.reading() as other:
        bodies.take(whole, 80)  # it is being decoded
        now[0] = 2 * intake.IDLE_SECONDS
        with pytest.raises(Unavailable):
            bodies.add(other, 40)
    assert bodies.held == 0


async def test_a_whole_body_in_chunks_may_not_exceed_the_limit(start: Start) -> None:
    """The body arrives in one packet with its head, which does not say how long it is."""
    server = await start(ServeConfig(max_body=4096))
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await connect(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (5000, b" " * 5000))
    assert await status(reader) == 413
    writer.close()


async def test_a_body_that_two_handlers_decode_is_read_once(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await server.post("/invocations", body))[0] == 200


# -- connections -----------------------------------------------------------------------------------


async def test_connections_are_limited_and_the_log_says_so_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    server = await start()
    inside = [await connect(server, GET) for _ in range(3)]
    for reader, _ in inside:
        assert await status(reader) == 200
    with caplog.at_level(logging.WARNING, logger="app.http.connection"):
        for _ in range(3):
            reader, writer = await connect(server, GET)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in answer.lower() and b"Connection: close" in answer
            writer.close()
    assert len([r for r in caplog.records if "3 clients" in r.message]) == 1
    for _, writer in inside:
        writer.close()
    await until(lambda: server.connections == 0)
    async with server.http.get("/health") as healthy:
        assert healthy.status == 200


async def test_refusals_are_limited_too(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(connection, "REFUSALS", 0)
    server = await start()
    reader, writer = await connect(server, GET)
    assert await status(reader) == 200
    other, outside = await connect(server)
    with pytest.raises(ConnectionError):
        assert not await other.read()
        raise ConnectionResetError
    for each in (writer, outside):
        each.close()


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "])
async def test_a_head_that_does_not_come_ends_its_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    server = await start()
    idle, kept = await connect(server, GET)  # between requests: it has its own, longer time
    assert await status(idle) == 200
    await idle.readuntil(b"}")
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    again, second = await connect(server, GET)
    assert await status(again) == 200
    await again.readuntil(b"}")
    reader, writer = await connect(server, sent)
    assert await reader.read() == b""
    for pipe, each in ((idle, kept), (again, second)):
        each.write(GET)
        assert await status(pipe) == 200
        each.close()
    writer.close()


async def test_bytes_that_trickle_prolong_no_head(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    server = await start()
    reader, writer = await connect(server, GET)
    assert await status(reader) == 200
    await reader.readuntil(b"}")
    writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
    ended = asyncio.create_task(reader.read())
    while not ended.done():
        writer.write(b"x")
        await asyncio.sleep(0.005)
    assert ended.exception() is not None or ended.result() == b""
    writer.close()


async def test_a_slow_body_is_no_slow_head(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    server = await start()
    body = b'{"input_ids": [1, 2]}'
    reader, writer = await connect(server, posted(0, len(body)) + body[:1])
    silent, other = await connect(server)
    assert await silent.read() == b""  # the time of a head has passed
    writer.write(body[1:])
    assert await status(reader) == 200
    for each in (writer, other):
        each.close()


def test_the_limit_follows_that_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1024))
    assert connection.connection_limit() == 1024 - connection.OWN_FILES
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_000_000, 1_000_000))
    assert connection.connection_limit() == connection.MAX_CONNECTIONS
