"""Faults in the step loop: whoever lost a token is told, the others notice nothing, nobody waits in vain."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from app.engine import gc as housekeeping_module
from app.engine.backlog import Backlog
from app.engine.gc import Housekeeping
from app.engine.job import Job, Piece
from app.engine.loop import PAUSED_TICK
from app.engine.output import Stream
from app.engine.watchdog import FIRST, Watchdog
from app.text.tokenizer import Tokenizer
from core.errors import EngineFailed, Unavailable
from core.types import FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, PROMPT, VOCAB, Bench
from tests.rigs.wait import PATIENCE, settle, until

DEPTHS = [0, 1]
AT = 3
"""Calls that go well before the fault."""


def failing(act: Callable[..., Any], after: int = AT) -> Callable[..., Any]:
    """`act`, whose call number `after` raises."""
    calls = 0

    def faulty(*args: object) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KeyError("injected")
        return act(*args)

    return faulty


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("where", ["plan", "apply", "deliver"])
async def test_an_exception_in_the_loop_fails_the_engine_and_every_stream(
    tokenizer: Tokenizer,
    depth: int,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(tokenizer, depth=depth, rows=2)
    reasons: list[str] = []
    bench.replicas.on_failure = reasons.append
    if where == "deliver":
        monkeypatch.setattr(Backlog, "deliver", failing(Backlog.deliver))
    else:
        monkeypatch.setattr(bench.scheduler, where, failing(getattr(bench.scheduler, where)))
    runs = [await bench.start(f"j{i}", 50) for i in range(4)]  # two run, two wait
    await asyncio.gather(*(run.wait() for run in runs))
    expected = oracle(PROMPT.tolist(), 50, VOCAB)
    for i in range(4):
        finish = bench.pieces[f"j{i}-0"][-1].finish
        assert finish is not None
        assert (finish.reason, finish.message) == (FinishReason.ERROR, "KeyError: 'injected'")
        tokens = bench.tokens(f"j{i}-0")
        assert tokens == expected[: len(tokens)], "no hole before the error"
    assert reasons == ["KeyError: 'injected'"]
    assert "most recent call first" in caplog.text, "the stacks of all threads"
    with pytest.raises(Unavailable):
        await bench.start("late")
    runs[0].abort()  # fine, and nothing more comes of it
    await settle()
    assert reasons == ["KeyError: 'injected'"]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("act", ["feed", "end"])
async def test_an_exception_in_one_stream_ends_it_alone(
    tokenizer: Tokenizer, depth: int, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tokenizer, depth=depth)
    runs = [await bench.start(f"j{i}", 20) for i in range(3)]
    whole = getattr(Stream, act)
    faulty = failing(whole, AT if act == "feed" else 0)
    second = bench.engine._backlog._streams[runs[1].requests[0]]

    def chosen(self: Stream, *args: object) -> Any:
        return (faulty if self is second else whole)(self, *args)

    monkeypatch.setattr(Stream, act, chosen)
    await asyncio.gather(*(run.wait() for run in runs))
    await settle()
    assert bench.reason("j1-0") is FinishReason.ERROR
    for i in (0, 2):
        assert bench.tokens(f"j{i}-0") == oracle(PROMPT.tolist(), 20, VOCAB)
        assert bench.reason(f"j{i}-0") is FinishReason.LENGTH
    assert bench.engine.failure is None
    assert bench.submitter.idle
    bench.scheduler.check_integrity()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("raises", ["once", "last", "always"])
async def test_a_sink_that_raises_ends_its_request_alone(
    tokenizer: Tokenizer, depth: int, raises: str
) -> None:
    bench = Bench(tokenizer, depth=depth)
    taken: list[Piece] = []
    raised = 0

    def sink(index: int, piece: Piece) -> None:
        nonlocal raised
        if raises == "always" or (not raised and (raises == "once" or piece.finish is not None)):
            raised += 1
            raise ValueError("injected")
        taken.append(piece)

    job = Job(id="bad", prompt=PROMPT, max_tokens=20, sampling=GREEDY, ignore_eos=True)
    bad = await bench.submitter.start(job, sink)
    good = await bench.start("good", 20)
    await asyncio.gather(bad.wait(), good.wait())
    await settle()
    assert raised
    if raises != "always":
        finish = taken[-1].finish
        assert finish is not None and finish.reason is FinishReason.ERROR and finish.message
    assert bench.tokens("good-0") == oracle(PROMPT.tolist(), 20, VOCAB)
    assert bench.engine.failure is None
    assert bench.submitter.idle
    bench.scheduler.check_integrity()


async def test_time_without_work_is_no_latency_between_tokens(tokenizer: Tokenizer) -> None:
    now = [0.0]
    bench = Bench(tokenizer, depth=1)
    bench.engine.recorder._clock = lambda: now[0]
    for i in range(3):
        now[0] += 1000.0
        run = await bench.start(f"j{i}", 5)
        await run.wait()
        await settle()
    assert bench.engine.statistics().histograms.inter_token.total == 0.0


async def test_a_paused_engine_looks_at_its_clock_while_requests_wait(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tokenizer)
    bench.engine.paused = True
    later: list[tuple[float, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(bench.engine, "_loop", Timers(loop, later))
    await settle()
    assert later == []
    run = await bench.start("a", 4)
    await settle()
    assert [seconds for seconds, _ in later] == [PAUSED_TICK]
    later.pop()[1]()
    await settle()
    assert len(later) == 1, "and again"
    bench.engine.resume()
    await run.wait()


async def test_requests_run_out_of_time_while_the_engine_is_paused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tokenizer, waiting_timeout=10.0)
    now, later = [0.0], list[tuple[float, Callable[[], None]]]()
    monkeypatch.setattr(bench.scheduler, "_clock", lambda: now[0])
    monkeypatch.setattr(bench.engine, "_loop", Timers(asyncio.get_running_loop(), later))
    bench.engine.paused = True
    run = await bench.start("a", 4)
    for at in (9.0, 11.0):
        await settle()
        assert "a-0" not in bench.pieces
        now[0] = at
        later.pop()[1]()
    await settle()
    assert bench.reason("a-0") is FinishReason.ABORT
    await run.wait()
    await settle()
    assert later == [], "nobody waits any more"
    bench.scheduler.check_integrity()


class Timers:
    """A loop whose timers a test rings."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, later: list[tuple[float, Callable[[], None]]]
    ) -> None:
        self.call_soon = loop.call_soon
        self.call_soon_threadsafe = loop.call_soon_threadsafe
        self.run_in_executor = loop.run_in_executor
        self.later = later

    def call_later(self, seconds: float, act: Callable[..., None], *args: object) -> object:
        self.later.append((seconds, lambda: act(*args)))
        return Ringing()


class Marked:
    """Something that the collector walks."""


class Ringing:
    def cancel(self) -> None: ...


# -- housekeeping -----------------------------------------------------------------------------------


async def test_housekeeping_goes_on_after_it_raised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tokenizer)
    later: list[tuple[float, Callable[[], None]]] = []
    housekeeping = Housekeeping(bench.replicas, Timers(asyncio.get_running_loop(), later))  # type: ignore[arg-type]
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        raise RuntimeError("pages are missing")

    housekeeping.start()
    monkeypatch.setattr(housekeeping_module.gc, "collect", lambda generation: check())
    try:
        timers = len(later)
        for round in range(1, 4):
            due, later[:] = list(later), []
            for _, act in due:
                act()
            assert (checks, len(later)) == (round, timers)
    finally:
        housekeeping.stop()
    assert caplog.text.count("RuntimeError: pages are missing") == 3


@pytest.mark.parametrize("change", ["nothing", "work"])
async def test_books_that_do_not_agree_are_told_where_nothing_has_changed(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    bench = Bench(tokenizer)
    later: list[tuple[float, Callable[[], None]]] = []
    housekeeping = Housekeeping(bench.replicas, Timers(asyncio.get_running_loop(), later))  # type: ignore[arg-type]
    threads: list[int] = []
    looking, go_on = threading.Event(), threading.Event()

    def check() -> None:
        threads.append(threading.get_ident())
        looking.set()
        go_on.wait(PATIENCE)
        raise RuntimeError("pages are missing")

    monkeypatch.setattr(bench.scheduler, "check_integrity", check)
    gc.freeze()  # it collects first: walking all that the tests have imported takes a second
    housekeeping.start()
    try:
        collect = next(act for seconds, act in later if seconds == housekeeping_module.COLLECT_EVERY)
        collect()
        assert await asyncio.to_thread(looking.wait, PATIENCE)
        if change == "work":
            await (await bench.start("a", 4)).wait()
            await settle()
        go_on.set()
        await until(lambda: not housekeeping._checking)
        assert ("RuntimeError: pages are missing" in caplog.text) is (change == "nothing")
        collect()  # again only where something has changed
        await until(lambda: not housekeeping._checking)
        assert len(threads) == (1 if change == "nothing" else 2)
        assert threading.get_ident() not in threads
    finally:
        housekeeping.stop()


@pytest.mark.parametrize("long", [0.0, 1e9])
async def test_what_took_long_to_collect_is_not_walked_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, long: float
) -> None:
    monkeypatch.setattr(housekeeping_module, "LONG", long)
    bench = Bench(tokenizer)
    later: list[tuple[float, Callable[[], None]]] = []
    housekeeping = Housekeeping(bench.replicas, Timers(asyncio.get_running_loop(), later))  # type: ignore[arg-type]
    gc.freeze()
    housekeeping.start()
    try:
        alive = [Marked() for _ in range(1000)]
        due, later[:] = list(later), []
        for _, act in due:
            act()
        walked = sum(type(each) is Marked for each in gc.get_objects())
        assert walked == (len(alive) if long else 0)
    finally:
        housekeeping.stop()


async def test_a_busy_server_collects_where_its_heap_has_grown(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that are alive do not count, however many: the streams would stand still for nothing."""
    bench = Bench(tokenizer, eager=False)
    later: list[tuple[float, Callable[[], None]]] = []
    housekeeping = Housekeeping(bench.replicas, Timers(asyncio.get_running_loop(), later))  # type: ignore[arg-type]
    monkeypatch.setattr(housekeeping_module, "GROWN", 5_000)
    generations: list[int] = []
    gc.freeze()
    housekeeping.start()
    try:
        collect = next(act for seconds, act in later if seconds == housekeeping_module.COLLECT_EVERY)
        monkeypatch.setattr(housekeeping_module.gc, "collect", generations.append)
        run = await bench.start("a", 4)
        await settle()
        for _ in range(10):
            alive = [Marked() for _ in range(1_000)]
            collect()
        assert generations == []
        leaked = [Marked() for _ in range(5_000)]
        collect()
        assert generations == [1]
        del alive, leaked
        bench.executor.eager = True
        bench.executor.complete(len(bench.executor.pending))
        await run.wait()
        await settle()
        collect()
        assert generations == [1, 2]
    finally:
        housekeeping.stop()


# -- the watchdog -----------------------------------------------------------------------------------


class Watched:
    """An engine whose device the test steps, and a watchdog whose clock it moves."""

    def __init__(self, tokenizer: Tokenizer, depth: int = 1) -> None:
        self.bench = Bench(tokenizer, depth=depth, eager=False)
        self.now = 0.0
        self.watchdog = Watchdog(self.bench.engine, 8.0, lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Time passes, and the watchdog looks as it should."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.watchdog.interval
            self.watchdog.check()

    async def step(self) -> None:
        self.bench.executor.complete()
        await settle()


@pytest.mark.parametrize("depth", DEPTHS)
async def test_a_step_that_never_ends_fails_the_engine(
    tokenizer: Tokenizer, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tokenizer, depth)
    bench = watched.bench
    run = await bench.start("a", 50)
    await settle()
    for _ in range(20):  # a slow device is none that hangs
        watched.wait(6.0)
        await watched.step()
    assert bench.engine.failure is None
    watched.wait(12.0)
    assert bench.engine.failure is not None and "--watchdog-timeout is 8 s" in bench.engine.failure
    assert bench.engine.hung
    await run.wait()
    assert bench.reason("a-0") is FinishReason.ERROR
    assert "most recent call first" in caplog.text
    bench.engine.close()
    assert not bench.executor.closed, "its threads would be waited for"


async def test_the_first_step_may_compile(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    await watched.bench.start("a", 50)
    await settle()
    watched.wait((FIRST - 1) * 8.0)
    assert watched.bench.engine.failure is None
    watched.wait(3 * 8.0)
    assert watched.bench.engine.failure is not None


async def test_a_device_without_steps_does_not_hang(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    bench = watched.bench
    run = await bench.start("a", 3)
    await settle()
    while bench.executor.pending:
        await watched.step()
    await run.wait()
    watched.wait(100.0)  # idle
    bench.engine.paused = True
    await bench.start("b", 3)
    watched.wait(100.0)  # paused
    bench.executor.holds = True
    order = asyncio.create_task(bench.engine.commands.carry_out("wake"))
    await settle()
    watched.wait(100.0)  # reading weights
    bench.executor.carry_out()
    await order
    assert bench.engine.failure is None


async def test_an_adapter_on_its_way_hides_no_hang(tokenizer: Tokenizer) -> None:
    """The adapter's copy waits for steps, and so for ever where a step never ends."""
    watched = Watched(tokenizer)
    bench = watched.bench
    await bench.start("a", 50)
    await settle()
    bench.executor.holds = True
    reading = asyncio.create_task(bench.engine.commands.carry_out("adapter_read", adapter="a"))
    await settle()
    watched.wait((FIRST + 2) * 8.0)
    assert bench.engine.failure is not None
    with pytest.raises(EngineFailed):
        await reading


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
