"""The tensors behind every view: one set, and each graph sees the first of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.context import AuxStates, Tail
from gpu.lora import StepAdapters, empty_rows, rows_of_one
from gpu.sample.rows import DraftSamples, Paths, Rows
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import ChunkRow, StepView
from gpu.step.steps import Forward

TAIL_TOKENS = 2048
"""Padded tokens up to which a step's hidden states may all be wanted without a plain launch of its forward.
For an 8B on an H200 a step of 64 rows and one prompt of 500 tokens takes 18 ms as a graph, and 45 to 55
launched plainly. Kernels of more tokens than these take longer than their launches."""


class Samples(NamedTuple):
    """Which tokens are chosen, int32 [s] each: row of the step, slot, position of the token to choose.
    `drafts` is written where slots may have any."""

    rows: Tensor
    slots: Tensor
    positions: Tensor
    drafts: DraftSamples

    def first(self, count: int) -> Samples:
        """The first `count` samples."""
        rows, slots, positions = (each[:count] for each in self[:3])
        return self._replace(rows=rows, slots=slots, positions=positions)


class HiddenShape(NamedTuple):
    """Width and dtype of the hidden state that the model leaves per token."""

    width: int
    dtype: torch.dtype


class StepBuffers:
    """Buffers for steps of up to `limits` tokens, samples, rows and chunks.

    Owner: launch thread; the kernels of a step write them, and the next step's write over them.
    """

    def __init__(self, tables: SlotTables, limits: Limits, hidden: HiddenShape, places: int = 0) -> None:
        """`places` for adapters that rows may have."""
        device = tables.page_table.device

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._tables = tables
        samples, chunks = limits.samples, limits.chunks
        self._counts, self._at = ints(4), ints(1)
        self._tokens = ints(3, limits.tokens)
        self._rows = ints(2, samples)
        self._chunks = ints(2, chunks), ints(chunks + 1)
        drafts = DraftSamples(ints(1), ints(limits.rows + 1), ints(1))
        self.samples = Samples(ints(samples), ints(samples), ints(samples), drafts)
        self.paths: Paths | None = None
        if tables.ancestors is not None:
            self.paths = Paths(self.samples.rows, ints(samples), ints(samples))
        self._hidden = hidden
        self.aux: AuxStates | None = None
        """Where a forward keeps the hidden states that a draft model reads, if there is one."""
        self._adapters: StepAdapters | None = None
        if places:
            rows = [empty_rows(count, places, device) for count in (limits.tokens, samples)]
            self._adapters = StepAdapters(*rows)
        self.sample_hidden = torch.zeros(samples, hidden.width, dtype=hidden.dtype, device=device)
        self.tail: Tail | None = None
        """Inputs of `CausalModel.finish`, which forwards with chunks and up to `TAIL_TOKENS` tokens fill."""

    def keep_aux(self, layers: tuple[int, ...] | None, tokens: int) -> None:
        """Make room for the hidden states of `layers`, or for the last ones, of every token of a step."""
        if layers is not None:
            width, dtype = self._hidden
            shape = tokens, max(len(layers), 1) * width
            self.aux = AuxStates(layers, torch.zeros(shape, dtype=dtype, device=self._at.device))

    def keep_tail(self, widths: Sequence[int]) -> None:
        """Allocate `tail`; `widths` are `CausalModel.tail_widths`."""
        tokens, dtype = min(TAIL_TOKENS, self._tokens.shape[1]), self._hidden.dtype
        self.tail = tuple(torch.zeros(tokens, n, dtype=dtype, device=self._at.device) for n in widths)

    def tail_of(self, key: Forward) -> Tail | None:
        """Return the part of `tail` that a forward fills; None if it has no chunks or too many tokens."""
        if self.tail is None or not key.chunks or key.tokens > len(self.tail[0]):
            return None
        return tuple(each[: key.tokens] for each in self.tail)

    def view(self, key: Forward, placed: tuple[ChunkRow, ...] = ()) -> StepView:
        """The inputs of a forward of these sizes."""
        ids, positions, mapping = self._tokens[:, : key.tokens]
        slots, lengths = self._rows[:, : key.decode]
        chunk_slots, chunk_starts = self._chunks[0][:, : key.chunks]
        adapters = None
        if key.adapters and self._adapters is not None:
            tokens, samples = self._adapters
            adapters = StepAdapters(tokens.first(key.tokens), samples.first(key.samples))
        return StepView(
            key.tokens, key.decode, key.chunks, self._counts, ids, positions, mapping,
            self._tables.page_table, slots, lengths, chunk_slots, chunk_starts,
            self._chunks[1][: key.chunks + 1], self._at, key.shared, key.deep, key.query, placed,
            None if self.paths is None else self.paths.ancestors[: key.decode],
            adapters,
        )  # fmt: skip

    def slot_view(self, slot: int, count: int) -> StepView:
        """A view of no tokens whose samples are `count` of one slot."""
        view = self.view(Forward(0, 0, 0, 0))
        if self._adapters is None:
            return view
        place, places = self._tables.place[slot : slot + 1], len(self._adapters.samples.starts) - 1
        rows = rows_of_one(place, count, places)
        return view._replace(adapters=StepAdapters(rows, rows))

    def begun(self) -> tuple[Tensor, Tensor]:
        """Ids and positions int32 [2, tokens] of a step's tokens, and their `StepView.kv_slot_mapping`."""
        return self._tokens[:2], self._tokens[2]

    @property
    def num_decode(self) -> Tensor:
        """int32 [1] on the device: tokens of decode rows."""
        return self._counts[1:2]

    @property
    def behind(self) -> tuple[Tensor, Tensor | None]:
        """`before` and `moved` of `PackedRows`."""
        return self.samples.drafts.before, None if self.paths is None else self.paths.moved

    @property
    def rows(self) -> Rows:
        """All samples, as the sampling stage sees them."""
        _, slots, positions, drafts = self.samples
        return Rows(slots, positions, self._counts[3:4], self._tables, drafts, self.paths)
