"""Which options each slot's sampling has: kept on the host, to launch no more than a step needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from core.plan import NewSlot
from core.types import Ints, LogprobsMode

# Plain integers: `&` of an IntFlag takes 1 µs.
ADJUSTED: Final = 1
"""The row's logits are changed before the choice: bias, min_tokens or penalties."""
LOGPROBS: Final = 2
"""Something is reported of each token: log-probabilities, or what the last four of these flags say."""
PROCESSED: Final = 4
"""The row has a logit processor."""
FILTERED: Final = 8
"""The row draws from less than the whole vocabulary."""
ENTROPY: Final = 16
SUPPORT: Final = 32
"""The tokens that were left to choose from are reported."""
AFTER_MASK: Final = 64
"""Log-probabilities are of the tokens that the row's grammar allows."""
AFTER_ALL: Final = 128
"""Log-probabilities are of what the token was chosen from."""

_MODES: Final[Mapping[LogprobsMode, int]] = {
    "raw_logprobs": 0,
    "masked_logprobs": AFTER_MASK,
    "processed_logprobs": AFTER_ALL,
}


class LogprobOptions(NamedTuple):
    """What a slot wants to know of its tokens: the `best` log-probabilities (-1: none) and those of `ids`."""

    needs: int
    best: int
    ids: tuple[int, ...]
    greedy: bool


class SlotOptions:
    """Owner: launch thread. Slot 0 is the dump and wants nothing."""

    def __init__(self, num_slots: int) -> None:
        self._needs: Ints = np.zeros(num_slots, np.int32)
        self._wanted: dict[int, LogprobOptions] = {}

    def write(self, new_slots: Sequence[NewSlot]) -> None:
        """Replace the options of `new_slots`."""
        for new in new_slots:
            params = new.params
            self._needs[new.slot] = needs = _needs(new)
            self._wanted.pop(new.slot, None)
            if needs & LOGPROBS:
                self._wanted[new.slot] = LogprobOptions(
                    needs, params.logprobs, params.logprob_ids, params.greedy
                )

    def needs(self, slots: Ints) -> int:
        """Union of the options of `slots` [n]."""
        return int(np.bitwise_or.reduce(self._needs[slots], initial=0))

    def wanted(self, slots: Ints) -> dict[int, LogprobOptions]:
        """Options by row of `slots` [n], for the rows that want something reported of their tokens."""
        rows = np.flatnonzero(self._needs[slots] & LOGPROBS).tolist()
        return {row: self._wanted[slot] for row, slot in zip(rows, slots[rows].tolist(), strict=True)}


def _needs(new: NewSlot) -> int:
    params = new.params
    filtered = params.top_k > 1 or params.top_p < 1.0 or params.min_p > 0.0
    early = params.min_tokens > 0 and bool(params.stop_ids)
    needs = ADJUSTED if params.logit_bias or early or new.count_row >= 0 else 0
    needs |= FILTERED if filtered and not params.greedy else 0
    needs |= LOGPROBS if params.wants_logprobs else 0
    needs |= ENTROPY if params.entropy else 0
    needs |= SUPPORT if params.support else 0
    needs |= PROCESSED if params.processor else 0
    return needs | (_MODES[params.logprobs_mode] if params.logprobs >= 0 else 0)
