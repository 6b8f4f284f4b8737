"""Hidden states that requests want back, and nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.plan import Chunk, NewSlot, StepPlan
from gpu.inputs import ChunkRow, StepInputs
from gpu.models.base import CausalModel


class HiddenRows:
    """Who wants what. Owner: launch thread."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: set[int] = set()
        """Slots whose decode rows give theirs."""

    def apply(self, new_slots: Sequence[NewSlot]) -> None:
        """Take over what new slots ask for. Before `take`."""
        for new in new_slots:
            if new.params.hidden == "all":
                self._all.add(new.slot)
            else:
                self._all.discard(new.slot)

    def wants(self, plan: StepPlan) -> bool:
        """Whether `take` would find anything."""
        return any(chunk.hidden != "none" for chunk in plan.chunks) or (
            bool(self._all) and not self._all.isdisjoint(plan.decode_slots.tolist())
        )

    def take(
        self, model: CausalModel, hidden: torch.Tensor, plan: StepPlan, rows: Sequence[ChunkRow]
    ) -> dict[int, torch.Tensor]:
        """Slot to float32 [n, width], on the device and nobody else's; `hidden` [n, hidden] is the step's,
        and `rows` say where in it the chunks lie."""
        found: dict[int, torch.Tensor] = {}
        if self._all:
            for row, slot in enumerate(plan.decode_slots.tolist()):
                if slot in self._all:
                    found[slot] = _copy(hidden[row : row + 1])
        for chunk, at in zip(plan.chunks, rows, strict=True):
            if chunk.hidden != "none":
                found[chunk.slot] = _of_chunk(model, hidden, chunk, at)
        return found


def _of_chunk(model: CausalModel, hidden: torch.Tensor, chunk: Chunk, at: ChunkRow) -> torch.Tensor:
    rows = hidden[at.first : at.first + at.tokens]
    match chunk.hidden:
        case "first":
            return _answer(model, rows[:1])
        case "last":
            return _answer(model, rows[-1:])
    rows = rows[max(chunk.hidden_start - chunk.start, 0) :]
    return rows.sum(0, keepdim=True, dtype=torch.float32) if chunk.hidden == "sum" else _copy(rows)


def _answer(model: CausalModel, row: torch.Tensor) -> torch.Tensor:
    """The hidden state itself, or what the model's head says of it."""
    return model.logits(row) if model.spec.task == "classify" else _copy(row)


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """The step's own memory may be the next one's."""
    return rows.to(torch.float32, copy=True)


def segments(plan: StepPlan, inputs: StepInputs) -> torch.Tensor | None:
    """int64 [n]: 1 for the second text of a pair; None where no chunk has two."""
    if not any(chunk.pair for chunk in plan.chunks):
        return None
    found = torch.zeros_like(inputs.ids)
    for chunk, at in zip(plan.chunks, inputs.chunks, strict=True):
        if chunk.pair:
            found[at.first + chunk.pair - chunk.start : at.first + at.tokens] = 1
    return found
