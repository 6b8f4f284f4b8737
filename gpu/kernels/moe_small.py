"""Routed experts for a handful of rows: two launches, only the chosen experts read, no tiles.

    gate_up   a program per (pair, columns): finds its expert from the row's logits itself, which
              costs less than a launch, then two dot products per column on the plain cores
    down      a program per (row, columns): the row's experts one after the other, weighted, summed

At one row the weights of eight experts (75 MB at 30B-A3B, 18 µs) dwarf everything else, and a tensor
core would be fed one row in sixteen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, options, pow2, pow2_divisor
from gpu.kernels.route import Routing, _best


class SmallConfig(NamedTuple):
    """Columns per program and warps, for each of the two kernels. 4 and 8 columns were chosen for
    enough loads in flight: 32 KiB a program of 128 threads, 16 bytes each."""

    up_columns: int = 4
    up_warps: int = 4
    down_columns: int = 8
    down_warps: int = 4


@jit
def _products(
    w: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 [rows, BLOCK_K] that sum along the second axis to w[rows] · x, K elements each."""
    acc = tl.zeros([rows.shape[0], BLOCK_K], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        d = k + tl.arange(0, BLOCK_K)
        inside = d < K
        at = w + rows[:, None] * K + d[None, :]
        tile = tl.load(at, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
        acc += tile * tl.load(x + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@jit
def _small_up(
    x: tl.tensor,
    logits: tl.tensor,
    w13: tl.tensor,
    s13: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    hidden: tl.tensor,
    num_rows: tl.tensor,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORM: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    pair = tl.program_id(1)
    row = pair // TOP_K
    begin(PDL)
    live = row >= 0
    if num_rows is not None:
        live = row < tl.load(num_rows)
    one = row + tl.zeros([1], tl.int32)
    weight, expert, _ = _best(
        logits, one, one < tl.where(live, row + 1, 0), E, TOP_K, RENORM, BLOCK_E, BLOCK_J
    )
    mine = tl.arange(0, BLOCK_J)[None, :] == pair % TOP_K
    chosen = tl.sum(tl.sum(tl.where(mine, expert, 0), 1), 0)
    if tl.program_id(0) == 0:
        tl.store(experts + pair, chosen)
        tl.store(weights + pair, tl.sum(tl.sum(tl.where(mine, weight, 0.0), 1), 0))
    if chosen < 0:
        return
    cols = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = cols < N
    own = w13 + chosen.to(tl.int64) * (2 * N * K)
    gate = tl.sum(_products(own, x + row * K, cols, inside, K, BLOCK_K), 1)
    up = tl.sum(_products(own + N * K, x + row * K, cols, inside, K, BLOCK_K), 1)
    if s13 is not None:
        scale = s13 + chosen * (2 * N) + cols
        gate *= tl.load(scale, mask=inside, other=0.0)
        up *= tl.load(scale + N, mask=inside, other=0.0)
    result = gate * tl.sigmoid(gate) * up
    tl.store(hidden + pair * N + cols, result.to(hidden.dtype.element_ty), mask=inside)


@jit
def _small_down(
    hidden: tl.tensor,
    w2: tl.tensor,
    s2: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(1)
    cols = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = cols < N
    begin(PDL)
    if tl.load(experts + row * TOP_K) < 0:
        return
    total = tl.zeros([SPAN, BLOCK_K], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = row * TOP_K + j
        expert = tl.load(experts + pair)
        own = w2 + expert.to(tl.int64) * (N * K)
        part = _products(own, hidden + pair * K, cols, inside, K, BLOCK_K)
        if s2 is not None:
            part *= tl.load(s2 + expert * N + cols, mask=inside, other=0.0)[:, None]
        total += tl.load(weights + pair) * part
    # Summed across threads once, not per expert.
    tl.store(out + row * N + cols, tl.sum(total, 1).to(out.dtype.element_ty), mask=inside)


def _chunk(k: int, most: int) -> int:
    """Elements of K at a time: a power of two that divides it where that leaves wide loads."""
    fitting = pow2_divisor(k)
    return min(fitting if fitting >= 64 else pow2(k), most)


def small_moe(
    x: Tensor,
    logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    *,
    renormalise: bool = True,
    scales: tuple[Tensor, Tensor] | None = None,
    num_rows: Tensor | None = None,
    config: SmallConfig | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Routing]:
    """The whole expert MLP of `x` [T, hidden], from router `logits` [T, experts].

    `w13` [experts, 2 * width, hidden], `w2` [experts, hidden, width], all contiguous; sums are float32.
    `scales` float32 [experts, 2 * width] and [experts, hidden] are those of e4m3 weights; `x` stays as it is.
    Every row reads its experts anew, so above about four rows the tiles of `route` read less.
    Returns [T, hidden] in x's dtype, rows from `num_rows` (int32 [1], device) on not written, and the
    routing.
    """
    use = config or SmallConfig()
    s13, s2 = scales if scales is not None else (None, None)
    rows, size = x.shape
    experts = logits.shape[1]
    width = w2.shape[2]
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    found = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    hidden = x.new_empty(rows * top_k, width)
    out = torch.empty_like(x)
    _small_up[(cdiv(width, use.up_columns), rows * top_k)](
        x,
        logits,
        w13,
        s13,
        weights,
        found,
        hidden,
        num_rows,
        E=experts,
        TOP_K=top_k,
        RENORM=renormalise,
        N=width,
        K=size,
        SPAN=use.up_columns,
        BLOCK_K=_chunk(size, 2048),
        BLOCK_E=max(pow2(experts), 16),
        BLOCK_J=max(pow2(top_k), 2),
        PDL=pdl,
        **options(use.up_warps, pdl=pdl),
    )
    _small_down[(cdiv(size, use.down_columns), rows)](
        hidden,
        w2,
        s2,
        weights,
        found,
        out,
        TOP_K=top_k,
        N=size,
        K=width,
        SPAN=use.down_columns,
        BLOCK_K=_chunk(width, 1024),
        PDL=pdl,
        **options(use.down_warps, pdl=pdl),
    )
    return out, Routing(weights, found)
