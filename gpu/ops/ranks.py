"""The operations of a rank that holds a part of a model: those of its device, with what ranks exchange.

Layers are the same: a row-split product leaves a partial sum, which the next norm sums over the ranks before
it adds it to the residual, and the embedding is looked up by the rank that has the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.lora import LoraMatrix
from gpu.ops.base import Input, Ops, PairNorms, Part, WideNorms
from gpu.quant.rows import Table
from gpu.ranks import Rank


class TableOps:
    """`Ops` of a draft model, which each rank has whole, over the target's divided embedding.

    Owner: launch thread, for one step.
    """

    def __init__(self, own: Ops, rank: Rank, vocab: int) -> None:
        """`own` are the device's; `vocab` is the target's."""
        self._own, self._rank, self._vocab = own, rank, vocab
        self.rotation, self.attend, self.store = own.rotation, own.attend, own.store
        self.linear, self.gated_linear, self.gate = own.linear, own.gated_linear, own.gate
        self.add_lora = own.add_lora
        self.attend_latent, self.complete = own.attend_latent, own.complete
        self.router_logits, self.experts, self.routes = own.router_logits, own.experts, own.routes
        self.mean_squares = own.mean_squares

    def for_samples(self) -> Ops:
        """See `Ops.for_samples`."""
        return type(self)(self._own.for_samples(), self._rank, self._vocab)

    def embed(self, table: Table, ids: Tensor, lora: LoraMatrix | None = None) -> Tensor:
        """See `Ops.embed`. A table of fewer rows than the vocabulary is the rank's part of one."""
        if len(table) >= self._vocab:
            return self._own.embed(table, ids, lora)
        local = ids - len(table) * self._rank.shard.rank
        outside = (local < 0) | (local >= len(table))
        found = self._own.embed(table, local.masked_fill(outside, 0), lora)
        return self._rank.reduce_sum(found.masked_fill_(outside[:, None], 0))

    def embed_beside(self, table: Table, ids: Tensor, hidden: Tensor, norms: PairNorms | None) -> Tensor:
        """See `Ops.embed_beside`."""
        if len(table) >= self._vocab:
            return self._own.embed_beside(table, ids, hidden, norms)
        rows = torch.arange(len(ids), device=ids.device)
        return self._own.embed_beside(self.embed(table, ids), rows, hidden, norms)

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`."""
        return self._own.add_rms_norm(part, residual, weight, eps, keep)

    def add_then_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Input:
        """See `Ops.add_then_norm`."""
        return self._own.add_then_norm(part, residual, weight, eps, keep)

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops.add_normed`."""
        self._own.add_normed(part, residual, weight, eps)

    def norm_wide(self, qkv: Tensor, norms: WideNorms, means: Tensor | None = None) -> None:
        """See `Ops.norm_wide`."""
        self._own.norm_wide(qkv, norms, means)


class RankOps(TableOps):
    """`Ops` of a rank's part of a model. Owner: launch thread, for one step."""

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`: `part` is a partial sum."""
        total = None if part is None else self._rank.reduce_sum(self.complete(part))
        return self._own.add_rms_norm(total, residual, weight, eps, keep)

    def add_then_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_then_norm`: the sum over ranks runs, and the norm with it."""
        return self.add_rms_norm(part, residual, weight, eps, keep)

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops.add_normed`: `part` is a partial sum."""
        self._own.add_normed(self._sum(self.complete(part)), residual, weight, eps)

    def norm_wide(self, qkv: Tensor, norms: WideNorms, means: Tensor | None = None) -> None:
        """See `Ops.norm_wide`: over the heads of all ranks. All have as many, and each key head has as many
        copies: the mean of the ranks' means is that of all heads."""
        if means is None:
            means = self._sum(self.mean_squares(qkv, norms)) / self._rank.shard.ranks
        self._own.norm_wide(qkv, norms, means)

    def _sum(self, part: Tensor) -> Tensor:
        return self._rank.reduce_sum(part)
