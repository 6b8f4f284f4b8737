"""`/v1/responses` in the background: polled, streamed and taken up again, cancelled, cut off."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from app.api.responses import background as responses_live
from app.api.responses.disk import Disk, Record
from app.api.responses.events import ResponseEvents
from app.api.responses.store import Store
from app.api.routes import make_app
from app.engine.job import Piece
from app.http.server import Runner
from core.config import ServeConfig
from tests.rigs.responses import STOP, URL, events, frames, split
from tests.rigs.server import Server, Start
from tests.rigs.wait import until


async def test_in_the_background(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.manual = True
    made = await client.responses.create(model="org/tiny", input="hi", background=True)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    assert (await client.responses.retrieve(made.id)).status == "in_progress"
    assert [i.content[0].text async for i in client.responses.input_items.list(made.id)] == ["hi"]
    with pytest.raises(openai.BadRequestError, match="is in_progress"):
        await client.responses.create(model="org/tiny", input="and?", previous_response_id=made.id)
    run = server.engine.runs[0]
    run.push(0, Piece("Hel", [1]))
    run.push(0, Piece("lo", [2], None, STOP))
    done = await client.responses.retrieve(made.id)
    assert (done.status, done.output_text, done.usage.output_tokens) == ("completed", "Hello", 2)
    assert (await client.responses.cancel(made.id)).status == "completed"  # too late, and no error


async def test_one_in_the_background_that_cannot_be_read_fails_alone(
    client: openai.AsyncOpenAI, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.manual = True
    made = await client.responses.create(model="org/tiny", input="hi", background=True)

    def broken(events: ResponseEvents, piece: Piece) -> list[bytes]:
        raise IndexError("no such thing")

    monkeypatch.setattr(ResponseEvents, "take", broken)
    run = server.engine.runs[0]
    run.push(0, Piece("Hel", [1]))  # as the engine does: nothing may come back from it
    done = await client.responses.retrieve(made.id)
    assert done.status == "failed" and done.error is not None
    assert "could not read" in done.error.message
    assert run.aborted


async def test_a_stream_in_the_background_can_be_taken_up_again(server: Server) -> None:
    server.engine.manual = True
    async with server.http.post(URL, json={"input": "hi", "background": True, "stream": True}) as response:
        first = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        id = json.loads(first[0].split(b"data: ")[1])["response"]["id"]
        run = server.engine.runs[0]
        run.push(0, Piece("Hel", [1]))
        first += [await response.content.readuntil(b"\n\n") for _ in range(3)]
        response.close()
    run.push(0, Piece("lo", [2]))
    assert not run.aborted

    rest = f"{URL}/{id}?stream=true&starting_after=3"
    async with server.http.get(rest) as one, server.http.get(rest) as two:
        heads = [await response.content.readuntil(b"\n\n") for response in (one, two)]
        run.push(0, Piece("!", [3]))
        run.push(0, Piece("", [], None, STOP))
        live = [split(head + await response.read()) for head, response in zip(heads, (one, two), strict=True)]
    stored = await frames(server, "GET", rest)
    assert live == [stored, stored]
    told = [frame.removesuffix(b"\n\n") for frame in first[:4]]
    assert await frames(server, "GET", f"{URL}/{id}?stream=true") == [*told, *stored]
    whole = events(told + stored)
    assert "".join(e["delta"] for e in whole if e["type"] == "response.output_text.delta") == "Hello!"
    assert whole[-1]["type"] == "response.completed"
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == "Hello!"


async def test_the_client_takes_a_stream_up_again(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="org/tiny", input="hi", background=True, stream=True)
    seen = [event async for event in stream]
    id = seen[0].response.id
    again = await client.responses.retrieve(id, stream=True, starting_after=seen[5].sequence_number)
    assert [event.to_dict() async for event in again] == [event.to_dict() for event in seen[6:]]


async def test_what_was_not_streamed_cannot_be(server: Server) -> None:
    server.engine.manual = True
    _, made = await server.post(URL, {"input": "hi", "background": True})
    for _ in range(2):  # while it is made, and after
        async with server.http.get(f"{URL}/{made['id']}?stream=true") as response:
            assert response.status == 400 and (await response.json())["error"]["param"] == "stream"
        server.engine.runs[0].push(0, Piece("x", [1], None, STOP))
    async with server.http.get(f"{URL}/{made['id']}?starting_after=-1") as response:
        assert response.status == 400


async def test_cancelling(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.manual = True
    made = await client.responses.create(model="org/tiny", input="hi", background=True)
    server.engine.runs[0].push(0, Piece("Hel", [1]))
    for _ in range(2):
        gone = await client.responses.cancel(made.id)
        assert (gone.status, gone.output_text) == ("cancelled", "Hel")
    assert server.engine.runs[0].aborted
    assert (await client.responses.retrieve(made.id)).status == "cancelled"
    server.engine.manual = False
    plain = await client.responses.create(model="org/tiny", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(plain.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_0")


async def test_deleting_one_that_is_made_ends_it(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.manual = True
    made = await client.responses.create(model="org/tiny", input="hi", background=True)
    await client.responses.delete(made.id)
    assert server.engine.runs[0].aborted
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


@pytest.mark.parametrize("full", [True, False])
async def test_one_whose_end_cannot_be_stored_has_an_end(
    full: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.engine.manual = True
    _, made = await server.post(URL, {"input": "hi", "background": True})

    def put(disk: Disk, record: Record) -> bool:
        if full:
            raise OSError(errno.ENOSPC, "full")
        return False  # larger than the store

    monkeypatch.setattr(Disk, "put", put)
    server.engine.runs[0].push(0, Piece("Hello", [1], None, STOP))
    path = f"{URL}/{made['id']}"
    async with asyncio.timeout(5):
        while (found := await (await server.http.get(path)).json())["status"] == "in_progress":
            await asyncio.sleep(0.01)
    assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "Hello"
    async with server.http.post(f"{path}/cancel") as response:
        assert (await response.json())["status"] == "completed"
    async with server.http.delete(path) as response:
        assert response.status == 200
    async with server.http.get(path) as response:
        assert response.status == 404


async def test_a_failure_in_the_background(client: openai.AsyncOpenAI, server: Server) -> None:
    server.engine.fail_at = 2
    stream = await client.responses.create(model="org/tiny", input="hi", background=True, stream=True)
    told = [event async for event in stream]
    assert told[-1].type == "response.failed"
    failed = await client.responses.retrieve(told[0].response.id)
    assert (failed.status, failed.error.message) == ("failed", "The device was lost.")


async def test_the_background_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_live, "MAX_LIVE", 1)
    server.engine.manual = True
    body = {"input": "hi", "background": True}
    assert (await server.post(URL, body))[0] == 200
    assert (await server.post(URL, body))[0] == 429
    server.engine.runs[0].push(0, Piece("", [], None, STOP))
    assert (await server.post(URL, body))[0] == 200


async def test_a_client_gone_before_it_knew_leaves_nothing_running(server: Server) -> None:
    server.engine.manual, server.engine.gate = True, asyncio.Event()
    post = asyncio.ensure_future(server.post(URL, {"input": "hi", "background": True}))
    await server.engine.started.wait()
    post.cancel()
    with pytest.raises(asyncio.CancelledError):
        await post
    await until(lambda: not server.connections)
    server.engine.gate.set()
    await until(lambda: not server.engine.live)


async def test_a_server_that_stops_tells_how_far_it_came(
    server: Server, start: Start, tmp_path: Path
) -> None:
    data = str(tmp_path / "own")
    runner = Runner(make_app(server.service, ServeConfig(data_dir=data)), shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.engine.manual = True
    body = {"input": "hi", "background": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{host}:{port}{URL}", json=body) as response,
    ):
        made = await response.json()
    run = server.engine.runs[0]
    run.push(0, Piece("Hel", [1]))
    await runner.cleanup()
    again = await start(ServeConfig(data_dir=data))
    kept = await again.get(f"{URL}/{made['id']}")
    assert (kept["status"], kept["error"]["code"]) == ("failed", "service_unavailable")
    assert kept["output"][0]["content"][0]["text"] == "Hel" and run.aborted


async def test_a_stream_that_a_restart_cut_off_has_an_end(start: Start, tmp_path: Path) -> None:
    id = f"resp_{'0' * 32}"
    doc = {"id": id, "object": "response", "status": "in_progress", "background": True, "output": []}
    crashed = Store(tmp_path, 10**6)
    await crashed.put(
        Record(
            id=id, owner="", status="in_progress", created=2**31, doc=json.dumps(doc).encode(), input=b"[]"
        )
    )
    await crashed.close()
    server = await start(ServeConfig(data_dir=str(tmp_path)))
    (last,) = await frames(server, "GET", f"{URL}/{id}?stream=true&starting_after=41")
    event = json.loads(last.split(b"data: ")[1])
    assert (event["type"], event["sequence_number"]) == ("response.failed", 42)
    assert event["response"]["status"] == "failed"
