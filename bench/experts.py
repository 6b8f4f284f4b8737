"""Which experts the rows of a step choose, watched inside captured steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gpu.kernels.moe.fused as moe
from core.models import ModelSpec


class ExpertWatch:
    """Every forward's choices of experts, copied as part of its graph. Must exist before the first capture.

    Random weights need not route evenly: rows behind one long prefix are alike, choose alike and read fewer
    weights than a bound for even routing says. Adds a copy of some KiB to each layer.
    """

    def __init__(self, spec: ModelSpec, rows: int, device: torch.device) -> None:
        if spec.moe is None:
            raise ValueError("a model without experts")
        self.experts = spec.moe.experts
        self.top_k = spec.moe.per_token
        shape = (spec.layers, rows, self.top_k)
        self._chosen = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._calls = 0
        module: Any = moe
        self._route = module.route
        module.route = self._watch

    def _watch(self, logits: Tensor, *args: Any, **options: Any) -> Any:
        routing, tiles = self._route(logits, *args, **options)
        kept = self._chosen[self._calls % len(self._chosen)]
        self._calls += 1
        rows = min(len(kept), len(routing.experts))
        kept[:rows].copy_(routing.experts[:rows])
        return routing, tiles

    def distinct(self, rows: int) -> tuple[float, float]:
        """Distinct experts of the first `rows` rows of the last step that was routed: on average over the
        layers, and what even routing would give."""
        chosen = self._chosen[:, :rows].flatten(1).long().cpu()
        hit = torch.zeros(len(chosen), self.experts + 1)
        hit.scatter_(1, chosen + 1, 1.0)
        even = self.experts * (1 - (1 - self.top_k / self.experts) ** rows)
        return float(hit[:, 1:].sum(1).mean()), even
