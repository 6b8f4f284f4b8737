"""Far more important requests: what goes on before them, who is preempted for them, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest

from core.errors import Overloaded
from core.request import Request, SamplingParams, State
from tests.rigs.scheduler import Harness

LONG = [*range(5, 90)] * 40
"""A prompt of 3,400 tokens."""


def turns(h: Harness, request: Request) -> int:
    """Turns until it has its first token."""
    count = 0
    while not h.delivered[request.id]:
        h.turn()
        count += 1
    if request.params.max_tokens == 1:
        h.check(request)
    return count


@pytest.mark.parametrize("caller", ["", "other"])
def test_an_urgent_prompt_goes_before_a_long_one_under_way(caller: str) -> None:
    """The long prompt may be one of the same caller."""
    h = Harness(pages=5_000, rows=8, step_tokens=128, order="priority", prefill_weight=0)
    long = h.request(LONG, 1)
    for _ in range(3):
        h.turn()
    assert turns(h, h.request([96] * 100, 1, priority=1_000, caller=caller)) <= 2
    assert not long.finish
    h.run()
    h.check(long)


def test_no_row_is_preempted_before_the_next_step_takes_the_urgent_prompt() -> None:
    """An equally urgent prompt is under way for 40 steps, in which the rows keep decoding."""
    h = Harness(pages=5_000, rows=3, step_tokens=128, order="priority", preemption_gap=5)
    for row in range(2):
        h.request([row + 1] * 4, 4_000)
    for _ in range(4):
        h.turn()
    h.request(LONG, 1, priority=10)
    for _ in range(4):
        h.turn()
    urgent = h.request([96] * 100, 1, priority=10)
    while not h.scheduler.counters.retractions:
        h.turn()
    assert turns(h, urgent) <= 4


def test_cached_tokens_of_an_urgent_prompt_do_not_make_it_long() -> None:
    """304 tokens, of which 4 are to be computed while prompts pause."""
    h = Harness(pages=5_000, rows=5, step_tokens=400, order="priority", preemption_gap=5, prefill_weight=1.0)
    h.executor.seconds, h.executor.token_seconds = 1e-3, 1e-3
    stem = [*range(30, 90)] * 5
    turns(h, h.request(stem, 1))
    for row in range(4):
        h.request([row + 1] * 4, 4_000)
    for _ in range(3):
        h.turn()
    turns(h, h.request(range(1, 97), 4_000))
    h.turn()
    assert turns(h, h.request([*stem, 3, 3, 3, 3], 1, priority=10)) <= 4


def test_pages_kept_for_a_request_that_has_left_preempt_nobody() -> None:
    h = Harness(pages=24, rows=4, depth=0, order="priority", preemption_gap=1, conservativeness=1.0)
    low = h.request(range(1, 5), 40)
    gone = h.request(range(10, 14), 60, priority=20)
    for _ in range(3):
        h.turn()
    waits = h.request(range(50, 70), 40)
    h.turn()
    assert waits.state is State.WAITING
    h.scheduler.abort(gone)
    urgent = h.request(range(20, 40), 8, priority=10)
    h.turn()
    assert (urgent.state, h.scheduler.counters.retractions) == (State.DECODE, 0)
    h.run()
    for request in (low, urgent, waits):
        h.check(request)


@pytest.mark.parametrize("order", ["fcfs", "fair", "priority"])
def test_a_request_that_goes_on_with_an_answer_is_the_first_of_all_callers(order: str) -> None:
    h = Harness(pages=400, rows=2, depth=0, order=order)
    before = h.request(range(1, 60), 100, caller="a")
    h.request([61] * 4, 100, caller="b")
    h.turn()
    h.request([62] * 80, 3, caller="a")
    for token in range(20):
        h.request([token] * 6, 3, caller="b")
    while len(before.output) < 51:
        h.turn()
    h.scheduler.abort(before)
    more = h.request([63, *before.output[:3]], 4, caller="a", continues=True)
    h.turn()
    assert more.state is not State.WAITING
    h.run()
    h.check(more)


def asked(h: Harness, due: float, priority: int = 0) -> Request:
    """A request whose first token is due in `due` seconds, ended at once."""
    params, now = SamplingParams(max_tokens=1), h.clock.now
    prompt = np.arange(50, dtype=np.int32)
    request = Request("x", prompt, params, arrival=now, due=now + due, priority=priority)
    h.scheduler.add([request])
    h.scheduler.abort(request)
    return request


def test_a_forecast_stays_finite_while_long_answers_have_all_slots() -> None:
    """No prompt token is computed for 50 minutes: the rate falls to nothing."""
    h = Harness(pages=4_000, rows=2)
    h.executor.seconds = 0.02
    for row in range(2):
        h.request([row + 1] * 100, 7_500)
    h.request([5] * 100, 10)
    waits = []
    for _ in range(1_500):
        h.turn()
        h.clock.now += 2.0
        if h.clock.now % 10 == 0 and h.clock.now > 60:
            with pytest.raises(Overloaded) as refused:
                asked(h, 1.0)
            waits.append(refused.value.retry_after)
    assert math.ceil(max(waits)) <= 1_000


def test_retracted_tokens_are_forecast_once() -> None:
    expected = {}
    for order in ("fcfs", "priority"):
        h = Harness(pages=4_000, rows=2, order=order, step_tokens=64)
        h.executor.seconds = 0.01
        for row in range(2):
            h.request([row + 1] * 200, 200, priority=5)
        h.request([9] * 64, 3, priority=5)
        for _ in range(30):
            h.turn()
            h.clock.now += 0.01
        h.scheduler.retract_all()
        expected[order] = asked(h, 100.0, priority=5).expected
    assert expected["priority"] == pytest.approx(expected["fcfs"]) and expected["fcfs"] > 0


def test_an_accident_in_the_first_step_with_chunks_leaves_no_lasting_debt() -> None:
    """30 s for a kernel that was compiled. At 5 ms a step the next prompt waits for less than a second."""
    h = Harness(pages=20_000, rows=64, step_tokens=1_024)
    h.executor.seconds, h.executor.token_seconds = 5e-3, 1e-5
    for row in range(48):
        h.request([*[1] * 8, row], 1_500)
    h.submit()
    h.request([2] * 40, 4)
    h.executor.complete()
    h.apply()
    h.submit()
    h.executor.complete()
    h.apply()
    h.executor.seconds = 30.0
    h.executor.complete()
    h.apply()
    h.executor.seconds = 5e-3
    assert turns(h, h.request([3] * 40, 4)) <= 100
