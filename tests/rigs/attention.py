"""Attention in plain torch, for tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gpu.kv.pool import KvPool
from gpu.state.view import StepView

PAGE = 4
NAN = float("nan")


class EagerAttention:
    """Paged attention over `caches`, token by token; the output of padding is NaN."""

    name = "eager"

    def __init__(
        self,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        windows: Sequence[int],
        scale: float | None = None,
    ) -> None:
        """`scale` of scores; None: 1 / sqrt(head_dim)."""
        self.caches = caches
        self.windows, self.scale = windows, scale

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`."""
        self.caches = () if pool is None else pool.caches()

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`."""

    def attend(
        self, layer: int, q: torch.Tensor, view: StepView, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        assert q.is_contiguous()
        k_all, v_all = self.caches[layer]
        out = q.new_full((*q.shape[:2], v_all.shape[2]), NAN)
        window = self.windows[layer]
        seen = [-1] * len(q) if view.ancestors is None else view.ancestors.tolist()
        for row, (slot, position) in enumerate(owners(view)):
            first = max(position + 1 - window, 0) if window else 0
            at = torch.arange(first, position + 1)
            if row < view.max_decode:
                at = at[[seen[row] >> min(behind, 31) & 1 > 0 for behind in (position - at).tolist()]]
            cells = view.page_table[slot, at // PAGE].long() * PAGE + at % PAGE
            k, v = (side[cells].transpose(0, 1)[None] for side in (k_all, v_all))
            found = F.scaled_dot_product_attention(
                q[row][None, :, None], k, v, scale=self.scale, enable_gqa=True
            )
            out[row] = found[0, :, 0]
            if sinks is not None:
                group = len(sinks) // k.shape[1]
                scores = torch.einsum("hd,hkd->hk", q[row], k[0].repeat_interleave(group, 0))
                total = torch.logsumexp(scores * q.shape[-1] ** -0.5, -1)
                out[row] *= torch.sigmoid(total - sinks)[:, None]
        return out.flatten(1)


def owners(view: StepView) -> list[tuple[int, int]]:
    """(slot, position) of every token that is not padding."""
    _, decode, chunks, _ = view.counts.tolist()
    found = [(int(view.decode_slots[i]), int(view.decode_lengths[i]) - 1) for i in range(decode)]
    for i in range(chunks):
        start, count = int(view.chunk_starts[i]), int(view.chunk_firsts[i + 1] - view.chunk_firsts[i])
        found += [(int(view.chunk_slots[i]), start + j) for j in range(count)]
    return found
