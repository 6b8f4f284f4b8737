"""The device tables: one row per slot, kept for as long as a request runs."""

from __future__ import annotations

import torch

from core.plan import StepPlan


class SlotState:
    """Last token, length and page table of every slot. Row 0 is the dump of padded rows.

    Owner: launch thread.

        last_token  int64 [max_rows + 1]             the future-token cell: sampling writes it,
                                                     the next step's gather reads it
        length      int64 [max_rows + 1]             tokens whose KV some launched step has written
        page_table  int32 [max_rows + 1, max_pages]  entries past a slot's pages are stale
    """

    __slots__ = ("last_token", "length", "page_table")

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.last_token = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.length = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(max_rows + 1, max_pages, dtype=torch.int32, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take over a plan's new slots, then its page writes. Runs before the step's gather."""
        for new in plan.new_slots:
            self.length[new.slot] = new.cached
            self.last_token[new.slot] = 0
        writes = plan.page_writes
        if len(writes.slots):
            device = self.page_table.device
            slots, indices, pages = (
                torch.tensor(ids, dtype=torch.int64, device=device)
                for ids in (writes.slots, writes.indices, writes.pages)
            )
            self.page_table[slots, indices] = pages.int()

    def write_tokens(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put sampled `tokens` [n] into the cells of `slots` [n].

        A row without finite logits reports -1. Its cell gets 0: with overlap one more step of the
        row may already be planned, and an embedding has no row -1.
        """
        self.last_token[slots] = tokens.clamp(min=0)
