"""A drafter behind the steps of a runner: what is launched for a plan, and what is captured ahead of serving.

sampling ─► accept ─► Follow: the step's tokens ─► Propose: drafts of its rows, in `SlotTables.drafts`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from core.plan import StepPlan
from gpu.draft.drafter import Drafter, StepOutcome
from gpu.state.tables import SlotTables
from gpu.step.graphs import Work
from gpu.step.shapes import decode_sizes, fit
from gpu.step.steps import Forward

# Structs, not tuples: as keys of one table, equal fields must not make two kinds equal.


class Follow(msgspec.Struct, frozen=True):
    """Takes in the tokens of a forward."""

    forward: Forward


class Propose(msgspec.Struct, frozen=True):
    """Drafts for up to `rows` rows."""

    rows: int


Key = Follow | Propose


class Launchable(Protocol):
    """Captured work by key: `gpu.step.graphs.Launches`."""

    def __getitem__(self, key: Key) -> Work: ...


class DraftStage:
    """Owner: launch thread."""

    def __init__(
        self,
        drafter: Drafter,
        tables: SlotTables,
        outcome: Callable[[Forward | None], StepOutcome],
        padded: bool,
    ) -> None:
        """`outcome` gives what a step of that size leaves, for None the whole of its buffers. `padded`: work
        is captured, in few sizes."""
        self.drafter = drafter
        self._tables, self._outcome = tables, outcome
        self._sizes = decode_sizes(tables.slots - 1) if padded else None
        self._stale = False
        """Whether slots have drafts that a step left there and that are for none behind it."""

    def launch(self, plan: StepPlan, forward: Forward, launches: Launchable) -> None:
        """Behind the sampling of `plan`, whose launches had the sizes of `forward`."""
        if self.drafter.keeps_kv:
            launches[Follow(forward)]()
        rows = plan.num_samples - plan.drafts
        if not rows:
            return
        if self.drafter.keeps_kv and len(plan.decode_slots) and plan.query_length == 1:
            if self._stale:
                self._tables.drafts[:, 0].zero_()
            self._stale = False
            return
        launches[Propose(rows if self._sizes is None else fit(self._sizes, rows))]()
        self._stale = True

    def keys(self, forwards: Iterable[Forward]) -> Iterator[Key]:
        """All that is captured, largest first."""
        if self.drafter.keeps_kv:
            yield from map(Follow, forwards)
        yield from map(Propose, reversed(self._sizes or ()))

    def run(self, key: Key) -> None:
        """The work of `key`."""
        if isinstance(key, Follow):
            self.drafter.follow(self._outcome(key.forward))
        else:
            self.drafter.propose(self._outcome(None), key.rows)
