"""Orders choose who goes first, and nothing else: each request is admitted once, reads its own prefix, and is
overtaken by so many and no more."""

from __future__ import annotations

import random

import pytest

from core.config import SchedulePolicy
from core.request import Request, State
from core.schedule.policy import OVERTAKEN
from tests.rigs.scheduler import VOCAB, Harness

POLICIES: tuple[SchedulePolicy, ...] = ("fair", "fcfs", "lpm", "dfs-weight", "lof", "random", "priority")


def admissions(h: Harness) -> int:
    return sum(len(plan.new_slots) for plan in h.executor.plans)


def run_all(h: Harness, requests: list[Request]) -> None:
    h.run()
    for request in requests:
        h.check(request)


@pytest.mark.parametrize("order", POLICIES)
def test_prompts_that_part_in_the_middle_of_a_node_are_admitted_once(order: SchedulePolicy) -> None:
    h = Harness(order=order)
    stem = list(range(16))
    first = h.request(stem, max_tokens=1)
    h.run()
    burst = [h.request([*stem[:n], 90 + i], max_tokens=6) for i, n in enumerate((16, 8, 16))]
    run_all(h, [first, *burst])
    assert admissions(h) == 4


@pytest.mark.parametrize("order", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_a_burst_is_admitted_once_and_reads_what_was_written(order: SchedulePolicy, seed: int) -> None:
    rng = random.Random(seed)
    h = Harness(order=order, pages=96, rows=rng.choice([2, 8]), step_tokens=rng.choice([16, 32, 64]))
    stem = [rng.randrange(VOCAB) for _ in range(rng.randrange(8, 33))]
    sent = [h.request(stem, max_tokens=2)]
    h.run()
    for _ in range(3):
        for _ in range(6):
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 10))]
            sent.append(
                h.request([*stem[: rng.randrange(len(stem) + 1)], *own], max_tokens=rng.randrange(1, 8))
            )
        for _ in range(rng.randrange(6)):
            h.turn()
            h.scheduler.check_integrity()
    run_all(h, sent)
    assert h.scheduler.counters.retractions or admissions(h) == len(sent)


@pytest.mark.parametrize("order", ["lpm", "dfs-weight", "lof"])
def test_a_request_is_overtaken_by_so_many_and_no_more(order: SchedulePolicy) -> None:
    """Ten minutes in which others that the order likes better never stop coming."""
    rows = 4
    h = Harness(order=order, rows=rows, depth=0)
    h.request(range(16), max_tokens=1)
    h.run()
    for i in range(2 * rows):
        h.request([*range(16), i], max_tokens=9)
    passed_over = h.request([90, 91, 92], max_tokens=2)
    since = len(h.finishes)
    while passed_over.state is State.WAITING and h.clock.now < 600:
        while h.scheduler.statistics().waiting < 3 * rows:
            h.request([*range(16), 50, len(h.delivered) % VOCAB], max_tokens=9)
        h.clock.now += 0.2
        h.turn()
    assert passed_over.state is not State.WAITING
    assert len(h.finishes) - since <= OVERTAKEN + 4 * rows
    run_all(h, [passed_over])


@pytest.mark.parametrize("order", POLICIES)
def test_who_was_retracted_goes_before_who_came_later(order: SchedulePolicy) -> None:
    h = Harness(order=order, rows=2, depth=0)
    retracted = h.request([1, 2, 3], max_tokens=8)
    other = h.request([4, 5, 6], max_tokens=8)
    h.turn()
    later = h.request([7, 8, 9], max_tokens=60)
    h.scheduler.retract_all()
    h.turn()
    assert later.state is State.WAITING
    run_all(h, [retracted, other, later])
