"""Hidden states: whose they are, each once, whatever was cached, chunked, aborted or retracted; prompts of
encoders run whole and leave nothing in the tree."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import ContextExceeded
from core.request import Request
from tests.rigs.scheduler import VOCAB, Harness

A = [i * 7 % VOCAB for i in range(30)]
B = [i * 11 % VOCAB for i in range(19)]


def states(tokens: list[int]) -> list[list[int]]:
    """Hidden states of the fake device for tokens."""
    return [[token, at] for at, token in enumerate(tokens)]


def given(harness: Harness, request: Request) -> list[list[int]]:
    return np.concatenate(request.hidden).astype(int).tolist()


def everything(harness: Harness, request: Request) -> list[list[int]]:
    """All but the last sampled token, which is never read."""
    return states([*request.prompt.tolist(), *harness.delivered[request.id][:-1]])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_once_in_order(depth: int) -> None:
    harness = Harness(depth=depth, step_tokens=16)
    first = harness.request(A, 6, hidden="all")
    other = harness.request(B, 9)
    harness.run()
    again = harness.request(A, 3, hidden="all")  # the tree has all of it
    harness.run()
    for request in (first, again):
        harness.check(request)
        assert given(harness, request) == everything(harness, request)
    assert again.cached == 0
    assert not other.hidden


def test_a_stop_token_ends_them() -> None:
    """With overlap a step beyond it runs: its state is nobody's."""
    probe = Harness()
    plain = probe.request(A, 8)
    probe.run()
    harness = Harness(depth=2)
    request = harness.request(A, 8, hidden="all", stop_ids=frozenset({probe.delivered[plain.id][3]}))
    harness.run()
    assert len(harness.delivered[request.id]) <= 4
    assert given(harness, request) == everything(harness, request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 7])
def test_retraction_gives_nothing_twice(depth: int, turns: int) -> None:
    harness = Harness(depth=depth, step_tokens=16)
    request = harness.request(A, 8, hidden="all")
    output = harness.request(B[3:], 8, hidden="output")
    total = harness.request(B, 0, hidden="sum")
    of_prompts = [harness.request(B, 6, hidden=kind) for kind in ("sum", "last", "first")]
    for _ in range(turns):
        harness.turn()
    harness.scheduler.retract_all()
    harness.run()
    harness.check(request)
    assert given(harness, request) == everything(harness, request)
    assert given(harness, output) == everything(harness, output)[len(B) - 4 :]
    answering, last, first = of_prompts
    for each in (total, answering):
        sums = np.concatenate(each.hidden).sum(0)
        assert sums.tolist() == np.sum(states(B), axis=0).tolist()
    assert given(harness, last) == states(B)[-1:]
    assert given(harness, first) == states(B)[:1]


def test_the_last_token_is_found_behind_a_cached_prefix() -> None:
    harness = Harness()
    harness.request(A, 4)
    harness.run()
    request = harness.request(A, 0, hidden="last")
    harness.run()
    assert request.cached == 28
    assert given(harness, request) == states(A)[-1:]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_made_the_output_is_found_behind_a_cached_prefix(depth: int) -> None:
    harness = Harness(depth=depth, step_tokens=16)
    harness.request(A, 4)
    harness.run()
    request = harness.request(A, 6, hidden="output")
    harness.run()
    assert request.cached == 28
    assert given(harness, request) == everything(harness, request)[len(A) - 1 :]


def test_sums_and_first_tokens_read_all_of_the_prompt() -> None:
    harness = Harness(step_tokens=16)
    harness.request(A, 4)
    harness.run()
    first = harness.request(A, 0, hidden="first")
    total = harness.request(A, 0, hidden="sum")
    harness.run()
    assert (first.cached, total.cached) == (0, 0)
    assert given(harness, first) == states(A)[:1]
    assert len(total.hidden) > 1
    assert np.concatenate(total.hidden).sum(0).tolist() == np.sum(states(A), axis=0).tolist()


def test_an_aborted_request_is_given_nothing_more() -> None:
    harness = Harness(depth=2)
    gone = harness.request(A, 20, hidden="all")
    harness.turn()
    harness.submit()
    harness.scheduler.abort(gone)
    stays = harness.request(B, 4, hidden="all")
    before = len(gone.hidden)
    harness.run()
    assert len(gone.hidden) == before
    assert given(harness, stays) == everything(harness, stays)


# -- encoders --------------------------------------------------------------------------------------


def test_prompts_of_encoders_run_whole() -> None:
    harness = Harness(causal=False, step_tokens=32)
    requests = [harness.request(prompt, 0, hidden="last") for prompt in (A, B, A, B[:5], A[:9])]
    harness.run()
    chunks = [[len(chunk.tokens) for chunk in plan.chunks] for plan in harness.executor.plans]
    assert sorted(n for step in chunks for n in step) == [5, 9, 19, 30, 30]
    assert max(map(sum, chunks)) <= 32
    assert all(chunk.start == 0 for plan in harness.executor.plans for chunk in plan.chunks)
    for request in requests:
        assert given(harness, request) == states(request.prompt.tolist())[-1:]


def test_encoders_leave_nothing_to_be_found() -> None:
    harness = Harness(causal=False)
    for _ in range(2):
        request = harness.request(A, 0, hidden="first")
        harness.run()
        assert request.cached == 0
    cache = harness.scheduler.cache.statistics()
    assert (cache.nodes, cache.cached, cache.free) == (Harness().scheduler.cache.statistics().nodes, 0, 64)


def test_what_no_step_takes_whole_is_refused() -> None:
    harness = Harness(causal=False, step_tokens=16)
    with pytest.raises(ContextExceeded, match="16 tokens"):
        harness.request(A[:17], 0, hidden="last")
    harness.request(A[:16], 0, hidden="last")
    harness.run()
