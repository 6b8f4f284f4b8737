"""What prompts may take of a step that decode rows are in."""

from __future__ import annotations

from core.plan import StepPlan
from core.schedule.throttle import MIN_PROMPT_TOKENS
from tests.rigs.scheduler import VOCAB, Harness

STEP, MIXED = 400, 100


def steps(h: Harness) -> list[StepPlan]:
    """Turn until all is over; the plans that had prompts in them."""
    before = len(h.executor.plans)
    h.run()
    return [plan for plan in h.executor.plans[before:] if plan.chunks]


def decoding(h: Harness, rows: int = 1, max_tokens: int = 200) -> None:
    """So many rows, their prompts behind them."""
    for row in range(rows):
        h.request([row + 1] * 4, max_tokens)
    for _ in range(3):
        h.turn()


def harness(mixed: int = MIXED, rows: int = 8) -> Harness:
    return Harness(pages=5_000, rows=rows, step_tokens=STEP, mixed_tokens=mixed)


def test_prompts_beside_rows_leave_most_of_a_step_empty() -> None:
    h = harness()
    decoding(h)
    long = h.request(range(1, 601), 4)
    sizes = [plan.num_tokens for plan in steps(h)]
    assert max(sizes) <= MIXED
    assert len(sizes) == 7, "600 tokens by 96, whole pages beside one row"
    h.check(long)


def test_prompts_alone_fill_their_steps() -> None:
    h = harness()
    h.request(range(1, 601), 4)
    assert [plan.num_tokens for plan in steps(h)] == [STEP, 200]


def test_without_a_limit_rows_change_nothing() -> None:
    h = harness(mixed=0)
    decoding(h)
    h.request(range(1, 601), 4)
    assert max(plan.num_tokens for plan in steps(h)) > MIXED


def test_prompts_that_come_faster_than_rows_leave_fill_their_steps() -> None:
    """20 steps of 100 would be more than the rows still take: then nothing is saved by small ones."""
    h = harness()
    decoding(h, max_tokens=8)
    for start in range(4):
        h.request(range(start + 1, start + 501), 2)
    assert max(plan.num_tokens for plan in steps(h)) > 2 * MIXED


def test_as_many_rows_as_tokens_keep_nobody_waiting() -> None:
    h = harness(mixed=MIN_PROMPT_TOKENS, rows=MIN_PROMPT_TOKENS + 8)
    decoding(h, rows=MIN_PROMPT_TOKENS)
    long = h.request(range(1, 301), 4)
    assert len(steps(h)) == 5, "300 tokens by MIN_PROMPT_TOKENS"
    h.check(long)


def test_answers_that_ended_early_say_how_long_the_next_are() -> None:
    """Who may have 800 tokens and stops at the first: those that run are taken to be as short."""
    h = harness(rows=3)
    h.request([1] * 4, 800, stop_ids=frozenset(range(VOCAB)))
    h.run()
    decoding(h, rows=2, max_tokens=800)
    h.request(range(1, 601), 4)
    assert max(plan.num_tokens for plan in steps(h)) > 2 * MIXED
