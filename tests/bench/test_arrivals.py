from __future__ import annotations

import numpy as np
import pytest

from bench.load import arrivals


def test_poisson_has_the_rate_and_a_coefficient_of_variation_of_one() -> None:
    gaps = np.diff(arrivals.gamma(rate=20.0, burstiness=1.0, count=20_000, seed=1))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)
    # Memoryless: the share of gaps above t is exp(-rate t).
    assert (gaps > 0.05).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_variation_and_not_the_rate(burstiness: float) -> None:
    gaps = np.diff(arrivals.gamma(rate=5.0, burstiness=burstiness, count=40_000, seed=2))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_times_are_deterministic_by_seed_and_ascending() -> None:
    first, again, other = (arrivals.gamma(3.0, 1.0, 50, seed) for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()
    assert (np.diff(first) > 0).all() and first[0] > 0


def test_a_rate_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="positive"):
        arrivals.gamma(0.0, 1.0, 5, 0)
