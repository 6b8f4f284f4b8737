"""Requests whose first token could not come in time are refused at once, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from core.config import SchedulePolicy
from core.errors import Overloaded
from core.request import Request
from tests.rigs.simulation import TOKEN, Arrivals, Simulation

SECONDS = 8.0

LOADS: dict[str, tuple[float, dict[str, Any]]] = {
    "prompts": (27, {}),
    "callers": (27, {"callers": 3}),
    "output": (24, {"output": (10, 60)}),
    "slots": (87, {"tokens": (50, 500), "output": (20, 100)}),
}
"""Requests a second that the simulated device has served of each load, and the load: limited by prompts, by
steps that have other rows too, or by 64 slots."""


def overloaded(load: str, limit: float, due: float | None, order: SchedulePolicy) -> Arrivals:
    """Twice the capacity for some seconds, and what is left of them."""
    capacity, options = LOADS[load]
    simulation = Simulation(rows=64 if load == "slots" else 256, order=order)
    arrivals = Arrivals(simulation, 2 * capacity, due, **options)
    simulation.run(SECONDS)
    arrivals.taken = [request for request in arrivals.taken if request.arrival < SECONDS - limit]
    return arrivals


@pytest.mark.parametrize(
    ("load", "limit", "order"),
    [
        ("prompts", 1.0, "fcfs"),
        ("callers", 1.0, "fair"),
        ("output", 1.0, "fair"),
        ("slots", 1.0, "fair"),
    ],
)
def test_at_twice_the_capacity_those_who_are_taken_are_in_time(
    load: str, limit: float, order: SchedulePolicy
) -> None:
    with_limit = overloaded(load, limit, limit, order)
    good = with_limit.in_time(limit)
    assert good >= 0.95 * len(with_limit.taken)
    assert good >= overloaded(load, limit, None, order).in_time(limit)
    assert good >= 0.9 * LOADS[load][0] * (SECONDS - limit), "the device has too little to do"
    assert with_limit.refused


def test_below_the_capacity_nobody_is_refused() -> None:
    simulation = Simulation(rows=256)
    arrivals = Arrivals(simulation, 0.5 * LOADS["output"][0], 2.0, **LOADS["output"][1])
    simulation.run(SECONDS)
    assert not arrivals.refused


def backlog(simulation: Simulation, prompts: int, caller: str = "", **options: Any) -> list[Request]:
    """Prompts of 4,000 tokens, some seven a second, the first of which have run."""
    requests = [simulation.request(caller, 4_000, **options) for _ in range(prompts)]
    simulation.scheduler.add(requests)
    simulation.run(1.0)
    return requests


def taken(simulation: Simulation, request: Request, limit: float) -> bool:
    request.due = simulation.clock.now + limit
    try:
        simulation.scheduler.add([request])
    except Overloaded as refused:
        assert refused.retry_after >= 1.0
        return False
    return True


def test_a_refusal_is_counted_and_says_when_to_come_again() -> None:
    simulation = Simulation()
    backlog(simulation, 60)
    late = simulation.request("", 100)
    late.due = simulation.clock.now + 1.0
    with pytest.raises(Overloaded, match=r"would take about 1[0-2]") as refused:
        simulation.scheduler.add([late])
    assert 9.0 < refused.value.retry_after < 12.0
    assert simulation.scheduler.statistics().refused == {"ttft_slo": 1}
    assert simulation.scheduler.statistics().waiting_tokens < 60 * 4_000, "it was not queued"
    assert taken(simulation, simulation.request("", 100), 13.0)


def test_what_counts_is_the_callers_own_turn() -> None:
    simulation = Simulation()
    backlog(simulation, 60, "busy")
    assert not taken(simulation, simulation.request("busy", 1_000), 2.0)
    other = simulation.request("other", 1_000)
    assert taken(simulation, other, 2.0)
    simulation.run(2.0)
    assert 0.0 < other.first_token_at < other.due


def test_less_urgent_requests_delay_nobody() -> None:
    simulation = Simulation(order="priority")
    backlog(simulation, 60)
    assert not taken(simulation, simulation.request("", 1_000), 2.0)
    assert taken(simulation, simulation.request("", 1_000, priority=1), 2.0)


def test_what_is_cached_takes_no_time() -> None:
    simulation = Simulation()
    first = backlog(simulation, 30)[0]
    equal = simulation.request("other", 1)
    equal.prompt = np.append(first.prompt, np.int32(1))
    assert taken(simulation, equal, 2.0)
    fresh = simulation.request("another", 4_001)
    assert taken(simulation, fresh, 2.0)
    assert fresh.expected - equal.expected == pytest.approx(4_000 * TOKEN, rel=0.2)


def test_who_waits_for_nobody_is_taken_whatever_was_known() -> None:
    """Else one slow time would be the last that is known."""
    simulation = Simulation()
    backlog(simulation, 60)
    simulation.run(60.0)
    assert taken(simulation, simulation.request("", 12_000), 0.01)
