"""RMSNorm."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.parameters import Parameters
from gpu.ops.base import Input, Part


class RmsNorm:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; `weight` [hidden]."""

    def __init__(self, spec: ModelSpec, name: str, parameters: Parameters) -> None:
        self.eps = spec.norm_eps
        self.weight = norm_weight(spec, f"{name}.weight", spec.hidden, parameters)

    def __call__(
        self, ctx: ForwardContext, part: Part | None, residual: torch.Tensor, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add `part`, if any, to `residual` [n, hidden] in place and norm the sum: a new [n, hidden]. The sum
        is also stored in `keep` [n, hidden], whose rows may be strided."""
        return ctx.ops.add_rms_norm(part, residual, self.weight, self.eps, keep)

    def before(
        self, ctx: ForwardContext, part: Part | None, residual: torch.Tensor, keep: torch.Tensor | None = None
    ) -> Input:
        """Do the same, but the result is read by products alone: their kernels may compute the norm."""
        return ctx.ops.add_then_norm(part, residual, self.weight, self.eps, keep)

    def add_to(self, ctx: ForwardContext, residual: torch.Tensor, part: Part) -> None:
        """Add the norm of `part` to `residual` [n, hidden] in place."""
        ctx.ops.add_normed(part, residual, self.weight, self.eps)


def norm_weight(spec: ModelSpec, name: str, size: int, parameters: Parameters) -> torch.Tensor:
    """The weight of a norm over `size` numbers (see `ModelSpec.norm_offset`)."""
    return parameters.tensor(name, size, dtype=torch.float32 if spec.norm_offset else None)
