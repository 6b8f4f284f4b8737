"""Drafts one after the other on the device: EAGLE, EAGLE-3, MTP, a small model of the same vocabulary.

    follow    the step's tokens ─► one forward of the draft: its KV, and the states of each row's last token
    propose   states ─► draft 1 ─► forward ─► draft 2 ─► forward ─► ...   a forward less than drafts

A draft model's KV lies in pages of the target's numbers. The entry at position p of EAGLE and MTP is made of
the target's hidden state at p and of the token at p + 1, which the step that computes p has chosen; a page
that two texts share may hold another text's token at its last position, which costs the draft a little and no
text anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from core.plan import StepPlan
from gpu.context import ForwardContext
from gpu.draft.drafter import StepOutcome
from gpu.draft.model import AnyDraftModel, DraftMachine, ModelDrafter
from gpu.draft.successors import Successors
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
        """See `ModelDrafter`."""
        super().__init__(load, machine, tables, aux, samples)
        self._kept = min(samples, tables.slots - 1)
        self._states: tuple[Tensor, Tensor] | None = None
        self._successors = Successors(tables.slots, tables.words.device)

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`."""
        super().use_model(target)
        if target is None:
            self._states = None
        if target is None or self._states is not None:
            return
        model = self._ready()
        self._rows = self._rows._replace(shifted=model.shifted)
        shape, device = (self._kept, model.width), target.embedding.device
        states, ahead = (torch.zeros(shape, dtype=model.dtype, device=device) for _ in range(2))
        self._states = states, ahead

    def prepare(self, plan: StepPlan) -> None:
        """See `Drafter.prepare`: a new slot's cached tokens have the draft's KV in the same pages."""
        self._successors.prepare(plan)

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`. Behind the last layer's attention only the rows' last tokens go on."""
        model, kernels, pdl = self._ready(), self._machine.kernels, self._machine.pdl
        view, samples, live, chosen, aux = outcome
        row = self._rows.first(min(len(samples.rows), self._kept))
        behind = self._successors.behind(view)
        view, last = kernels.follow(view, samples, live, chosen, row, behind, pdl=pdl)
        ctx = self._context(view)
        wanted = last if view.max_chunks and len(last) else None
        hidden = view.ids if aux is None else model.fuse(aux[: view.tokens], ctx.ops)
        states = model.forward(ctx._replace(wanted=wanted), view.ids, hidden)
        if len(last):
            assert self._states is not None
            kernels.keep(states, last if wanted is None else None, self._states, pdl=pdl)

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        model, kernels, pdl = self._ready(), self._machine.kernels, self._machine.pdl
        assert self._states is not None
        row, (states, hidden) = self._rows.first(rows), (each[:rows] for each in self._states)
        kernels.start(outcome.view, outcome.samples, row, pdl=pdl)
        for made in range(self._tables.most_drafts):
            if made or not model.shifted:
                states, hidden = model.forward(self._context(row.view), row.view.ids, hidden)
            kernels.draw(model.logits(states), model.token_ids, row, made, pdl=pdl)
