"""Requests that arrive together start a few at a time, so that results of steps are not late."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from app.http.keys import TURNS
from app.http.turns import PER_TURN, Turns
from tests.rigs.server import Start
from tests.rigs.wait import until


async def enter(turns: Turns, started: list[int], number: int) -> None:
    await turns.enter()
    started.append(number)


async def test_a_turn_starts_a_few_in_order_and_lets_others_run_between() -> None:
    turns, started = Turns(), list[int]()
    tasks = [asyncio.create_task(enter(turns, started, number)) for number in range(3 * PER_TURN + 1)]
    seen = []
    while len(started) < len(tasks):
        await asyncio.sleep(0)
        seen.append(len(started))
    steps = [after - before for before, after in pairwise([0, *seen])]
    assert max(steps) == PER_TURN
    assert started == list(range(len(tasks)))


async def test_one_that_arrives_later_does_not_overtake() -> None:
    turns, started = Turns(), list[int]()
    tasks = [asyncio.create_task(enter(turns, started, number)) for number in range(2 * PER_TURN)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the second half has its turn, and has not run yet
    tasks.append(asyncio.create_task(enter(turns, started, 2 * PER_TURN)))
    await asyncio.gather(*tasks)
    assert started == list(range(2 * PER_TURN + 1))


async def test_who_leaves_while_it_waits_takes_no_place() -> None:
    turns, started = Turns(), list[int]()
    tasks = [asyncio.create_task(enter(turns, started, number)) for number in range(3 * PER_TURN)]
    await asyncio.sleep(0)
    for task in tasks[PER_TURN : 2 * PER_TURN]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert started == [*range(PER_TURN), *range(2 * PER_TURN, 3 * PER_TURN)]
    await asyncio.wait_for(turns.enter(), 10)


async def test_requests_over_http_start_a_few_in_each_turn(start: Start) -> None:
    server = await start()
    counts, over = list[int](), asyncio.Event()

    async def count() -> None:
        while not over.is_set():
            counts.append(len(server.engine.runs))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    requests = 10 * PER_TURN
    body = b'{"prompt": [1, 2], "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    pipes = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(requests)]
    for _, writer in pipes:
        writer.write(head % len(body) + body)
    await until(lambda: len(server.engine.runs) == requests)
    over.set()
    await counting
    assert max(after - before for before, after in pairwise(counts)) <= PER_TURN
    for reader, writer in pipes:
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_probes_do_not_wait_behind_prompts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start()
    waiting = asyncio.Event()

    async def never() -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server.app[TURNS], "enter", never)
    prompt = asyncio.create_task(server.post("/v1/completions", {"prompt": "a"}))
    await waiting.wait()
    async with server.http.get("/health") as response:
        assert response.status == 200
    prompt.cancel()
