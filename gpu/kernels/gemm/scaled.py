"""y = x Wᵀ of e4m3 rows and weights that are scaled by blocks.

`x` comes with a scale for each row and 128 inputs, the weights with one for each 128 x 128. A step over K is
128 inputs: its products are summed by the tensor cores, scaled, and added to float32 sums, so that no sum of
more than 128 products is rounded as Hopper's e4m3 products are (to 14 bits: DeepSeek-V3's report, 3.3.2).
Up to 64 rows are `skinny_gemm`'s where it takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from core.models.quant import BLOCK
from gpu.kernels.gemm.skinny import PROCESSORS
from gpu.kernels.jit import begin, cdiv, jit_loose, launch_options

_BLOCK = tl.constexpr(BLOCK)

TOGETHER: tl.constexpr = tl.constexpr(16)
"""Tiles of rows whose programs run side by side over one tile of weights: what they share comes from L2."""


class ScaledGemmConfig(NamedTuple):
    """How a product is cut: rows and outputs of a program."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@jit_loose("rows")
def _scaled_gemm(
    x: tl.tensor,
    x_scales: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: int,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    pid = tl.program_id(0)
    tiles_m = (rows + BLOCK_M - 1) // BLOCK_M
    tiles_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = pid // (TOGETHER * tiles_n) * TOGETHER
    height = tl.minimum(tiles_m - band, TOGETHER)
    inner = pid % (TOGETHER * tiles_n)
    first, n = (band + inner % height) * BLOCK_M, inner // height * BLOCK_N
    begin(PDL)
    m = first + tl.arange(0, BLOCK_M)
    cols = n + tl.arange(0, BLOCK_N)
    groups: tl.constexpr = K // _BLOCK
    by_row = x_scales + tl.minimum(m, rows - 1) * groups
    by_block = w_scales + n // _BLOCK * groups
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(groups):
        some = x.load([first, k * _BLOCK])
        tile = w.load([n, k * _BLOCK])
        scale = tl.load(by_row + k) * tl.load(by_block + k)
        acc += tl.dot(some, tl.trans(tile), out_dtype=tl.float32) * scale[:, None]
    if bias is not None:
        acc += tl.load(bias + cols)[None, :].to(tl.float32)
    at = out + m.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None])


def scaled_gemm_config(rows: int, outputs: int) -> ScaledGemmConfig:
    """For a product of so many rows, on a device with 132 multiprocessors. Measured on an H200 at 6,144
    outputs of 4,096 inputs, us, the best of eight cuts and cuBLAS in bfloat16: 14.2 and 16.7 (128 rows), 32
    and 36 (512), 223 and 261 (4,096).

    Tiles of 128 rows that are a few more than there are multiprocessors would run in two waves, the second
    nearly empty; of 64 rows three run at once. At 512 rows, us with tiles of 64 and of 128: 32 and 41 at
    6,144 outputs (192 tiles of 128), 27 and 24 at 4,096 (128), 124 and 118 at 24,576 (768). At 128 rows
    of 24,576 outputs 35 with three tiles of inputs on their way, 43 with five, which fewer programs have room
    for."""
    tiles = cdiv(rows, 128) * cdiv(outputs, 128)
    if rows <= 128:
        return ScaledGemmConfig(64, 128, 4, 3 if tiles > PROCESSORS else 5)
    if PROCESSORS < tiles <= 3 * PROCESSORS // 2:
        return ScaledGemmConfig(64, 128, 4, 3)
    return ScaledGemmConfig(128, 128, 8, 4)


def scaled_gemm(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: ScaledGemmConfig,
    *,
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b of e4m3 `x` [n, inputs] with float32 `x_scales` [n, inputs / 128] and e4m3 `weight`
    [outputs, inputs] with `scale` [outputs / 128, inputs / 128], all contiguous: a new [n, outputs]."""
    rows, size = x.shape
    outputs = len(weight)
    assert not (outputs % BLOCK or size % BLOCK or BLOCK % config.block_n)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    _scaled_gemm[(cdiv(rows, config.block_m) * cdiv(outputs, config.block_n),)](
        TensorDescriptor.from_tensor(x, [config.block_m, BLOCK]),
        x_scales,
        TensorDescriptor.from_tensor(weight, [config.block_n, BLOCK]),
        scale,
        bias,
        out,
        rows,
        N=outputs,
        K=size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **launch_options(pdl, config.warps, config.stages),
    )
    return out
