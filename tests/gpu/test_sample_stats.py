"""The chi-square test by which the other sampling tests judge, itself checked against tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rigs.statistics import independent, p_value


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
