"""Per-row state of drafting, kept between forwards of the draft model."""

from __future__ import annotations

from typing import Final, NamedTuple

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


class Block(NamedTuple):
    """What a forward of a draft model has of each row: one token, or `tokens` of which all but the first, the
    row's last one, are the id `mask`. Unless it is `causal` each sees the whole block."""

    tokens: int = 1
    mask: int = 0
    causal: bool = True

    @property
    def draws(self) -> int:
        """Tokens that are drawn for a row at once."""
        return max(self.tokens - 1, 1)


ONE_TOKEN: Final = Block()


class DraftRows(NamedTuple):
    """Rows that get drafts, in memory that all steps share: graphs hold its addresses.

    tables     of their slots
    view       the next forward of the draft model: a block of each row; its samples are what is drawn
    ends       int32 [rows]: the first position without a page
    slots      int32 [rows * draws]: of the tokens to draw next
    positions  int32 [rows * draws]: of the same
    gaps       of all slots
    page_size  tokens of a page
    shifted    see `gpu.draft.chain.Chain`
    block      of each row
    """

    tables: SlotTables
    view: StepView
    ends: Tensor
    slots: Tensor
    positions: Tensor
    gaps: Gaps
    page_size: int = 1
    shifted: bool = False
    block: Block = ONE_TOKEN

    @classmethod
    def of(cls, tables: SlotTables, block: Block = ONE_TOKEN) -> DraftRows:
        """`DraftRows` for as many rows as there are slots."""
        device, rows = tables.words.device, tables.slots - 1

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        tokens, (few, none) = rows * block.tokens, (ints(1), ints(0))
        ids, positions, mapping, slots, lengths = ints(5, tokens)
        view = StepView(
            tokens, tokens, 0, ints(4), ids, positions, mapping, tables.page_table, slots, lengths, none,
            none, few, few,
        )  # fmt: skip
        drawn, ahead = ints(2, rows * block.draws)
        if block.tokens == 1:
            drawn = slots
        return cls(tables, view, ints(rows), drawn, ahead, Gaps(*ints(2, tables.slots)), block=block)

    @property
    def most(self) -> int:
        """Drafts of a row."""
        return self.tables.most_drafts if self.block.tokens == 1 else self.block.draws

    @property
    def reach(self) -> int:
        """How many drafts a row has whose pages end at its last token: each further position is one more."""
        return int(self.shifted) if self.block.tokens == 1 else -1

    def first(self, rows: int) -> DraftRows:
        """The first `rows`."""
        view, tokens, draws = self.view, rows * self.block.tokens, rows * self.block.draws
        view = view._replace(
            tokens=tokens,
            max_decode=tokens,
            ids=view.ids[:tokens],
            positions=view.positions[:tokens],
            kv_slot_mapping=view.kv_slot_mapping[:tokens],
            decode_slots=view.decode_slots[:tokens],
            decode_lengths=view.decode_lengths[:tokens],
        )
        return self._replace(
            view=view, ends=self.ends[:rows], slots=self.slots[:draws], positions=self.positions[:draws]
        )
