"""Masks of several ranks: rank 0 has the matchers, and what it fills is every rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from core.plan import NewSlot, StepPlan
from gpu.grammar.matchers import Masks, Matchers
from gpu.ranks import Rank
from gpu.sample.rows import RowTokens
from gpu.state.tables import SlotTables


class Filled(NamedTuple):
    """The masks of a step, and the slots that have no drafts from it on."""

    masks: Masks | None
    ended: list[int]


class RankMatchers(Matchers):
    """Ranks with matchers of their own could differ: drafts end where masks take long, and matchers of one
    grammar share a lexer with limits.

    Owner: launch thread.
    """

    def __init__(self, tables: SlotTables, rank: Rank) -> None:
        super().__init__(tables)
        self._rank, self._leads = rank, rank.shard.rank == 0
        self._masked: set[int] = set()
        """Slots whose owners came with a grammar, whether or not it has ended: all ranks know the same."""
        self._ended: list[int] = []
        """Slots that have no drafts from the step on whose masks are filled."""

    def apply(self, new_slots: Iterable[NewSlot]) -> None:
        """See `Matchers.apply`."""
        for new in (given := list(new_slots)):
            self._masked.discard(new.slot)
        begun = [new.slot for new in given if new.grammar is not None]
        self._masked.update(begun)
        if self._leads:
            super().apply(given)
        elif begun and self._known is not None:
            self._known.begin(begun)

    def fetch(self, masks: Masks | None) -> None:
        """See `Matchers.fetch`."""
        if self._leads:
            super().fetch(masks)

    def fill(self, plan: StepPlan) -> Masks | None:
        """See `Matchers.fill`. The ranks read rank 0's memory, which it writes again only when all have come
        to the forward of the next step."""
        if self._masked.isdisjoint(plan.sampling_slots.tolist()):
            return None
        masks, ended = self._rank.first(partial(self._fill_for_all, plan), Filled)
        if ended and self._known is not None and not self._leads:
            self._known.end(ended)
        return masks

    def accept(self, masks: Masks, made: RowTokens) -> dict[int, str]:
        """See `Matchers.accept`: rank 0's answer is the step's."""
        return super().accept(masks, made) if self._leads else {}

    def _fill_for_all(self, plan: StepPlan) -> Filled:
        self._ended = []
        return Filled(super().fill(plan), self._ended)

    def _end_drafts(self, slots: Sequence[int]) -> None:
        super()._end_drafts(slots)
        self._ended += slots
