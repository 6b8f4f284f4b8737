"""The tensors behind every view: one set, and each graph sees the first of each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.state.tables import SlotTables
from gpu.state.view import StepView


class Samples(NamedTuple):
    """Which tokens are chosen, int32 [s] each: row of the step, slot, position of the token to choose."""

    rows: Tensor
    slots: Tensor
    positions: Tensor

    def first(self, count: int) -> Samples:
        """The first `count` of each."""
        return Samples(*(each[:count] for each in self))


class StepBuffers:
    """For steps of up to `tokens` tokens, `rows` samples and `chunks` chunks.

    Owner: launch thread; the kernels of a step write them, and the next step's write over them.
    """

    __slots__ = ("_at", "_chunks", "_counts", "_rows", "_table", "_tokens", "picked", "samples")

    def __init__(
        self,
        tables: SlotTables,
        tokens: int,
        rows: int,
        chunks: int,
        hidden: tuple[int, torch.dtype],
    ) -> None:
        """`hidden` is width and dtype of what the model leaves per token."""
        device = tables.page_table.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._table = tables.page_table
        self._counts, self._at = ints(4), ints(1)
        self._tokens = ints(3, tokens)
        self._rows = ints(2, rows)
        self._chunks = ints(2, chunks), ints(chunks + 1)
        self.samples = Samples(ints(rows), ints(rows), ints(rows))
        self.picked = torch.zeros(rows, hidden[0], dtype=hidden[1], device=device)

    def view(self, tokens: int, mixed: bool, shared: bool = False, deep: bool = False) -> StepView:
        """What a graph of `tokens` padded tokens reads; one that is not `mixed` holds decode rows only, one
        that is `shared` attends apart to the keys that these have in common. `deep`: see `StepView`."""
        decode = min(tokens, self._rows.shape[1])
        chunks = len(self._chunks[1]) - 1 if mixed else 0
        ids, positions, mapping = self._tokens[:, :tokens]
        slots, lengths = self._rows[:, :decode]
        (chunk_slots, chunk_starts), firsts = self._chunks[0][:, :chunks], self._chunks[1][: chunks + 1]
        return StepView(
            tokens, decode, chunks, self._counts, ids, positions, mapping, self._table, slots, lengths,
            chunk_slots, chunk_starts, firsts, self._at, shared, deep,
        )  # fmt: skip

    @property
    def num_samples(self) -> Tensor:
        """int32 [1] on the device."""
        return self._counts[3:4]
