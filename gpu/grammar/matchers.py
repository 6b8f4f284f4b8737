"""The matchers of running slots: masks before sampling, tokens after it.

A plan does not say when a slot is given back, so a matcher stays until its grammar has ended or its
slot has a new owner; there are never more than slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from core.clock import monotonic
from core.grammar import BROKEN, CompiledGrammar
from core.plan import NewSlot, StepPlan
from core.types import NAN_TOKEN, NO_LIMIT, Ints
from gpu.grammar.stepper import Bits, Matcher, Stepper
from gpu.sample.rows import RowTokens
from gpu.state.known import KnownDrafts
from gpu.state.tables import SlotTables

Owner = tuple[int, int, int]
"""The index of a masked row's first mask, the row's index among the rows that sample, and its slot."""

MOST_SECONDS = 0.2
"""Seconds in a step for filling masks along drafts: a hostile grammar takes up to 0.09 for each, and all rows
wait. Past them no row that had drafts then has any from there on: which row took the time is not measured. 64
ordinary rows with four drafts each take 5 ms on one thread."""


class Masks(NamedTuple):
    """Which tokens the masked rows of a step may sample.

    `rows` [m] are indices of the step's sampling rows, ascending; `bits` int32 [m, words] their masks;
    `slots` [m] whose they are. `bits` are good until the next `fill`, which writes over them.

    A row with drafts is in all three once more for each of them: its mask is for the token behind so many
    `drafts` int32 [m], `NO_LIMIT` for one that cannot matter. None: 0 for all.
    """

    rows: Sequence[int]
    slots: Sequence[int]
    bits: Bits
    drafts: Ints | None = None

    def owners(self) -> list[Owner]:
        """The masked rows."""
        firsts = range(len(self.rows)) if self.drafts is None else np.flatnonzero(self.drafts == 0).tolist()
        return [(at, self.rows[at], self.slots[at]) for at in firsts]

    def empty(self, first: int, drafts: int) -> bool:
        """Whether nothing may follow the first `drafts` drafts of the row whose first mask this is."""
        at = first + drafts
        if at == first or (self.drafts is not None and at < len(self.drafts) and self.drafts[at] == drafts):
            return not self.bits[at].any()
        return False


class Failed(NamedTuple):
    """Replaces the matcher of a slot that broke while it replayed the slot's output."""

    reason: str


class _Row:
    """A slot's matcher, and the tokens that it has taken. `drafts`: whether the slot may have any."""

    __slots__ = ("drafts", "grammar", "matcher", "taken")

    def __init__(self, grammar: CompiledGrammar, drafts: bool) -> None:
        self.grammar, self.drafts = grammar, drafts
        self.matcher: Matcher = grammar.matcher()
        self.taken: list[int] = []

    def replay(self, output: Sequence[int]) -> str | None:
        """Begin anew and take `output`. Returns the reason if that fails."""
        self.matcher, self.taken = self.grammar.matcher(), list(output)
        for token in output:
            (reason,) = self.matcher.stepper.accept([self.matcher.state], [token])
            if reason is not None:
                return reason
        return None


class Matchers:
    """What constrains each slot.

    `fill` and `accept` are apart because a device that runs on its own samples between them: there
    the masks travel through pinned memory, only the sampling of masked rows waits for them, and
    `accept` is called with the tokens when they have arrived, at the latest before the next `fill`.

    How many of a row's drafts a step verifies is known on the device alone: each that may be gets a mask.

    Owner: launch thread.
    """

    def __init__(self, tables: SlotTables | None = None) -> None:
        """`tables` have the slots' drafts, if there are any."""
        self._by_slot: dict[int, _Row | Failed] = {}
        self._known = None if tables is None or not tables.most_drafts else KnownDrafts(tables)
        self._bits: Bits = np.zeros((0, 0), np.int32)
        """Written anew at each step: allocating 64 rows of 151,936 tokens (1.2 MB) takes 12 µs."""

    def apply(self, new_slots: Iterable[NewSlot]) -> None:
        """Assign matchers to new slots; one that was retracted replays what it had generated."""
        begun = []
        for new in new_slots:
            self._by_slot.pop(new.slot, None)
            if new.grammar is not None:
                begun.append(new.slot)
                row = _Row(new.grammar, new.drafts)
                reason = row.replay(new.output.tolist()) if new.output.size else None
                self._by_slot[new.slot] = Failed(reason) if reason else row
        if begun and self._known is not None:
            self._known.begin(begun)

    def fetch(self, masks: Masks | None) -> None:
        """Copy the drafts that a step leaves, if it has `masks`: then the next one waits for its end."""
        if masks is not None and self._known is not None:
            self._known.fetch()

    def fill(self, plan: StepPlan) -> Masks | None:
        """Masks of the sampling rows whose slots are constrained; None when there is none."""
        if not self._by_slot:
            return None
        listed = plan.sampling_slots.tolist()
        rows = [row for row, slot in enumerate(listed) if slot in self._by_slot]
        if not rows:
            return None
        owners = [listed[row] for row in rows]
        ahead = self._ahead(plan, rows, owners)
        if any(ahead):
            return self._fill_ahead(rows, owners, ahead)
        masks = Masks(rows, owners, self._room(len(rows)))
        for i, slot in enumerate(owners):
            if isinstance(self._by_slot[slot], Failed):
                masks.bits[i] = 0
        for stepper, group in self._grouped(enumerate(owners)).items():
            stepper.fill([row.matcher.state for _, row in group], [i for i, _ in group], masks.bits)
        return masks

    def _room(self, count: int) -> Bits:
        """Room for so many masks."""
        live = (row for row in self._by_slot.values() if isinstance(row, _Row))
        words = next((row.matcher.stepper.words for row in live), 0)
        if self._bits.shape[0] < count or self._bits.shape[1] != words:
            self._bits = np.zeros((count, words), np.int32)
        return self._bits[:count]

    def _ahead(self, plan: StepPlan, rows: list[int], owners: list[int]) -> list[list[int]]:
        """The drafts of each row that the step may verify."""
        most = min(plan.query_length - 1, plan.drafts)
        if self._known is None or most < 1:
            return [[] for _ in rows]
        found = []
        for row, slot, (count, *ids) in zip(rows, owners, self._known.rows[owners].tolist(), strict=True):
            entry = self._by_slot[slot]
            drafts = row < len(plan.decode_slots) and isinstance(entry, _Row) and entry.drafts
            found.append(ids[: min(count, most)] if drafts else [])
        return found

    def _fill_ahead(self, rows: list[int], owners: list[int], ahead: list[list[int]]) -> Masks:
        """Fill masks along the drafts `ahead` of each row."""
        counts = np.array([1 + len(tokens) for tokens in ahead])
        firsts = np.cumsum(counts) - counts
        drafts = (np.arange(counts.sum()) - np.repeat(firsts, counts)).astype(np.int32)
        bits, first = self._room(len(drafts)), firsts.tolist()
        for i, slot in enumerate(owners):
            if isinstance(self._by_slot[slot], Failed):
                bits[first[i]] = 0
        for stepper, group in self._grouped(enumerate(owners)).items():
            which, begun = [i for i, _ in group], monotonic()
            given = stepper.fill_ahead(
                [row.matcher.state for _, row in group],
                [first[i] for i in which],
                bits,
                [ahead[i] for i in which],
            )
            for (i, row), masks in zip(group, given, strict=True):
                drafts[first[i] + masks : first[i] + counts[i]] = NO_LIMIT
                if ahead[i] and stepper.lost(row.matcher.state):
                    self._restore(owners[i], row, first[i])
            if monotonic() - begun > MOST_SECONDS:
                self._end_drafts([owners[i] for i in which if ahead[i]])
        return Masks(np.repeat(rows, counts).tolist(), np.repeat(owners, counts).tolist(), bits, drafts)

    def _end_drafts(self, slots: Sequence[int]) -> None:
        """Give these slots no drafts from the next step on."""
        assert self._known is not None
        self._known.end(slots)
        for slot in slots:
            entry = self._by_slot[slot]
            if isinstance(entry, _Row):
                entry.drafts = False

    def _restore(self, slot: int, row: _Row, first: int) -> None:
        """Make anew a matcher that failed on its way along drafts: these may be wrong."""
        reason = row.replay(row.taken)
        if reason is not None:
            self._by_slot[slot] = Failed(reason)
        else:
            row.matcher.stepper.fill([row.matcher.state], [first], self._bits)

    def accept(self, masks: Masks, made: RowTokens) -> dict[int, str]:
        """Advance by the tokens of the step. Returns the reasons of those that cannot be, by index."""
        tokens, failed, behind = made.tokens.tolist(), dict[int, str](), 0
        turn = masks.owners()
        while turn:
            moving = []
            for owner in turn:
                first, row, slot = owner
                at, entry = made.index(row, behind), self._by_slot[slot]
                if at < 0:
                    continue
                if isinstance(entry, Failed):
                    failed[at] = entry.reason
                elif tokens[at] != NAN_TOKEN:
                    moving.append((at, owner))
                    continue
                elif masks.empty(first, behind):
                    failed[at] = "nothing can follow here"
                else:
                    continue
                del self._by_slot[slot]
            turn = self._advance(moving, tokens, failed)
            behind += 1
        return {at: f"{BROKEN}: {why}." for at, why in failed.items()}

    def _advance(
        self, moving: list[tuple[int, Owner]], tokens: list[int], failed: dict[int, str]
    ) -> list[Owner]:
        """Advance each row by the token at an index, and note in `failed` why not. Returns the rows that go
        on."""
        going = []
        owners = dict(moving)
        for stepper, group in self._grouped((at, owner[2]) for at, owner in moving).items():
            taken = [tokens[at] for at, _ in group]
            reasons = stepper.accept([row.matcher.state for _, row in group], taken)
            for (at, row), token, reason in zip(group, taken, reasons, strict=True):
                row.taken.append(token)
                if reason is not None:
                    failed[at] = reason
                    if row.matcher.grammar is not None:
                        row.matcher.grammar.broken = True
                elif not stepper.ended(row.matcher.state, token):
                    going.append(owners[at])
                    continue
                # Tokens behind may come from a row whose grammar has ended, and with overlap a step more is
                # on its way: they are sampled without a mask, and dropped.
                del self._by_slot[owners[at][2]]
        return going

    def _grouped(self, rows: Iterable[tuple[int, int]]) -> dict[Stepper, list[tuple[int, _Row]]]:
        """Live rows (index, slot) by library, with their indices: one native call each."""
        groups: dict[Stepper, list[tuple[int, _Row]]] = {}
        for i, slot in rows:
            entry = self._by_slot[slot]
            if isinstance(entry, _Row):
                groups.setdefault(entry.matcher.stepper, []).append((i, entry))
        return groups
