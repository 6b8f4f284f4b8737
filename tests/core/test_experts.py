"""Experts that were chosen: whose they are, each once, from where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import RequestError
from core.request import Request, SamplingParams
from core.request.params import MAX_SUPPORT, check
from tests.rigs.scheduler import VOCAB, Harness

A = [i * 7 % VOCAB for i in range(30)]
B = [i * 11 % VOCAB for i in range(19)]


def given(harness: Harness, request: Request) -> list[list[int]]:
    found = request.experts
    return [row[0].tolist() for part in found for row in part]


def wanted(harness: Harness, request: Request, start: int = 0) -> list[list[int]]:
    """Experts of all tokens but the last sampled one, which is never read."""
    tokens = [*request.prompt.tolist(), *harness.delivered[request.id][:-1]]
    return [[token, at] for at, token in enumerate(tokens)][start:]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_once_in_order(depth: int) -> None:
    harness = Harness(depth=depth, step_tokens=16)
    first = harness.request(A, 6, experts_from=0)
    other = harness.request(B, 9)
    harness.run()
    again = harness.request(A, 3, experts_from=0)  # the tree has all of it
    harness.run()
    for request in (first, again):
        harness.check(request)
        assert given(harness, request) == wanted(harness, request)
    assert again.cached == 0
    assert not other.experts


@pytest.mark.parametrize(("start", "cached"), [(5, 4), (17, 16), (29, 28), (30, 28)])
def test_what_comes_before_the_start_may_be_cached(start: int, cached: int) -> None:
    harness = Harness(step_tokens=16)
    harness.request(A, 4)
    harness.run()
    request = harness.request(A, 5, experts_from=start)
    harness.run()
    assert request.cached == cached
    assert given(harness, request) == wanted(harness, request, start)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 7])
def test_retraction_gives_nothing_twice(depth: int, turns: int) -> None:
    harness = Harness(depth=depth, step_tokens=16)
    request = harness.request(A, 8, experts_from=11)
    for _ in range(turns):
        harness.turn()
    harness.scheduler.retract_all()
    harness.run()
    harness.check(request)
    assert given(harness, request) == wanted(harness, request, 11)


def test_beside_hidden_states_they_begin_where_these_do() -> None:
    harness = Harness()
    request = harness.request(A, 4, experts_from=9, hidden="all")
    harness.run()
    assert given(harness, request) == wanted(harness, request)
    assert len(np.concatenate(request.hidden)) == len(given(harness, request))


def test_a_prompt_without_output() -> None:
    harness = Harness()
    request = harness.request(A, 0, experts_from=0)
    harness.run()
    assert given(harness, request) == [[token, at] for at, token in enumerate(A)]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(support=True),
        SamplingParams(support=True, top_p=0.9),
        SamplingParams(support=True, top_k=MAX_SUPPORT + 1),
    ],
)
def test_a_mask_needs_a_bound(params: SamplingParams) -> None:
    with pytest.raises(RequestError, match="top_k") as caught:
        check(params, VOCAB)
    assert caught.value.param == "return_sampling_mask"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(support=True, temperature=0.0),
        SamplingParams(support=True, top_k=1),
        SamplingParams(support=True, top_k=MAX_SUPPORT, top_p=0.9),
    ],
)
def test_a_mask_with_one_is_told(params: SamplingParams) -> None:
    check(params, VOCAB)
    assert params.wants_logprobs
