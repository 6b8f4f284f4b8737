"""The chi-square test of the sampling tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

MIN_P = 1e-4
"""Seeds are fixed, so a p-value is the same in each run; a correct sampler is below this in one of 10,000
tests, a biased one by many orders of magnitude."""


def p_value(observed: ArrayLike, expected: ArrayLike) -> float:
    """p-value of the counts `observed` [k] under `expected` [k], by Pearson's chi-square.

    0 if a cell with an expectation of 0 was observed; cells with an expectation below 5 are merged.
    """
    observations, expectations = np.asarray(observed, np.float64), np.asarray(expected, np.float64)
    assert observations.shape == expectations.shape
    if observations[expectations == 0].any():
        return 0.0
    rare = expectations < 5
    observations = np.append(observations[~rare], observations[rare].sum())
    expectations = np.append(expectations[~rare], expectations[rare].sum())
    observations, expectations = observations[expectations > 0], expectations[expectations > 0]
    if len(expectations) < 2:
        return float(np.array_equal(observations, expectations))
    statistic = float(((observations - expectations) ** 2 / expectations).sum())
    half = torch.tensor([(len(expectations) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def independent(pairs: Sequence[np.ndarray], size: int) -> float:
    """p-value for two uniform variates in range(`size`), [n] each, being independent."""
    first, second = pairs
    counts = np.bincount(first * size + second, minlength=size * size)
    return p_value(counts, np.full(size * size, len(first) / size**2))
