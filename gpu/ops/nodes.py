"""Operations of a GPU rank whose peers are in other processes: all-reduces run between kernels."""

from __future__ import annotations

from torch import Tensor

from gpu.ops.base import Part
from gpu.ops.fused import TritonOps
from gpu.ops.ranks import RankOps
from gpu.ranks import Rank


class NodeOps(RankOps):
    """`Ops` of a rank's part of a model. Owner: launch thread, for one step."""

    def __init__(self, own: TritonOps, rank: Rank, vocab: int) -> None:
        """As `TableOps`."""
        super().__init__(own, rank, vocab)
        self._kernels = own

    def for_samples(self) -> NodeOps:
        """See `Ops.for_samples`."""
        return NodeOps(self._kernels.for_samples(), self._rank, self._vocab)

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`: `part` is a partial sum, which experts leave pending."""
        total = None if part is None else self._kernels.complete(part)
        return super().add_rms_norm(total, residual, weight, eps, keep)

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops.add_normed`: `part` as for `add_rms_norm`."""
        super().add_normed(self._kernels.complete(part), residual, weight, eps)
