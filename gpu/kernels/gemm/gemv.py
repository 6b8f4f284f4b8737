"""GEMV: y = x Wᵀ for a few rows, at the speed at which the weights are read.

A program per few outputs and all of K. It loads its whole share of the weights before it waits for the
kernel that makes `x`: under programmatic dependent launch the weights of a product stream into registers
while its predecessors run. Sums are float32 on the plain cores, across a program's threads once, in one
launch and in a fixed order.

At one to four rows a tensor core would be fed one row in sixteen to four, and a library's kernels, which
wait before they load, leave the memory idle between one product and the next.

What is ahead of the registers is best left alone. With 8, 16 and 32 MB of the weights behind attention asked
into L2 before it began, a step of one row took 4.00, 4.02 and 4.05 ms on an H200 where it takes 3.97
(Qwen3-8B, 200 keys; Qwen3-30B-A3B 2.26 to 2.29 for 2.23), and with the weights of programs that had no place
yet, 6.70 (2.68).
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import (
    add_pairs,
    begin,
    cdiv,
    jit,
    launch_dependents,
    launch_options,
    pow2,
    pow2_divisor,
    wait,
)

WIDE: tl.constexpr = tl.constexpr(8)
"""Elements of a row that a thread holds side by side: 16 bytes of 16-bit weights, one load."""

GROUP = 8
"""Rows of a program at most; those of a step are a multiple of it, or fewer."""

SMALL = 1 << 21
"""Elements of a small weight: what counts is that its programs are there before their rows."""

ROUTER_OUTPUTS, ROUTER_ROWS = 256, 32
"""Few outputs have short programs, so that more rows pay. us on an H200 at 8 and at 32 rows, here, by cuBLAS
and by `skinny_gemm`: 128 x 2048 2.3, 4.9, 4.9 and 3.0, 4.9, 5.3; 576 x 1536 (SmolLM2's down) 3.7, 5.1, 6.7
and 8.4, 5.1, 7.0; 576 x 576 2.5, 3.1, 2.3 and 5.4, 3.0, 2.4."""


class GemvConfig(NamedTuple):
    """Outputs per program (gate and up count as one) and warps."""

    columns: int
    warps: int


@jit
def tiles(
    w: tl.tensor, rows: tl.tensor, live: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """All of w[rows], `w` [..., K], as a tuple of [rows, BLOCK_K]; `live` None: every row is there."""
    found: tl.tensor = ()
    for k in tl.static_range(0, K, BLOCK_K):
        d = k + tl.arange(0, BLOCK_K)
        at = w + rows.to(tl.int64)[:, None] * K + d[None, :]
        # evict_first: a weight is read once a step, and L2 is needed for what is read again.
        if live is None and K % BLOCK_K == 0:
            found += (tl.load(at, eviction_policy="evict_first"),)
        else:
            mask = (d < K)[None, :] if live is None else live[:, None] & (d < K)[None, :]
            found += (tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return found


@jit
def dots(tile: tl.tensor, x: tl.tensor, SPAN: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """float32 [SPAN, BLOCK_K / WIDE] that sum along the second axis to float32 `tile` [SPAN, BLOCK_K] · `x`
    [1 or SPAN, BLOCK_K]; a thread sums what it holds side by side, in registers."""
    return tl.sum(tl.reshape(tile * x, [SPAN, BLOCK_K // WIDE, WIDE]), 2)


@jit
def _vector(x: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """x[:K] as a tuple of [BLOCK_K]."""
    found: tl.tensor = ()
    for k in tl.static_range(0, K, BLOCK_K):
        d = k + tl.arange(0, BLOCK_K)
        found += (tl.load(x + d) if K % BLOCK_K == 0 else tl.load(x + d, mask=d < K, other=0.0),)
    return found


@jit
def _products(
    held: tl.tensor,
    x: tl.tensor,
    norm: tl.tensor | None,
    eps: float,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the products of every row of `x` [ROWS, K] with each of the matrices `held`, a tuple of float32
    [SPAN], row by row, and a tuple of the norms' scales. With weights `norm` the rows are normed first.

    The scale of a norm is a factor of the sums, so the sum of squares is computed in the same pass over the
    row. The normed row is not rounded before it is multiplied."""
    MANY: tl.constexpr = len(held)
    sums: tl.tensor = ()
    for _ in tl.static_range(ROWS * MANY):
        sums += (tl.zeros([SPAN, BLOCK_K // WIDE], tl.float32),)
    squares: tl.tensor = ()
    for _ in tl.static_range(ROWS):
        squares += (tl.zeros([SPAN, BLOCK_K // WIDE], tl.float32),)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        grown: tl.tensor = ()
        squared: tl.tensor = ()
        for r in tl.static_range(ROWS):
            d = i * BLOCK_K + tl.arange(0, BLOCK_K)
            at = x + r * K + d
            some = tl.load(at) if K % BLOCK_K == 0 else tl.load(at, mask=d < K, other=0.0)
            some = some.to(tl.float32)[None, :]
            if norm is not None:
                both = tl.broadcast_to(some, [SPAN, BLOCK_K])
                squared += (squares[r] + dots(both, both, SPAN, BLOCK_K),)
                some = some * norm[i].to(tl.float32)[None, :]
            for j in tl.static_range(MANY):
                grown += (sums[r * MANY + j] + dots(held[j][i].to(tl.float32), some, SPAN, BLOCK_K),)
        sums = grown
        if norm is not None:
            squares = squared
    found: tl.tensor = ()
    scales: tl.tensor = ()
    for r in tl.static_range(ROWS):
        if norm is not None:
            total, square = tl.reduce((sums[r * MANY], squares[r]), 1, add_pairs)
            scale = tl.rsqrt(square / K + eps)
            found += (total * scale,)
            scales += (scale,)
            for j in tl.static_range(1, MANY):
                found += (tl.sum(sums[r * MANY + j], 1) * scale,)
        else:
            for j in tl.static_range(MANY):
                found += (tl.sum(sums[r * MANY + j], 1),)
    return found, scales


@jit
def _gemv(
    x: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor | None,
    residual: tl.tensor | None,
    normed: tl.tensor | None,
    out: tl.tensor,
    eps: float,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    first = tl.program_id(1) * ROWS
    cols = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = None if N % SPAN == 0 else cols < N
    MANY: tl.constexpr = 2 if GATED else 1
    held: tl.tensor = (tiles(w, cols, live, K, BLOCK_K),)
    if GATED:
        held += (tiles(w, cols + N, live, K, BLOCK_K),)
    by = None if norm is None else _vector(norm, K, BLOCK_K)
    olds: tl.tensor = ()
    if residual is not None:
        for r in tl.static_range(ROWS):
            # The kernel before does not change it. Past L1, where an older one may lie.
            old_at = residual + (first + r) * N + cols
            olds += (tl.load(old_at, mask=cols < N, other=0.0, cache_modifier=".cg"),)
    if normed is None:
        begin(PDL)
    else:
        launch_dependents(PDL)
        wait(PDL)
    sums, scales = _products(held, x + first * K, by, eps, K, ROWS, SPAN, BLOCK_K)
    for r in tl.static_range(ROWS):
        y = sums[r * MANY]
        if bias is not None:
            y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
        if GATED:
            up = sums[r * MANY + 1]
            if bias is not None:
                up += tl.load(bias + N + cols, mask=cols < N, other=0.0).to(tl.float32)
            y = y * tl.sigmoid(y) * up
        y = y.to(out.dtype.element_ty)
        if residual is not None:  # rounded as the norm's kernel rounds it: the product, then the sum
            y = (y.to(tl.float32) + olds[r].to(tl.float32)).to(y.dtype)
        tl.store(out + (first + r) * N + cols, y, mask=live)
        if normed is not None:
            d = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
            at, inside = (first + r) * K + d, d < K
            some = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.max(scales[r], 0)
            some *= tl.load(norm + d, mask=inside, other=0.0).to(tl.float32)
            tl.store(normed + at, some.to(normed.dtype.element_ty), mask=inside)


def chunk(k: int, most: int) -> int:
    """Elements of K at a time: a power of two that divides it where that leaves wide loads."""
    fitting = pow2_divisor(k)
    return max(min(fitting if fitting >= 256 else pow2(k), most), 8)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: GemvConfig,
    *,
    gated: bool = False,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b of `x` contiguous [n, inputs], n up to 8 or a multiple of 8, `weight` contiguous [outputs,
    inputs], `bias` [outputs]: a new [n, outputs] in x's dtype. Up to 8, each number of rows compiles a kernel
    of its own. `config` from `gemv_config`.

    gated     silu(g) · u of the halves g and u, which are not rounded in between: a new [n, outputs / 2]
    norm      weight [inputs] and eps: the rows are normed first (RMSNorm), and not rounded behind it
    residual  contiguous [n, outputs], not written by the kernel before: the product is added to it in place,
              and it is returned. Loaded behind the wait it took 2.3 us more at 4096 x 4096
    normed    contiguous [n, inputs], in x's dtype: where the normed rows, rounded, are stored for the kernels
              that follow. The next may begin before `x` is there
    """
    rows, size = x.shape
    width = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(rows, width) if residual is None else residual
    norm_weight, eps = (None, 0.0) if norm is None else norm
    group = min(rows, GROUP)
    assert rows % group == 0 and x.is_contiguous()
    _gemv[(cdiv(width, config.columns), rows // group)](
        x,
        weight,
        bias,
        norm_weight,
        residual,
        normed,
        out,
        eps,
        N=width,
        K=size,
        ROWS=group,
        GATED=gated,
        SPAN=config.columns,
        BLOCK_K=chunk(size, 4096),
        SHARE=pow2(cdiv(size, cdiv(width, config.columns))),
        **launch_options(pdl, config.warps),
    )
    return out


def most_rows(outputs: int, inputs: int, gated: bool) -> int:
    """Rows up to which these products were faster than cuBLAS's and `skinny_gemm`'s on an H200."""
    if outputs * inputs <= SMALL and not gated:
        if outputs <= ROUTER_OUTPUTS:
            return ROUTER_ROWS
        return 8 if inputs >= 1024 else 4
    return 2 if gated or max(outputs, inputs) > 4096 else 4


def gemv_config(rows: int, weight: Tensor, gated: bool = False) -> GemvConfig | None:
    """How to cut `weight` [outputs, inputs] of 16 bits at `rows` rows; None where another kernel is faster,
    where the registers do not hold what a program loads at once, and for float32."""
    outputs, inputs = weight.shape
    if weight.element_size() != 2 or rows > most_rows(outputs, inputs, gated) or rows % min(rows, GROUP):
        return None
    cut = _cut(rows, outputs, inputs, gated)
    held = (1 + gated) * cut.columns * inputs // (64 * cut.warps)  # registers of a thread
    return cut if held <= 64 else None


def _cut(rows: int, outputs: int, inputs: int, gated: bool) -> GemvConfig:
    small = outputs > ROUTER_OUTPUTS and outputs * inputs <= SMALL
    # One where two are much to load for so few programs: 3.7 us instead of 6.1 at 576 x 1536 and 8 rows.
    columns = 1 if gated or inputs > 16_384 or (small and outputs < 1024 < inputs) else 2
    # Four warps where a thread has little to load, or has products with several rows to keep apart.
    few = rows <= 4 and (inputs <= 2048 or rows > (1 if gated else 2))
    return GemvConfig(columns, 4 if few or (small and not gated) else 8)
