"""Retraction: who gives up its pages, for whom, and what it finds when it comes back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from core.request import Request, State
from core.types import FinishReason
from tests.rigs.scheduler import VOCAB, Harness


def run_all(h: Harness, requests: list[Request]) -> None:
    h.run()
    for request in requests:
        h.check(request)


def admitted(h: Harness) -> list[int]:
    """First prompt tokens, in the order of admission."""
    return [int(new.prompt[0]) for plan in h.executor.plans for new in plan.new_slots]


@pytest.mark.parametrize("order", ["fcfs", "lpm", "lof"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_later_arrivals_do_not_take_the_pages_of_a_retracted_request(depth: int, order: str) -> None:
    """Nobody who came later is admitted between a retraction and the return of who was retracted."""
    retractions = 0
    for seed in range(5):
        rng = random.Random(seed)
        h = Harness(pages=16, rows=8, depth=depth, order=order, conservativeness=0.01)
        sent = [h.request([i, *range(rng.randrange(2, 9))], max_tokens=24) for i in range(6)]
        for _ in range(200):
            h.clock.now += 1.0
            h.turn()
            h.scheduler.check_integrity()
            if len(sent) < 60 and h.scheduler.statistics().waiting < 4:
                sent.append(h.request([50, rng.randrange(VOCAB)], max_tokens=8))
        run_all(h, sent)
        assert overtakings(sent) == []
        retractions += h.scheduler.counters.retractions
    assert retractions > 20


def overtakings(sent: list[Request]) -> list[tuple[str, str]]:
    """Pairs of a request that was retracted and one that came later and was admitted before it was back."""
    found = []
    for at, request in enumerate(sent):
        moves = [(when, what) for when, what, _ in request.history if what != "chunk"]
        for (left, what), (back, _) in pairwise(moves):
            if what == "retracted":
                found += [(request.id, r.id) for r in sent[at + 1 :] if admitted_between(r, left, back)]
    return found


def admitted_between(request: Request, start: float, end: float) -> bool:
    return any(what == "admitted" and start <= when < end for when, what, _ in request.history)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_retracting_all_keeps_their_order(depth: int) -> None:
    h = Harness(depth=depth, rows=5)
    requests = [h.request([i, 5, 6], max_tokens=20) for i in range(5)]
    h.turn()
    h.turn()
    waiting = h.request([70], max_tokens=2)
    h.scheduler.retract_all()
    run_all(h, [*requests, waiting])
    assert admitted(h) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 70]


def test_of_equals_the_youngest_is_retracted() -> None:
    h = Harness(pages=6, rows=2, depth=0, conservativeness=0.01)
    old, young = h.request(range(8), max_tokens=16), h.request(range(50, 58), max_tokens=16)
    while not h.scheduler.counters.retractions:
        h.turn()
    assert (old.retractions, young.retractions) == (0, 1)
    run_all(h, [old, young])


def test_preemption_takes_the_youngest_of_equals() -> None:
    h = Harness(rows=2, depth=0, order="priority", preemption_gap=1)
    old, young = h.request(range(8), max_tokens=16), h.request(range(50, 58), max_tokens=16)
    h.turn()
    high = h.request(range(4), max_tokens=2, priority=5)
    h.turn()
    assert (old.retractions, young.retractions) == (0, 1)
    run_all(h, [old, young, high])


def test_nobody_is_preempted_where_a_cached_prefix_leaves_room() -> None:
    """Nine of the newcomer's ten pages are those that the running request stands on."""
    h = Harness(pages=16, rows=4, depth=0, order="priority", preemption_gap=1, conservativeness=0.01)
    low = h.request(range(36), max_tokens=12)
    h.turn()
    h.turn()
    high = h.request([*range(36), 90], max_tokens=2, priority=5)
    h.turn()
    assert high.state is not State.WAITING
    assert low.retractions == 0
    run_all(h, [low, high])


@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_is_preempted_for_who_does_not_fit_after_it(depth: int) -> None:
    h = Harness(pages=16, rows=4, depth=depth, order="priority", preemption_gap=5, conservativeness=0.01)
    peer = h.request(range(32), max_tokens=16, priority=9)
    low = h.request(range(50, 54), max_tokens=8)
    for _ in range(4):
        h.turn()
    high = h.request(range(60, 92), max_tokens=2, priority=10)
    h.turn()
    assert (low.retractions, peer.retractions) == (0, 0)
    run_all(h, [peer, low, high])
    assert low.retractions == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_as_many_are_preempted_as_it_takes(depth: int) -> None:
    h = Harness(pages=16, rows=4, depth=depth, order="priority", preemption_gap=5, conservativeness=0.01)
    low = [h.request(range(20 * i, 20 * i + 16), max_tokens=12) for i in range(3)]
    for _ in range(3):
        h.turn()
    high = h.request(range(60, 92), max_tokens=2, priority=10)
    for _ in range(depth + 2):
        h.turn()
    assert high.state is not State.WAITING
    assert [r.retractions for r in low] == [0, 1, 1]
    run_all(h, [*low, high])


# -- time limits


def test_who_was_retracted_does_not_wait_too_long_because_it_arrived_long_ago() -> None:
    h = Harness(rows=1, depth=0, waiting_timeout=5.0)
    request = h.request(range(8), max_tokens=40)
    for _ in range(10):
        h.turn()
        h.clock.now += 1.0
    h.scheduler.retract_all()
    h.turn()
    h.clock.now += 6.0
    run_all(h, [request])
    assert h.finishes[request.id].reason is FinishReason.LENGTH


def test_who_has_tokens_already_may_wait() -> None:
    h = Harness(rows=1, depth=0, waiting_timeout=5.0)
    request = h.request(range(8), max_tokens=10)
    h.turn()
    h.scheduler.retract_all()
    h.clock.now = 60.0
    h.scheduler.expire(h.clock.now)
    run_all(h, [request])


def test_who_was_retracted_without_a_token_waits_from_then_on() -> None:
    h = Harness(rows=1, depth=0, step_tokens=16, waiting_timeout=5.0)
    request = h.request(range(40), max_tokens=10)
    h.turn()
    h.clock.now = 20.0
    h.scheduler.retract_all()
    h.scheduler.expire(24.0)
    assert request.state is State.WAITING
    h.scheduler.expire(26.0)
    assert request.state is State.FINISHED
    h.run()
    assert h.finishes[request.id].message == "The request waited too long."


def test_the_time_that_a_request_waits_is_no_running_time() -> None:
    h = Harness(rows=1, depth=0, running_timeout=10.0)
    request = h.request(range(8), max_tokens=30)
    h.turn()
    h.clock.now = 6.0
    h.scheduler.retract_all()
    h.clock.now = 100.0
    h.turn()  # admitted again, after 94 s of waiting
    h.clock.now = 103.0
    h.turn()
    assert request.state is State.DECODE
    h.clock.now = 105.0  # 6 s and 5 s
    h.run()
    assert h.finishes[request.id].message == "The request ran too long."


def test_time_limits_hold_while_nothing_is_planned() -> None:
    h = Harness(rows=1, depth=0, waiting_timeout=5.0, running_timeout=20.0)
    running, waiting = h.request(range(8), max_tokens=100), h.request(range(9))
    h.turn()
    h.scheduler.expire(6.0)
    assert h.scheduler.take_finished() == [waiting]
    h.scheduler.expire(21.0)
    assert h.scheduler.take_finished() == [running]
    h.scheduler.check_integrity()
    assert h.scheduler.idle
