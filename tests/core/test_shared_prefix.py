"""Pages that all decode rows begin with are found, and are never claimed where they differ."""

from __future__ import annotations

import random

from core.plan import StepPlan
from tests.rigs.scheduler import Harness, prompts


def last(h: Harness) -> StepPlan:
    return h.executor.plans[-1]


def test_rows_behind_one_prefix_share_its_pages() -> None:
    h = Harness(pages=200, depth=0)
    prefix = list(range(20))
    h.request(prefix, max_tokens=1)
    h.run()
    requests = [h.request([*prefix, 50 + i], max_tokens=12) for i in range(4)]
    h.turn()
    h.turn()
    assert len(last(h).decode_slots) == 4
    assert last(h).common == 20
    h.run()
    for request in requests:
        h.check(request)


def test_rows_that_come_one_by_one_share_them_too() -> None:
    h = Harness(pages=200, depth=0)
    prefix = list(range(20))
    h.request(prefix, max_tokens=1)
    h.run()
    for i in range(5):
        h.request([*prefix, 50 + i], max_tokens=30)
        h.turn()
        h.turn()
    assert len(last(h).decode_slots) == 5
    assert last(h).common == 20
    h.run()


def test_a_stranger_ends_it_and_its_end_brings_it_back() -> None:
    h = Harness(pages=200, depth=0)
    prefix = list(range(20))
    h.request(prefix, max_tokens=1)
    h.run()
    for i in range(3):
        h.request([*prefix, 50 + i], max_tokens=30)
    stranger = h.request([90, 91], max_tokens=4)
    seen = []
    while stranger.finish is None:
        h.turn()
        seen.append(last(h).common)
    assert not any(seen)
    for _ in range(8):  # whoever leaves is looked for once in as many changes as there are rows
        h.request([*prefix, 60], max_tokens=1)
        h.turn()
    assert last(h).common == 20
    h.run()


def test_one_row_shares_with_nobody() -> None:
    h = Harness(depth=0)
    h.request(range(20), max_tokens=3)
    h.turn()
    h.turn()
    assert last(h).common == 0
    h.run()


def test_random_rows() -> None:
    """The fake device holds every plan's claim against its page table."""
    rng = random.Random(5)
    claimed = 0
    for round in range(12):
        h = Harness(pages=60, depth=round % 3, rows=6, step_tokens=32)
        for prompt in prompts(rng, 25, longest=30):
            h.request(prompt, max_tokens=rng.randrange(1, 9))
            if rng.random() < 0.5:
                h.turn()
        h.run()
        claimed += sum(plan.common > 0 for plan in h.executor.plans)
    assert claimed, "no plan had anything in common"
