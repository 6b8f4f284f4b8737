"""The tensors behind every view: one set, and each graph sees the first of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.sample.rows import Queries
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import ChunkRow, StepView
from gpu.step.steps import Forward


class Samples(NamedTuple):
    """Which tokens are chosen, int32 [s] each: row of the step, slot, position of the token to choose.
    `firsts` and `num_rows`, as in `gpu.sample.rows.Queries`, are written where rows may have drafts."""

    rows: Tensor
    slots: Tensor
    positions: Tensor
    firsts: Tensor
    num_rows: Tensor

    def first(self, count: int) -> Samples:
        """The first `count` samples."""
        rows, slots, positions = (each[:count] for each in self[:3])
        return self._replace(rows=rows, slots=slots, positions=positions)


class HiddenShape(NamedTuple):
    """Width and dtype of the hidden state that the model leaves per token."""

    width: int
    dtype: torch.dtype


class StepBuffers:
    """For steps of up to `limits` tokens, samples, rows and chunks.

    Owner: launch thread; the kernels of a step write them, and the next step's write over them.
    """

    def __init__(
        self,
        tables: SlotTables,
        limits: Limits,
        hidden: HiddenShape,
    ) -> None:
        device = tables.page_table.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._table = tables.page_table
        samples, chunks = limits.samples, limits.chunks
        self._counts, self._at = ints(4), ints(1)
        self._tokens = ints(3, limits.tokens)
        self._rows = ints(2, samples)
        self._chunks = ints(2, chunks), ints(chunks + 1)
        self.samples = Samples(ints(samples), ints(samples), ints(samples), ints(limits.rows + 1), ints(1))
        self.sample_hidden = torch.zeros(samples, hidden.width, dtype=hidden.dtype, device=device)

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

    @property
    def queries(self) -> Queries:
        """Of the step whose view was taken last."""
        return Queries(self.samples.firsts, self.samples.num_rows, self._tokens[0])
