"""RMSNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.layers.linear import Places


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; `weight` [size]."""

    __slots__ = ("_eps", "_shape", "weight")

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = eps
        self._shape = (size,)
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], a new tensor."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place and norm the sum: one kernel where there is one."""
        return F.rms_norm(residual.add_(x), self._shape, self.weight, self._eps)

    def places(self, name: str) -> Places:
        return {f"{name}.weight": self.weight}
