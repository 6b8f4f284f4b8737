from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from aiohttp import web

from bench.load.client import Client, Target
from bench.load.drive import Driver
from bench.load.prompts import Source
from bench.load.workloads import Workload
from tests.rigs.completions_server import Body, Fake, proper, serving


def driver(
    url: str, work: Workload, part: tuple[int, int] = (0, 1), take: Callable[[], int] | None = None
) -> Driver:
    client = Client(Target.of(url), work.endpoint)
    return Driver(work, Source(work, "m"), client, part, take or itertools.count().__next__)


async def test_a_closed_loop_has_at_most_the_requested_concurrency() -> None:
    work = Workload(input_len=4, output_len=2, concurrency=3, requests=12)
    running, most = 0, 0

    class Counting(Fake):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().complete(request)

    async with serving(Counting()) as url:
        run = driver(url, work)
        await run.run(0.0)
    assert sorted(record.index for record in run.records) == list(range(12))
    assert most <= 3
    assert all(record.bad is None for record in run.records)


async def test_processes_share_concurrency_and_requests() -> None:
    work = Workload(input_len=4, output_len=1, concurrency=5, requests=11)
    count = itertools.count()
    async with serving(Fake()) as url:
        parts = [driver(url, work, (i, 2), count.__next__) for i in range(2)]
        assert [part._callers for part in parts] == [3, 2]
        await asyncio.gather(*(part.run(0.0) for part in parts))
    assert sorted(r.index for part in parts for r in part.records) == list(range(11))


async def test_an_open_loop_sends_on_schedule_while_no_answer_ends() -> None:
    work = Workload(input_len=4, output_len=1, requests=6, rate=200.0)
    gate = asyncio.Event()

    class Slow(Fake):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if len(self.bodies) == work.requests - 1:
                gate.set()  # no request is answered before all have been sent
            self.bodies.append({})
            await gate.wait()
            self.bodies.pop(0)
            return await super().complete(request)

    async with serving(Slow()) as url:
        run = driver(url, work)
        start = time.perf_counter()
        await run.run(start)
    due = Source(work, "m").arrivals()
    assert due is not None
    for record in run.records:
        assert record.planned == start + due[record.index] and record.sent >= record.planned
    assert len(run.records) == 6


async def test_a_conversation_contains_the_real_answers() -> None:
    work = Workload(input_len=4, output_len=2, turns=3, requests=1, endpoint="chat", prompt_kind="text")
    fake = Fake()
    async with serving(fake) as url:
        run = driver(url, work)
        await run.run(0.0)
    assert [record.turn for record in run.records] == [0, 1, 2]
    last = fake.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == last[3]["content"] == " w0 w1"
    assert last[:3] == fake.bodies[1]["messages"]


async def test_a_conversation_ends_at_its_first_failure() -> None:
    def broken(body: Body) -> list[str]:
        return proper(body)[:-1] if len(body["messages"]) > 1 else proper(body)

    work = Workload(input_len=4, output_len=2, turns=3, requests=1, endpoint="chat", prompt_kind="text")
    async with serving(Fake(broken)) as url:
        run = driver(url, work)
        await run.run(0.0)
    assert [record.bad for record in run.records] == [None, "no [DONE]"]


async def test_warm_up_is_not_measured() -> None:
    fake = Fake()
    async with serving(fake) as url:
        run = driver(url, Workload(input_len=4, output_len=1, concurrency=2, requests=2))
        await run.warm(5)
    assert len(fake.bodies) == 5 and run.records == []


async def test_an_interrupted_run_keeps_its_records() -> None:
    work = Workload(input_len=4, output_len=1, concurrency=1, requests=5)
    third = asyncio.Event()

    class Stuck(Fake):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if len(self.bodies) == 2:
                third.set()
                await asyncio.Event().wait()
            return await super().complete(request)

    async with serving(Stuck()) as url:
        run = driver(url, work)
        task = asyncio.create_task(run.run(0.0))
        await third.wait()
        task.cancel()
        await asyncio.wait((task,))
    assert [record.index for record in run.records] == [0, 1]
