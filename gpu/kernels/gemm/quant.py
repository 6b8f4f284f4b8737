"""Activations to e4m3 or int8 with a scale for each row, or to e4m3 with one for each group of a row: what
products of such weights take."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, padding, pow2
from gpu.quant.scaled import FP8, INT8, LEAST, TOP, TOP_INT8

_TOP, _TOP_INT8, _LEAST = tl.constexpr(TOP), tl.constexpr(TOP_INT8), tl.constexpr(LEAST)

_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 and taken off again: what is between is rounded to an integer, ties to even."""


@jit
def _quantise(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = cols < WIDTH
    begin(PDL)
    if padding(row // PER, num_rows):
        return
    f = tl.load(x + row * WIDTH + cols, mask=mask, other=0.0).to(tl.float32)
    integers: tl.constexpr = numbers.dtype.element_ty == tl.int8
    top: tl.constexpr = _TOP_INT8 if integers else _TOP
    scale = tl.maximum(tl.max(tl.abs(f), 1), _LEAST) / top
    # The division's last bit may lift the largest number over the format's, which must not become NaN.
    f = tl.clamp(f / scale[:, None], -top, top, propagate_nan=tl.PropagateNan.ALL)
    if integers:
        scale += tl.sum(f * 0.0, 1)  # a NaN, which an integer cannot be
        f = f + _ROUND - _ROUND
    tl.store(numbers + row * WIDTH + cols, f.to(numbers.dtype.element_ty), mask=mask)
    some: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    tl.store(scales + row * some + group, scale, mask=group < some)


def quantise_rows(
    x: Tensor,
    dtype: torch.dtype = FP8,
    *,
    group: int = 0,
    per: int = 1,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """e4m3 or int8 [n, width] of `x` contiguous [n, width] and scales float32 [n]; with `group`, a power of
    two that divides the width, e4m3 and [n, width / group]. See `gpu.quant.scaled`.

    `num_rows` int32 [1] on the device: rows from `per` times that on are neither read nor written.
    """
    assert dtype in (FP8, INT8)
    rows, width = x.shape
    numbers = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty((rows, width // group) if group else rows, dtype=torch.float32, device=x.device)
    block = pow2(width)
    size = group or block
    warps = min(max(block // 1024, 1), 16)
    cut = {"WIDTH": width, "GROUP": size, "GROUPS": block // size}
    _quantise[(rows,)](x, numbers, scales, num_rows, **cut, PER=per, **launch_options(pdl, warps))
    return numbers, scales
