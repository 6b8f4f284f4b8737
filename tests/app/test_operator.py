"""Pausing, sleeping and reloading a running engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from app.engine.operator import Operator
from app.text.tokenizer import Tokenizer
from core.errors import EngineFailed, RequestError
from core.request import State
from core.types import FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import PROMPT, VOCAB, Bench
from tests.rigs.wait import settle


@pytest.fixture
async def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer, eager=False)


@pytest.fixture
def operator(bench: Bench, tmp_path: Path) -> Operator:
    return Operator(bench.replicas, tmp_path / "traces")


async def finish(bench: Bench, *runs: object) -> None:
    """Let the device work until nothing is left."""
    while not bench.engine.idle:
        await bench.complete()


async def held(bench: Bench, work: asyncio.Task[None]) -> None:
    """Finish the steps in flight, which is what an operation waits for."""
    await settle()
    assert not work.done() or not bench.executor.pending
    bench.executor.complete(len(bench.executor.pending))
    await work


async def test_slowed_down_one_step_is_planned_at_a_time(tokenizer: Tokenizer, tmp_path: Path) -> None:
    bench = Bench(tokenizer)
    operator = Operator(bench.replicas, tmp_path)
    operator.slow_down(60)
    run = await bench.start("a", 12)
    await settle()
    assert bench.scheduler.counters.steps == 1
    operator.slow_down(0)
    await run.wait()
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 12, VOCAB)
    for wrong in (-1.0, 61.0, float("nan")):
        with pytest.raises(RequestError, match="forward_sleep_time"):
            operator.slow_down(wrong)
    bench.engine.close()


@pytest.mark.parametrize("mode", ["keep", "retract"])
async def test_a_pause_waits_for_what_is_in_flight_and_changes_no_text(
    bench: Bench, operator: Operator, mode: str
) -> None:
    run = await bench.start("a", 20)
    await settle()
    bench.executor.complete()
    await settle()
    await held(bench, asyncio.create_task(operator.pause(mode)))  # type: ignore[arg-type]
    await settle()
    assert operator.paused
    assert bench.scheduler.in_flight == 0
    assert run.requests[0].state is (State.DECODE if mode == "keep" else State.WAITING)
    late = await bench.start("b", 3)  # is taken, and waits
    await settle()
    assert not bench.executor.pending
    await operator.resume()
    await settle()
    await finish(bench)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 20, VOCAB)
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), 3, VOCAB)
    del late


async def test_a_pause_may_abort(bench: Bench, operator: Operator) -> None:
    await bench.start("a", 20)
    await settle()
    await held(bench, asyncio.create_task(operator.pause("abort")))
    await settle()
    assert bench.reason("a-0") is FinishReason.ABORT


async def test_new_weights_drop_every_kv_and_requests_start_over(bench: Bench, operator: Operator) -> None:
    await bench.start("a", 20)
    await settle()
    bench.executor.complete()
    await settle()
    await held(bench, asyncio.create_task(operator.load_weights("other")))
    assert [(o.action, o.path) for o in bench.executor.commands] == [("load_weights", "other")]
    assert not operator.paused
    await settle()
    assert bench.scheduler.cache.statistics().cached == 0
    await finish(bench)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 20, VOCAB)


async def test_weights_that_are_refused_change_nothing(bench: Bench, operator: Operator) -> None:
    await bench.start("a", 8)
    await settle()
    bench.executor.refuse = "not the same model"
    work = asyncio.create_task(operator.load_weights("other"))
    with pytest.raises(RequestError, match="not the same model"):
        await held(bench, work)
    assert not operator.paused
    await settle()
    await finish(bench)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 8, VOCAB)


async def test_asleep_requests_wait_and_a_resume_is_refused(bench: Bench, operator: Operator) -> None:
    await operator.sleep(("weights",))
    await operator.sleep()  # only what is still there
    assert [o.tags for o in bench.executor.commands] == [("weights",), ("kv_cache",)]
    await bench.start("a", 4)
    await settle()
    with pytest.raises(RequestError, match="sleeps"):
        await operator.resume()
    await operator.wake(("kv_cache",))
    assert operator.paused
    await operator.wake()
    assert operator.asleep == frozenset()
    await settle()
    await finish(bench)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 4, VOCAB)


async def test_asleep_nothing_is_left_in_the_cache(bench: Bench, operator: Operator) -> None:
    """The memory of the KV pool comes back with other contents."""
    bench.executor.eager = True
    await (await bench.start("a", 20)).wait()
    await settle()
    assert bench.scheduler.cache.statistics().cached
    await operator.sleep(("kv_cache",))
    assert bench.scheduler.cache.statistics().cached == 0


async def test_a_profile_is_written_where_the_server_says(operator: Operator, bench: Bench) -> None:
    await operator.start_profile()
    path = await operator.stop_profile()
    assert [o.action for o in bench.executor.commands] == ["profile_start", "profile_stop"]
    assert bench.executor.commands[1].path == str(path)
    assert path.parent.is_dir()


async def test_a_profile_that_could_not_be_written_is_not_begun(bench: Bench, tmp_path: Path) -> None:
    """Such a profile would be recorded for ever, since no stop could write it."""
    (tmp_path / "file").touch()
    operator = Operator(bench.replicas, tmp_path / "file" / "traces")
    with pytest.raises(RequestError, match=r"file/traces cannot be made: Not a directory\. Set .*LOOM_CACHE"):
        await operator.start_profile()
    assert not bench.executor.commands


# -- clients that leave ------------------------------------------------------------------------------


async def left(work: asyncio.Task[None]) -> None:
    """The client goes, and its handler is cancelled."""
    await settle()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_new_weights_forget_every_kv_when_their_client_has_gone(
    bench: Bench, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bench.executor.eager = True
    await (await bench.start("a", 20)).wait()
    await settle()
    assert bench.scheduler.cache.statistics().cached
    bench.executor.holds = True
    await left(asyncio.create_task(operator.load_weights("other")))
    assert operator.paused, "the weights are on their way"
    bench.executor.carry_out()
    await settle()
    assert bench.scheduler.cache.statistics().cached == 0
    assert not operator.paused
    assert "load_weights: done" in caplog.text


async def test_a_sleep_whose_client_has_gone_can_be_woken_from(bench: Bench, operator: Operator) -> None:
    bench.executor.holds = True
    await left(asyncio.create_task(operator.sleep()))
    bench.executor.carry_out()
    await settle()
    assert operator.asleep == {"weights", "kv_cache"}
    bench.executor.holds = False
    await operator.wake()
    assert [o.action for o in bench.executor.commands] == ["sleep", "wake"]
    run = await bench.start("a", 4)
    await settle()
    await finish(bench)
    await run.wait()
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 4, VOCAB)


@pytest.mark.parametrize("name", ["sleep", "load_weights"])
async def test_a_call_that_is_left_while_it_waits_for_quiet_comes_to_its_end(
    bench: Bench, operator: Operator, name: str
) -> None:
    await bench.start("a", 8)
    await settle()
    act = {"sleep": operator.sleep, "load_weights": lambda: operator.load_weights("other")}[name]
    await left(asyncio.create_task(act()))
    assert bench.executor.commands == []
    await bench.complete()
    assert [o.action for o in bench.executor.commands] == [name]
    assert operator.paused == (name == "sleep")
    await operator.wake()
    await settle()
    await finish(bench)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 8, VOCAB)


async def test_a_refused_sleep_leaves_nothing_paused(
    bench: Bench, operator: Operator, caplog: pytest.LogCaptureFixture
) -> None:
    bench.executor.refuse = "memory is in use"
    with pytest.raises(RequestError, match="in use"):
        await operator.sleep()
    assert not operator.paused
    assert operator.asleep == frozenset()
    assert "sleep: refused: memory is in use" in caplog.text


@pytest.mark.parametrize("order", [("pause", "sleep"), ("sleep", "pause")])
async def test_waking_resumes_only_what_sleep_stopped(
    bench: Bench, operator: Operator, order: tuple[str, str]
) -> None:
    for name in order:
        await getattr(operator, name)()
    await operator.wake()
    assert operator.paused, "by the operator, until it is resumed"
    await operator.wake()
    assert operator.paused
    await operator.load_weights("other")
    assert operator.paused
    await operator.resume()
    assert not operator.paused


@pytest.mark.parametrize("waiting_for", ["an order", "quiet"])
async def test_a_failure_answers_who_waits_for_an_order(
    bench: Bench, operator: Operator, waiting_for: str
) -> None:
    if waiting_for == "quiet":
        await bench.start("a", 8)
        await settle()
    bench.executor.holds = True
    work = asyncio.create_task(operator.load_weights("other"))
    await settle()
    bench.engine.fail("the device was lost")
    for late in (work, operator.sleep()):
        with pytest.raises(EngineFailed, match="the device was lost"):
            await late
