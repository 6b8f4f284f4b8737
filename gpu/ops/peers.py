"""The operations of a rank that is one of several GPUs: sums over ranks in the kernels of the norms."""

from __future__ import annotations

from torch import Tensor

from gpu.lora import LoraMatrix
from gpu.ops.base import Part
from gpu.ops.fused import IN_MEMORY, TritonOps
from gpu.ops.ranks import RankOps
from gpu.peers import PeerRank
from gpu.quant.rows import Table


class PeerOps(RankOps):
    """`Ops` of a rank's part of a model. Owner: launch thread, for one step."""

    def __init__(self, own: TritonOps, rank: PeerRank, vocab: int) -> None:
        """See `TableOps`."""
        super().__init__(own, rank, vocab)
        self._kernels, self._peer = own, rank

    def for_samples(self) -> PeerOps:
        """See `Ops.for_samples`."""
        return PeerOps(self._kernels.for_samples(), self._peer, self._vocab)

    def embed(self, table: Table, ids: Tensor, lora: LoraMatrix | None = None) -> Tensor:
        """See `Ops.embed`: one launch where no adapter changes the table."""
        own = self._kernels
        if len(table) >= self._vocab or (lora is not None and own.adapts):
            return super().embed(table, ids, lora)
        assert isinstance(table, Tensor), IN_MEMORY
        return self._peer.embed(table, ids, own.num_rows, own.pdl)

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`: `part` is a partial sum."""
        own = self._kernels
        if part is None:
            return own.add_rms_norm(None, residual, weight, eps, keep)
        total = own.complete(part)
        return self._peer.add_rms_norm(total, residual, (weight, eps), keep, own.num_rows, own.pdl)

    def _sum(self, part: Tensor) -> Tensor:
        return self._peer.reduce_sum(part, self._kernels.num_rows, self._kernels.pdl)
