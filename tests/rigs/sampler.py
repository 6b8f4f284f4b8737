"""The sampling stage alone: from logits to tokens in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.plan import NewSlot, RowLogprobs, StepPlan
from core.types import NO_TOKENS
from gpu.grammar.matchers import Masks
from gpu.sample import torch_kernels
from gpu.sample.kernels import SamplingKernels
from gpu.sample.processors import Processor
from gpu.sample.rows import Rows, RowTokens
from gpu.state.entry import NEW, Limits
from gpu.state.tables import COLUMNS, SlotTables
from gpu.step.graphs import Work
from gpu.step.rings import Entries, Rings
from gpu.step.sampling import Key, SamplingDevice, SamplingStage


class Sampled(NamedTuple):
    """`tokens` int64 [n], -1 where a row's logits were not finite; `logprobs` by row, for rows that requested
    them and have a token; `failed`: errors of logit processors by row."""

    tokens: Tensor
    logprobs: dict[int, RowLogprobs]
    failed: Mapping[int, str]


class Sampler:
    """Owner: launch thread."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        processors: Mapping[str, Processor] = MappingProxyType({}),
        kernels: SamplingKernels = torch_kernels,
        slots: int | None = None,
    ) -> None:
        """`processors` by name. For `max_rows` samples at once, of `slots` slots: as many if that is None."""
        self._tables = SlotTables(max_rows if slots is None else slots, 1, device)
        slots, positions, count = (
            torch.zeros(n, dtype=torch.int32, device=device) for n in (max_rows, max_rows, 1)
        )
        self._rows = Rows(slots, positions, count, self._tables)
        self._rings = Rings(Entries(Limits(max_rows, 0, 0, 8192, 1, max_rows), 1, device), device)
        self._logits = torch.zeros(0, vocab_size)
        sampling_device = SamplingDevice(self._rows, self._rings, kernels)
        self.stage = SamplingStage(sampling_device, vocab_size, self._head, processors)

    def _head(self, rows: int, adapters: bool) -> Tensor:
        return self._logits

    def __getitem__(self, key: Key) -> Work:
        """An uncaptured launch."""
        return self.stage.work(key)

    def apply(self, new_slots: Sequence[NewSlot]) -> None:
        """Initialise slots; no state of earlier requests remains."""
        if new_slots:
            plan = StepPlan(0, NO_TOKENS, new_slots=tuple(new_slots))
            self.stage.prepare(plan, self._rings.write(plan))
            self._take_new()

    def _take_new(self) -> None:
        """Copy the new slots of the ring entry into the tables, as the first kernel of a step does."""
        at, entry = self._rings.entries.at.new, self._rings.entries.words[0].numpy()
        records = entry[at : at + int(entry[4]) * NEW].reshape(-1, NEW).copy()
        slots = torch.from_numpy(records[:, 0]).long()
        for column in COLUMNS:
            first = 1 + column.row
            words = torch.from_numpy(records[:, first : first + column.width].copy())
            table = self._tables.columns[column.row]
            table[slots] = words.view(column.dtype)[:, 0].to(table.device)

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, masks: Masks | None = None) -> Sampled:
        """Choose a token per row: `logits` float32 [n, vocab]; `slots`, `positions` int64 [n], a position
        being that of the token to choose.

        A row has no token (-1) if a logit is NaN or plus infinity or all are minus infinity, also
        when processor, bias, mask or penalties made it so. Sampled tokens are counted for penalised slots.
        """
        count = len(slots)
        self._logits = logits
        self._rows.slots[:count], self._rows.positions[:count] = slots.int(), positions.int()
        self._rows.live.fill_(count)
        sampled = self.stage.launch(StepPlan(0, slots.numpy().astype(np.int32)), count, masks, self)
        tokens = self._rings.answers[0, :count].numpy().copy()
        sampled.processed.accept(tokens)
        return Sampled(
            torch.from_numpy(tokens).long(), sampled.read(RowTokens(tokens)), sampled.processed.failed
        )
