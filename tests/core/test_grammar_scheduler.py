"""Grammars in the scheduler: rows that fail by themselves, ends before min_tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from core.plan import StepPlan, StepResult
from core.request import Request, SamplingParams
from core.types import Finish, FinishReason
from tests.rigs.scheduler import Harness


class Anything:
    """A compiled grammar, as far as the scheduler is concerned."""

    def matcher(self) -> Any:
        raise AssertionError("the scheduler looked into a grammar")


def add(harness: Harness, id: str, **params: Any) -> Request:
    request = Request(
        id, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=9, **params), grammar=Anything()
    )
    harness.scheduler.add([request])
    return request


def step(harness: Harness, tokens: list[int], failed: dict[int, str] | None = None) -> dict[int, Finish]:
    plan = harness.scheduler.plan()
    assert isinstance(plan, StepPlan)
    result = StepResult(plan.step, np.array(tokens, np.int32), failed=failed or {})
    ends = harness.scheduler.apply(result).ends
    harness.scheduler.check_integrity()
    return ends


def test_the_grammar_travels_to_the_slot() -> None:
    harness = Harness()
    request = add(harness, "a")
    plan = harness.scheduler.plan()
    assert plan is not None
    assert [new.grammar for new in plan.new_slots] == [request.grammar]


def test_a_failed_row_ends_its_request_with_the_reason_and_no_other() -> None:
    harness = Harness()
    first, second, third = (add(harness, id) for id in "abc")
    assert step(harness, [5, 5, 5]) == {}
    ends = step(harness, [6, -1, -1], {1: "no way on"})
    assert ends[1] == Finish(FinishReason.ERROR, message="no way on")
    assert "finite" in str(ends[2].message)
    assert (first.output, second.output, third.output) == ([5, 6], [5], [5])
    assert step(harness, [7]) == {}


def test_reasons_find_their_rows_when_others_have_left() -> None:
    """Results in flight still carry the rows of requests that were aborted meanwhile."""
    harness = Harness()
    first, _ = add(harness, "a"), add(harness, "b")
    plan = harness.scheduler.plan()
    assert plan is not None
    harness.scheduler.abort(first)
    result = StepResult(plan.step, np.array([5, -1], np.int32), failed={1: "no way on"})
    confirmed = harness.scheduler.apply(result)
    assert [request.id for request in confirmed.requests] == ["b"]
    assert confirmed.ends[0].message == "no way on"


def test_an_end_under_a_grammar_counts_before_min_tokens() -> None:
    """The end was sampled only because the grammar is complete; the plain request beside it goes on."""
    harness = Harness()
    add(harness, "a", min_tokens=5, stop_ids=frozenset({9}))
    plain = harness.request([4, 5, 6], 9, min_tokens=5, stop_ids=frozenset({9}))
    assert step(harness, [9, 9]) == {0: Finish(FinishReason.STOP, 9)}
    assert plain.finish is None
