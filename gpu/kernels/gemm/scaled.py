"""y = x Wᵀ of rows and weights of 8 bits: e4m3 that is scaled by blocks, int8 that is scaled by rows.

With blocks `x` has a scale for each row and 128 inputs, the weights one for each 128 x 128. A step over K is
128 inputs: its products are summed by the tensor cores, scaled, and added to float32 sums, so that no sum of
more than 128 products is rounded as Hopper's e4m3 products are (to 14 bits: DeepSeek-V3's report, 3.3.2).
Sums of int8 are int32, exact, and scaled at the end. (cuBLAS scales sums of e4m3 rows, but of int8 it writes
the sums, 4 bytes an output, which another kernel would have to read.)

Few rows are `skinny_gemm`'s where it takes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from core.models.quant import BLOCK
from gpu.kernels.gemm.skinny import PROCESSORS
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options
from gpu.quant.scaled import INT8

_BLOCK = tl.constexpr(BLOCK)

TOGETHER: tl.constexpr = tl.constexpr(16)
"""Tiles of rows whose programs run side by side over one tile of weights: what they share comes from L2."""


class ScaledGemmConfig(NamedTuple):
    """How a product is cut: rows and outputs of a program. `tma`: tiles are loaded through tensor
    descriptors, which before Hopper would cost registers that spill."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = True


@jit
def _load(
    a: tl.tensor,
    row: tl.tensor,
    last: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
) -> tl.tensor:
    """[BLOCK, 128] of `a` [.., K] from `row` and `k` on, zeros behind the last input. Rows behind `last` are
    not stored: they stay on it."""
    if TMA:
        tile = a.load([row, k])
    else:
        d = k + tl.arange(0, _BLOCK)[None, :]
        rows = tl.minimum(row + tl.arange(0, BLOCK), last).to(tl.int64)
        at = a + rows[:, None] * K + d
        whole: tl.constexpr = K // _BLOCK * _BLOCK == K
        tile = tl.load(at) if whole else tl.load(at, mask=d < K, other=0)
    return tile


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
    BY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
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
    row = tl.minimum(m, rows - 1)
    inside: tl.constexpr = N % BLOCK_N == 0
    if not BY_BLOCK:
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for k in range(0, K, _BLOCK):
            some = _load(x, first, rows - 1, k, K, BLOCK_M, TMA)
            tile = _load(w, n, N - 1, k, K, BLOCK_N, TMA)
            sums = tl.dot(some, tl.trans(tile), sums, out_dtype=tl.int32)
        by_output = tl.load(w_scales + cols) if inside else tl.load(w_scales + cols, mask=cols < N, other=0.0)
        acc = sums.to(tl.float32) * tl.load(x_scales + row)[:, None] * by_output[None, :]
    else:
        groups: tl.constexpr = K // _BLOCK
        by_row = x_scales + row * groups
        by_block = w_scales + n // _BLOCK * groups
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(groups):
            some = _load(x, first, rows - 1, k * _BLOCK, K, BLOCK_M, TMA)
            tile = _load(w, n, N - 1, k * _BLOCK, K, BLOCK_N, TMA)
            scale = tl.load(by_row + k) * tl.load(by_block + k)
            acc += tl.dot(some, tl.trans(tile), out_dtype=tl.float32) * scale[:, None]
    if bias is not None:
        more = tl.load(bias + cols) if inside else tl.load(bias + cols, mask=cols < N, other=0.0)
        acc += more[None, :].to(tl.float32)
    at = out + m.to(tl.int64)[:, None] * N + cols[None, :]
    live = (m < rows)[:, None] if inside else (m < rows)[:, None] & (cols < N)[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=live)


SMALLEST = ScaledGemmConfig(64, 128, 4, 3, tma=False)
"""Fits every GPU with int8 products: 48 KiB of shared memory."""


def scaled_gemm_config(rows: int, outputs: int) -> ScaledGemmConfig:
    """The config for a product of so many rows, on a device with 132 multiprocessors. Measured for e4m3 on an
    H200 at 6,144 outputs of 4,096 inputs, us, the best of eight cuts and cuBLAS in bfloat16: 14.2 and 16.7
    (128 rows), 32 and 36 (512), 223 and 261 (4,096).

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
    [outputs, inputs] with `scale` [outputs / 128, inputs / 128], or of int8 with `x_scales` [n] and `scale`
    [outputs], all contiguous: a new [n, outputs]. For int8, 16 divides inputs."""
    rows, size = x.shape
    outputs = len(weight)
    assert weight.dtype == INT8 or not (outputs % BLOCK or size % BLOCK or BLOCK % config.block_n)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    numbers: Any = x
    weights: Any = weight
    if config.tma:
        numbers = TensorDescriptor.from_tensor(x, [config.block_m, BLOCK])
        weights = TensorDescriptor.from_tensor(weight, [config.block_n, BLOCK])
    _scaled_gemm[(cdiv(rows, config.block_m) * cdiv(outputs, config.block_n),)](
        numbers,
        x_scales,
        weights,
        scale,
        bias,
        out,
        rows,
        N=outputs,
        K=size,
        BY_BLOCK=scale.dim() == 2,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TMA=config.tma,
        **launch_options(pdl, config.warps, config.stages),
    )
    return out
