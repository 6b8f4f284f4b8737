"""min_tokens of captured steps: what may not end yet, known on the host.

A sampling row makes one token, so the host can count them without reading any, and keep the stop ids from
a row by the mask that grammars have. In plain torch 64 such rows cost 45 ms a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.plan import NewSlot
from core.types import Ints

Stops = frozenset[int]


class Early:
    """Slots that may not stop yet. Owner: launch thread."""

    __slots__ = ("_by_slot",)

    def __init__(self) -> None:
        self._by_slot: dict[int, tuple[int, Stops]] = {}

    def apply(self, new_slots: Iterable[NewSlot]) -> None:
        """Take over slots; what was generated before a retraction counts."""
        for new in new_slots:
            left = new.params.min_tokens - len(new.output)
            if left > 0 and new.params.stop_ids:
                self._by_slot[new.slot] = left, new.params.stop_ids
            else:
                self._by_slot.pop(new.slot, None)

    def count(self, slots: Ints) -> Sequence[tuple[int, Stops]]:
        """The rows of a step that samples `slots` whose token may be none of these; it is counted."""
        if not self._by_slot:
            return ()
        found = []
        for row, slot in enumerate(slots.tolist()):
            if (held := self._by_slot.pop(slot, None)) is None:
                continue
            left, stops = held
            found.append((row, stops))
            if left > 1:
                self._by_slot[slot] = left - 1, stops
        return tuple(found)
