"""Prompts of embeddings: every row is planned where it belongs, again after a retraction, and pages are
found by the job alone whose key they are under."""

from __future__ import annotations

import numpy as np
import pytest

from core.plan import NewSlot
from core.request import Request
from core.types import Floats, RootKey
from tests.rigs.scheduler import Harness

WIDTH = 3


def rows(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)


def request(
    harness: Harness, embeds: Floats, own: str, max_tokens: int = 6, ids: tuple[int, ...] = ()
) -> Request:
    made = harness.request([0] * len(embeds) + list(ids), max_tokens, root=RootKey(own=own))
    made.embeds = embeds
    return made


def planned(harness: Harness, *slots: int) -> list[tuple[int, Floats | None]]:
    """Start and embeddings of each chunk of these slots."""
    chunks = [c for plan in harness.executor.plans for c in plan.chunks if c.slot in slots]
    return [(chunk.start, chunk.embeds) for chunk in chunks]


def fresh(harness: Harness) -> list[NewSlot]:
    return [new for plan in harness.executor.plans for new in plan.new_slots]


def test_chunks_carry_their_part() -> None:
    harness = Harness(step_tokens=16)
    made = request(harness, rows(38), "a", ids=(7, 8, 9, 10))
    harness.run()
    chunks = planned(harness, 1)
    assert [start for start, _ in chunks] == [0, 16, 32]
    for start, part in chunks:
        np.testing.assert_array_equal(part, rows(38)[start : start + 16])
    (new,) = fresh(harness)
    assert (new.embedded, len(new.prompt), new.known.tolist()) == (38, 42, [7, 8, 9, 10])
    harness.check(made)


def test_a_chunk_behind_them_has_none() -> None:
    harness = Harness(step_tokens=16)
    request(harness, rows(16), "a", ids=tuple(range(9)))
    harness.run()
    assert [part is None for _, part in planned(harness, 1)] == [False, True]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("flush", [False, True])
def test_a_retracted_prompt_comes_again(depth: int, flush: bool) -> None:
    """Pages that the prompt's own key still finds are not computed twice; the rest is, from the same rows."""
    harness = Harness(depth=depth, step_tokens=16)
    made = request(harness, rows(30), "a")
    for _ in range(4):
        harness.turn()
    before = len(planned(harness, 1))
    harness.scheduler.retract_all()
    if flush:
        harness.scheduler.cache.flush()
    harness.run()
    harness.check(made)
    again = planned(harness, 1, 2)[before:]
    if flush:
        assert again[0][0] == 0
    for start, part in again:
        assert (part is None) == (start >= 30)
        if part is not None:
            np.testing.assert_array_equal(part, rows(30)[start : start + 16])


def test_only_their_own_job_finds_their_pages() -> None:
    harness = Harness()
    request(harness, rows(20), "a")
    mate, stranger = request(harness, rows(20), "a"), request(harness, rows(20, 1), "b")
    plain = harness.request([0] * 20)
    salted = harness.request([0] * 20, root=RootKey(salt="a"))
    harness.run()
    assert mate.cached > 0
    assert [other.cached for other in (stranger, plain, salted)] == [0, 0, 0]


def test_pages_under_a_key_of_their_own_push_nothing_out() -> None:
    """When the job is over nobody can find them again: they are free at once."""
    harness = Harness(pages=32, page_size=4)
    harness.request(range(60), 1)
    harness.run()
    cached = harness.scheduler.statistics().cache
    for seed in range(8):
        for _ in range(2):
            request(harness, rows(20, seed), f"job{seed}", ids=(1, 2, 3))
        harness.run()
        now = harness.scheduler.statistics().cache
        assert (now.free, now.cached, now.nodes) == (cached.free, cached.cached, cached.nodes)
    again = harness.request(range(60), 1)
    harness.run()
    assert again.cached == 56


@pytest.mark.parametrize("again", [False, True])
def test_a_retracted_job_leaves_nothing_either(again: bool) -> None:
    harness = Harness(rows=1, depth=0)
    made = request(harness, rows(20), "a")
    for _ in range(3):
        harness.turn()
    harness.scheduler.retract_all()
    assert harness.scheduler.statistics().cache.cached > 0
    if not again:
        harness.scheduler.abort(made)
    harness.run()
    assert harness.scheduler.statistics().cache.free == 64
    plain = [harness.request([i] * 50, 8) for i in range(9)]  # evicts past what was dropped
    harness.run()
    for each in plain:
        harness.check(each)
