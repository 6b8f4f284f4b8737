"""A rank's part of a model, as the runner and drafters see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu.context import ForwardContext, Tail
from gpu.models.base import CausalModel
from gpu.ops.base import Ops
from gpu.ranks import Rank


class RankModel(CausalModel):
    """A decoder divided among ranks, with logits of the whole vocabulary. `embedding` is the rank's part."""

    def __init__(self, own: CausalModel, rank: Rank) -> None:
        self.spec, self.embedding, self._parameters = own.spec, own.embedding, own._parameters
        self._own, self._rank = own, rank

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.forward`. All ranks have the same hidden states."""
        return self._own.forward(ctx, ids)

    @property
    def tail_widths(self) -> Sequence[int]:
        """See `CausalModel.tail_widths`."""
        return self._own.tail_widths

    def finish(self, ctx: ForwardContext, tail: Tail) -> torch.Tensor:
        """See `CausalModel.finish`."""
        return self._own.finish(ctx, tail)

    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """See `CausalModel.logits`. A classifier's head is not divided."""
        own = self._own.logits(hidden, ops)
        if self.spec.task != "generate":
            return own
        return self._rank.gather(own)[:, : self.spec.vocab_size].contiguous()
