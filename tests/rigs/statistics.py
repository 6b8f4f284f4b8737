"""The chi-square test by which sampling tests judge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
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
