"""Hidden states and experts that requests ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core.models import ModelSpec
from core.plan import Chunk, NewSlot, StepPlan
from core.types import Floats, Ints, frozen
from gpu.models.base import CausalModel
from gpu.state.view import ChunkRow, PackedRows
from gpu.transfer import download


class StepExtras(NamedTuple):
    """What a step returns besides tokens, by slot, on its way to the host: hidden states float32 [n,
    width], and the experts chosen, int32 [n, layers, experts per token]. `rows` are the rows of slots that
    decode: of these it is that of drafts too, accepted or not."""

    hidden: Mapping[int, torch.Tensor]
    experts: Mapping[int, torch.Tensor]
    rows: Mapping[int, int]

    def read(self, counts: Ints | None) -> tuple[dict[int, Floats], dict[int, Ints]]:
        """Hidden states and experts, read-only, once the step has ended; `counts` int32 [rows] are the tokens
        that each row has accepted, None: one each."""

        def accepted(slot: int, found: torch.Tensor) -> Any:
            row = self.rows.get(slot)
            return frozen(found.numpy()[: None if row is None or counts is None else counts[row]])

        hidden: dict[int, Floats] = {slot: accepted(slot, rows) for slot, rows in self.hidden.items()}
        experts: dict[int, Ints] = {slot: accepted(slot, rows) for slot, rows in self.experts.items()}
        return hidden, experts


NO_EXTRAS = StepExtras({}, {}, {})


class HiddenRows:
    """Which slots want hidden states or experts. Owner: launch thread."""

    def __init__(self) -> None:
        self._all: set[int] = set()
        """Slots whose decode rows give theirs."""
        self._routed: set[int] = set()
        """Slots whose decode rows give their experts."""

    def apply(self, new_slots: Sequence[NewSlot]) -> None:
        """Take over what new slots ask for. Before `take`."""
        for new in new_slots:
            for slots, wanted in (
                (self._all, new.params.hidden in ("output", "all")),
                (self._routed, new.params.experts_from >= 0),
            ):
                if wanted:
                    slots.add(new.slot)
                else:
                    slots.discard(new.slot)

    def routes(self, plan: StepPlan) -> list[torch.Tensor] | None:
        """A list for the step's forward to fill, None where nobody wants to see experts."""
        wanted = any(chunk.experts for chunk in plan.chunks) or (
            bool(self._routed) and not self._routed.isdisjoint(plan.decode_slots.tolist())
        )
        return [] if wanted else None

    def wants(self, plan: StepPlan) -> bool:
        """Whether `take` would find anything."""
        return any(chunk.hidden != "none" for chunk in plan.chunks) or (
            bool(self._all) and not self._all.isdisjoint(plan.decode_slots.tolist())
        )

    def take(
        self,
        model: CausalModel,
        hidden: torch.Tensor,
        routes: Sequence[torch.Tensor] | None,
        packed: PackedRows,
    ) -> StepExtras:
        """`hidden` [n, hidden] is the step's, `routes` the list that its forward has filled, `packed` says
        whose they are."""
        decoding = packed.plan.decode_slots.tolist() if self._all or self._routed else []
        rows = {slot: row for row, slot in enumerate(decoding)}
        every = None if routes is None else _all_layers(model.spec, routes)
        states = {slot: _copy(packed.of_row(hidden, row)) for slot, row in rows.items() if slot in self._all}
        experts: dict[int, torch.Tensor] = {}
        if every is not None:
            experts = {slot: packed.of_row(every, row) for slot, row in rows.items() if slot in self._routed}
        for chunk, at in zip(packed.plan.chunks, packed.chunks, strict=True):
            if chunk.hidden != "none":
                states[chunk.slot] = _of_chunk(model, packed.of_chunk(hidden, at), chunk)
            if chunk.experts and every is not None:
                experts[chunk.slot] = packed.of_chunk(every, at)[_skipped(chunk) :]
        hidden_states, chosen = (
            {slot: download(found) for slot, found in each.items()} for each in (states, experts)
        )
        return StepExtras(hidden_states, chosen, rows)


def _all_layers(spec: ModelSpec, routes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The experts chosen in each layer, int32 [n, layers, experts per token], 0 in dense layers."""
    assert spec.moe is not None, "experts in a model without"
    every = routes[0].new_zeros(len(routes[0]), spec.layers, spec.moe.per_token, dtype=torch.int32)
    for layer, chosen in zip(sorted(spec.moe.layers), routes, strict=True):
        every[:, layer] = chosen
    return every


def _of_chunk(model: CausalModel, rows: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    match chunk.hidden:
        case "first":
            return _answer(model, rows[:1])
        case "last":
            return _answer(model, rows[-1:])
    rows = rows[_skipped(chunk) :]
    return rows.sum(0, keepdim=True, dtype=torch.float32) if chunk.hidden == "sum" else _copy(rows)


def _skipped(chunk: Chunk) -> int:
    """Tokens of a chunk whose states and experts are not owed."""
    return max(chunk.hidden_start - chunk.start, 0)


def _answer(model: CausalModel, row: torch.Tensor) -> torch.Tensor:
    """The hidden state itself, or what the model's head says of it."""
    return model.logits(row) if model.spec.task == "classify" else _copy(row)


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """The step's own memory may be the next one's."""
    return rows.to(torch.float32, copy=True)


def segments(plan: StepPlan, placed: Sequence[ChunkRow], device: torch.device) -> torch.Tensor | None:
    """int64 [n]: 1 for the second text of a pair; None where no chunk has two."""
    if not any(chunk.pair for chunk in plan.chunks):
        return None
    found = torch.zeros(plan.num_tokens, dtype=torch.int64, device=device)
    for chunk, at in zip(plan.chunks, placed, strict=True):
        if chunk.pair:
            found[at.first + chunk.pair - chunk.start : at.first + at.tokens] = 1
    return found
