"""Per-slot sampling parameters, kept on the host: a step asks them what it may skip.

Plain torch reads one row's parameters as Python numbers, so they need no device copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.plan import NewSlot
from core.types import LogprobsMode
from gpu.sample.filters import Rule
from gpu.sample.penalties import Penalty

# What a slot wants beyond the argmax of its logits. Plain integers: `&` of an IntFlag takes 1 µs,
# and a step asks several times per row.
DRAWS: Final = 1
"""Not greedy."""
BIASED: Final = 2
MIN_TOKENS: Final = 4
COUNTED: Final = 8
LOGPROBS: Final = 16
"""Something is told of each token: these, or what the last two of these flags say."""
PROCESSED: Final = 32
"""Has a logit processor."""
FILTERED: Final = 64
"""Draws from less than the whole vocabulary."""
ENTROPY: Final = 128
SUPPORT: Final = 256
"""What was left to choose from."""
AFTER_MASK: Final = 512
"""Log-probabilities are told of the tokens that its grammar allows."""
AFTER_ALL: Final = 1024
"""They are told of what the token was chosen from."""


_MODES: Final[Mapping[LogprobsMode, int]] = {
    "raw_logprobs": 0,
    "masked_logprobs": AFTER_MASK,
    "processed_logprobs": AFTER_ALL,
}


class SlotParams(NamedTuple):
    """One slot's entry. The defaults are neutral: greedy, nothing else."""

    needs: int = 0
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    count_row: int = -1
    prompt_len: int = 0
    min_tokens: int = 0
    logprobs: int = -1

    @property
    def rule(self) -> Rule:
        """The filters of a row that draws."""
        return Rule(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def penalty(self) -> Penalty:
        """The penalties of a row with counts."""
        return Penalty(self.repetition, self.frequency, self.presence)


_ENTRY = np.dtype([(name, np.float64 if type(value) is float else np.int64)
                   for name, value in SlotParams._field_defaults.items()])  # fmt: skip


class ParamTable:
    """Owner: launch thread. One `SlotParams` per slot, 104 bytes each."""

    def __init__(self, num_slots: int) -> None:
        self._entries: NDArray[np.void] = np.full(num_slots, np.array(SlotParams(), _ENTRY), _ENTRY)

    def write(self, new_slots: Sequence[NewSlot]) -> None:
        """Replace the entries of `new_slots`, in one write."""
        if new_slots:
            slots = [new.slot for new in new_slots]
            self._entries[slots] = np.array([_entry(new) for new in new_slots], _ENTRY)

    def needs(self, slots: NDArray[np.int64] | NDArray[np.int32]) -> int:
        """Union of what `slots` [n] want."""
        return int(np.bitwise_or.reduce(self._entries["needs"][slots], initial=0))

    def read(self, slots: NDArray[np.int64]) -> list[SlotParams]:
        """The entries of `slots` [n]."""
        return [SlotParams(*entry) for entry in self._entries[slots].tolist()]


def _entry(new: NewSlot) -> SlotParams:
    params = new.params
    needs = 0 if params.greedy else DRAWS
    filtered = params.top_k > 1 or params.top_p < 1.0 or params.min_p > 0.0
    needs |= FILTERED if filtered and not params.greedy else 0
    needs |= BIASED if params.logit_bias else 0
    needs |= MIN_TOKENS if params.min_tokens > 0 and params.stop_ids else 0
    needs |= COUNTED if new.count_row >= 0 else 0
    needs |= LOGPROBS if params.wants_logprobs else 0
    needs |= ENTROPY if params.entropy else 0
    needs |= SUPPORT if params.support else 0
    needs |= PROCESSED if params.processor else 0
    if params.logprobs >= 0:
        needs |= _MODES[params.logprobs_mode]
    return SlotParams(
        needs=needs,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        count_row=new.count_row,
        prompt_len=len(new.prompt),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
    )
