"""The matchers of running slots: masks before sampling, tokens after it.

A plan does not say when a slot is given back, so a matcher stays until its grammar has ended or its
slot has a new owner; there are never more than slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.grammar import BROKEN
from core.plan import NewSlot, StepPlan
from core.types import NAN_TOKEN
from gpu.grammar.stepper import Bits, Matcher, Stepper


class Masks(NamedTuple):
    """Which tokens the masked rows of a step may sample.

    `rows` [m] are indices of the step's sampling rows, ascending; `bits` int32 [m, words] their masks;
    `slots` [m] whose they are. `bits` are good until the next `fill`, which writes over them.
    """

    rows: Sequence[int]
    slots: Sequence[int]
    bits: Bits


class Failed(NamedTuple):
    """In place of a slot's matcher that broke while replaying its output."""

    reason: str


class Matchers:
    """What constrains each slot.

    `fill` and `accept` are apart because a device that runs on its own samples between them: there
    the masks travel through pinned memory, only the sampling of masked rows waits for them, and
    `accept` is called with the tokens when they have arrived, at the latest before the next `fill`.

    Owner: launch thread.
    """

    def __init__(self) -> None:
        self._by_slot: dict[int, Matcher | Failed] = {}
        self._bits: Bits = np.zeros((0, 0), np.int32)
        """Written anew at each step: allocating 64 rows of 151,936 tokens (1.2 MB) takes 12 µs."""

    def apply(self, new_slots: Iterable[NewSlot]) -> None:
        """Assign matchers to new slots; one that was retracted replays what it had generated."""
        for new in new_slots:
            self._by_slot.pop(new.slot, None)
            if new.grammar is not None:
                matcher: Matcher = new.grammar.matcher()
                reason = _replay(matcher, new.output) if new.output.size else None
                self._by_slot[new.slot] = Failed(reason) if reason else matcher

    def fill(self, plan: StepPlan) -> Masks | None:
        """Masks of the sampling rows whose slots are constrained; None when there is none."""
        if not self._by_slot:
            return None
        listed = plan.decode_slots.tolist() + [chunk.slot for chunk in plan.chunks if chunk.samples]
        rows = [row for row, slot in enumerate(listed) if slot in self._by_slot]
        if not rows:
            return None
        owners = [listed[row] for row in rows]
        words = next((m.stepper.words for m in self._by_slot.values() if isinstance(m, Matcher)), 0)
        if self._bits.shape[0] < len(rows) or self._bits.shape[1] != words:
            self._bits = np.zeros((len(rows), words), np.int32)
        masks = Masks(rows, owners, self._bits[: len(rows)])
        for i, slot in enumerate(owners):
            if isinstance(self._by_slot[slot], Failed):
                masks.bits[i] = 0
        for stepper, group in self._grouped(enumerate(owners)).items():
            stepper.fill([matcher.state for _, matcher in group], [i for i, _ in group], masks.bits)
        return masks

    def accept(self, masks: Masks, tokens: Sequence[int]) -> dict[int, str]:
        """Advance by the sampled `tokens` [n] of the step. Returns the reasons of rows that cannot."""
        failed: dict[int, str] = {}
        moving = []
        for i, (row, slot) in enumerate(zip(masks.rows, masks.slots, strict=True)):
            entry = self._by_slot[slot]
            if isinstance(entry, Failed):
                failed[row] = entry.reason
            elif tokens[row] != NAN_TOKEN:
                moving.append((i, slot))
            elif not masks.bits[i].any():
                failed[row] = "nothing can follow here"
        for stepper, group in self._grouped(moving).items():
            taken = [tokens[masks.rows[i]] for i, _ in group]
            reasons = stepper.accept([matcher.state for _, matcher in group], taken)
            for (i, matcher), token, reason in zip(group, taken, reasons, strict=True):
                if reason is not None:
                    failed[masks.rows[i]] = reason
                    if matcher.grammar is not None:
                        matcher.grammar.broken = True
                elif stepper.ended(matcher.state, token):
                    # With overlap one more step of this row is on its way: it is sampled without a
                    # mask, and its token is dropped.
                    del self._by_slot[masks.slots[i]]
        for row, slot in zip(masks.rows, masks.slots, strict=True):
            if row in failed:
                self._by_slot.pop(slot, None)
        return {row: f"{BROKEN}: {why}." for row, why in failed.items()}

    def _grouped(self, rows: Iterable[tuple[int, int]]) -> dict[Stepper, list[tuple[int, Matcher]]]:
        """Live matchers of rows (index, slot) by library, with their indices: one native call each."""
        groups: dict[Stepper, list[tuple[int, Matcher]]] = {}
        for i, slot in rows:
            entry = self._by_slot[slot]
            if isinstance(entry, Matcher):
                groups.setdefault(entry.stepper, []).append((i, entry))
        return groups


def _replay(matcher: Matcher, output: NDArray[np.int32]) -> str | None:
    for token in output.tolist():
        (reason,) = matcher.stepper.accept([matcher.state], [token])
        if reason is not None:
            return reason
    return None
