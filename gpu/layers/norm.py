"""RMSNorm."""

from __future__ import annotations

import torch

from gpu.context import ForwardContext
from gpu.layers.linear import Places
from gpu.ops.base import Part


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; `weight` [size]."""

    __slots__ = ("eps", "weight")

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, ctx: ForwardContext, x: torch.Tensor) -> torch.Tensor:
        """[..., size], a new tensor."""
        return ctx.ops.rms_norm(x, self.weight, self.eps)

    def add(self, ctx: ForwardContext, part: Part, residual: torch.Tensor) -> torch.Tensor:
        """Add `part` to `residual` in place and norm the sum."""
        return ctx.ops.add_rms_norm(part, residual, self.weight, self.eps)

    def places(self, name: str) -> Places:
        return {f"{name}.weight": self.weight}
