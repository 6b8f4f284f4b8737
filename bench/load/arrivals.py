"""Arrival times of an open loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


def gamma(rate: float, burstiness: float, count: int, seed: int) -> Seconds:
    """Arrival times [count], ascending, of a renewal process with `rate` arrivals per second.

    Gaps are gamma distributed with shape `burstiness`: 1 is Poisson, below 1 comes in bursts,
    far above 1 is evenly spaced. The coefficient of variation of the gaps is burstiness**-0.5.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError("rate and burstiness must be positive")
    draw = np.random.default_rng(seed)
    return np.cumsum(draw.gamma(burstiness, 1.0 / (rate * burstiness), count))
