"""Places of adapters: who runs, who waits, and that nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from core.request import Request, State
from core.schedule.adapters import PATIENCE
from core.types import FinishReason, RootKey
from tests.rigs.scheduler import Harness


def send(h: Harness, adapter: str, tokens: int = 8, prompt: int = 4, priority: int = 0) -> Request:
    root = RootKey(adapter=adapter)
    return h.request(range(prompt), tokens, root=root, priority=priority)


def adapters_of_steps(h: Harness) -> list[bool]:
    return [plan.adapters for plan in h.executor.plans]


def test_a_request_waits_for_its_adapter_and_others_go_on() -> None:
    h = Harness(places=1)
    h.loads_at_once = False
    adapted, base = send(h, "a"), send(h, "")
    for _ in range(3):
        h.turn()
    assert (adapted.state, base.state) == (State.WAITING, State.DECODE)
    assert h.loading == [("a", 0)]
    h.load()
    h.run()
    h.check(adapted)
    h.check(base)


def test_slots_have_places_and_steps_say_whether_any_row_has() -> None:
    h = Harness(places=2, depth=0)
    requests = [send(h, "", 2), send(h, "a", 6), send(h, "b", 4)]
    h.run()
    places = {new.place for plan in h.executor.plans for new in plan.new_slots}
    assert places == {-1, 0, 1}
    send(h, "", 3)
    before = len(h.executor.plans)
    h.run()
    assert not any(adapters_of_steps(h)[before:])
    for request in requests:
        h.check(request)


def test_prefix_hits_do_not_cross_adapters() -> None:
    h = Harness(places=2)
    for adapter in ("", "a", "b"):
        send(h, adapter, 2, prompt=32)
        h.run()
    again = [send(h, adapter, 2, prompt=32) for adapter in ("", "a", "b", "c")]
    h.run()
    assert [request.cached for request in again] == [28, 28, 28, 0]
    for request in again:
        h.check(request)


def test_the_least_recently_used_adapter_makes_way() -> None:
    h = Harness(places=2)
    for adapter in ("a", "b", "a", "c"):
        send(h, adapter)
        h.run()
    assert h.loads == 3
    send(h, "a")
    h.run()
    assert h.loads == 3, "'b' was used least recently, so 'a' is still there"


def test_a_pinned_adapter_keeps_its_place() -> None:
    h = Harness(places=2)
    h.scheduler.places.pin("a")
    for adapter in ("a", "b", "c", "d", "a"):
        send(h, adapter)
        h.run()
    assert h.loads == 4


def test_a_place_is_not_reused_while_a_step_reads_it() -> None:
    """The rig refuses a copy to the place of a step under way."""
    h = Harness(places=1, depth=2)
    gone = send(h, "a", 40)
    for _ in range(4):
        h.turn()
    send(h, "b")
    h.submit()
    h.scheduler.abort(gone)
    h.submit()
    assert h.executor.pending and not h.loading
    h.run()
    assert h.loads == 2


def test_steady_traffic_of_the_resident_adapters_starves_nobody() -> None:
    """Two adapters always have requests for the two places; a third one is served all the same."""
    h = Harness(places=2, rows=8, pages=256)
    rng = random.Random(0)
    late = None
    for turn in range(400):
        for adapter in ("a", "b"):
            if turn % 3 == 0:
                send(h, adapter, rng.randrange(4, 20))
        if turn == 20:
            late = send(h, "c")
        h.clock.now += PATIENCE / 4
        h.turn()
        h.scheduler.check_integrity()
        if late is not None and late.state is State.FINISHED:
            break
    assert late is not None and late.state is State.FINISHED and turn < 120
    h.run()


@pytest.mark.parametrize("order", ["fair", "fcfs", "lpm", "dfs-weight", "lof", "random", "priority"])
@pytest.mark.parametrize("places", [1, 2, 3])
def test_every_one_of_more_adapters_than_places_gets_its_turn(order: str, places: int) -> None:
    h = Harness(places=places, rows=6, order=order, pages=256)
    rng = random.Random(places)
    names = "abcdefgh"
    sent: list[Request] = []
    for _ in range(150):
        sent.append(send(h, rng.choice(names[: rng.randrange(1, 9)]), rng.randrange(1, 12)))
        h.clock.now += PATIENCE / 8
        h.turn()
    h.run()
    for request in sent:
        h.check(request)
    starts = [request.started_at - request.arrival for request in sent]
    assert max(starts) < 150 * PATIENCE / 8, "it had to wait for the end of the traffic"


def test_at_most_as_many_adapters_run_as_there_are_places() -> None:
    h = Harness(places=2, rows=8)
    for adapter in "abcdabcd":
        send(h, adapter)
    for _ in range(200):
        h.turn()
        assert len(h.scheduler.statistics().running_adapters) <= 2
    assert h.scheduler.idle


def test_draining_ends_when_nobody_waits_any_more() -> None:
    h = Harness(places=1, rows=4)
    send(h, "a", 30)
    h.turn()
    waits = send(h, "b")
    h.clock.now += 2 * PATIENCE
    h.turn()
    second = send(h, "a", 4)
    h.turn()
    assert second.state is State.WAITING, "'a' is drained"
    h.scheduler.abort(waits)
    h.turn()
    assert second.state is not State.WAITING
    h.run()
    assert h.loads == 1


def test_a_draining_place_waits_for_its_rows_only() -> None:
    h = Harness(places=1, rows=4)
    first = send(h, "a", 12)
    for _ in range(3):
        h.turn()
    waits = send(h, "b", 4)
    h.clock.now += 2 * PATIENCE
    h.turn()
    behind = send(h, "a", 4)
    while behind.state is State.WAITING:
        h.clock.now += 1.0
        h.turn()
    assert (first.state, h.loads) == (State.FINISHED, 3)
    assert waits.started_at < behind.started_at
    h.run()


def test_a_turn_serves_all_that_waited_when_it_began_and_nobody_later() -> None:
    """Though a step takes two of the prompts, and others wait for the place meanwhile."""
    h = Harness(places=1, rows=8, step_tokens=8)
    first = send(h, "a", 12)
    h.turn()
    waited = [send(h, "b", 12) for _ in range(6)]
    other = send(h, "c", 4)
    later: list[Request] = []
    while other.state is not State.FINISHED:
        h.clock.now += PATIENCE
        if h.scheduler.places.running == ["b"] and not later:
            later.append(send(h, "b", 4))
        h.turn()
        h.scheduler.check_integrity()
    h.run()
    assert h.loads == 4, "a, b, c, and b again"
    assert max(each.started_at for each in waited) < other.started_at < later[0].started_at
    assert first.started_at < waited[0].started_at


def test_retracted_requests_come_back_with_their_adapter() -> None:
    h = Harness(places=1, rows=4, depth=2)
    sent = [send(h, "a", 12), send(h, "b", 12), send(h, "a", 12)]
    for _ in range(4):
        h.turn()
    h.scheduler.retract_all()
    h.scheduler.check_integrity()
    h.run()
    for request in sent:
        h.check(request)


def test_an_adapter_that_cannot_be_copied_leaves_its_place() -> None:
    h = Harness(places=1)
    h.loads_at_once = False
    lost = send(h, "a")
    h.turn()
    assert h.loading == [("a", 0)]
    h.loading.clear()
    h.scheduler.abort(lost)
    h.scheduler.places.forget("a")
    other = send(h, "b")
    h.loads_at_once = True
    h.run()
    h.check(other)
    assert h.finishes[lost.id].reason is FinishReason.ABORT


def test_places_go_by_priority_where_requests_do() -> None:
    h = Harness(places=1, order="priority", preemption_gap=100)
    low, high = send(h, "a", priority=0), send(h, "b", priority=5)
    h.run()
    assert high.started_at <= low.started_at
    first = next(new for plan in h.executor.plans for new in plan.new_slots)
    assert first.place == 0 and h.loads == 2


def test_nobody_is_preempted_for_a_request_whose_adapter_has_no_place() -> None:
    h = Harness(places=1, rows=1, order="priority", preemption_gap=1)
    low = send(h, "a", 20)
    h.turn()
    send(h, "b", 4, priority=9)
    for _ in range(3):
        h.turn()
    assert low.retractions == 0
    h.run()
    h.check(low)
