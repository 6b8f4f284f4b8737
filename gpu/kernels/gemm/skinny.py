"""Skinny GEMM, y = x Wᵀ for 3 to 64 rows, at the speed at which the weights are read.

The weights are the left operand of the tensor cores and the rows, padded to 16, 32, 64 or 128, their narrow
right side. A program multiplies some outputs over all of K, or over a part of it where the outputs are too
few to fill the device (split-K): each stores float32 partial sums, and the last program of a tile (a counter
per tile) adds them in the order of K, so that the same rows give the same bits.

What counts, as measured on an H200:

    one program a multiprocessor with 120 to 220 KiB of tiles; two that share as much were slower, but for
    gate and up at more rows than 32
    each tile starts at another K: 0.7 of 52 µs, probably because not all programs then read the rows from
    the same few slices of L2 at once
    no launch behind the product: neither for the parts of K nor for silu
    under programmatic dependent launch the first weights are prefetched before the wait. Half a microsecond
    behind attention, nothing elsewhere: it is done where K is split, as behind attention it is

Rows and weights of e4m3 or int8 come with scales (`gpu.quant.scaled`). Those of rows multiply the sums at the
end; those of blocks the sum of each 128 products, which then are never rounded as Hopper's e4m3 sums of more
are (to 14 bits: DeepSeek-V3's report, 3.3.2). Where rows have the scales, what 128 products gave is added in
float32. Sums of int8 are int32 and exact, across parts of K too.

For rows with adapters the epilogue adds the deltas (`gpu.kernels.gemm.delta`), which need what `shrink`, the
kernel in front, finds. The product does not wait for it: `shrink` lets its dependents begin when what both
read, the rows, is there. The wait stands in front of the epilogue.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from core.models.quant import BLOCK
from gpu.kernels.gemm.delta import Delta, DeltaShape, add_delta, delta_rows
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_dependents, launch_options, pow2, wait
from gpu.quant.scaled import sum_dtype

_BLOCK = tl.constexpr(BLOCK)

COUNTERS = 1024
"""Tiles that a product may split K of."""

AHEAD: tl.constexpr = tl.constexpr(512)
"""Bytes of each output prefetched before the wait. At 1,024 and more they drive each other out of L2."""

LEAST_ROWS, MOST_ROWS = 3, 64
"""At 128 rows Qwen3-8B's four products, each behind its norm and by the best of 16 cuts, took 148 µs where
cuBLAS takes 137; at 96 143 and 134."""

MOST_SCALED_ROWS = 128
"""Maximum number of rows of `x` where rows have scales. Microseconds at 128 rows of Qwen3-8B, here and by
cuBLAS, quantisation included: o 14 and 18, down 28 and 36, gate_up with silu 38 and 44; qkv, whose inputs are
not split, 19 and 17."""

LEAST_WEIGHTS = 1 << 23
"""Elements of the smallest weight that fills the device."""

SHORT_INPUTS, SHORT_WEIGHTS = 768, 1 << 21
"""Sums this short end before cuBLAS has begun. us on an H200 at 8 and at 32 rows, here and by cuBLAS: 576 x
576 2.3 and 3.1, 2.4 and 3.0; gate and up of 3072 x 576 with silu 4.1 and 5.5, 4.3 and 5.6. With 1,024 inputs
cuBLAS is faster: 5.6 and 5.2 at 4096 x 1024."""

PROCESSORS = 132

FILLED = 90
"""Programs that draw all of the memory's bandwidth."""


class SkinnyConfig(NamedTuple):
    """How a product is cut.

    block_n  outputs of a program; of a gated product as many pairs
    block_k  inputs at a time
    split    programs that share the inputs of a tile; 1 for a gated product
    warps    of a program
    stages   tiles of `block_k` inputs on their way, by a program
    """

    block_n: int
    block_k: int
    split: int
    warps: int
    stages: int


class Scales(NamedTuple):
    """Scales of e4m3 or int8 rows and weights: float32 [n] and [outputs], or [n, inputs / 128] and [outputs /
    128, inputs / 128]. See `gpu.quant.scaled`."""

    x: Tensor
    weight: Tensor


def split_k_counters(device: torch.device) -> Tensor:
    """What `skinny_gemm` counts arrivals in, for all products of a stream: zero, and zero after each."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@jit
def prefetch(at: tl.tensor, COUNT: tl.constexpr) -> None:
    """Prefetch `COUNT` bytes from every address on, whole 16s, into L2."""
    sizes = tl.zeros(at.shape, tl.int32) + COUNT
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [at, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _weights(
    w: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    last: tl.tensor,
    K: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_N, BLOCK_K] from row n and input k on. Rows behind `last` are not stored: they stay on it."""
    row = tl.minimum(n + tl.arange(0, BLOCK_N), last).to(tl.int64)
    at = w + row[:, None] * K + (k + tl.arange(0, BLOCK_K))[None, :]
    # evict_first: a weight is read once a step, and L2 is needed for what is read again.
    return tl.load(at, eviction_policy="evict_first")


@jit
def _multiply_add(
    acc: tl.tensor,
    weights: tl.tensor,
    some: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    group: tl.tensor,
    BY: tl.constexpr,
) -> tl.tensor:
    """`acc` and the product of two tiles, for blocks by their scales."""
    if BY == "blocks":
        scale = tl.load(x_scales + group) * tl.load(w_scales + group)
        return acc + tl.dot(weights, some, out_dtype=tl.float32) * scale[None, :]
    most: tl.constexpr = _BLOCK if weights.dtype.is_fp8() else None
    return tl.dot(weights, some, acc, input_precision="ieee", max_num_imprecise_acc=most, out_dtype=acc.dtype)


@jit
def _finish(
    acc: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    bias: tl.tensor,
    first: int,
    cols: tl.tensor,
    m: tl.tensor,
    rows: int,
    N: int,
    BY: tl.constexpr,
) -> tl.tensor:
    """`acc` [outputs, rows] by the scales of rows and outputs, where these have any, and the bias: those of
    output `first` + `cols`, of N each."""
    acc = acc.to(tl.float32)
    if BY == "rows":
        by_row = tl.load(x_scales + m, mask=m < rows, other=0.0)[None, :]
        acc *= tl.load(w_scales + first + cols, mask=cols < N, other=0.0)[:, None] * by_row
    if bias is not None:
        acc += tl.load(bias + first + cols, mask=cols < N, other=0.0).to(tl.float32)[:, None]
    return acc


@jit_loose("rows")
def _skinny(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    x_scales: tl.tensor,
    w_scales: tl.tensor,
    delta: Delta,
    rows: int,
    N: int,
    K: int,
    BY: tl.constexpr,
    DELTA: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    n = tile * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    cols = n + tl.arange(0, BLOCK_N)
    start = K // BLOCK_K * part // SPLIT * BLOCK_K
    steps = K // BLOCK_K * (part + 1) // SPLIT - start // BLOCK_K
    shift = tile % steps
    if PDL and SPLIT > 1:
        ahead: tl.constexpr = AHEAD * 8 // w.dtype.element_ty.primitive_bitwidth
        first = start + tl.minimum(shift * BLOCK_K, steps * BLOCK_K - ahead)
        prefetch(w + tl.minimum(cols, N - 1).to(tl.int64) * K + first, AHEAD)
    # Rows that are loaded before the wait: past L1.
    CACHE: tl.constexpr = "" if DELTA is None else ".cg"
    if DELTA is None:
        begin(PDL)
    else:
        launch_dependents(PDL)
        of_delta = delta_rows(delta, m, rows, DELTA)
    inside = m < rows
    of_rows, of_block, of_up = x_scales, w_scales, w_scales
    if BY == "blocks":
        of_rows += tl.minimum(m, rows - 1) * (K // _BLOCK)
        of_block += n // _BLOCK * (K // _BLOCK)
        of_up += (N + n) // _BLOCK * (K // _BLOCK)
    x_at = x + m[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
    SUM: tl.constexpr = tl.int32 if w.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    up = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for i in range(steps):
        step = i + shift
        k = start + tl.where(step < steps, step, step - steps) * BLOCK_K
        some = tl.trans(tl.load(x_at + k, mask=inside[:, None], other=0.0, cache_modifier=CACHE))
        these = _weights(w, n, k, N - 1, K, BLOCK_N, BLOCK_K)
        acc = _multiply_add(acc, these, some, of_rows, of_block, k // _BLOCK, BY)
        if GATED:
            those = _weights(w, N + n, k, 2 * N - 1, K, BLOCK_N, BLOCK_K)
            up = _multiply_add(up, those, some, of_rows, of_up, k // _BLOCK, BY)
    if SPLIT > 1:
        whole: tl.constexpr = BLOCK_N * BLOCK_M
        held = parts + tile * (SPLIT * whole)
        tl.store(held + part * whole + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :], acc)
        tl.debug_barrier()  # all threads' sums, before one thread increments the counter
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") < SPLIT - 1:
            return
        tl.store(counters + tile, 0)
        own = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
        for i in tl.static_range(SPLIT):
            acc += tl.load(held + i * whole + own, cache_modifier=".cg")
    if DELTA is not None:
        wait(PDL)
        acc = add_delta(acc, delta, of_delta, cols, n, m, rows, DELTA)
        if GATED:
            up = add_delta(up, delta, of_delta, N + cols, N + n, m, rows, DELTA)
    acc = _finish(acc, x_scales, w_scales, bias, 0, cols, m, rows, N, BY)
    if GATED:
        up = _finish(up, x_scales, w_scales, bias, N, cols, m, rows, N, BY)
        acc = acc * tl.sigmoid(acc) * up
    result = tl.trans(acc.to(out.dtype.element_ty))
    tl.store(out + m[:, None] * N + cols[None, :], result, mask=inside[:, None] & (cols < N)[None, :])


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig,
    counters: Tensor,
    *,
    gated: bool = False,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
    delta: tuple[Delta, DeltaShape] | tuple[None, None] = (None, None),
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b of `x` contiguous [n, inputs], n up to 64, or 128 for rows scaled by row, `weight` contiguous
    [outputs, inputs], both of 16 bits, or e4m3 or int8 with `scales`, `bias` [outputs]: a new [n, outputs] of
    `dtype`, or x's. `gated`: silu(g) · u of the halves g and u, which are not rounded in between: a new
    [n, outputs / 2]. One kernel serves up to 16, 32, 64 or 128 rows. `config` from `skinny_config` or
    `skinny_scaled_config`, `counters` from `split_k_counters`. `delta` of the rows' adapters (weights of 16
    bits alone, and where it `fits`) is added before silu; the kernel in front must be the `shrink` it is
    from."""
    rows, size = x.shape
    width = len(weight) // 2 if gated else len(weight)
    block_m, tiles = max(pow2(rows), 16), cdiv(width, config.block_n)
    assert rows <= MOST_SCALED_ROWS and size % config.block_k == 0 and x.is_contiguous()
    by = "" if scales is None else "rows" if scales.x.dim() == 1 else "blocks"
    assert by != "blocks" or (config.block_k == BLOCK and not (width % BLOCK or BLOCK % config.block_n))
    assert scales is None or delta == (None, None)
    out = x.new_empty(rows, width, dtype=dtype or x.dtype)
    parts = None
    if config.split > 1:
        assert not gated and tiles <= len(counters)
        count = tiles * config.split * config.block_n * block_m
        parts = x.new_empty(count, dtype=sum_dtype(weight.dtype))
    _skinny[(tiles * config.split,)](
        x,
        weight,
        bias,
        out,
        parts,
        counters if config.split > 1 else None,
        *(scales or (None, None)),
        delta[0],
        rows,
        width,
        size,
        BY=by,
        DELTA=delta[1],
        GATED=gated,
        SPLIT=config.split,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        **launch_options(pdl, config.warps, config.stages),
    )
    return out


def _cut(rows: int, outputs: int, inputs: int) -> SkinnyConfig | None:
    tiles = cdiv(outputs, 64)
    split = next((parts for parts in (1, 2, 4) if tiles * parts >= FILLED), 0)
    programs = tiles * split
    if split == 0 or inputs // split < 512:
        return None
    if programs <= PROCESSORS:
        return SkinnyConfig(64, 128, split, 4, 6)
    # Two a multiprocessor. At more rows than 32 cuBLAS was faster: 1.6 µs at 5120 x 2048 and 64 rows.
    return SkinnyConfig(64, 64, split, 4, 6) if programs <= 2 * PROCESSORS and rows <= 32 else None


def _gated_cut(rows: int, pairs: int) -> SkinnyConfig | None:
    if rows <= 32 and FILLED <= cdiv(pairs, 128) <= PROCESSORS:
        return SkinnyConfig(128, 128, 1, 8, 3)
    return SkinnyConfig(64, 64, 1, 4, 4) if FILLED <= cdiv(pairs, 64) <= 2 * PROCESSORS else None


def skinny_config(rows: int, weight: Tensor, gated: bool = False) -> SkinnyConfig | None:
    """How to cut `weight` [outputs, inputs] of 16 bits at `rows` rows, on a device with 132 multiprocessors
    of 228 KiB; None where cuBLAS is as fast (the largest weights: a head of 152,000 tokens comes at 98 % of
    the bandwidth) or faster, or where it was not measured."""
    outputs, inputs = weight.shape
    if not LEAST_ROWS <= rows <= MOST_ROWS or weight.element_size() != 2:
        return None
    if inputs <= SHORT_INPUTS and inputs % 64 == 0 and outputs * inputs <= SHORT_WEIGHTS:
        return SkinnyConfig(64, 64, 1, 4, 4) if gated or rows <= 32 else None
    if inputs % 128 or outputs * inputs < LEAST_WEIGHTS:
        return None
    return _gated_cut(rows, outputs // 2) if gated else _cut(rows, outputs, inputs)


def skinny_scaled_config(
    rows: int, weight: Tensor, by_block: bool, gated: bool = False
) -> SkinnyConfig | None:
    """Like `skinny_config`, for `weight` of e4m3 or int8, scaled by blocks or by rows: for e4m3 the quickest
    of 8 to 24 cuts on an H200, but for 0.3 us, at 1, 8, 32 and 64 rows of Qwen3-8B's products. us by rows, by
    blocks and of bfloat16: qkv 9, 11 and 15 (1 row), 11, 15 and 16 (64), o 7, 9 and 13, down 15, 17 and 32 (1
    row), 17, 26 and 31 (64), gate_up with silu 26, 26 and 48 (1 row), 32, 33 and 52 (64)."""
    outputs, inputs = weight.shape
    if rows > (MOST_ROWS if by_block else MOST_SCALED_ROWS) or outputs * inputs < LEAST_WEIGHTS:
        return None
    if inputs % BLOCK or (by_block and gated and outputs // 2 % BLOCK):
        return None
    if gated:
        cut = SkinnyConfig(64, 128, 1, 4, 4) if rows <= MOST_ROWS else SkinnyConfig(128, 128, 1, 8, 4)
        return cut if FILLED <= cdiv(outputs // 2, cut.block_n) <= 2 * PROCESSORS else None
    return _scaled_cut(rows, outputs, inputs, by_block)


def _scaled_cut(rows: int, outputs: int, inputs: int, by_block: bool) -> SkinnyConfig | None:
    # What scales each sum is done between two tiles: of blocks two programs hide it from each other.
    wanted = 2 * FILLED if by_block and rows <= 32 else FILLED
    tiles = cdiv(outputs, 64)
    split = next((parts for parts in (1, 2) if tiles * parts >= wanted), 4)
    if tiles * split < FILLED or inputs // split < 512:
        return None
    if rows > MOST_ROWS and split == 1:
        return None
    return SkinnyConfig(64, 128, split, 4, 12 if split > 1 and rows <= 32 and not by_block else 8)
