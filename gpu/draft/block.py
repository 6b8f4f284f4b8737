"""Drafts of a whole block in one forward: DFlash.

    follow    the target's states of the step's tokens ─► K and V of each layer of the draft, in its pages
    propose   last token, masks ─► one forward behind that context ─► a draft from each mask's states

The states of the mask at a position are for the token of that position; those of the last token are for none.

A block's own K and V lie where those of its row's next tokens will: attention reads them in the forward that
wrote them, and what a step computes is stored over them before a later block calls it context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.draft.drafter import StepOutcome
from gpu.draft.model import DraftRows, ModelDrafter
from gpu.models.draft import BlockModel


class BlockDrafter(ModelDrafter[BlockModel]):
    """`gpu.draft.drafter.Drafter` over a `BlockModel`. A forward has at most as many tokens as are drawn at
    once, or one row's: the blocks of more rows run one batch after the other."""

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`."""
        model, machine = self._ready(), self._machine
        view, samples, live, chosen, aux = outcome
        assert aux is not None, "a block reads its target's states"
        row = self._chain.first(min(len(samples.rows), self._tables.slots - 1))
        view, _ = machine.chain.follow(view, samples, live, chosen, row, None, pdl=machine.pdl)
        ctx = self._context(view)
        model.store(ctx, model.fuse(aux[: view.tokens], ctx.ops))

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        row, most = self._rows(outcome, rows), max(self._draws // (1 + self._most()), 1)
        for first in range(0, rows, most):
            self._propose(row.part(first, first + most))

    def _propose(self, row: DraftRows) -> None:
        tables, model, most = self._tables, self._ready(), self._most()
        ids = tables.last_token.new_full((len(row.slots), 1 + most), model.spec.mask_token)
        ids[:, 0] = tables.last_token[row.slots]
        positions = row.lengths[:, None] + torch.arange(1 + most, device=ids.device)
        tokens = row.repeat(1 + most)
        view = self._view(tokens, ids.flatten(), positions.flatten())
        if not model.spec.causal:
            seen = (
                torch.minimum(tokens.lengths + 1 + most, tokens.ends) - self._chain.gaps.skipped[tokens.slots]
            )
            seen = seen.clamp(min=1)
            view = view._replace(decode_lengths=seen.to(torch.int32))
        hidden = model.forward(self._context(view), view.ids).view(*ids.shape, -1)
        drafts = self._draw(hidden[:, 1:].flatten(0, 1), row.repeat(most), positions[:, 1:].flatten())
        count = (row.ends - row.lengths - 1).clamp(0, most)
        count = torch.where(row.slots > 0, count, 0)[:, None]
        made: Tensor = torch.cat([count, drafts.view(-1, most)], 1)
        tables.drafts[row.slots, : 1 + most] = made.to(torch.int32)

    def _most(self) -> int:
        """Drafts of a row."""
        return min(self._ready().spec.block_size - 1, self._tables.most_drafts)
