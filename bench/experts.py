"""Records to which experts the rows of a step are routed, also in captured steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gpu.kernels.moe.fused as moe
from core.models import ModelSpec


class ExpertWatch:
    """Copies the routed experts of every forward, as part of its graph. Must exist before the first capture.

    Random weights do not route evenly: rows behind one long prefix have similar hidden states, are routed to
    the same experts and read fewer weights than with even routing. Adds a copy of some KiB to each layer.
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
        """Distinct experts of the first `rows` rows in the last routed step, averaged over the layers; and
        the number expected with even routing."""
        chosen = self._chosen[:, :rows].flatten(1).long().cpu()
        hit = torch.zeros(len(chosen), self.experts + 1)
        hit.scatter_(1, chosen + 1, 1.0)
        even = self.experts * (1 - (1 - self.top_k / self.experts) ** rows)
        return float(hit[:, 1:].sum(1).mean()), even
