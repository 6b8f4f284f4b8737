"""Arrays as plans carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ints(values: Sequence[int]) -> np.ndarray:
    """int32, as plans carry them."""
    return np.array(values, np.int32)
