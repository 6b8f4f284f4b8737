"""Metrics of requests, jobs and steps, and when they are counted."""

from __future__ import annotations

import pytest

from app.engine.job import TextOptions
from app.engine.metrics import Rate, token_bounds
from app.text.tokenizer import Tokenizer
from core.stats import Histogram, Histograms
from tests.rigs.executor import oracle
from tests.rigs.step_loop import PROMPT, VOCAB, Bench
from tests.rigs.wait import settle


def histograms(bench: Bench) -> Histograms:
    (statistics,) = bench.submitter.statistics()
    return statistics.histograms


def seen(histogram: Histogram) -> tuple[int, float]:
    """How many observations, and their sum."""
    return sum(histogram.counts), histogram.total


@pytest.mark.parametrize(
    ("context", "bounds"),
    [(1, (1,)), (32, (1, 2, 5, 10, 20)), (100, (1, 2, 5, 10, 20, 50, 100)), (40960, None)],
)
def test_bounds_of_token_counts_end_with_the_context(context: int, bounds: tuple[int, ...] | None) -> None:
    found = token_bounds(context)
    if bounds is not None:
        assert found == bounds
    assert list(found) == sorted(set(found)) and found[-1] <= context < found[-1] * 2.5


async def test_a_job_is_counted_by_choice_and_once(bench: Bench) -> None:
    run = await bench.start("a", 12, n=3)
    await run.wait()
    await settle()
    h = histograms(bench)
    assert seen(h.prompt_tokens) == (3, 3 * len(PROMPT))
    assert seen(h.output_tokens) == seen(h.max_tokens) == (3, 36)
    assert seen(h.choices) == (1, 3) and seen(h.longest) == (1, 12)
    for times in (h.ttft, h.queue, h.prefill, h.decode, h.inference, h.per_token, h.end_to_end):
        assert seen(times)[0] == 3


async def test_tokens_behind_a_stop_string_are_not_counted(bench: Bench, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(oracle(PROMPT.tolist(), 40, VOCAB))
    run = await bench.start("a", 40, text=TextOptions(stop=(text[10:13],)))
    await run.wait()
    await settle()
    made = len(bench.tokens("a-0"))
    assert made < 40
    assert seen(histograms(bench).output_tokens) == seen(histograms(bench).longest) == (1, made)


async def test_prefill_and_decode_are_the_whole_inference(bench: Bench) -> None:
    run = await bench.start("a", 12)
    await run.wait()
    await settle()
    h = histograms(bench)
    assert h.prefill.total + h.decode.total == pytest.approx(h.inference.total)
    assert h.queue.total + h.inference.total == pytest.approx(h.end_to_end.total)
    assert h.per_token.total == pytest.approx(h.decode.total / 11)


async def test_a_prompt_that_generates_nothing_was_queued_and_read(bench: Bench) -> None:
    run = await bench.start("a", 0)
    await run.wait()
    await settle()
    h = histograms(bench)
    assert [seen(times)[0] for times in (h.queue, h.prefill, h.inference)] == [1, 1, 1]
    assert h.queue.total + h.prefill.total == pytest.approx(h.end_to_end.total)
    assert [seen(times)[0] for times in (h.ttft, h.decode, h.per_token)] == [0, 0, 0]


async def test_one_token_has_no_time_between_tokens(bench: Bench) -> None:
    run = await bench.start("a", 1)
    await run.wait()
    await settle()
    assert seen(histograms(bench).decode)[0] == 1 and seen(histograms(bench).per_token)[0] == 0


async def test_a_request_that_never_ran_has_sizes_and_no_times(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False, rows=1)
    first = await bench.start("first", 4)
    await settle()
    second = await bench.start("second", 4)
    second.abort()
    await second.wait()
    await settle()
    h = histograms(bench)
    assert seen(h.end_to_end)[0] == seen(h.prompt_tokens)[0] == 1
    assert seen(h.output_tokens) == (1, 0)
    assert [seen(times)[0] for times in (h.prefill, h.decode, h.inference, h.per_token)] == [0] * 4
    first.abort()
    bench.engine.close()


async def test_a_step_has_the_tokens_of_prompts_and_answers(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    run = await bench.start("a", 12)
    await run.wait()
    await settle()
    (statistics,) = bench.submitter.statistics()
    cached = statistics.scheduler.cached_tokens
    assert seen(statistics.histograms.step_tokens)[1] == len(PROMPT) - cached + 12
    bench.engine.close()


async def test_a_preempted_request_waits_as_such(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, eager=False)
    run = await bench.start("a", 8)
    while not run.requests[0].output:
        await settle()
        bench.executor.complete(1)
    bench.engine.paused = True
    bench.engine.retract_all()
    await bench.complete()
    assert (bench.engine.load().waiting, bench.engine.load().retracted) == (1, 1)
    bench.engine.resume()
    while not run.requests[0].finish:
        await bench.complete()
    assert bench.engine.load().retracted == 0
    bench.engine.close()


def test_a_rate_is_of_the_last_second_and_falls_by_itself() -> None:
    rate = Rate(since=100.0)
    for step in range(1, 11):
        rate.add(100.0 + step / 8, tokens=50, seconds=0.1)
    assert rate.read(101.25) == (400.0, pytest.approx(0.8))
    assert rate.read(101.9) == (400.0, pytest.approx(0.8))  # the next second is not over
    assert rate.read(103.0) == (50.0, pytest.approx(0.1))  # two steps since, and then none
    assert rate.read(1101.0)[0] < 0.2
