"""A batch takes what nobody else wants: what a client sees of it is nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.batch import capacity
from app.batch.capacity import BACKGROUND
from core.request import State
from tests.rigs.batches import Rig, line
from tests.rigs.wait import PATIENCE, settle, until


async def filled(rig: Rig, rows: int, max_tokens: int = 300, prompt: str = "hello") -> None:
    """A batch of many lines, as many of them running as may."""
    await rig.submit([line(f"l{i}", max_tokens, prompt=f"{prompt} {i}") for i in range(100)])
    async with asyncio.timeout(PATIENCE):
        while rig.scheduler.running < rows:
            await rig.step()
            await asyncio.sleep(0.001)


async def test_a_batch_fills_the_rows_but_the_last(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, rows=16, pages=3001) as rig:
        await filled(rig, 14)
        for _ in range(20):
            await rig.step()
            await asyncio.sleep(0.001)
        assert rig.scheduler.running == 14
        assert rig.scheduler.statistics().waiting == 0


async def test_a_batch_fills_all_replicas_alike(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, rows=16, pages=3001, replicas=3) as rig:
        await filled(rig, 14)
        async with asyncio.timeout(PATIENCE):
            while [scheduler.running for scheduler in rig.schedulers] != [14, 14, 14]:
                await rig.step()
                await asyncio.sleep(0.001)


async def test_a_request_preempts_lines_of_its_replica_alone(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, replicas=2) as rig:
        await filled(rig, 7)
        async with asyncio.timeout(PATIENCE):
            while rig.schedulers[1].running < 7:
                await rig.step()
                await asyncio.sleep(0.001)
        before = [set(scheduler.requests()) for scheduler in rig.schedulers]
        run = await rig.interactive("client", n=3, replica=1)
        planned = len(rig.executors[1].plans)
        while len(rig.executors[1].plans) == planned:
            await rig.step()
        assert [request.state for request in run.requests] == [State.DECODE] * 3
        assert before[0] <= set(rig.schedulers[0].requests())
        assert not before[1] <= set(rig.schedulers[1].requests())
        run.abort()


async def test_batches_of_several_replicas_are_complete(tmp_path: Path) -> None:
    async with Rig(tmp_path, replicas=2) as rig:
        batch = await rig.submit([line(f"l{i}", 5, prompt=f"line {i}") for i in range(40)])
        ended = await rig.ended(batch.id)
        assert ended.status == "completed" and ended.request_counts is not None
        assert ended.request_counts.completed == 40
        assert all(engine.recorder.finished["length"] > 5 for engine in rig.replicas.engines)


@pytest.mark.parametrize("n", [1, 3, 8])
async def test_a_request_is_admitted_by_the_next_plan(tmp_path: Path, n: int) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        await filled(rig, 7)
        await rig.step()
        run = await rig.interactive("client", n=n)
        planned = len(rig.executor.plans)
        while len(rig.executor.plans) == planned:
            await rig.step()
        assert [request.state for request in run.requests] == [State.DECODE] * n
        assert len(rig.executor.plans[planned].new_slots) >= n
        run.abort()


async def test_a_request_is_never_behind_a_line_in_the_queue(tmp_path: Path) -> None:
    """Prompts that fill step after step: those that wait go away, those being computed make way."""
    async with Rig(tmp_path, auto=False, step_tokens=64) as rig:
        await rig.submit([line(f"l{i}", 5, prompt="x" * 400) for i in range(20)])
        await until(lambda: rig.scheduler.running > 0)
        await rig.step()
        run = await rig.interactive("client")
        planned = len(rig.executor.plans)
        while len(rig.executor.plans) == planned:
            await rig.step()
        assert run.requests[0].state is State.DECODE
        run.abort()


async def test_a_full_queue_never_refuses_a_client_for_a_batch(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, max_queued=2, step_tokens=16) as rig:
        await rig.submit([line(f"l{i}", 50, prompt="y" * 100) for i in range(50)])
        await until(lambda: rig.scheduler.running + rig.scheduler.statistics().waiting > 0)
        await settle()
        runs = [await rig.interactive(f"client{i}") for i in range(2)]
        waiting = [r for r in rig.scheduler.requests() if r.state is State.WAITING]
        assert all(r.priority != BACKGROUND for r in waiting)
        for run in runs:
            run.abort()


async def test_pages_held_by_lines_go_to_who_waits_for_them(tmp_path: Path) -> None:
    """96 pages: lines hold most of them when a request comes that needs 80."""
    async with Rig(tmp_path, auto=False, pages=97) as rig:
        await filled(rig, 3, max_tokens=60, prompt="z" * 50)
        run = await rig.interactive("client", prompt=320)
        steps = rig.scheduler.counters.steps
        async with asyncio.timeout(PATIENCE):
            while run.requests[0].state is State.WAITING:
                await rig.step()
                await asyncio.sleep(0.02)  # two looks of the batch at who waits
        assert rig.scheduler.counters.steps - steps <= capacity.MAX_PASSED_OVER + 4
        run.abort()


async def test_no_line_starts_while_somebody_waits(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False, rows=2) as rig:
        runs = [await rig.interactive(f"client{i}", max_tokens=100) for i in range(3)]
        await rig.submit([line(f"l{i}", 5) for i in range(5)])
        for _ in range(30):
            await rig.step()
            await asyncio.sleep(0.002)
        assert all(r.priority != BACKGROUND for r in rig.scheduler.requests())
        for run in runs:
            run.abort()


async def test_lines_that_made_way_come_again(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line(f"l{i}", 30) for i in range(20)])
        async with asyncio.timeout(PATIENCE):
            for i in range(10):
                while not rig.scheduler.running:
                    await rig.step()
                    await asyncio.sleep(0.001)
                run = await rig.interactive(f"client{i}", n=8)
                await rig.step()
                await rig.step()
                run.abort()
            while (done := await rig.client.batches.retrieve(batch.id)).status != "completed":
                await rig.step()
        assert done.request_counts is not None
        assert (done.request_counts.completed, done.request_counts.failed) == (20, 0)
        answers = await rig.records(done.output_file_id)
        assert {a["response"]["body"]["usage"]["completion_tokens"] for a in answers.values()} == {30}


async def test_a_line_that_an_operator_ended_comes_again(tmp_path: Path) -> None:
    async with Rig(tmp_path, auto=False) as rig:
        batch = await rig.submit([line("a", 20)])
        await until(lambda: rig.scheduler.running > 0)
        rig.submitter.abort_all()
        async with asyncio.timeout(PATIENCE):
            while (done := await rig.client.batches.retrieve(batch.id)).status != "completed":
                await rig.step()
        assert done.error_file_id is None, await rig.records(done.error_file_id)
        answer = (await rig.records(done.output_file_id))["a"]["response"]["body"]
        assert answer["choices"][0]["finish_reason"] == "length"
