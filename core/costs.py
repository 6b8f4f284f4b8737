"""What steps cost, as an executor measures it at its start."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class CostTable(msgspec.Struct, frozen=True):
    """Seconds of launches by their tokens or rows: `sizes` ascend, and others are padded to them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def upto(self, most: int) -> NDArray[np.float64]:
        """Seconds float64 [most + 1] of 0 ... `most`: of the least size that holds them, and behind the last
        size on the line through the last two. Never less than fewer take."""
        sizes, seconds = np.array(self.sizes), np.maximum.accumulate(self.seconds)
        every = np.arange(most + 1)
        found: NDArray[np.float64] = seconds[np.searchsorted(sizes, every).clip(max=len(sizes) - 1)]
        if len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            found += slope * np.maximum(every - sizes[-1], 0)
        return found


class ChunkCosts(msgspec.Struct, frozen=True):
    """Costs of steps with prompt chunks, in seconds: `step` by all tokens of a step, without attention;
    `pair` for each query of a chunk and each of its keys."""

    step: CostTable
    pair: float


class StepCosts(msgspec.Struct, frozen=True):
    """`verify` by tokens: a step's forward and sampling. `draft` by rows: what a step takes longer if the
    drafter proposes behind it."""

    verify: CostTable
    draft: CostTable


class MeasuredCosts(msgspec.Struct, frozen=True):
    """All that an executor measures; None where nothing depends on it."""

    drafts: StepCosts | None = None
    chunks: ChunkCosts | None = None
