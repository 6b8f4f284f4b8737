"""Products of weights of 8 bits over a captured step: which kernel multiplies what.

Few rows are `skinny_gemm`'s (up to 64, of some sizes scaled by rows up to 128), at the speed at which the
weights come; more are cuBLAS's where they are e4m3 scaled by rows, or `scaled_gemm`'s, by blocks and of int8.
What those of e4m3 take: `bench/results/fp8-h200.json`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.models.quant import BLOCK
from gpu.kernels.gemm.quant import quantise_rows
from gpu.kernels.gemm.scaled import SMALLEST, scaled_gemm, scaled_gemm_config
from gpu.kernels.gemm.skinny import Scales, skinny_gemm, skinny_scaled_config
from gpu.kernels.silu_mul import silu_mul
from gpu.ops.base import Matrix
from gpu.quant.scaled import INT8


def scaled_linear(
    x: Tensor,
    matrix: Matrix,
    counters: Tensor | None,
    *,
    gated: bool = False,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b as `Ops.linear` with a scale of 8 bits; `gated`: silu(first half) · second half of it.
    `counters` and `pdl` as in `Kernels`; `num_rows` int32 [1] on the device, how many rows are true."""
    weight, bias, scale, _ = matrix
    assert scale is not None
    by_block = scale.dim() == 2
    group = BLOCK if by_block else 0
    numbers, rows = quantise_rows(x, weight.dtype, group=group, num_rows=num_rows, pdl=pdl)
    cut = None if counters is None else skinny_scaled_config(len(x), weight, by_block, gated)
    if counters is not None and cut is not None:
        by_both = Scales(rows, scale)
        return skinny_gemm(
            numbers, weight, bias, cut, counters, gated=gated, scales=by_both, dtype=x.dtype, pdl=pdl
        )
    if by_block or weight.dtype == INT8:
        # A device without counters has less shared memory than these tile sizes need.
        config = SMALLEST if counters is None and not by_block else scaled_gemm_config(len(x), len(weight))
        out = scaled_gemm(numbers, rows, weight, scale, bias, x.dtype, config, pdl=pdl)
    else:
        out = cublas_fp8_gemm(numbers, rows, weight, scale, bias, x.dtype)
    return silu_mul(out, num_rows=num_rows, pdl=pdl) if gated else out


def cublas_fp8_gemm(
    x: Tensor, rows: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x Wᵀ + b of e4m3 `x` [n, inputs] and `weight` [outputs, inputs], scaled by `rows` [n] and `scale`
    [outputs] behind sums that stay float32 (without cuBLAS's fast accumulation, which rounds them)."""
    return torch._scaled_mm(
        x, weight.t(), rows[:, None], scale[None, :], bias=bias, out_dtype=dtype, use_fast_accum=False
    )
