"""Every per-slot quantity that a captured step needs, in device memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotTables(NamedTuple):
    """One row per slot; row 0 is the dump of padded rows and stays neutral.

    Written by the kernels of the step alone: whatever the host has to say travels in the step's order.

    last_token   int32 [slots]         the future-token cell: sampling writes it, the next step reads it
    length       int32 [slots]         tokens whose KV some launched step has written
    page_table   int32 [slots, pages]  entries past a slot's pages are stale
    temperature  float32 [slots]       0 is greedy
    seed         int64 [slots]
    top_k        int32 [slots]         0: off
    top_p        float32 [slots]       1: off
    min_p        float32 [slots]       0: off
    count_row    int32 [slots]         row of token counts, -1 for none
    repetition   float32 [slots]       1: off
    frequency    float32 [slots]       0: off
    presence     float32 [slots]       0: off
    """

    last_token: Tensor
    length: Tensor
    page_table: Tensor
    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    count_row: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def slot_tables(max_rows: int, max_pages: int, device: torch.device) -> SlotTables:
    """Tables of `max_rows` slots and the dump, all neutral."""
    slots = max_rows + 1

    def zeros(dtype: torch.dtype, *more: int) -> Tensor:
        return torch.zeros(slots, *more, dtype=dtype, device=device)

    return SlotTables(
        last_token=zeros(torch.int32),
        length=zeros(torch.int32),
        page_table=zeros(torch.int32, max_pages),
        temperature=zeros(torch.float32),
        seed=zeros(torch.int64),
        top_k=zeros(torch.int32),
        top_p=zeros(torch.float32).fill_(1),
        min_p=zeros(torch.float32),
        count_row=zeros(torch.int32).fill_(-1),
        repetition=zeros(torch.float32).fill_(1),
        frequency=zeros(torch.float32),
        presence=zeros(torch.float32),
    )
