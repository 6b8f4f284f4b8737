"""Arrays with the dtypes of plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def ints(values: Sequence[int]) -> np.ndarray:
    """An int32 array, as in plans."""
    return np.array(values, np.int32)
