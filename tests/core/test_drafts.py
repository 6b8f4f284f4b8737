"""Rows of several tokens: what a step with drafts may assume, and what its result makes of that."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from app.engine.loop import BACKLOG
from core.plan import MASKED_DRAFTS, StepPlan, StepResult
from core.request import Request
from core.request.request import Drafts
from core.schedule.scheduler import Confirmed
from core.schedule.table import SlotTable
from core.types import Finish, FinishReason
from tests.rigs.executor import oracle
from tests.rigs.scheduler import VOCAB, Harness


def plan_of(harness: Harness) -> StepPlan:
    plan = harness.scheduler.plan()
    assert plan is not None
    return plan


def answer(harness: Harness, plan: StepPlan, rows: list[list[int]], **more: Any) -> Confirmed:
    """Apply a result that brings `rows`."""
    tokens = np.array([token for row in rows for token in row], np.int32)
    counts = np.array([len(row) for row in rows], np.int32)
    confirmed = harness.scheduler.apply(StepResult(plan.step, tokens, counts=counts, **more))
    harness.scheduler.check_integrity()
    return confirmed


def decoding(harness: Harness, *requests: Request) -> None:
    """Prompts are through: each request has its first token, 1."""
    answer(harness, plan_of(harness), [[1] for _ in requests])


def test_without_drafts_a_row_has_one_token() -> None:
    h = Harness()
    decoding(h, h.request([1, 2, 3]))
    plan = plan_of(h)
    assert (plan.query_length, plan.drafts, plan.num_tokens, plan.num_samples) == (1, 0, 1, 1)


def test_a_step_grants_drafts_and_the_result_says_what_came() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    plan = plan_of(h)
    assert (plan.query_length, plan.drafts, plan.num_tokens, plan.num_samples) == (4, 6, 8, 8)
    confirmed = answer(h, plan, [[5, 6, 7], [8]])
    assert (confirmed.requests, confirmed.tokens, confirmed.rows) == ([a, a, a, b], [5, 6, 7, 8], 2)
    assert (a.output, b.output) == ([1, 5, 6, 7], [1, 8])
    assert h.scheduler.counters.output_tokens == 6


def test_a_row_may_bring_nothing() -> None:
    """The row's earlier step in flight reached the limit."""
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 4), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    first, second = plan_of(h), plan_of(h)
    assert second.decode_slots.tolist() == first.decode_slots.tolist(), "at least a token each is due"
    confirmed = answer(h, first, [[5, 6, 7], [8]])
    assert confirmed.ends == {2: Finish(FinishReason.LENGTH)}
    confirmed = answer(h, second, [[], [9]])
    assert (confirmed.requests, confirmed.tokens, confirmed.rows) == ([b], [9], 1)
    assert (a.output, b.output) == ([1, 5, 6, 7], [1, 8, 9])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_complete_rows_are_dropped_by_the_least_that_they_can_have_made(depth: int) -> None:
    """By the most, a row whose drafts all fail would wait for its results before it goes on."""
    h = Harness(drafts=7, samples=64, depth=depth)
    decoding(h, h.request([1, 2, 3], 5))
    plans = [plan_of(h) for _ in range(depth + 1)]
    assert [len(plan.decode_slots) for plan in plans] == [1] * (depth + 1)


def test_a_stop_id_cuts_in_the_middle() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20, stop_ids=frozenset({9}), logprobs=0), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    confirmed = answer(h, plan_of(h), [[5, 9, 9, 7], [8, 9]])
    assert (confirmed.requests, confirmed.tokens) == ([a, a, b, b], [5, 9, 8, 9])
    assert confirmed.ends == {1: Finish(FinishReason.STOP, 9)}
    assert (a.output, b.output, confirmed.rows) == ([1, 5, 9], [1, 8, 9], 2)
    assert h.scheduler.counters.output_tokens == 6, "what was delivered"


def drafted(*counts: int) -> np.ndarray:
    return np.array(counts, np.int32)


def test_a_request_knows_its_drafts() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    answer(h, plan_of(h), [[5, 6, 7], [8]], drafted=drafted(3, 0))
    answer(h, plan_of(h), [[9], [5, 6]], drafted=drafted(2, 1))
    assert (a.drafts.steps, a.drafts.drafted, a.drafts.accepted) == (2, 5, 2)
    assert (b.drafts.steps, b.drafts.drafted, b.drafts.accepted) == (1, 1, 1)
    assert (a.drafts.delivered(len(a.output)), b.drafts.delivered(len(b.output))) == (2, 1)


def test_a_step_without_drafts_counts_for_nobody() -> None:
    h = Harness(drafts=3, samples=32)
    a = h.request([1, 2, 3], 20)
    decoding(h, a)
    confirmed = h.scheduler.apply(StepResult(plan_of(h).step, np.array([5], np.int32), drafted=drafted(0)))
    assert (confirmed.tokens, a.drafts) == ([5], Drafts())


@pytest.mark.parametrize(
    ("row", "delivered"), [([9, 5, 6, 7], 1), ([5, 9, 6, 7], 2), ([5, 6, 9, 7], 3), ([5, 6, 7, 9], 3)]
)
def test_drafts_behind_a_stop_are_accepted_and_not_delivered(row: list[int], delivered: int) -> None:
    h = Harness(drafts=3, samples=32)
    a = h.request([1, 2, 3], 20, stop_ids=frozenset({9}))
    decoding(h, a)
    answer(h, plan_of(h), [[5, 6]], drafted=drafted(3))
    answer(h, plan_of(h), [row], drafted=drafted(3))
    assert (a.drafts.drafted, a.drafts.accepted) == (6, 4)
    assert a.drafts.delivered(len(a.output)) == 1 + delivered


def test_a_stop_found_many_steps_late_leaves_the_drafts_before_it() -> None:
    made = random.Random(3).choices(range(1, 5), k=BACKLOG + 2)
    drafts, kinds = Drafts(), [False]  # the first token is the prompt's; which of the others are drafts
    for count in made:
        drafts.verified(3, count, len(kinds))
        kinds += [True] * (count - 1) + [False]
    for output in range(1, len(kinds) + 1):
        assert drafts.delivered(output) == sum(kinds[:output])


def test_drafts_of_a_request_that_has_left_count_for_nobody() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    plan = plan_of(h)
    h.scheduler.abort(a)
    answer(h, plan, [[5, 6], [7, 8]], drafted=drafted(3, 3))
    assert (a.drafts, b.drafts.accepted) == (Drafts(), 1)


def test_min_tokens_is_counted_within_a_row() -> None:
    h = Harness(drafts=3, samples=32)
    a = h.request([1, 2, 3], 20, stop_ids=frozenset({9}), min_tokens=3)
    decoding(h, a)
    confirmed = answer(h, plan_of(h), [[9, 9, 9, 7]])
    assert (confirmed.tokens, confirmed.ends) == ([9, 9, 9], {2: Finish(FinishReason.STOP, 9)})


def test_max_tokens_cuts_in_the_middle() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 3), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    confirmed = answer(h, plan_of(h), [[5, 6, 7, 8], [9]])
    assert (confirmed.requests, confirmed.tokens) == ([a, a, b], [5, 6, 9])
    assert confirmed.ends == {1: Finish(FinishReason.LENGTH)}


def test_a_row_that_fails_in_the_middle_keeps_what_came_before() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    confirmed = answer(h, plan_of(h), [[5, -1], [8, 9]], failed={1: "no way on"})
    assert confirmed.ends == {1: Finish(FinishReason.ERROR, message="no way on")}
    assert (a.output, b.output) == ([1, 5], [1, 8, 9])


def test_tokens_find_their_requests_when_others_have_left() -> None:
    h = Harness(drafts=3, samples=32)
    a, b = h.request([1, 2, 3], 20), h.request([4, 5, 6], 20)
    decoding(h, a, b)
    plan = plan_of(h)
    h.scheduler.abort(a)
    confirmed = answer(h, plan, [[5, 6], [7, 8, -1]], failed={4: "no way on"})
    assert (confirmed.requests, confirmed.tokens) == ([b, b, b], [7, 8, -1])
    assert confirmed.ends[2].message == "no way on"


def test_log_probabilities_and_hidden_states_are_of_accepted_tokens() -> None:
    h = Harness(drafts=3, samples=32, seed=5)
    a = h.request([1, 2, 3], 20, logprobs=0, hidden="all")
    h.run()
    h.check(a)
    tokens = [*a.prompt.tolist(), *a.output[:-1]]
    assert np.concatenate(a.hidden).tolist() == [[t, at] for at, t in enumerate(tokens)]
    assert len(h.executor.plans) < 20, "drafts were accepted"


@pytest.mark.parametrize("seed", range(4))
def test_hidden_states_of_tokens_behind_a_stop_are_dropped(seed: int) -> None:
    h = Harness(drafts=7, samples=32, seed=seed)
    stop = oracle([1, 2, 3], 20, VOCAB)[10]
    a = h.request([1, 2, 3], 20, stop_ids=frozenset({stop}), hidden="all", experts_from=0)
    h.run()
    h.check(a)
    tokens = [*a.prompt.tolist(), *a.output[:-1]]
    assert np.concatenate(a.hidden).tolist() == [[t, at] for at, t in enumerate(tokens)]
    assert np.concatenate(a.experts).tolist() == [[[t, at]] for at, t in enumerate(tokens)]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_pages_follow_the_most_that_rows_can_write(depth: int) -> None:
    """A row holds pages for at most depth + 1 queries ahead, and no more."""
    h = Harness(pages=400, page_size=1, drafts=3, samples=32, depth=depth, seed=3)
    a = h.request([1, 2, 3], 60)
    while a.finish is None:
        h.submit()
        if a.hold is not None:
            limit = len(a.prompt) + 60 - 1
            assert len(a.hold.pages) <= min(a.num_tokens + (depth + 1) * 4, limit)
        h.executor.complete()
        h.apply()
        h.scheduler.check_integrity()
    h.run()
    h.check(a)


def test_short_of_pages_drafts_go_before_anyone_is_retracted() -> None:
    """Two rows fit the pool token by token, for one stops early, but not with eight tokens ahead of each."""
    h = Harness(pages=20, page_size=1, rows=2, drafts=7, samples=32, depth=0, conservativeness=0.01, seed=1)
    stop = oracle([1, 2, 3], 10, VOCAB)[3]
    a, b = h.request([1, 2, 3], 10, stop_ids=frozenset({stop})), h.request([4, 5, 6], 10)
    h.run()
    queries = [plan.query_length for plan in h.executor.plans if len(plan.decode_slots)]
    assert queries[0] == 1 and queries[-1] == 8, "drafts are back when there is room"
    assert h.scheduler.counters.retractions == 0
    h.check(a)
    h.check(b)


def test_rows_that_drafts_in_flight_make_short_of_pages_wait_for_their_results() -> None:
    h = Harness(pages=15, page_size=1, drafts=3, samples=32, conservativeness=0.01)
    decoding(h, h.request([1, 2, 3], 12), h.request([4, 5, 6], 12))
    first = plan_of(h)
    assert first.query_length == 4
    assert h.scheduler.plan() is None, "a token each beyond eight of drafts would take sixteen pages"
    answer(h, first, [[5], [6]])
    assert (plan_of(h).query_length, h.scheduler.counters.retractions) == (1, 0)


def test_tokens_of_a_retracted_row_count() -> None:
    h = Harness(drafts=3, samples=32, depth=1)
    a = h.request([1, 2, 3], 20, stop_ids=frozenset({9}))
    decoding(h, a)
    first, second = plan_of(h), plan_of(h)
    h.scheduler.retract(a)
    answer(h, first, [[5, 6, 7]])
    assert a.output == [1, 5, 6, 7] and a.finish is None
    answer(h, second, [[8, 9, 7, 7]])
    assert a.output == [1, 5, 6, 7, 8, 9] and a.finish == Finish(FinishReason.STOP, 9)
    assert h.scheduler.idle


@pytest.mark.parametrize("samples", [0, 9, 12])
def test_a_step_samples_no_more_rows_than_the_device_can(samples: int) -> None:
    """The limit holds also beside prompts, each of which may need a row: the fake device checks every
    plan."""
    h = Harness(rows=8, drafts=3, samples=samples, seed=2)
    for start in range(12):
        h.request([start + 1, 2, 3], 12)
    h.run()
    most = max(plan.num_samples for plan in h.executor.plans)
    assert most == max(samples, 8)


def test_prompts_are_not_starved_by_drafts() -> None:
    h = Harness(rows=4, drafts=7, samples=100, step_tokens=16, depth=0)
    h.request([1, 2, 3], 40)
    h.turn()
    h.request(list(range(30)), 4)
    plan = plan_of(h)
    assert 0 < plan.drafts <= 7 and sum(len(chunk.tokens) for chunk in plan.chunks) >= 8


def test_the_limit_travels_to_the_slot() -> None:
    """The last of four tokens needs no KV."""
    h = Harness()
    h.request([1, 2, 3], 4)
    assert [new.limit for new in plan_of(h).new_slots] == [6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_takes_rows_with_drafts_in_flight(depth: int) -> None:
    h = Harness(rows=1, drafts=3, samples=8, depth=depth, order="priority", seed=4)
    low = h.request([1, 2, 3], 30)
    h.turn()
    h.turn()
    high = h.request([4, 5], 8, priority=20)
    h.run()
    assert low.retractions == 1
    h.check(low)
    h.check(high)


def test_fewer_steps_for_the_same_text() -> None:
    plain, drafting = Harness(), Harness(drafts=7, samples=64, seed=1)
    made = []
    for h in (plain, drafting):
        request = h.request([1, 2, 3], 60)
        h.run()
        made.append((h.delivered[request.id], len(h.executor.plans)))
    assert made[0][0] == made[1][0] == oracle([1, 2, 3], 60, VOCAB)
    assert made[1][1] < made[0][1] / 2


def test_requests_with_grammars_draft_while_their_masks_are_few() -> None:
    """The host fills them between two kernels. A request that leaves makes room for another."""
    most = 48
    held = MASKED_DRAFTS // most
    h = Harness(drafts=most, samples=1000, rows=20, pages=2000)
    grammar: Any = object()

    def begin(count: int) -> list[Request]:
        made = [h.request([at, 2, 3], 200) for at in range(count)]
        for request in made:
            request.grammar = grammar
        return made

    first = begin(held + 2)
    plan = plan_of(h)
    assert [new.drafts for new in plan.new_slots] == [True] * held + [False] * 2
    answer(h, plan, [[1] for _ in first])
    plan = plan_of(h)
    assert plan.drafts == held * most
    answer(h, plan, [[1] for _ in first])
    for request in first[:2]:
        h.scheduler.abort(request)
    h.request([9, 9], 200)
    begin(3)
    assert [new.drafts for new in plan_of(h).new_slots] == [True, True, True, False]


def test_a_request_with_a_grammar_has_no_drafts_where_the_executor_masks_none() -> None:
    """Such executors have trees of drafts: masks are filled along chains."""
    table, harness = SlotTable(2, max_drafts=3, masked_drafts=0), Harness()
    grammar: Any = object()
    for masked in (None, grammar):
        request = harness.request([1, 2, 3], 20)
        request.grammar = masked
        assert bool(table.drafting[table.take(request, 0, 1)]) == (masked is None)


def test_a_request_with_a_logit_processor_has_no_drafts() -> None:
    h = Harness(drafts=3, samples=32)
    decoding(h, h.request([1, 2, 3], 20, processor="it"))
    plan = plan_of(h)
    assert (plan.query_length, plan.drafts) == (1, 0)
