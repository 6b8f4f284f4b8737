"""Launches that plans take."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from core.plan import Chunk, StepPlan
from core.types import NO_TOKENS
from gpu.state.entry import CASCADE_KEYS, CASCADE_ROWS
from gpu.step.sampling import sampling_keys
from gpu.step.steps import (
    DEEP_KEYS,
    DEEP_ROW_KEYS,
    DEEP_ROWS,
    DEEP_TOKENS,
    ExactSizes,
    Forward,
    PaddedSizes,
)
from tests.rigs.arrays import ints

STEPS = PaddedSizes(64, 2048, 16)
DRAFTING = PaddedSizes(64, 2048, 16, most_drafts=7)


def padded(tokens: int, mixed: bool, query: int = 1, **kind: bool) -> Forward:
    return Forward(tokens, min(tokens, 64), 16 if mixed else 0, min(tokens, 64), query=query, **kind)


def plan(
    rows: int,
    *chunks: tuple[int, int],
    common: int = 0,
    drafts: int = 0,
    query_length: int = 4,
    keys: int = 0,
) -> StepPlan:
    """Decode rows, and (start, tokens) of chunks; `drafts` of all rows together."""
    tables = tuple(Chunk(100 + i, start, np.zeros(n, np.int32), True) for i, (start, n) in enumerate(chunks))
    return StepPlan(
        1,
        ints(range(1, rows + 1)) if rows else NO_TOKENS,
        tables,
        common=common,
        keys=keys,
        query_length=query_length,
        drafts=drafts,
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan(3), padded(4, False)),
        (plan(CASCADE_ROWS, common=CASCADE_KEYS), padded(8, False, shared=True)),
        (plan(3, drafts=2), padded(8, False)),
        (plan(16, drafts=48), padded(64, False)),
        (plan(3, (0, 55), drafts=6), padded(64, True)),
        (plan(3, (0, 55), drafts=7), padded(128, True)),
        (plan(CASCADE_ROWS, common=CASCADE_KEYS, drafts=1), padded(16, False, shared=True)),
        (plan(CASCADE_ROWS - 1, common=CASCADE_KEYS, drafts=9), padded(16, False)),
        (plan(0, (0, 128)), padded(128, True)),
        (plan(0, (DEEP_KEYS - 1, 100)), padded(128, True)),
        (plan(2, (0, 20), (DEEP_KEYS, 100)), padded(128, True, deep=True)),
        (plan(CASCADE_ROWS, (5000, 9), common=CASCADE_KEYS), padded(64, True, shared=True, deep=True)),
        (plan(0, (DEEP_KEYS, DEEP_TOKENS)), padded(DEEP_TOKENS, True, deep=True)),
        (plan(1, (DEEP_KEYS, DEEP_TOKENS)), padded(320, True)),
        (plan(1, keys=DEEP_ROW_KEYS), padded(1, False)),
        (plan(1, keys=DEEP_ROW_KEYS + 1), padded(1, False, deep=True)),
        (plan(DEEP_ROWS, keys=20_000), padded(DEEP_ROWS, False, deep=True)),
        (plan(DEEP_ROWS + 1, keys=20_000), padded(8, False)),
        (plan(1, (0, 60), keys=20_000), padded(64, True)),
    ],
)
def test_the_smallest_that_holds_it(step: StepPlan, expected: Forward) -> None:
    assert STEPS.forward(step) == expected


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (plan(3, query_length=8), padded(4, False)),  # no drafts
        (plan(3, drafts=1, query_length=8), padded(4, False, query=4)),
        (plan(3, drafts=5, query_length=4), padded(8, False, query=4)),
        (plan(3, drafts=5, query_length=5), padded(8, False, query=8)),
        (plan(CASCADE_ROWS, common=CASCADE_KEYS, drafts=8), padded(16, False, shared=True, query=4)),
        (plan(3, (0, 55), drafts=6), padded(64, True, query=8)),
        (plan(3, (0, 55)), padded(64, True, query=8)),
        (plan(3, drafts=20, query_length=9), padded(24, False)),  # longer than was foreseen: token by token
    ],
)
def test_rows_with_drafts_share_passes_over_their_keys(step: StepPlan, expected: Forward) -> None:
    assert DRAFTING.forward(step) == expected


def test_sizes_without_drafts_are_as_many_as_ever() -> None:
    assert {key.query for key in STEPS.all() if isinstance(key, Forward)} == {1}
    mixed = [
        sum(key.chunks > 0 for key in each.all() if isinstance(key, Forward)) for each in (STEPS, DRAFTING)
    ]
    assert mixed[0] == mixed[1]


@pytest.mark.parametrize("sizes", [STEPS, DRAFTING], ids=["plain", "drafts"])
def test_whatever_a_plan_takes_was_made_before(sizes: PaddedSizes) -> None:
    made = list(sizes.all())
    assert len(made) == len(set(made))
    for rows, drafts in ((0, 0), (1, 0), (1, 3), (CASCADE_ROWS, 0), (CASCADE_ROWS, 7), (20, 44), (64, 0)):
        for longest, keys in product(range(1, 10) if rows else (), (DEEP_ROW_KEYS, 20_000)):
            step = plan(rows, common=CASCADE_KEYS, drafts=drafts, query_length=longest, keys=keys)
            assert sizes.forward(step) in made
            assert {*sampling_keys(sizes.samples(rows + drafts))} <= {*made}
        for tokens in (1, 60, 200, DEEP_TOKENS, 700, 1900):
            for start in (0, DEEP_KEYS):
                step = plan(rows, (start, tokens), common=CASCADE_KEYS, drafts=drafts)
                assert sizes.forward(step) in made


def test_exact_sizes_are_the_plans_own() -> None:
    assert ExactSizes().forward(plan(3, (0, 20), (7, 5))) == Forward(28, 3, 2, 5)
    assert ExactSizes().forward(plan(3, (0, 20), drafts=5, query_length=3)) == Forward(28, 8, 1, 9, query=3)
    assert ExactSizes().samples(4) == 4
    assert not list(ExactSizes().all())
