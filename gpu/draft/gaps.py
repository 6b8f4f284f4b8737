"""Tokens that a draft model did not take in, because nobody drafted behind their steps.

Taking in a step's tokens costs a forward of the draft model, some 4% of a step of an 8B model with an EAGLE-3
head. While drafts do not pay, decode steps do without it, and a row's text gets a gap. Behind the gap the
draft model goes on as if the tokens in it had never been: its entries lie, and are rotated, at positions that
are less by their number. It drafts for the text that it knows; a wrong draft costs time and changes nothing.
Prompts are always taken in; of the pages of an answer a later prompt may share entries that lie too early,
which costs its drafts as little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.draft.drafter import StepOutcome
from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class Gaps:
    """Owner: launch thread."""

    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables
        self.skipped = torch.zeros_like(tables.length)
        """int32 [slots]: tokens in the gap of each."""
        self._taken = torch.zeros_like(tables.length)
        """Length of each slot behind the last step that was taken in."""

    def close(self, outcome: StepOutcome, page_size: int) -> StepView:
        """The view of a step that is taken in, with its decode rows' tokens where the draft model has
        them."""
        view, slots, lengths = outcome.view, *self._rows(outcome)
        positions = outcome.samples.positions[: len(slots)]
        missed = (self.skipped[slots] + positions - 1 - self._taken[slots]).clamp(min=0)
        own, before = outcome.samples.drafts.rows, outcome.samples.drafts.before
        decode = view.num_decode - before[own.long()]
        at = torch.arange(len(slots), device=slots.device)
        missed = torch.where((at < decode) & (slots > 0), missed, 0)
        self.skipped[slots] = missed
        self._taken[slots] = lengths
        most = view.max_decode
        if not most:
            return view
        owners = view.decode_slots.long()
        gap = self.skipped[owners]
        held = view.positions[:most] - gap
        cells = self._tables.page_table[owners, (held // page_size).long()] * page_size + held % page_size
        mapping = torch.where(gap > 0, cells, view.kv_slot_mapping[:most])
        # Tokens of chunks stand behind those of decode rows; what these have no room for is of nobody.
        return view._replace(
            positions=torch.cat([held, view.positions[most:]]),
            kv_slot_mapping=torch.cat([mapping, view.kv_slot_mapping[most:]]),
            decode_lengths=view.decode_lengths - gap,
        )

    def _rows(self, outcome: StepOutcome) -> tuple[Tensor, Tensor]:
        """Slots int64 of the step's rows that sample, 0 for padding, and their lengths."""
        own, slots = outcome.samples.drafts.rows, outcome.samples.slots
        slots = slots[: self._tables.slots - 1]
        at = torch.arange(len(slots), device=slots.device)
        slots = torch.where(at < own, slots, 0).long()
        return slots, self._tables.length[slots]
