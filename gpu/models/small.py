"""A small model of the target's vocabulary that drafts for it."""

from __future__ import annotations

from torch import Tensor

from gpu.context import ForwardContext
from gpu.models.base import CausalModel
from gpu.ops.base import Ops


class SmallModel:
    """`gpu.draft.chain.Chain` over a language model of its own, which reads nothing of its target."""

    token_ids = None
    shifted = False

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.width, self.dtype = model.spec.hidden, model.embedding.dtype

    def retarget(self, target: CausalModel) -> None:
        """See `gpu.models.draft.DraftModel.retarget`: it reads nothing of its target."""

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """See `Chain.fuse`."""
        return aux

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Chain.forward`."""
        made = self._model.forward(ctx, ids)
        return made, made

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Chain.logits`."""
        return self._model.logits(hidden)
