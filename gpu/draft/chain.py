"""Drafts one after the other on the device: EAGLE, EAGLE-3, a small model of the same vocabulary.

    follow    the step's tokens ─► one forward of the draft: its KV, and the states of each row's last token
    propose   states ─► draft 1 ─► forward ─► draft 2 ─► forward ─► ...   a forward less than drafts

A draft model's KV lies in pages of the target's numbers. EAGLE's entry at position p is made of the target's
hidden state at p and of the token at p + 1, which the step that computes p has chosen; a page that two texts
share may hold another text's token at its last position, which costs the draft a little and no text anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gpu.context import ForwardContext
from gpu.draft.drafter import StepOutcome
from gpu.draft.model import AnyDraftModel, DraftMachine, ModelDrafter
from gpu.models.base import CausalModel
from gpu.state.tables import SlotTables


@runtime_checkable
class Chain(AnyDraftModel, Protocol):
    """A draft model that makes one token after the other: `gpu.models.draft.ChainModel`, or a small model.

    width, dtype  of the hidden states that it reads and makes
    shifted       whether a position's entry is made of the token behind it
    """

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shifted(self) -> bool: ...

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states for `logits` and for the next call, of tokens `ids` [n] and `hidden` [n, width]."""
        ...


class ChainDrafter(ModelDrafter[Chain]):
    """`gpu.draft.drafter.Drafter` over a `Chain`."""

    def __init__(
        self,
        load: Callable[[CausalModel], Chain],
        machine: DraftMachine,
        tables: SlotTables,
        aux: tuple[int, ...] | None,
        samples: int,
    ) -> None:
        """See `ModelDrafter`; steps have up to `samples` samples."""
        super().__init__(load, machine, tables, aux, tables.slots)
        self._samples = samples
        self._states: tuple[Tensor, Tensor] | None = None

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`."""
        super().use_model(target)
        self._states = None
        if target is None:
            return
        model, device = self._ready(), self._tables.words.device
        made, ahead = (
            torch.zeros(self._samples, model.width, dtype=model.dtype, device=device) for _ in range(2)
        )
        self._states = made, ahead

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`."""
        view, samples, model = outcome.view, outcome.samples, self._ready()
        count = len(samples.rows)
        ids = view.ids
        if model.shifted:
            # Each token's successor; behind a row's last token the one that was chosen there.
            ids = torch.cat([ids[1:], ids.new_zeros(2)])
            at = torch.arange(count, device=ids.device)
            rows = torch.where(at < outcome.live, samples.rows, view.tokens)
            ids.index_copy_(0, rows.long(), outcome.chosen[:count].clamp(min=0).to(ids.dtype))
            ids = ids[: view.tokens]
        ctx = self._context(view)
        hidden = model.fuse(outcome.aux[: view.tokens], ctx.ops) if outcome.aux is not None else ids
        states = model.forward(ctx, ids, hidden)
        accepted = self._tables.length[samples.slots.long()] + 1 - samples.positions
        last = (samples.rows + accepted - 1).clamp(0, view.tokens - 1).long()
        assert self._states is not None
        for out, found in zip(self._states, states, strict=True):
            torch.index_select(found, 0, last, out=out[:count])

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        tables, model = self._tables, self._ready()
        assert self._states is not None
        most, row = tables.most_drafts, self._rows(outcome, rows)
        position, hidden = row.lengths, self._states[1][:rows]
        made = list[Tensor]()
        if model.shifted:
            made.append(ids := self._draw(self._states[0][:rows], row, position + 1))
        else:
            ids = tables.last_token[row.slots]
        while len(made) < most:
            view = self._view(row, ids, position)
            states, hidden = model.forward(self._context(view), view.ids, hidden)
            position = position + 1
            made.append(ids := self._draw(states, row, position + model.shifted))
        count = (row.ends - row.lengths + model.shifted).clamp(0, most)
        count = torch.where(row.slots > 0, count, 0)
        tables.drafts[row.slots] = torch.stack([count, *made], 1).to(torch.int32)
