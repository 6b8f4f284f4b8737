"""An event loop that delivers late: the tokens of many steps wait, those of a request in one row."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from app.engine.backlog import ENDS, FEWEST_ENDS, SLICE, SLICE_TOKENS, SLICES
from app.engine.job import TextOptions
from app.engine.loop import BACKLOG
from app.text.tokenizer import Tokenizer
from core.schedule.scheduler import NOT_FINITE
from core.types import NAN_TOKEN, Finish, FinishReason
from tests.rigs.executor import oracle
from tests.rigs.step_loop import GREEDY, PROMPT, VOCAB, Bench
from tests.rigs.wait import settle

LATE = 30


def replace(bench: Bench, deliver: Callable[[], None]) -> Callable[[], None]:
    """Replace the engine's `Backlog.deliver`. Return the one before."""
    backlog = bench.engine._backlog
    before, backlog.deliver = backlog.deliver, deliver  # type: ignore[method-assign]
    return before


async def late(bench: Bench, steps: int = LATE) -> Callable[[], None]:
    """Run so many steps and deliver nothing. Return what delivers the next slice."""
    deliver = replace(bench, lambda: None)
    for _ in range(steps):
        await settle()
        if bench.executor.pending:
            bench.executor.complete()
    await settle()
    return deliver


async def end(bench: Bench, deliver: Callable[[], None]) -> None:
    """Deliver in time again, until nothing runs."""
    replace(bench, deliver)
    bench.executor.eager = True
    bench.executor.complete(len(bench.executor.pending))
    bench.engine.wake()  # planning may have paused
    while not bench.engine.idle:
        await settle()


def delivered(bench: Bench) -> int:
    return sum(len(piece.tokens) for pieces in bench.pieces.values() for piece in pieces)


async def test_the_device_has_steps_while_the_loop_delivers_late(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    await bench.start("a", 100)
    deliver = await late(bench, 20)
    assert bench.executor.pending and bench.pieces == {}
    await end(bench, deliver)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 100, VOCAB)


async def test_plain_rows_of_many_steps_take_no_more_slices_than_those_of_one(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=3 * SLICE, pages=9_000)
    await bench.start("a", 100, n=3 * SLICE)
    deliver = await late(bench)
    for _ in range(3):
        deliver()
    assert bench.engine._backlog.waiting == 0
    assert delivered(bench) > 3 * SLICE * (LATE - 5)
    await end(bench, deliver)


@pytest.mark.parametrize("steps", [1, 2, 3, LATE])
async def test_a_turn_delivers_as_many_slices_as_steps_wait(tokenizer: Tokenizer, steps: int) -> None:
    """But few, so that requests which start wait for few."""
    bench = Bench(tokenizer, eager=False, rows=(SLICES + 1) * SLICE, pages=14_000)
    for id in range(SLICES + 1):
        await bench.start(f"a{id}", 100, n=SLICE)
    deliver = await late(bench, steps)
    slices = list[int]()

    def counted() -> None:
        slices.append(len(bench.engine._backlog._rows))
        deliver()

    replace(bench, counted)
    waiting = bench.engine._backlog.waiting
    bench.engine._backlog.deliver_turn()
    assert len(slices) == min(waiting, SLICES), f"{waiting} steps wait"
    assert len(set(slices)) == len(slices), "each has rows"
    await end(bench, deliver)


async def test_first_tokens_overtake_those_that_wait(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=3 * SLICE, pages=9_000)
    await bench.start("a", 100, n=2 * SLICE)
    deliver = await late(bench, 20)
    for _ in range(2):
        deliver()
    await late(bench, 5)
    run = await bench.start("b", 9)
    await late(bench, 3)
    waiting = bench.engine._backlog.waiting
    assert run.first_token_at == 0.0
    deliver()
    assert run.first_token_at > 0.0
    assert bench.engine._backlog.waiting == waiting, "the oldest still waits"
    await end(bench, deliver)
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), 9, VOCAB)


@pytest.mark.parametrize("interval", [1, 50])
async def test_last_tokens_overtake_those_that_wait(tokenizer: Tokenizer, interval: int) -> None:
    """A client sends its next request when it has them."""
    bench = Bench(tokenizer, eager=False, rows=3 * SLICE, pages=9_000)
    bench.engine.set_stream_interval(interval)
    await bench.start("a", 100, n=2 * SLICE)
    run = await bench.start("b", 30)
    deliver = await late(bench, 10)
    for _ in range(3):
        deliver()
    assert run.first_token_at > 0.0
    await late(bench, 25)
    others = delivered(bench)
    assert bench.pieces["b-0"][-1].finish is None
    deliver()
    assert bench.reason("b-0") is FinishReason.LENGTH
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), 30, VOCAB)
    assert delivered(bench) < others + 25 * SLICE, "the others still wait"
    await end(bench, deliver)
    assert all(bench.tokens(f"a-{at}") == oracle(PROMPT.tolist(), 100, VOCAB) for at in range(2 * SLICE))


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize(("replicas", "most"), [(1, ENDS), (2, ENDS // 2), (2 * ENDS, FEWEST_ENDS)])
async def test_a_slice_ends_few_answers(tokenizer: Tokenizer, tokens: int, replicas: int, most: int) -> None:
    """A slice ends at most `ends` answers and delivers other rows beside them. The limit is lower with
    several replicas, and counts answers of one token too."""
    bench = Bench(tokenizer, eager=False, rows=3 * SLICE, pages=9_000)
    bench.engine.share_loop(replicas)
    answers = [f"b-{at}" for at in range(2 * most + 1)]
    await bench.start("a", 100, n=SLICE)
    deliver = await late(bench, 3)
    deliver()
    await bench.start("b", tokens, n=len(answers))
    await late(bench, 3)
    if tokens > 1:
        deliver()  # the first ones
    await late(bench, tokens)
    ended, others = list[int](), list[int]()
    while bench.engine._backlog.waiting:
        deliver()
        pieces = [bench.pieces[id][-1] for id in answers if id in bench.pieces]
        ended.append(sum(piece.finish is not None for piece in pieces))
        others.append(sum(len(bench.pieces[f"a-{at}"]) for at in range(SLICE)))
    assert ended[:3] == [most, 2 * most, 2 * most + 1]
    assert others[0] > SLICE, "others have their turn in the same slice"
    await end(bench, deliver)
    assert all(bench.tokens(id) == oracle(PROMPT.tolist(), tokens, VOCAB) for id in answers)


async def test_answers_that_wait_for_their_end_do_not_stop_planning(tokenizer: Tokenizer) -> None:
    """Rows that have ended do not grow, so they do not count towards `BACKLOG`."""
    bench = Bench(tokenizer, eager=False)
    bench.engine.set_stream_interval(2 * BACKLOG)
    await bench.start("a", 2 * BACKLOG + 20)
    deliver = await late(bench, 3)
    deliver()  # its first tokens
    await bench.start("b", 3)
    await late(bench, BACKLOG + 10)
    assert bench.engine._backlog.waiting > BACKLOG, "the end of b"
    assert bench.executor.pending, "a runs"
    await end(bench, deliver)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 2 * BACKLOG + 20, VOCAB)
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), 3, VOCAB)


async def test_planning_pauses_while_first_tokens_wait(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    await bench.start("a", 3 * BACKLOG)
    deliver = await late(bench, 2 * BACKLOG)
    assert not bench.executor.pending
    await end(bench, deliver)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 3 * BACKLOG, VOCAB)


async def test_a_row_that_is_divided_delays_no_other_first_token(tokenizer: Tokenizer) -> None:
    """After its first part the row moves behind other rows, and planning pauses when it waits too long."""
    bench = Bench(tokenizer, eager=False, depth=2, drafts=7, rows=4, pages=4_000)
    sampling = msgspec.structs.replace(GREEDY, logprobs=128)
    await bench.start("a", 400, n=4, sampling=sampling)
    deliver, begun = await late(bench), list[int]()
    streams = list(bench.engine._backlog._streams.values())
    for _ in range(4):
        deliver()
        begun.append(sum(stream.count > 0 for stream in streams))
    assert begun == [1, 2, 3, 4]
    await late(bench, 2 * BACKLOG)
    assert bench.engine._backlog.behind >= BACKLOG and not bench.executor.pending
    await end(bench, deliver)
    assert all(bench.tokens(f"a-{at}") == oracle(PROMPT.tolist(), 400, VOCAB) for at in range(4))


@pytest.mark.parametrize(("single", "logprobs"), [(True, -1), (False, 0)])
async def test_a_slice_has_few_tokens_that_are_fed_one_by_one(
    tokenizer: Tokenizer, single: bool, logprobs: int
) -> None:
    bench = Bench(tokenizer, eager=False, depth=2, drafts=7, rows=16, pages=4_000)
    sampling = msgspec.structs.replace(GREEDY, logprobs=logprobs)
    await bench.start("a", 100, n=12, single_tokens=single, sampling=sampling)
    deliver = await late(bench)
    while bench.engine._backlog.waiting:
        before = delivered(bench)
        deliver()
        assert 0 < delivered(bench) - before <= SLICE_TOKENS
    await end(bench, deliver)


@pytest.mark.parametrize("logprobs", [20, 128])
async def test_alternatives_count_as_tokens_of_a_slice(tokenizer: Tokenizer, logprobs: int) -> None:
    """A row with many of them is divided, and loses none."""
    bench = Bench(tokenizer, eager=False, depth=2, drafts=7, rows=4, pages=4_000)
    sampling = msgspec.structs.replace(GREEDY, logprobs=logprobs)
    await bench.start("a", 400, n=4, sampling=sampling)
    deliver, backlog = await late(bench), bench.engine._backlog
    streams = list(backlog._streams.values())
    while backlog.waiting:
        before = sum(stream.count for stream in streams)
        deliver()
        assert 0 < sum(stream.count for stream in streams) - before <= max(SLICE_TOKENS // (1 + logprobs), 1)
    await end(bench, deliver)
    for at in range(4):
        assert bench.tokens(f"a-{at}") == oracle(PROMPT.tolist(), 400, VOCAB)
        rows = [row for piece in bench.pieces[f"a-{at}"] for row in piece.logprobs or ()]
        assert len(rows) == 400 and all(len(row.top_ids) == logprobs for row in rows)


async def test_a_row_that_is_longer_than_a_slice_is_one(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, drafts=15, rows=2, pages=400)
    await bench.start("a", 400, single_tokens=True)
    deliver = await late(bench, 33)
    deliver()
    assert delivered(bench) > SLICE_TOKENS
    await end(bench, deliver)
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 400, VOCAB)


async def test_planning_goes_on_when_the_oldest_row_is_aborted(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    oldest = await bench.start("a", 200)
    deliver = await late(bench, 5)
    deliver()  # its first tokens: what follows of it is not urgent
    await late(bench, 10)
    await bench.start("b", 100)
    await late(bench, 60)
    assert bench.engine._backlog.waiting >= BACKLOG and not bench.executor.pending, "planning has paused"
    oldest.abort()
    await settle()
    assert bench.executor.pending, "nothing else would wake the engine"
    await end(bench, deliver)
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), 100, VOCAB)


async def test_first_tokens_that_wait_are_delivered_when_the_engine_fails(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 9)
    replace(bench, await late(bench, 3))
    bench.engine.fail("broken")
    await run.wait()
    made = bench.tokens("a-0")
    assert made == oracle(PROMPT.tolist(), len(made), VOCAB) != []
    assert bench.reason("a-0") is FinishReason.ERROR


async def test_a_failed_delivery_ends_requests_whose_first_token_waits(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 9)
    await late(bench, 3)

    def broken() -> None:
        raise KeyError("injected")

    replace(bench, broken)
    await run.wait()
    assert bench.tokens("a-0") == []
    assert bench.reason("a-0") is FinishReason.ERROR


async def test_the_reason_that_is_counted_is_the_clients(tokenizer: Tokenizer) -> None:
    """The scheduler ends the request by its length before the stop string is found."""
    text = tokenizer.decode(oracle(PROMPT.tolist(), 40, VOCAB))
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 24, text=TextOptions(stop=(text[4:7],)))
    await end(bench, await late(bench))
    await run.wait()
    assert bench.reason("a-0") is FinishReason.STOP
    assert bench.engine.statistics().finished == {"stop": 1}


async def test_tokens_of_a_step_that_was_applied_in_part_are_not_delivered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them may be some behind a stop, or the mark of logits that were not finite."""
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 60)
    deliver = await late(bench, 4)

    def broken(*_: object) -> None:
        replace(bench, deliver)
        raise KeyError("injected")

    monkeypatch.setattr(bench.scheduler, "_end_rows", broken)
    bench.executor.nan_slots = {run.requests[0].slot}
    bench.executor.complete()
    await run.wait()
    assert bench.reason("a-0") is FinishReason.ERROR
    assert NAN_TOKEN not in bench.tokens("a-0")


@pytest.mark.parametrize("made", [0, 5, 11])
async def test_tokens_before_logits_that_are_not_finite_are_delivered(
    tokenizer: Tokenizer, made: int
) -> None:
    """The case is met in the first, a middle and the last token."""
    bench = Bench(tokenizer, eager=False)
    other = await bench.start("a", 30)
    run = await bench.start("b", 12)
    deliver = await late(bench, made)
    bench.executor.nan_slots = {run.requests[0].slot}
    await late(bench, 3)
    assert bench.pieces == {}
    await end(bench, deliver)
    assert bench.tokens("b-0") == oracle(PROMPT.tolist(), made, VOCAB)
    assert bench.pieces["b-0"][-1].finish == Finish(FinishReason.ERROR, message=NOT_FINITE)
    await other.wait()
    assert bench.tokens("a-0") == oracle(PROMPT.tolist(), 30, VOCAB)


async def test_a_first_token_that_waits_longer_than_others_counts(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    bench.engine.set_stream_interval(10)
    await bench.start("a", 100)
    deliver = await late(bench, 3)
    deliver()
    await bench.start("b", 100)
    await late(bench, 3)
    assert (bench.engine._backlog.waiting, len(bench.engine._backlog._due)) == (1, 0)
    await late(bench, 20)
    assert (bench.engine._backlog.waiting, len(bench.engine._backlog._due)) == (21, 1)
    await end(bench, deliver)


async def test_gaps_between_tokens_are_those_of_clients(tokenizer: Tokenizer) -> None:
    """A step takes a millisecond, and the loop delivers ten steps at once: each gap is ten milliseconds."""
    bench = Bench(tokenizer, eager=False)
    recorder, now = bench.engine.recorder, [1000.0]
    recorder._clock = lambda: now[0]
    await bench.start("a", 100, n=2)
    deliver = replace(bench, lambda: None)
    for step in range(1, 51):
        now[0] += 0.001
        await settle()
        if bench.executor.pending:
            bench.executor.complete()
        if step % 10 == 0:
            await settle()
            deliver()
    gaps = recorder.statistics(bench.scheduler.statistics()).histograms.inter_token
    events = [len(bench.pieces[f"a-{choice}"]) for choice in range(2)]
    assert sum(gaps.counts) == sum(events) - 2 == 8
    assert gaps.total == pytest.approx(8 * 0.01)
    await end(bench, deliver)
