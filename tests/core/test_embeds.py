"""Prompts of embeddings: every row is planned where it belongs, again after a retraction, and pages are
found by the job alone whose key they are under."""

from __future__ import annotations

import numpy as np
import pytest

from core.plan import NewSlot
from core.request import Request
from core.types import Floats, RootKey
from tests.core.harness import Harness

WIDTH = 3


def rows(n: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(n, WIDTH)).astype(np.float32)


def request(
    harness: Harness, embeds: Floats, own: str, max_tokens: int = 6, ids: tuple[int, ...] = ()
) -> Request:
    made = harness.request([0] * len(embeds) + list(ids), max_tokens, root=RootKey(own=own))
    made.embeds = embeds
    return made


def planned(harness: Harness, slot: int) -> list[tuple[int, Floats | None]]:
    """Where each chunk of a slot begins, and what it has of embeddings."""
    chunks = [c for plan in harness.executor.plans for c in plan.chunks if c.slot == slot]
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
    """What its own key still finds is not computed twice; the rest is, from the same rows."""
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
    again = planned(harness, 1)[before:]
    if flush:
        assert again[0][0] == 0
    for start, part in again:
        assert (part is None) == (start >= 30)
        if part is not None:
            np.testing.assert_array_equal(part, rows(30)[start : start + 16])


def test_only_their_own_job_finds_their_pages() -> None:
    harness = Harness()
    request(harness, rows(20), "a")
    harness.run()
    mate, stranger = request(harness, rows(20), "a"), request(harness, rows(20, 1), "b")
    plain = harness.request([0] * 20)
    salted = harness.request([0] * 20, root=RootKey(salt="a"))
    harness.run()
    assert mate.cached > 0
    assert [other.cached for other in (stranger, plain, salted)] == [0, 0, 0]
