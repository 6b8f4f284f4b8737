"""Drafts of a whole block in one forward: DFlash.

    follow    the target's states of the step's tokens ─► K and V of each layer of the draft, in its pages
    propose   last token, masks ─► one forward behind that context ─► a draft from each mask's states

The states of the mask at a position are for the token of that position; those of the last token are for none.

A block's own K and V lie where those of its row's next tokens will: attention reads them in the forward that
wrote them, and what a step computes is stored over them before a later block calls it context.
"""

from __future__ import annotations

from gpu.draft.drafter import StepOutcome
from gpu.draft.model import ModelDrafter
from gpu.models.base import CausalModel
from gpu.models.draft import BlockModel
from gpu.state.draft_rows import Block, DraftRows


class BlockDrafter(ModelDrafter[BlockModel]):
    """`gpu.draft.drafter.Drafter` over a `BlockModel`. A forward has at most as many tokens as a step
    samples, or one row's: the blocks of more rows run one batch after the other."""

    def use_model(self, target: CausalModel | None) -> None:
        """See `Drafter.use_model`."""
        super().use_model(target)
        if target is None:
            return
        spec = self._ready().spec
        block = Block(min(spec.block_size, 1 + self._tables.most_drafts), spec.mask_token, spec.causal)
        if block != (old := self._rows).block:
            self._rows = DraftRows.of(self._tables, block)._replace(page_size=old.page_size)

    def follow(self, outcome: StepOutcome) -> None:
        """See `Drafter.follow`."""
        model, machine = self._ready(), self._machine
        view, samples, live, chosen, aux = outcome
        assert aux is not None, "a block reads its target's states"
        row = self._rows.first(min(len(samples.rows), self._tables.slots - 1))
        view, _ = machine.kernels.follow(view, samples, live, chosen, row, None, pdl=machine.pdl)
        ctx = self._context(view)
        model.store(ctx, model.fuse(aux[: view.tokens], ctx.ops))

    def propose(self, outcome: StepOutcome, rows: int) -> None:
        """See `Drafter.propose`."""
        model, kernels, pdl = self._ready(), self._machine.kernels, self._machine.pdl
        tokens = self._rows.block.tokens
        most = max(self._samples // tokens, 1)
        for first in range(0, rows, most):
            count = min(most, rows - first)
            row = self._rows.first(count)
            kernels.start(outcome.view, outcome.samples, row, first, pdl=pdl)
            hidden = model.forward(self._context(row.view), row.view.ids)
            masks = hidden.view(count, tokens, -1)[:, 1:].flatten(0, 1)
            kernels.draw(model.logits(masks), model.token_ids, row, 0, pdl=pdl)
