"""Attention of encoders in plain torch: every token of a chunk sees all of it, and nothing outlives a
step, so there are no pages."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F

from gpu.inputs import StepInputs
from gpu.kv.pool import KvPool


class WholeAttention:
    """`AttentionBackend` where every chunk is a whole prompt. Chunks of one length are one call.

    Owner: launch thread.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: list[tuple[torch.Tensor, int]] = []
        """Rows int64 [chunks * length] of the step, and how many chunks they are."""

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`: nothing is kept."""

    def prepare(self, inputs: StepInputs) -> None:
        """Chunks by length."""
        firsts: dict[int, list[int]] = defaultdict(list)
        for chunk in inputs.chunks:
            firsts[chunk.tokens].append(chunk.first)
        device = inputs.ids.device
        self._groups = [
            ((torch.tensor(at, device=device)[:, None] + torch.arange(n, device=device)).flatten(), len(at))
            for n, at in firsts.items()
        ]

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        out = torch.empty_like(q).flatten(1)
        for rows, count in self._groups:
            queries, keys, values = (
                part[rows].view(count, -1, *part.shape[1:]).transpose(1, 2)
                for part in (q, kv[:, 0], kv[:, 1])
            )
            seen = F.scaled_dot_product_attention(queries, keys, values)
            out[rows] = seen.transpose(1, 2).flatten(0, 1).flatten(1)
        return out
