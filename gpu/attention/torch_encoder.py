"""Attention of encoders in plain torch: every token of a chunk sees all of it, and nothing outlives a
step, so there are no pages."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.kv.pool import KvPool
from gpu.state.view import StepView
from gpu.transfer import upload


class EncoderAttention:
    """`TorchBackend` where every chunk is a whole prompt. Chunks of one length are one call.

    Owner: launch thread.
    """

    name = "torch"

    def __init__(self) -> None:
        self._groups: list[tuple[Tensor, int]] = []
        """Rows int64 [chunks * length] of the step, and how many chunks they are."""
        self._kv = torch.empty(0)

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`: there are no pages."""

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`. Groups the chunks by length, which the host knows."""
        firsts: dict[int, list[int]] = defaultdict(list)
        for chunk in view.placed:
            firsts[chunk.tokens].append(chunk.first)
        device = view.ids.device
        self._groups = [
            ((upload(np.array(at), device)[:, None] + torch.arange(n, device=device)).flatten(), len(at))
            for n, at in firsts.items()
        ]

    def store(self, layer: int, kv: Tensor) -> None:
        """See `TorchBackend.store`: kept for this layer alone."""
        self._kv = kv

    def attend(self, layer: int, q: Tensor, view: StepView, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert sinks is None, "no encoder has sinks"
        out, kv = torch.empty_like(q).flatten(1), self._kv
        for rows, count in self._groups:
            queries, keys, values = (
                part[rows].view(count, -1, *part.shape[1:]).transpose(1, 2)
                for part in (q, kv[:, 0], kv[:, 1])
            )
            seen = F.scaled_dot_product_attention(queries, keys, values)
            out[rows] = seen.transpose(1, 2).flatten(0, 1).flatten(1)
        return out
