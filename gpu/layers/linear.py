"""Dense projections, several of one input fused into one matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from core.models import Held, Int4
from gpu.device import multiplies_bfloat16
from gpu.lora import LoraMatrix
from gpu.ops.base import Input, Matrix, Ops, Part, PendingProduct
from gpu.quant import int8, q4
from gpu.quant.int4 import WORD, span
from gpu.quant.scaled import dtype_of, scale_shape

Places = dict[str, torch.Tensor]
"""Checkpoint name to the view its tensor is copied into."""


PACK_ROWS = 8
"""Rows that packed weights are laid out for: good from 1 to a few hundred (see `Linear.seal`)."""

PACK_ELEMENTS = 128 * 1024
"""Smallest weight that is packed. A packed product costs about 35 us more per call than a plain one: with
64 x 64 weights 37 us instead of 5, on one AVX2 core."""


class Linear:
    """y = x Wᵀ + b, with the parts of W stacked along the output.

    `parts` maps each part's checkpoint name (`q_proj`) to its output size, in order.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        held: Held = "",
    ) -> None:
        """`held`: hold the weight so, if its sides allow."""
        outputs = sum(parts.values())
        self._packed = False
        self._packs = int8.pack if held == "int8" else q4.pack if held == "q4" else None
        self.quantized: int8.Packed | None = None
        """The packed weight of 8 or 4 bits on a CPU, from `seal` on. `matrix.weight` is empty then."""
        self._parts = dict(parts)
        weight, scale = empty_matrix(list(parts.values()), inputs, held, dtype, device)
        self.matrix = Matrix(
            weight, torch.empty(outputs, dtype=dtype, device=device) if bias else None, scale
        )

    def __call__(self, x: Input, ops: Ops | None = None) -> torch.Tensor:
        """[n, inputs] to [n, outputs], by this step's operations where they are given."""
        weight, bias, scale, lora = self.matrix
        if ops is not None and not self._packed:
            return ops.linear(x, self.matrix)
        assert isinstance(x, torch.Tensor), "a norm is left to operations alone"
        if self._packed:
            out: torch.Tensor
            if self.quantized is not None:
                out = int8.product(x, self.quantized, bias)
            else:
                out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out if ops is None else ops.add_lora(x, lora, out)
        assert scale is None, "products of 8 bits need this step's operations"
        return F.linear(x, weight, bias)

    def router_logits(self, x: Input, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """The product as router logits, and `x` as a tensor for the experts."""
        if self._packed:
            return self(x, ops), ops.complete(x)
        return ops.router_logits(x, self.matrix)

    def part(self, x: torch.Tensor, ops: Ops) -> Part:
        """The product as a part of the residual, which the next norm may run."""
        return self(x, ops) if self._packed else PendingProduct(x, self.matrix)

    def gated(self, x: Input, ops: Ops, activation: str) -> torch.Tensor:
        """activation(first half) · second half of the product: [n, inputs] to [n, outputs / 2]."""
        if self._packed:
            return ops.gate(self(x, ops), activation)
        return ops.gated_linear(x, self.matrix, activation)

    def to_float32(self, x: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """The product as float32 [n, outputs], with the adapters of the step's `ops`. On a GPU the
        accumulators as they are: a pass over 512 × 152,000 logits to widen them would cost as much as reading
        the head, and rounding them makes ties."""
        weight, bias, _, lora = self.matrix
        if weight.is_cuda and weight.dtype != torch.float32 and bias is None:
            out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        else:
            near = self(x)
            out = near.float()
            if self._packed and weight.dtype == torch.bfloat16:
                # What rounding left, of a second product: its sums are float32 until `near` is taken off.
                out += torch.ops.mkldnn._linear_pointwise.binary(x, near, weight, bias, "sub")
        return out if ops is None else ops.add_lora(x, lora, out)

    @property
    def rows(self) -> int:
        """Rows of a part, of a product that is computed in parts; 0 where it is computed at once. With
        adapters it is computed at once: they refer to the rows of the whole step."""
        parts = self._packs is not None and self.matrix.lora is None
        return int8.rows_at_once(sum(self._parts.values())) if parts else 0

    def adapt(self, lora: LoraMatrix) -> None:
        """Add this in steps with adapters."""
        self.matrix = self.matrix._replace(lora=lora)

    def seal(self) -> None:
        """The weights are final: lay them out for the device. What `places` gave is void from here on.

        A GPU takes them as they are: cuBLAS reads rows of 16-bit weights. On a CPU in float32 that is
        oneDNN's blocked layout, the one torch's own compiler packs into; F.linear calls MKL on plain
        rows instead. Measured on one AVX-512 core with 576 to 49,152 outputs: 1.3 times the speed at
        1 row, 1.7 to 2.3 times at 8, 1.1 times at 336. In bfloat16, where the CPU multiplies it, 1.1 to
        2.1 times at 1 row and 1.3 to 3.1 times at 8. Matrices of 8 and 4 bits have layouts of their own.
        """
        weight, scale = self.matrix.weight, self.matrix.scale
        if self._packs is not None:
            assert scale is not None, "8 or 4 bits without scales"
            self.matrix = self.matrix._replace(weight=weight.new_empty(0))
            self.quantized, self._packed = self._packs(weight, scale), True
            return
        packs = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())
        packs = packs and weight.device.type == "cpu"
        worthwhile = weight.numel() >= PACK_ELEMENTS
        if packs and worthwhile and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # built with oneDNN
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
            self.matrix, self._packed = self.matrix._replace(weight=packed), True

    def places(self, prefix: str) -> Places:
        """`{prefix}{part}.weight`, `.weight_scale` and `.bias` of every part. Of 4 bits the scales of a part
        are [outputs, groups, 2], on a GPU not contiguous."""
        found: Places = {}
        weight, bias, scale, _ = self.matrix
        first, outputs = 0, len(weight)
        for name, size in self._parts.items():
            found[f"{prefix}{name}.weight"] = weight[first : first + size]
            if scale is not None:
                each = 1 if self.matrix.is_int4 else outputs // len(scale)
                of_outputs = scale.transpose(0, 1) if self.matrix.is_int4 else scale
                part = of_outputs[first // each : (first + size) // each]
                found[f"{prefix}{name}.weight_scale"] = part
            if bias is not None:
                found[f"{prefix}{name}.bias"] = bias[first : first + size]
            first += size
        return found


def gated_mlp(x: Input, up: Linear, down: Linear, ops: Ops, activation: str) -> Part:
    """down(activation(first half) · second half of `up`'s product): [n, hidden] to [n, hidden]. Where
    products take few rows at a time, so does this: what lies between would be by far a long prompt's largest
    activation."""
    step = min(up.rows, down.rows)
    if not step or not isinstance(x, torch.Tensor) or len(x) <= step:
        return down.part(up.gated(x, ops, activation), ops)
    out = torch.empty_like(x)
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        out[rows] = down(up.gated(x[rows], ops, activation), ops)
    return out


def empty_matrix(
    parts: list[int], inputs: int, held: Held, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight, and its scale where it has one."""
    outputs = sum(parts)
    if isinstance(held, Int4):
        group = held.group or inputs
        if inputs % group == 0 and span(inputs, group):
            return (
                torch.empty(outputs, inputs // WORD, dtype=torch.int16, device=device),
                torch.empty(inputs // group, outputs, 2, dtype=dtype, device=device),
            )
    elif held == "int8":
        numbers = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        return numbers, torch.empty(outputs, dtype=torch.float32, device=device)
    elif held == "q4":
        words = torch.empty(outputs, inputs // q4.WORD, dtype=torch.int32, device=device)
        return words, torch.empty(outputs, inputs // q4.GROUP, 2, dtype=torch.float16, device=device)
    elif (scales := scale_shape(held, parts, inputs)) is not None:
        scale = torch.empty(scales, dtype=torch.float32, device=device)
        return torch.empty(outputs, inputs, dtype=dtype_of(held), device=device), scale
    return torch.empty(outputs, inputs, dtype=dtype, device=device), None
