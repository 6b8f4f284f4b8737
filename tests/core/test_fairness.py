"""Fairness between API keys: what a key sends delays that key."""

from __future__ import annotations

from statistics import median

import pytest

from core.config import SchedulePolicy
from core.request import Request, State
from core.schedule import callers, prefill
from core.schedule.callers import LINGER
from tests.rigs.scheduler import VOCAB, Harness
from tests.rigs.simulation import Client, Simulation

SECONDS = 8.0
LONG = 12_000


def measured(order: SchedulePolicy, tokens: int, output: int, gap: float, at_once: int) -> tuple[float, int]:
    """The client's median time to first token, and how many long prompts another client completed that keeps
    `at_once` of them running; 0: there is no other client."""
    simulation = Simulation(order=order)
    long = Client(simulation, "long", LONG, at_once=at_once)
    simulation.run(0.1)
    client = Client(simulation, "client", tokens, output=output, gap=gap)
    simulation.run(SECONDS)
    return median(client.first_tokens), len(long.first_tokens)


@pytest.mark.parametrize(
    ("tokens", "output", "gap", "at_once", "times"),
    [
        (1_000, 40, 0.35, 1, 2.0),
        (1_000, 40, 0.35, 8, 2.0),
        (3_000, 20, 0.1, 1, 2.0),
        (9_000, 20, 0.1, 8, 2.0),
        # Who never pauses gets half of the device. Steps are shorter, too.
        (1_000, 1, 0.0, 8, 2.2),
        (9_000, 1, 0.0, 1, 2.2),
    ],
)
def test_prompts_of_12_000_tokens_at_most_double_the_first_token_of_another(
    tokens: int, output: int, gap: float, at_once: int, times: float
) -> None:
    alone, _ = measured("fair", tokens, output, gap, 0)
    beside, long = measured("fair", tokens, output, gap, at_once)
    assert beside <= times * alone
    unfair, most = measured("fcfs", tokens, output, gap, at_once)
    assert unfair > times * alone, "the order makes no difference"
    assert long > 0.4 * most, "the long prompts do not go on"


def test_a_caller_alone_has_steps_of_full_size_again() -> None:
    simulation = Simulation()
    Client(simulation, "long", LONG)
    Client(simulation, "other", 100, gap=1e9)
    simulation.run(LINGER / 2)
    before = simulation.scheduler.counters.steps
    simulation.run(LINGER / 4)
    short = simulation.scheduler.counters.steps - before
    simulation.run(LINGER)
    before = simulation.scheduler.counters.steps
    simulation.run(LINGER / 4)
    assert simulation.scheduler.counters.steps - before < short / 3


def started(h: Harness, *requests: Request) -> list[Request]:
    """`requests` in the order in which they began, after everything has run."""
    h.run()
    for request in requests:
        h.check(request)
    return sorted(requests, key=lambda request: request.started_at)


def harness(**options: object) -> Harness:
    """One request runs at a time; the clock counts turns."""
    h = Harness(rows=1, depth=0, **options)  # type: ignore[arg-type]
    turn = h.turn

    def counted() -> bool:
        h.clock.now += 1.0
        return turn()

    h.turn = counted  # type: ignore[method-assign]
    return h


def test_callers_take_turns_by_tokens_of_prompts_and_output() -> None:
    h = harness()
    a = [h.request([i] * 8, 2, caller="a") for i in range(4)]
    b = [h.request([10 + i] * 2, 1, caller="b") for i in range(4)]
    assert started(h, *a, *b) == [a[0], b[0], b[1], b[2], a[1], b[3], a[2], a[3]], "12 tokens and 4 each"


def test_what_is_cached_is_not_charged() -> None:
    h = harness()
    stem = range(32)
    h.request(stem, 1, caller="a")
    h.turn()
    a = [h.request([*stem, i], 1, caller="a") for i in range(40, 44)]
    b = [h.request([50 + i] * 12, 1, caller="b") for i in range(2)]
    order = started(h, *a, *b)
    assert order.index(a[3]) < order.index(b[1])


def test_who_was_away_has_no_turns_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "HEAD_START", 8.0)
    h = harness()
    b = [h.request([9, 8, 7], 1, caller="b")]
    a = [h.request([i] * 8, 1, caller="a") for i in range(20)]
    for _ in range(10):
        h.turn()
    assert b[0].state is State.FINISHED
    b += [h.request([60 + i] * 8, 1, caller="b") for i in range(8)]
    before = [r for r in a if r.started_at]
    order = [r for r in started(h, *a, *b) if r not in before and r is not b[0]]
    firsts = [order.index(r) for r in b[1:]]
    assert firsts[0] == 0 and firsts[-1] >= 2 * len(firsts) - 4


def test_priorities_come_before_turns() -> None:
    h = harness(order="priority")
    h.request(range(30), 1, caller="a")
    h.turn()
    urgent = h.request([1, 2], 1, caller="a", priority=1)
    a, b = h.request([3, 4], 1, caller="a"), h.request([5, 6], 1, caller="b")
    assert started(h, urgent, a, b) == [urgent, b, a]


def test_a_long_prompt_under_way_waits_for_who_was_served_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long prompt keeps its pages and goes on in turns, and both answers are right."""
    monkeypatch.setattr(prefill, "SHARED_CHUNK", 16)
    h = Harness(pages=128, rows=4, depth=0, step_tokens=64)
    long = h.request([i % VOCAB for i in range(200)], 4, caller="a")
    h.turn()
    later = h.request([i * 3 % VOCAB for i in range(50)], 2, caller="a")
    other = h.request([i % 7 for i in range(64)], 4, caller="b")
    while other.state in (State.WAITING, State.PREFILL):
        h.turn()
    assert long.state is State.PREFILL and later.state is State.WAITING
    turns = [chunk.slot == long.slot for plan in h.executor.plans[1:] for chunk in plan.chunks]
    assert 0 < sum(turns) < len(turns), "both went on"
    h.run()
    for request in (long, later, other):
        h.check(request)
    assert max(plan.num_tokens for plan in h.executor.plans[1:]) <= 16 + 4
