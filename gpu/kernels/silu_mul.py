"""silu(gate) · up of a fused projection, and the same with gelu."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2

BLOCK = 1024
"""Columns per program: 8 of 16-bit elements per thread of four warps, one 16-byte load each side."""


@jit
def gated(gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """silu(gate) · up; with an ALPHA clamped, as `ClampedGate` has it."""
    if ALPHA > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        found = gate * tl.sigmoid(ALPHA * gate) * up
    else:
        found = gate * tl.sigmoid(gate) * up
    return found


@jit
def _silu_mul(
    both: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = cols < WIDTH
    begin(PDL)
    if padding(row, num_rows):
        return
    at = both + row * 2 * WIDTH + cols
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        # (1 + tanh(y)) / 2 = sigmoid(2 y), with y = sqrt(2 / pi) * (gate + 0.044715 * gate^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * WIDTH + cols, (gate * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(both: Tensor, *, num_rows: Tensor | None = None, pdl: bool = False) -> Tensor:
    """silu(first half) · second half of `both` contiguous [n, 2 * width]: a new [n, width].

    `num_rows` int32 [1] on the device: rows from there on are left out.
    """
    return _launch(both, num_rows, pdl, gelu=False)


def gelu_mul(both: Tensor, *, num_rows: Tensor | None = None, pdl: bool = False) -> Tensor:
    """`silu_mul` with gelu in its approximation by tanh."""
    return _launch(both, num_rows, pdl, gelu=True)


def _launch(both: Tensor, num_rows: Tensor | None, pdl: bool, *, gelu: bool) -> Tensor:
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    span = min(BLOCK, pow2(width))
    _silu_mul[(rows, cdiv(width, span))](
        both, out, num_rows, WIDTH=width, SPAN=span, GELU=gelu, **launch_options(pdl, 4)
    )
    return out
