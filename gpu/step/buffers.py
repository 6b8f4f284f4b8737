"""The tensors behind every view: one set, and each graph sees the first of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.state.tables import SlotTables
from gpu.state.view import ChunkRow, StepView
from gpu.step.steps import Forward


class Samples(NamedTuple):
    """Which tokens are chosen, int32 [s] each: row of the step, slot, position of the token to choose."""

    rows: Tensor
    slots: Tensor
    positions: Tensor

    def first(self, count: int) -> Samples:
        """The first `count` of each."""
        return Samples(*(each[:count] for each in self))


class HiddenShape(NamedTuple):
    """Width and dtype of the hidden state that the model leaves per token."""

    width: int
    dtype: torch.dtype


class StepBuffers:
    """For steps of up to `tokens` tokens, `rows` samples and `chunks` chunks.

    Owner: launch thread; the kernels of a step write them, and the next step's write over them.
    """

    __slots__ = ("_at", "_chunks", "_counts", "_rows", "_table", "_tokens", "sample_hidden", "samples")

    def __init__(
        self,
        tables: SlotTables,
        tokens: int,
        rows: int,
        chunks: int,
        hidden: HiddenShape,
    ) -> None:
        device = tables.page_table.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._table = tables.page_table
        self._counts, self._at = ints(4), ints(1)
        self._tokens = ints(3, tokens)
        self._rows = ints(2, rows)
        self._chunks = ints(2, chunks), ints(chunks + 1)
        self.samples = Samples(ints(rows), ints(rows), ints(rows))
        self.sample_hidden = torch.zeros(rows, hidden.width, dtype=hidden.dtype, device=device)

    def view(self, key: Forward, placed: tuple[ChunkRow, ...] = ()) -> StepView:
        """The inputs of a forward of these sizes."""
        ids, positions, mapping = self._tokens[:, : key.tokens]
        slots, lengths = self._rows[:, : key.decode]
        chunk_slots, chunk_starts = self._chunks[0][:, : key.chunks]
        return StepView(
            key.tokens, key.decode, key.chunks, self._counts, ids, positions, mapping, self._table, slots,
            lengths, chunk_slots, chunk_starts, self._chunks[1][: key.chunks + 1], self._at, key.shared,
            key.deep, placed,
        )  # fmt: skip

    @property
    def num_samples(self) -> Tensor:
        """int32 [1] on the device."""
        return self._counts[3:4]
