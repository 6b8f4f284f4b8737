"""Ids that slots name, in device memory: those of logit_bias, and the stop ids that min_tokens holds back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.plan import NewSlot
from core.request.params import MAX_BIAS, MAX_STOP_IDS
from gpu.transfer import upload


class TokenTables(NamedTuple):
    """A row per slot; how much of it holds is in `num_bias` and `num_stops` of `SlotTables`.

    bias_ids  int32 [slots, MAX_BIAS]      no id twice
    biases    float32 [slots, MAX_BIAS]
    stop_ids  int32 [slots, MAX_STOP_IDS]
    """

    bias_ids: Tensor
    biases: Tensor
    stop_ids: Tensor

    def write(self, new_slots: Sequence[NewSlot]) -> None:
        """Upload what new slots name, mostly nothing. Before the step that begins them."""
        columns: tuple[tuple[Tensor, Sequence[Sequence[float]]], ...] = (
            (self.bias_ids, [list(new.params.biases) for new in new_slots]),
            (self.biases, [list(new.params.biases.values()) for new in new_slots]),
            (self.stop_ids, [list(new.params.held_stops) for new in new_slots]),
        )
        for table, found in columns:
            if not any(found):
                continue
            firsts = [new.slot * table.shape[1] for new in new_slots]
            cells = [np.arange(first, first + len(each)) for first, each in zip(firsts, found, strict=True)]
            dtype = np.float32 if table.is_floating_point() else np.int32
            values = np.array([value for each in found for value in each], dtype)
            there = upload(np.concatenate(cells), table.device)
            table.view(-1).index_copy_(0, there, upload(values, table.device))


def token_tables(slots: int, device: torch.device) -> TokenTables:
    """Tables of `slots` slots, the dump among them: 9 KiB each."""
    return TokenTables(
        torch.zeros(slots, MAX_BIAS, dtype=torch.int32, device=device),
        torch.zeros(slots, MAX_BIAS, dtype=torch.float32, device=device),
        torch.zeros(slots, MAX_STOP_IDS, dtype=torch.int32, device=device),
    )
