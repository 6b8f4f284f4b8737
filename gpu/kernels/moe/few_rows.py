"""Routed experts for a handful of rows: two launches, only the chosen experts read, no tiles.

    up    a program per (pair, columns), as many as the processors hold at once: each finds its expert from
          the row's logits, which costs less than a launch, then a warp takes a column of gate and of up
    down  a program per (row, columns): all of the row's experts at once, weighted, summed

At one row the weights of eight experts (75 MB at 30B-A3B, 17.6 µs) dwarf everything else, and a tensor
core would be fed one row in sixteen. Integers of 4 bits (`gpu.quant.int4`) are a quarter of that to read,
and it is sums of their products that are scaled, so that a weight costs three operations. Not measured.

`down` routes for itself too, so that its weights stream in while `up` still runs: it starts when every
program of `up` has let it, which each does behind its wait, so the router's logits are there by then, if
not yet in what a multiprocessor keeps: they are read past that, through L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from core.models.quant import BLOCK
from gpu.experts import Experts
from gpu.kernels.gemm.gemv import WIDE, chunk, dots, tiles
from gpu.kernels.jit import add_pairs, begin, cdiv, jit, launch_options, pow2
from gpu.kernels.moe.few_rows_int4 import fine_down_sums, fine_row, fine_shape, fine_up_sums
from gpu.kernels.moe.route import Routing, router
from gpu.kernels.silu_mul import gated
from gpu.quant import int4

_BLOCK, _WORD = tl.constexpr(BLOCK), tl.constexpr(int4.WORD)

RESIDENT = 1056
"""Programs of two warps and 128 registers a thread that the 132 processors of an H200 hold at once."""

HELD = 96
"""Registers of a thread that `down` may fill with weights before it waits; it computes with 32 more."""


class FewRowsConfig(NamedTuple):
    """How the two kernels are cut. Measured on an H200, whole, 1 row of 30B-A3B: 21.3 µs; with `up` in one
    step less or more or without its limit of registers (two waves, each routing anew) 23 to 28.

    up_warps      columns a step: a warp to each
    up_steps      columns of a warp, one after the other
    down_columns  of a program, with all experts of the row
    down_warps    of a program
    """

    up_warps: int
    up_steps: int
    down_columns: int
    down_warps: int


UP_REGISTERS, FINE_REGISTERS = 128, 168
"""Registers of a thread of `up`, where the row fits beside the weights. The compiler would take 166, which
leaves one program a multiprocessor. Unpacking 4 bits takes more registers: six programs run instead of
eight."""


@jit
def _top_k(
    logits: tl.tensor,
    count: tl.tensor,
    ROUTER: tl.constexpr,
    WARPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The best of the first `count` of a row's logits, lowest expert first on ties: the logits as float32
    and 1 at the best ones [WARPS, block_e]; the best ones and their logits [WARPS, block_k].

    Every warp finds them, with a row of the tile to itself: what is reduced then never leaves a warp.
    """
    TOP_K: tl.constexpr = ROUTER.top_k
    BLOCK_E: tl.constexpr = ROUTER.block_e
    BLOCK_J: tl.constexpr = ROUTER.block_k
    e = tl.arange(0, BLOCK_E)[None, :] + tl.zeros([WARPS, 1], tl.int32)
    j = tl.arange(0, BLOCK_J)[None, :]
    x = tl.load(logits + e, mask=e < count, other=float("-inf"), cache_modifier=".cg").to(tl.float32) + 0.0
    x = tl.where(x == x, x, float("-inf"))  # whatever stands there, the experts are those of the table
    # Integers in the order of the floats (+ 0.0 above makes -0 equal to 0): a warp has an instruction
    # for their maximum.
    word = x.to(tl.int32, bitcast=True)
    left = word ^ ((word >> 31) & 0x7FFFFFFF)
    expert = tl.zeros([WARPS, BLOCK_J], tl.int32)
    order = tl.zeros([WARPS, BLOCK_J], tl.int32)
    taken = tl.zeros([WARPS, BLOCK_E], tl.int32)
    for i in tl.static_range(TOP_K):
        top = tl.max(left, 1)[:, None]
        index = tl.min(tl.where(left == top, e, BLOCK_E), 1)[:, None]
        expert = tl.where(j == i, index, expert)
        order = tl.where(j == i, top, order)
        taken = tl.where(e == index, 1, taken)
        left = tl.where(e == index, -(2**31), left)
    return x, taken, expert, (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _row(x: tl.tensor, K: tl.constexpr, WARPS: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """The row at `x` for every warp, a tuple of [WARPS, BLOCK_K]."""
    found: tl.tensor = ()
    for k in tl.static_range(0, K, BLOCK_K):
        d = k + tl.arange(0, BLOCK_K)[None, :] + tl.zeros([WARPS, 1], tl.int32)
        found += (tl.load(x + d, mask=d < K, other=0.0),)
    return found


@jit
def _by_block(
    scales: tl.tensor, row: tl.tensor, k: tl.tensor, inside: tl.tensor, K: tl.constexpr
) -> tl.tensor:
    """What weights of `row` and input `k`, of one shape when broadcast, are scaled by: those of their
    blocks, 0 where not `inside`."""
    at = scales + row // _BLOCK * (K // _BLOCK) + k // _BLOCK
    return tl.load(at, mask=inside & (k < K), other=0.0)


@jit
def _up_sums(
    gates: tl.tensor,
    ups: tl.tensor,
    row: tl.tensor,
    scales: tl.tensor,
    cols: tl.tensor,
    chosen: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """float32 [WARPS, BLOCK_K / WIDE] of gate and of up, which sum along the second axis to their products of
    the `row` with the weights `gates` and `ups` of the columns `cols`."""
    gate = tl.zeros([WARPS, BLOCK_K // WIDE], tl.float32)
    up = tl.zeros([WARPS, BLOCK_K // WIDE], tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        some = row[i].to(tl.float32)
        by_gate = dots(gates[i].to(tl.float32), some, WARPS, BLOCK_K)
        by_up = dots(ups[i].to(tl.float32), some, WARPS, BLOCK_K)
        if BLOCKS:
            k = i * BLOCK_K + tl.arange(0, BLOCK_K // WIDE)[None, :] * WIDE
            w_row, there = chosen * (2 * N) + cols[:, None], (cols < N)[:, None]
            by_gate *= _by_block(scales, w_row, k, there, K)
            by_up *= _by_block(scales, w_row + N, k, there, K)
        gate += by_gate
        up += by_up
    return gate, up


@jit
def _down_sums(
    held: tl.tensor,
    hidden: tl.tensor,
    pair: tl.tensor,
    live: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_J, SPAN, BLOCK_K / WIDE] that sum along the last axis to the products of the rows `pair`
    of `hidden` with the weights `held` of their experts, for the columns `cols`."""
    J: tl.constexpr = inside.shape[0]
    SPAN: tl.constexpr = cols.shape[0]
    total = tl.zeros([J, SPAN, BLOCK_K // WIDE], tl.float32)
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        d = i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(hidden + pair[:, None] * K + d, mask=live[:, None] & (d < K), other=0.0)
        product = held[i].to(tl.float32) * x.to(tl.float32)[:, None, :]
        some = tl.sum(tl.reshape(product, [J, SPAN, BLOCK_K // WIDE, WIDE]), 3)
        if BLOCKS:
            k = i * BLOCK_K + tl.arange(0, BLOCK_K // WIDE)[None, None, :] * WIDE
            w_row = (expert * N)[:, None, None] + cols[None, :, None]
            some *= _by_block(scales, w_row, k, inside, K)
        total += some
    return total


@jit
def _finish(
    sums: tl.tensor, scales: tl.tensor | None, bias: tl.tensor | None, outputs: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """Sums of `outputs`, where `there`, with their scales and biases, if they have any."""
    if scales is not None:
        sums *= tl.load(scales + outputs, mask=there, other=0.0)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=there, other=0.0).to(tl.float32)
    return sums


@jit
def _small_up(
    x: tl.tensor,
    logits: tl.tensor,
    w13: tl.tensor,
    s13: tl.tensor,
    b13: tl.tensor | None,
    routing: Routing,
    hidden: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUTER: tl.constexpr,
    FINE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    E: tl.constexpr = ROUTER.experts
    HELD: tl.constexpr = K if FINE is None else K // _WORD
    pair = tl.program_id(1)
    row = pair // ROUTER.top_k
    begin(PDL)
    live = row >= 0
    if num_rows is not None:
        live = row < tl.load(num_rows)
    score, taken, expert, value = _top_k(logits + row * E, tl.where(live, E, 0), ROUTER, WARPS)
    mine = tl.arange(0, ROUTER.block_k)[None, :] == pair % ROUTER.top_k
    chosen = tl.max(tl.max(tl.where(mine, expert, 0), 1), 0)
    if not live:
        if tl.program_id(0) == 0:
            tl.store(routing.experts + pair, -1)
            tl.store(routing.weights + pair, 0.0)
        return
    if FINE is not None:
        held, sums = fine_row(x + row * K, K, WARPS, BLOCK_K, FINE)
    elif KEEP:
        held = _row(x + row * K, K, WARPS, BLOCK_K)
    gates = w13 + chosen.to(tl.int64) * (2 * N * HELD)
    for step in tl.static_range(STEPS):
        cols = (tl.program_id(0) * STEPS + step) * WARPS + tl.arange(0, WARPS)
        inside = None if N % (STEPS * WARPS) == 0 else cols < N
        gate_tiles = tiles(gates, cols, inside, HELD, BLOCK_K)
        up_tiles = tiles(gates + N * HELD, cols, inside, HELD, BLOCK_K)
        if FINE is not None:
            gate, up = fine_up_sums(
                gate_tiles, up_tiles, held, sums, s13, cols, chosen, x, N, K, WARPS, BLOCK_K, FINE
            )
        else:
            if not KEEP:
                held = _row(x + row * K, K, WARPS, BLOCK_K)
            gate, up = _up_sums(gate_tiles, up_tiles, held, s13, cols, chosen, N, K, WARPS, BLOCK_K, BLOCKS)
        gate, up = tl.reduce((gate, up), 1, add_pairs)
        by_output = None if BLOCKS or FINE is not None else s13
        gate = _finish(gate, by_output, b13, chosen * (2 * N) + cols, cols < N)
        up = _finish(up, by_output, b13, chosen * (2 * N) + N + cols, cols < N)
        result = gated(gate, up, ALPHA, LIMIT)
        tl.store(hidden + pair * N + cols, result.to(hidden.dtype.element_ty), mask=cols < N)
    if tl.program_id(0) == 0:  # last: nothing here waits for it
        top = tl.max(value, 1)[:, None]
        share = tl.exp(score - top)
        counted = tl.where(taken > 0, share, 0.0) if ROUTER.renormalise else share
        own = tl.sum(tl.where(mine, tl.exp(value - top), 0.0), 1) / tl.sum(counted, 1)
        tl.store(routing.experts + pair, chosen)
        tl.store(routing.weights + pair, tl.max(own, 0))


@jit
def _small_down(
    hidden: tl.tensor,
    logits: tl.tensor,
    w2: tl.tensor,
    s2: tl.tensor,
    b2: tl.tensor | None,
    weights: tl.tensor,
    residual: tl.tensor | None,
    out: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUTER: tl.constexpr,
    FINE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    E: tl.constexpr = ROUTER.experts
    TOP_K: tl.constexpr = ROUTER.top_k
    BLOCK_J: tl.constexpr = ROUTER.block_k
    HELD: tl.constexpr = K if FINE is None else K // _WORD
    row = tl.program_id(1)
    live = row >= 0
    if num_rows is not None:
        live = row < tl.load(num_rows, cache_modifier=".cg")
    _, _, few, _ = _top_k(logits + row * E, tl.where(live, E, 0), ROUTER, WARPS)
    expert = tl.max(few, 0)
    j = tl.arange(0, BLOCK_J)
    cols = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside = (j < TOP_K)[:, None, None] & (cols < N)[None, :, None]
    at = w2 + expert.to(tl.int64)[:, None, None] * (N * HELD) + cols[None, :, None] * HELD
    held: tl.tensor = ()
    for k in tl.static_range(0, HELD, BLOCK_K):
        d = k + tl.arange(0, BLOCK_K)[None, None, :]
        some = tl.load(at + d, mask=inside & (d < HELD), other=0.0, eviction_policy="evict_first")
        held += (some,)
    if residual is not None:  # which `up` does not write. Past L1, where an older one may lie
        old = tl.load(residual + row * N + cols, mask=cols < N, other=0.0, cache_modifier=".cg")
    begin(PDL)
    if not live:
        return
    pair = row * TOP_K + j
    if FINE is not None:
        total = fine_down_sums(held, hidden, pair, j < TOP_K, s2, expert, cols, inside, N, K, BLOCK_K, FINE)
    else:
        total = _down_sums(held, hidden, pair, j < TOP_K, s2, expert, cols, inside, N, K, BLOCK_K, BLOCKS)
    weight = tl.load(weights + pair, mask=j < TOP_K, other=0.0)[:, None]
    found = tl.sum(total, 2)
    outputs, there = expert[:, None] * N + cols[None, :], (j < TOP_K)[:, None] & (cols < N)[None, :]
    found = _finish(found, None if BLOCKS or FINE is not None else s2, b2, outputs, there)
    found = tl.sum(found * weight, 0).to(out.dtype.element_ty)
    if residual is not None:  # rounded as the norm's kernel rounds it: the sum, then the new residual
        found = (found.to(tl.float32) + old.to(tl.float32)).to(found.dtype)
    tl.store(out + row * N + cols, found, mask=cols < N)


def few_rows_config(w2: Tensor, top_k: int, width: int) -> FewRowsConfig:
    """For `w2` [experts, hidden, `width`], of 4 bits in words: `up` in one wave at one row, `down` in the
    registers it may hold."""
    warps = 2
    resident = RESIDENT * 3 // 4 if w2.dtype == torch.int16 else RESIDENT
    steps = min(max(round(top_k * width / (warps * resident)), 1), 4)
    for columns, low_warps in ((4, 4), (2, 4), (1, 4)):
        if pow2(top_k) * columns * w2.shape[2] * w2.element_size() <= HELD * 4 * 32 * low_warps:
            return FewRowsConfig(warps, steps, columns, low_warps)
    return FewRowsConfig(warps, steps, 1, 8)


def few_rows_moe(
    x: Tensor,
    logits: Tensor,
    experts: Experts,
    *,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
    config: FewRowsConfig | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Routing]:
    """The whole expert MLP of `x` [T, hidden], from router `logits` [T, experts], all contiguous; sums are
    float32. `x` is not quantised where the weights are.
    Every row reads its experts anew, so above about four rows the tiles of `route` read less.
    Returns [T, hidden] in x's dtype, rows from `num_rows` (int32 [1], device; older than `logits`) on not
    written, and the routing. With a `residual` [T, hidden] the outputs are added to it, and it is returned.
    """
    w13, w2, top_k, renormalise, _, scales, *_ = experts
    b13, b2 = experts.biases or (None, None)
    gate = (0.0, 0.0) if (clamped := experts.clamped) is None else (clamped.alpha, clamped.limit)
    s13, s2 = scales if scales is not None else (None, None)
    rows, size = x.shape
    width = w13.shape[1] // 2
    use = config or few_rows_config(w2, top_k, width)
    up_fine = down_fine = None
    if experts.is_int4:
        assert s13 is not None and s2 is not None
        up_fine, s13 = fine_shape(s13, size)
        down_fine, s2 = fine_shape(s2, width)
    routing = Routing(
        torch.empty(rows, top_k, dtype=torch.float32, device=x.device),
        torch.empty(rows, top_k, dtype=torch.int32, device=x.device),
    )
    hidden = x.new_empty(rows * top_k, width)
    out = torch.empty_like(x) if residual is None else residual
    chosen_by = router(logits.shape[1], top_k, renormalise)
    blocked = s13 is not None and s13.dim() == w13.dim() and up_fine is None
    keep = size * x.element_size() <= 4096  # 32 registers
    _small_up[(cdiv(width, use.up_warps * use.up_steps), rows * top_k)](
        x,
        logits,
        w13,
        s13,
        b13,
        routing,
        hidden,
        num_rows,
        N=width,
        K=size,
        WARPS=use.up_warps,
        STEPS=use.up_steps,
        BLOCK_K=chunk(w13.shape[2], 256),
        KEEP=keep,
        BLOCKS=blocked,
        ALPHA=gate[0],
        LIMIT=gate[1],
        ROUTER=chosen_by,
        FINE=up_fine,
        **launch_options(pdl, use.up_warps),
        **({"maxnreg": UP_REGISTERS if up_fine is None else FINE_REGISTERS} if keep and pdl else {}),
    )
    _small_down[(cdiv(size, use.down_columns), rows)](
        hidden,
        logits,
        w2,
        s2,
        b2,
        routing.weights,
        residual,
        out,
        num_rows,
        N=size,
        K=width,
        SPAN=use.down_columns,
        BLOCK_K=chunk(w2.shape[2], 256 * max(use.down_warps // chosen_by.block_k, 1)),
        WARPS=use.down_warps,
        BLOCKS=blocked,
        ROUTER=chosen_by,
        FINE=down_fine,
        **launch_options(pdl, use.down_warps),
    )
    return out, routing
