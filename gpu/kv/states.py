"""States of linear attention, which layers keep instead of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.models import LinearSpec
from core.plan import MOST_SAVES, StepPlan
from gpu.device import zeros
from gpu.transfer import upload


class Pending(NamedTuple):
    """Inputs of the drafts of each slot's last step, at most `drafts`. A state cannot be rolled back, so a
    step updates it by the row's first token only. The row's next step knows how many drafts were accepted
    and updates the state by these first.

        held    int32 [layers, slots]: tokens in the slot's state. The row's next step begins at a position
                that is greater by the number of accepted drafts
        inputs  [layers, slots, drafts, channels]: of the convolution
        mixed   [layers, slots, drafts, channels]: its outputs
        gates   float32 [layers, slots, drafts, 2, value_heads]: decay and beta
        due     int32 [slots]: accepted drafts that this step applies; passed between a layer's kernels
    """

    held: Tensor
    inputs: Tensor
    mixed: Tensor
    gates: Tensor
    due: Tensor

    def of(self, layer: int) -> Pending:
        """Return the tensors of one layer."""
        return Pending(self.held[layer], self.inputs[layer], self.mixed[layer], self.gates[layer], self.due)


class StatePool:
    """The states of every layer with linear attention, as many as `linear.layers`.

        entries   | slots 0 ... rows | zeros | checkpoints 1 ... C |

    A slot's entry begins as a checkpoint's copy and is written in every step. Checkpoint 0 is the state
    before the first token, slot 0 the dump of padded rows.

        conv    [layers, entries, channels, kernel - 1]: the last inputs of the convolution, oldest first
        memory  float32 [layers, entries, value_heads, key_dim, value_dim]
        saves   int32 [slots, MOST_SAVES, 2]: a number of tokens, 0 for none, and the entry that takes the
                slot's state behind so many
        pending None where rows have no drafts

    The kernels of a step read `saves`, so that a graph can hold them. Numbers that a slot has passed stay.

    Owner: launch thread.
    """

    def __init__(
        self,
        linear: LinearSpec,
        slots: int,
        checkpoints: int,
        dtype: torch.dtype,
        device: torch.device,
        drafts: int = 0,
    ) -> None:
        """Allocate for rows with up to `drafts` drafts."""
        layers, entries = len(linear.layers), slots + 1 + checkpoints
        self.device = device
        self.first = slots
        """Entry of checkpoint 0."""
        self.conv = zeros((layers, entries, linear.channels, linear.kernel - 1), dtype, device)
        shape = (layers, entries, linear.value_heads, linear.key_dim, linear.value_dim)
        self.memory = zeros(shape, torch.float32, device)
        self.saves = torch.zeros(slots, MOST_SAVES, 2, dtype=torch.int32, device=device)
        self.pending: Pending | None = None
        if drafts:
            each = (layers, slots, drafts)
            self.pending = Pending(
                torch.zeros(layers, slots, dtype=torch.int32, device=device),
                zeros((*each, linear.channels), dtype, device),
                zeros((*each, linear.channels), dtype, device),
                zeros((*each, 2, linear.value_heads), torch.float32, device),
                torch.zeros(slots, dtype=torch.int32, device=device),
            )

    def prepare(self, plan: StepPlan) -> None:
        """Launch the copies that a plan needs before its step; usually there are none."""
        if not plan.new_slots and not plan.saves:
            return
        rows: dict[int, list[tuple[int, int]]] = {new.slot: [] for new in plan.new_slots}
        for save in plan.saves:
            rows.setdefault(save.slot, []).append((save.tokens, self.first + save.checkpoint))
        found = np.zeros((len(rows), MOST_SAVES, 2), np.int32)
        for at, saves in enumerate(rows.values()):
            found[at, : len(saves)] = np.array(saves, np.int32).reshape(-1, 2)
        self.saves.index_copy_(0, self._indices(list(rows)), upload(found, self.device))
        if plan.new_slots:
            slots = self._indices([new.slot for new in plan.new_slots])
            begin = self._indices([self.first + new.checkpoint for new in plan.new_slots])
            for each in (self.conv, self.memory):
                each.index_copy_(1, slots, each.index_select(1, begin))

    def _indices(self, numbers: list[int]) -> Tensor:
        return upload(np.array(numbers, np.int64), self.device)

    @staticmethod
    def entry_bytes(linear: LinearSpec | None, dtype: torch.dtype) -> int:
        """Bytes of one entry across all layers; 0 of a model without."""
        if linear is None:
            return 0
        conv = linear.channels * (linear.kernel - 1) * dtype.itemsize
        return len(linear.layers) * (conv + 4 * linear.value_heads * linear.key_dim * linear.value_dim)

    @staticmethod
    def pending_bytes(linear: LinearSpec, drafts: int, dtype: torch.dtype) -> int:
        """Return the bytes of a slot's `drafts` across all layers."""
        return len(linear.layers) * drafts * 2 * (linear.channels * dtype.itemsize + 4 * linear.value_heads)
