"""Dense projections, several of one input fused into one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

Places = dict[str, torch.Tensor]
"""Checkpoint name to the view its tensor is copied into."""


class Linear:
    """y = x Wᵀ + b, with the parts of W stacked along the output.

    `parts` maps each part's checkpoint name (`q_proj`) to its output size, in order.
    `weight` [sum of outputs, inputs], `bias` [sum of outputs] or None.
    """

    __slots__ = ("_parts", "bias", "weight")

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        outputs = sum(parts.values())
        self._parts = dict(parts)
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] to [n, outputs]."""
        return F.linear(x, self.weight, self.bias)

    def places(self, prefix: str) -> Places:
        """`{prefix}{part}.weight` and `.bias` of every part."""
        found: Places = {}
        first = 0
        for name, size in self._parts.items():
            found[f"{prefix}{name}.weight"] = self.weight[first : first + size]
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = self.bias[first : first + size]
            first += size
        return found
