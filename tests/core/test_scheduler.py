"""Promises of the scheduler to one request, whatever the others do."""

from __future__ import annotations

import pytest

from core.config import CacheConfig
from core.errors import ContextExceeded, Overloaded, RequestError
from core.request import Request, State
from core.schedule import prefill
from core.types import FinishReason, RootKey
from tests.rigs.executor import oracle
from tests.rigs.scheduler import Harness


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_text_is_the_oracles_at_every_depth(depth: int) -> None:
    h = Harness(depth=depth)
    requests = [h.request(range(3 * i + 1), max_tokens=10) for i in range(6)]
    h.run()
    for request in requests:
        h.check(request)
        assert h.finishes[request.id].reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("device", "depth", "seconds", "ahead"),
    [
        ("H200", 1, 0.0005, 2),
        ("H200", 1, 0.004, 1),
        ("H200", 1, 0.0, 1),  # unknown
        ("H200", 0, 0.0005, 0),
        ("H200", 2, 0.004, 2),
        ("cpu", 1, 0.0005, 1),
    ],
)
def test_short_steps_of_a_gpu_are_planned_two_ahead(
    device: str, depth: int, seconds: float, ahead: int
) -> None:
    """The host would be too late for the next one. A text does not depend on it."""
    h = Harness(depth=depth, device=device)
    requests = [h.request(range(3 * i + 1), max_tokens=10) for i in range(3)]
    h.executor.seconds = seconds
    h.turn()
    h.submit()
    assert h.scheduler.in_flight == 1 + ahead
    h.run()
    h.executor.seconds = 0.1  # long ones again
    requests.append(h.request(range(9), max_tokens=10))
    h.turn()
    h.submit()
    assert h.scheduler.in_flight == 1 + depth
    h.run()
    for request in requests:
        h.check(request)


def test_nothing_may_be_added() -> None:
    h = Harness()
    h.scheduler.add([])
    assert h.scheduler.idle


def test_decode_rows_go_before_chunks_in_one_mixed_step() -> None:
    h = Harness(depth=0, step_tokens=16)
    h.request([1, 2, 3], max_tokens=20)
    h.turn()
    h.request(range(40), max_tokens=2)
    h.turn()
    plan = h.executor.plans[-1]
    assert len(plan.decode_slots) == 1
    assert [len(c.tokens) for c in plan.chunks] == [12]  # 15 left of the budget: three whole pages
    assert plan.num_tokens <= 16
    h.run()


def test_a_step_starts_few_long_prompts_also_where_they_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning them takes the event loop time in any case."""
    monkeypatch.setattr(prefill, "STARTED", 80)
    h = Harness(depth=0, pages=128)
    requests = [h.request(range(40), max_tokens=8) for _ in range(5)]
    for running in (2, 4, 5):
        h.turn()
        assert h.scheduler.running == running
    h.run()
    for request in requests:
        h.check(request)


def test_prefill_first_gives_prompts_steps_of_their_own() -> None:
    h = Harness(depth=0, prefill_first=True)
    h.request([1, 2, 3], max_tokens=20)
    h.turn()
    h.request([4, 5, 6], max_tokens=20)
    h.turn()
    plan = h.executor.plans[-1]
    assert len(plan.chunks) == 1
    assert len(plan.decode_slots) == 0
    h.run()


def test_long_prompts_are_cut_at_pages_and_sample_only_at_the_end() -> None:
    h = Harness(depth=1, step_tokens=16)
    request = h.request(range(50), max_tokens=3)
    h.run()
    chunks = [c for plan in h.executor.plans for c in plan.chunks]
    assert [len(c.tokens) for c in chunks] == [16, 16, 16, 2]
    assert [c.samples for c in chunks] == [False, False, False, True]
    assert [c.target for c in chunks] == [16, 32, 48, -1]
    h.check(request)


def chunks_of(h: Harness, request: Request) -> list[int]:
    """Tokens that each step so far computed of a prompt; its slot is not taken by another."""
    return [sum(len(c.tokens) for c in plan.chunks if c.slot == request.slot) for plan in h.executor.plans]


def test_short_prompts_overtake_a_long_one_within_half_of_each_step() -> None:
    h = Harness(depth=0, step_tokens=16, pages=200)
    long = h.request(range(80), max_tokens=1)
    h.turn()
    others = [h.request(range(i, i + n), max_tokens=1) for i, n in ((10, 40), (20, 6), (30, 12), (40, 2))]
    h.turn()
    assert chunks_of(h, long) == [16, 8]
    assert {others[1].id, others[3].id} <= h.finishes.keys(), "6 and 2 tokens fit into the other 8"
    assert others[0].state is others[2].state is State.WAITING
    h.turn()
    assert chunks_of(h, long) == [16, 8, 16], "nobody fits into a half: all is its own"
    h.run()
    for request in (long, *others):
        h.check(request)


def test_nobody_is_overtaken_for_longer_than_the_first_prompt_takes() -> None:
    h = Harness(depth=0, step_tokens=16, pages=200)
    first, second = (h.request(range(i, i + 64), max_tokens=1) for i in (0, 9))
    ended = {}
    for turn in range(1, 31):
        h.request([90, turn, 3, 4, 5], max_tokens=1)
        h.turn()
        ended |= {request: turn for request in (first, second) if request.id in h.finishes} | ended
    assert ended[first] <= 64 / 8 and ended[second] <= 2 * 64 / 8
    h.run()


def test_a_lower_priority_overtakes_nobody() -> None:
    h = Harness(depth=0, step_tokens=16, pages=200, order="priority")
    h.request(range(48), max_tokens=1, priority=1)
    h.request([70, 71, 72], max_tokens=1, priority=0)
    equal = h.request([80, 81, 82], max_tokens=1, priority=1)
    h.turn()
    assert list(h.finishes) == [equal.id]
    h.run()


def test_a_long_prompt_keeps_a_chunk_of_the_step() -> None:
    h = Harness(depth=0, step_tokens=16, pages=200, chunks=3)
    long = h.request(range(40), max_tokens=1)
    for i in range(6):
        h.request([60 + i], max_tokens=1)
    h.turn()
    (plan,) = h.executor.plans
    assert len(plan.chunks) == 3 and chunks_of(h, long) == [12]
    h.run()


def test_steps_smaller_than_a_page_still_come_through() -> None:
    h = Harness(step_tokens=16, page_size=64, pages=4)
    requests = [h.request(range(i, i + 50), max_tokens=5) for i in range(3)]
    h.run()
    for request in requests:
        h.check(request)


def test_a_room_that_decode_rows_leave_below_a_page_is_used() -> None:
    h = Harness(step_tokens=18, page_size=16, rows=8)
    rows = [h.request([i], max_tokens=40) for i in range(5)]
    h.turn()
    late = h.request(range(40), max_tokens=4)
    for _ in range(10):
        h.turn()
    assert late.state is State.FINISHED or h.delivered[late.id]
    h.run()
    for request in (*rows, late):
        h.check(request)


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    h = Harness()
    first, second = h.request(range(33)), h.request(range(33))
    h.submit()
    assert [len(c.tokens) for c in h.executor.plans[0].chunks] == [33, 1]
    assert (first.cached, second.cached) == (0, 32)
    h.run()
    h.check(first)
    h.check(second)


def test_a_finished_answer_is_cached_for_the_next_turn_of_the_talk() -> None:
    h = Harness(page_size=4)
    first = h.request(range(16), max_tokens=9)
    h.run()
    follow = h.request([*range(16), *h.delivered[first.id], 5], max_tokens=4)
    h.run()
    assert follow.cached == 24  # 16 of the prompt and 8 of the 9 answers: the last has no KV
    h.check(follow)


def test_salt_and_adapter_keep_equal_prompts_apart() -> None:
    h = Harness(places=1)
    h.request(range(32))
    h.run()
    others = [h.request(range(32), root=RootKey(salt="b")), h.request(range(32), root=RootKey(adapter="x"))]
    h.run()
    assert [r.cached for r in others] == [0, 0]


def test_without_the_radix_cache_nothing_is_reused() -> None:
    h = Harness(cache=CacheConfig(radix_cache=False))
    requests = [h.request(range(32)) for _ in range(2)]
    h.run()
    assert [r.cached for r in requests] == [0, 0]
    for request in requests:
        h.check(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_id_ends_the_request_and_drops_what_was_in_flight(depth: int) -> None:
    h = Harness(depth=depth)
    expected = oracle(range(5), 20, 97)
    request = h.request(range(5), max_tokens=20, stop_ids=frozenset({expected[6]}))
    h.run()
    h.check(request)
    assert h.finishes[request.id].matched == expected[6]
    assert len(h.delivered[request.id]) == expected.index(expected[6]) + 1


def test_a_row_without_finite_logits_ends_alone() -> None:
    h = Harness(depth=1)
    bad, good = h.request(range(5)), h.request(range(6, 12))
    h.submit()
    h.executor.nan_slots = {bad.slot}
    h.run()
    assert h.finishes[bad.id].reason is FinishReason.ERROR
    h.check(good)


def test_max_tokens_zero_runs_the_prompt_and_yields_nothing() -> None:
    h = Harness(step_tokens=16)
    request = h.request(range(40), max_tokens=0)
    h.run()
    assert h.delivered[request.id] == []
    assert h.finishes[request.id].reason is FinishReason.LENGTH
    follow = h.request(range(40), max_tokens=1)
    h.run()
    assert follow.cached == 36


@pytest.mark.parametrize("start", [0, 1, 7, 16, 17, 39])
@pytest.mark.parametrize("step_tokens", [16, 64])
def test_prompt_logprobs_cover_each_position_once(start: int, step_tokens: int) -> None:
    h = Harness(step_tokens=step_tokens)
    h.request(range(40))
    h.run()  # the prompt is cached now; positions that are asked for must be computed again
    named = (7, 3)
    request = h.request(
        range(40),
        max_tokens=2,
        prompt_logprobs=0,
        prompt_logprobs_start=start,
        prompt_logprob_ids=named,
    )
    h.run()
    assert all(row == [*named] for p in request.prompt_logprobs for row in p.top_ids.tolist())
    seen = [
        (p.start + i, value) for p in request.prompt_logprobs for i, value in enumerate(p.values.tolist())
    ]
    assert seen == [(position, float(position)) for position in range(max(start, 1), 40)]


def test_pages_run_out_and_every_request_still_finishes_unchanged() -> None:
    h = Harness(pages=20, page_size=4, rows=8, depth=1, conservativeness=0.01)
    requests = [h.request(range(i, i + 8), max_tokens=40) for i in range(8)]
    h.run()
    assert h.scheduler.statistics().retractions > 0
    for request in requests:
        h.check(request)


def test_a_retracted_request_receives_its_in_flight_tokens_first() -> None:
    h = Harness(depth=1)
    request = h.request(range(8), max_tokens=12)
    h.turn()
    h.turn()
    made = len(request.output)
    assert h.scheduler.in_flight == 1
    h.scheduler.retract(request)
    assert request.state is State.RETRACTED
    h.executor.complete()
    h.apply()
    assert len(request.output) == made + 1
    assert request.state is State.WAITING
    h.run()
    h.check(request)


def test_an_in_flight_token_may_finish_a_retracted_request() -> None:
    h = Harness(depth=1)
    last = oracle(range(8), 3, 97)[-1]
    request = h.request(range(8), max_tokens=12, stop_ids=frozenset({last}))
    while len(request.output) < 2:
        h.turn()
    h.submit()
    h.scheduler.retract(request)
    h.run()
    h.check(request)
    assert h.finishes[request.id].reason is FinishReason.STOP


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_in_every_state_frees_everything(turns: int, depth: int) -> None:
    h = Harness(depth=depth, step_tokens=16)
    doomed = h.request(range(40), max_tokens=30)
    other = h.request(range(20, 30), max_tokens=30)
    for _ in range(turns):
        h.turn()
    h.submit()
    h.scheduler.abort(doomed)
    h.scheduler.check_integrity()
    h.run()
    assert h.finishes[doomed.id].reason is FinishReason.ABORT
    h.check(other)
    assert h.scheduler.running == 0
    assert h.scheduler.cache.available() == 64


def test_an_aborted_slot_is_taken_by_the_next_request_while_its_step_still_runs() -> None:
    h = Harness(rows=1, depth=1)
    doomed = h.request(range(9), max_tokens=30)
    h.turn()
    h.submit()
    slot = doomed.slot
    h.scheduler.abort(doomed)
    heir = h.request(range(50, 60), max_tokens=10)
    h.executor.complete()
    h.apply()
    h.submit()
    assert heir.slot == slot
    h.run()
    h.check(heir)


def test_a_request_that_goes_on_with_an_answer_is_in_front_of_a_full_queue() -> None:
    h = Harness(rows=1, max_queued=2, waiting_timeout=10.0)
    first = h.request(range(10), max_tokens=30)
    h.turn()
    others = [h.request(range(20, 30), max_tokens=4) for _ in range(2)]
    ahead = [h.request(range(start, start + 8), max_tokens=4, continues=True) for start in (40, 60)]
    with pytest.raises(Overloaded):
        h.request(range(10))
    h.clock.now += 11.0
    h.scheduler.expire()
    h.run()
    assert all(other.finish is not None and "waited too long" in other.finish.message for other in others)
    for request in (first, *ahead):
        h.check(request)


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    h = Harness(max_queued=2, max_queued_tokens=50)
    h.request(range(10))
    h.request(range(10))
    with pytest.raises(Overloaded):
        h.request(range(10))
    h = Harness(max_queued_tokens=50)
    h.request(range(30))
    with pytest.raises(Overloaded):
        h.request(range(30))
    h.run()


def test_what_can_never_fit_is_refused_before_it_is_queued() -> None:
    h = Harness(pages=8, page_size=4)
    with pytest.raises(ContextExceeded) as error:
        h.request(range(30), max_tokens=10)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError):
        h.request([], max_tokens=10)
    assert h.scheduler.idle


def test_waiting_and_running_timeouts_end_requests_with_a_message() -> None:
    h = Harness(rows=1, waiting_timeout=5.0, running_timeout=20.0)
    running = h.request(range(8), max_tokens=100)
    h.turn()
    waiting = h.request(range(8))
    h.clock.now = 6.0
    h.turn()
    assert h.finishes[waiting.id].message == "The request waited too long."
    h.clock.now = 21.0
    h.turn()
    assert h.finishes[running.id].message == "The request ran too long."
    h.run()


def test_every_penalised_request_has_a_row_of_counts() -> None:
    h = Harness(rows=3)
    for penalty in (1.0, 0.0, 1.0):
        h.request(range(8), max_tokens=6, presence_penalty=penalty)
    h.run()
    rows = [new.count_row for plan in h.executor.plans for new in plan.new_slots]
    assert rows == [0, -1, 2]


def test_requests_of_one_id_do_not_lose_slots() -> None:
    """Clients choose ids, and two tenants may choose the same."""
    h = Harness(rows=2)
    first, second = (h.request(range(8), max_tokens=2, presence_penalty=1.0) for _ in range(2))
    second.id = first.id
    h.scheduler.plan()
    h.scheduler.abort(first)
    h.scheduler.abort(second)
    later = [h.request(range(9), max_tokens=2, presence_penalty=1.0) for _ in range(2)]
    h.scheduler.plan()
    assert [request.state for request in later] == [State.DECODE, State.DECODE]


def admitted(h: Harness) -> list[int]:
    """First prompt tokens of the requests, in the order they were admitted."""
    return [int(new.prompt[-1]) for plan in h.executor.plans for new in plan.new_slots]


def test_orders_admit_as_they_say() -> None:
    for order, expected in [("fcfs", [1, 2, 3]), ("lof", [2, 3, 1]), ("priority", [3, 1, 2])]:
        h = Harness(rows=1, depth=0, order=order)
        h.request([1], max_tokens=1, priority=0)
        h.request([2], max_tokens=9, priority=0)
        h.request([3], max_tokens=5, priority=1)
        h.run()
        assert admitted(h) == expected, order


def test_lpm_prefers_what_is_cached() -> None:
    h = Harness(rows=1, depth=0, order="lpm")
    h.request([*range(16), 90], max_tokens=1)
    h.run()
    h.request([60, 61, 62, 63, 64, 1], max_tokens=1)
    h.request([*range(8), 91, 2], max_tokens=1)
    h.request([*range(16), 91, 3], max_tokens=1)
    h.run()
    assert admitted(h)[1:] == [3, 2, 1]


def test_dfs_weight_keeps_the_heaviest_branch_together() -> None:
    h = Harness(rows=1, depth=0, order="dfs-weight")
    h.request([*range(8)], max_tokens=1)
    h.request([*range(50, 58)], max_tokens=1)
    h.run()
    h.request([*range(8), 1], max_tokens=1)
    h.request([*range(50, 58), 2], max_tokens=1)
    h.request([*range(50, 58), 3], max_tokens=1)
    h.request([*range(50, 58), 4], max_tokens=1)
    h.run()
    assert admitted(h)[2:] == [2, 3, 1, 4]  # at the end both weigh one, and 1 came first


def test_a_far_higher_priority_takes_the_place_of_the_lowest() -> None:
    h = Harness(rows=2, depth=1, order="priority", preemption_gap=10)
    low = h.request(range(8), max_tokens=20, priority=0)
    middle = h.request(range(9), max_tokens=20, priority=5)
    h.turn()
    high = h.request(range(10), max_tokens=4, priority=10)
    for _ in range(3):
        h.turn()
    assert low.state is State.WAITING
    assert State.WAITING not in (middle.state, high.state)
    h.run()
    for request in (low, middle, high):
        h.check(request)
    assert low.retractions == 1


def test_a_result_out_of_order_is_refused() -> None:
    h = Harness(depth=1)
    h.request(range(8))
    h.submit()
    h.executor.complete(2)
    first, second = h.executor.results()
    with pytest.raises(RuntimeError, match="before"):
        h.scheduler.apply(second)  # type: ignore[arg-type]
    del first


def test_a_step_holds_no_more_chunks_than_the_device_can() -> None:
    h = Harness(pages=200, rows=8, depth=0, chunks=3)
    requests = [h.request([i, i + 1], max_tokens=2) for i in range(8)]
    h.run()
    assert max(len(plan.chunks) for plan in h.executor.plans) == 3
    for request in requests:
        h.check(request)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_plan_says_how_many_keys_its_longest_row_sees(depth: int) -> None:
    h = Harness(pages=200, depth=depth)
    for prompt in (20, 33, 5):
        h.request(range(prompt), max_tokens=4)
    h.run()
    decodes = [plan.keys for plan in h.executor.plans if len(plan.decode_slots) == 3 and not plan.chunks]
    assert decodes == [34, 35, 36][: len(decodes)]
    assert decodes
