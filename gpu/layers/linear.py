"""Dense projections, several of one input fused into one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from core.models import Fp8
from gpu.ops.base import Ops
from gpu.quant import FP8, scale_shape

Places = dict[str, torch.Tensor]
"""Checkpoint name to the view its tensor is copied into."""


PACK_ROWS = 8
"""Rows that packed weights are laid out for: good from 1 to a few hundred (see `Linear.seal`)."""


class Linear:
    """y = x Wᵀ + b, with the parts of W stacked along the output.

    `parts` maps each part's checkpoint name (`q_proj`) to its output size, in order.
    `weight` [sum of outputs, inputs], `bias` [sum of outputs] or None. In FP8 `scale` is what the weight's
    rows are multiplied by, float32 [sum of outputs], or its blocks, [sum of outputs / 128, inputs / 128];
    otherwise None.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        fp8: Fp8 = "",
    ) -> None:
        """`fp8`: hold the weight so, if its sides allow."""
        outputs = sum(parts.values())
        scales = scale_shape(fp8, list(parts.values()), inputs)
        self._packed = False
        self._parts = dict(parts)
        self.weight = torch.empty(outputs, inputs, dtype=FP8 if scales else dtype, device=device)
        self.scale = torch.empty(scales, dtype=torch.float32, device=device) if scales else None
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """[n, inputs] to [n, outputs], by this step's operations where they are given."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        if ops is None:
            assert self.scale is None, "products of FP8 need this step's operations"
            return F.linear(x, self.weight, self.bias)
        return ops.linear(x, self.weight, self.bias, self.scale)

    def gated(self, x: torch.Tensor, ops: Ops, activation: str) -> torch.Tensor:
        """activation(first half) · second half of the product: [n, inputs] to [n, outputs / 2]."""
        if self._packed:
            return ops.gated(self(x, ops), activation)
        return ops.gated_linear(x, self.weight, self.bias, activation, self.scale)

    def to_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The product as float32 [n, outputs]. On a GPU the accumulators as they are: a pass over
        512 × 152,000 logits to widen them would cost as much as reading the head, and rounding them
        makes ties."""
        if self.weight.is_cuda and self.weight.dtype != torch.float32 and self.bias is None:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return self(x).float()

    def seal(self) -> None:
        """The weights are final: lay them out for the device. What `places` gave is void from here on.

        A GPU takes them as they are: cuBLAS reads rows of 16-bit weights. On a CPU in float32 that is
        oneDNN's blocked layout, the one torch's own compiler packs into; F.linear calls MKL on plain
        rows instead. Measured on one AVX-512 core with 576 to 49,152 outputs: 1.3 times the speed at
        1 row, 1.7 to 2.3 times at 8, 1.1 times at 336.
        """
        plain = self.weight.device.type != "cpu" or self.weight.dtype != torch.float32
        if (
            plain or not self._parts or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
        ):  # built without oneDNN
            return
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_ROWS)
        self._packed = True

    def places(self, prefix: str) -> Places:
        """`{prefix}{part}.weight`, `.weight_scale` and `.bias` of every part."""
        found: Places = {}
        first, outputs = 0, len(self.weight)
        for name, size in self._parts.items():
            found[f"{prefix}{name}.weight"] = self.weight[first : first + size]
            if self.scale is not None:
                each = outputs // len(self.scale)
                found[f"{prefix}{name}.weight_scale"] = self.scale[first // each : (first + size) // each]
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = self.bias[first : first + size]
            first += size
        return found
