"""The chi-square test by which the other sampling tests judge, itself checked against tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

MIN_P = 1e-4
"""Every test draws with fixed seeds, so a p-value is the same on each run; a fair sampler falls below
this once in 10,000 tests, a biased one by many orders of magnitude."""


def p_value(observed: ArrayLike, expected: ArrayLike) -> float:
    """Probability of counts as far from `expected` as `observed` [k], by Pearson's chi-square.

    Cells that expect nothing must hold nothing, or the answer is 0; cells that expect less than 5
    are merged.
    """
    seen, want = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    assert seen.shape == want.shape
    if seen[want == 0].any():
        return 0.0
    rare = want < 5
    seen = np.append(seen[~rare], seen[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    seen, want = seen[want > 0], want[want > 0]
    if len(want) < 2:
        return float(np.array_equal(seen, want))
    statistic = float(((seen - want) ** 2 / want).sum())
    half = torch.tensor([(len(want) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def independent(pairs: Sequence[np.ndarray], size: int) -> float:
    """p-value for two uniform variates in range(`size`), [n] each, being independent."""
    first, second = pairs
    counts = np.bincount(first * size + second, minlength=size * size)
    return p_value(counts, np.full(size * size, len(first) / size**2))


@pytest.mark.parametrize(
    ("cells", "statistic", "p"), [(2, 3.841459, 0.05), (5, 13.276704, 0.01), (101, 149.449253, 0.001)]
)
def test_p_value_matches_the_tables(cells: int, statistic: float, p: float) -> None:
    expected = np.full(cells, 1000.0)
    observed = expected.copy()
    shift = np.sqrt(statistic * 1000 / 2)
    observed[0] += shift
    observed[1] -= shift
    assert p_value(observed, expected) == pytest.approx(p, rel=1e-4)


def test_p_value_sees_what_must_not_happen() -> None:
    assert p_value([50, 49, 1], [50, 50, 0]) == 0.0
    assert p_value([50, 50, 0], [50, 50, 0]) == 1.0
    assert p_value([600, 400], [500, 500]) < 1e-8


def test_dependence_is_seen() -> None:
    a = np.arange(10_000) % 16
    assert independent((a, np.roll(a, 1)), 16) == 0.0
