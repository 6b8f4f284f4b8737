"""Per-row state of chain drafting, kept between forwards of the draft model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class Gaps(NamedTuple):
    """Tokens that a draft model did not take in, because nobody drafted behind their steps; int32 [slots].

    Taking in a step's tokens costs a forward of the draft model, some 4% of a step of an 8B model with an
    EAGLE-3 head. While drafts do not pay, decode steps do without it, and a row's text gets a gap. Behind the
    gap the draft model goes on as if the tokens in it had never been: its entries lie, and are rotated, at
    positions that are less by their number. It drafts for the text that it knows; a wrong draft costs time
    and changes nothing. Prompts are always taken in; of the pages of an answer a later prompt may share
    entries that lie too early, which costs its drafts as little.

    skipped  tokens in the gap of each
    taken    length of each behind the last step that was taken in
    """

    skipped: Tensor
    taken: Tensor


class ChainRows(NamedTuple):
    """Rows that get drafts, in memory that all steps share: graphs hold its addresses.

    tables     of their slots
    view       the next forward of the draft model: one token of each row
    ends       int32 [rows]: the first position without a page
    gaps       of all slots
    positions  int32 [rows]: of the token to draw next
    page_size  tokens of a page
    shifted    see `gpu.draft.chain.Chain`
    """

    tables: SlotTables
    view: StepView
    ends: Tensor
    positions: Tensor
    gaps: Gaps
    page_size: int = 1
    shifted: bool = False

    @classmethod
    def of(cls, tables: SlotTables) -> ChainRows:
        """For as many rows as there are slots."""
        device, rows = tables.words.device, tables.slots - 1
        ints = torch.zeros(6, rows, dtype=torch.int32, device=device)
        ids, positions, mapping, slots, lengths, none = ints
        counts, few = (torch.zeros(n, dtype=torch.int32, device=device) for n in (4, 1))
        view = StepView(
            rows, rows, 0, counts, ids, positions, mapping, tables.page_table, slots, lengths, none[:0],
            none[:0], few, few,
        )  # fmt: skip
        ends, ahead = torch.zeros(2, rows, dtype=torch.int32, device=device)
        gaps = Gaps(*torch.zeros(2, tables.slots, dtype=torch.int32, device=device))
        return cls(tables, view, ends, ahead, gaps)

    def first(self, rows: int) -> ChainRows:
        """The first `rows`."""
        view = self.view
        view = view._replace(
            tokens=rows,
            max_decode=rows,
            ids=view.ids[:rows],
            positions=view.positions[:rows],
            kv_slot_mapping=view.kv_slot_mapping[:rows],
            decode_slots=view.decode_slots[:rows],
            decode_lengths=view.decode_lengths[:rows],
        )
        return self._replace(view=view, ends=self.ends[:rows], positions=self.positions[:rows])
