"""Attention of decode rows over pages, with the work cut on the device.

All rows' keys are laid end to end in tiles, and every program takes an equal run of them:

    rows      |   row 0   |       row 1          | row 2 |  ...
    tiles     | . . . . . | . . . . . . . . . .  | . . . |
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ...

so long rows get more programs, short ones share one, and no length changes the grid: one captured
graph serves them all. A row that one program holds is finished there. Of a row that several hold, each
leaves a partial result; whoever is last (a counter per row and head) merges them, which saves the
launch of a second kernel. The partial of program c of row r lies at c + r: along the staircase above
one of the two grows at each step, so no two share a place.

`plan_decode` runs once a step for all layers of one window, `paged_decode` once a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, jit_loose, options, pow2

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
UNROLL: tl.constexpr = tl.constexpr(4)


class DecodeConfig(NamedTuple):
    """How decode attention is cut. `programs` per KV head; `least` tiles per program: below that a
    program is cheaper than the merge of two."""

    tile: int
    warps: int
    stages: int
    programs: int
    least: int = 1


class DecodePlan(NamedTuple):
    """A step's division of work, for `rows` rows and `programs` programs per KV head.

    firsts  int32 [rows + 1]  tiles before each row, then all tiles
    starts  int32 [rows]      first key position that the row attends to
    ends    int32 [rows]      its length; 0 in padded rows
    owners  int32 [programs]  the row in which each program begins
    share   int32 [1]         tiles per program
    """

    firsts: Tensor
    starts: Tensor
    ends: Tensor
    owners: Tensor
    share: Tensor


class Workspace(NamedTuple):
    """Partial results, one for all layers. `counters` must be zero before the first call and are zero
    after each."""

    out: Tensor
    lse: Tensor
    counters: Tensor


def decode_config(head_dim: int, kv_heads: int, processors: int) -> DecodeConfig:
    """Sizes by reasoning: two programs a multiprocessor, each two tiles (64 KiB at head_dim 128) ahead.
    The page number stands between a tile and its address, so five stages are two tiles."""
    tile = 64 if head_dim <= 128 else 32
    return DecodeConfig(tile, 4, 5, max(2 * processors // kv_heads, 1), 1)


def decode_workspace(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, config: DecodeConfig, device: torch.device
) -> Workspace:
    """For up to `max_rows` rows: float32 [programs + rows, heads, head_dim] and what goes with it."""
    places = config.programs + max_rows
    return Workspace(
        torch.empty(places, heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(places, heads, dtype=torch.float32, device=device),
        torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device),
    )


@jit_loose("rows", "programs")
def _plan(
    slots: tl.tensor,
    lengths: tl.tensor,
    num_rows: tl.tensor,
    skip: tl.tensor,
    firsts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    owners: tl.tensor,
    share: tl.tensor,
    rows: int,
    programs: int,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    r = tl.arange(0, BLOCK)
    begin(PDL)
    n = rows
    if num_rows is not None:
        n = tl.minimum(tl.load(num_rows).to(tl.int32), rows)
    live = r < n
    slot = r
    if slots is not None:
        slot = tl.load(slots + r, mask=live, other=0)
    end = tl.load(lengths + slot, mask=live, other=0).to(tl.int32)
    start = tl.zeros([BLOCK], tl.int32)
    if skip is not None:
        start += tl.load(skip).to(tl.int32)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    start = tl.minimum(start, end)
    tiles = tl.where(start < end, (end + TILE - 1) // TILE - start // TILE, 0)
    upto = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    each = tl.maximum((total + programs - 1) // programs, LEAST)
    tl.store(firsts + r, upto - tiles, mask=r < rows)
    tl.store(starts + r, start, mask=r < rows)
    tl.store(ends + r, end, mask=r < rows)
    tl.store(firsts + rows, total)
    tl.store(share, each)
    for at in range(0, programs, SPAN):
        c = at + tl.arange(0, SPAN)
        before = (upto[None, :] <= (c * each)[:, None]) & (r < rows)[None, :]
        tl.store(owners + c, tl.sum(before.to(tl.int32), 1), mask=c < programs)


def plan_decode(
    slots: Tensor | None,
    lengths: Tensor,
    config: DecodeConfig,
    *,
    window: int = 0,
    num_rows: Tensor | None = None,
    skip: Tensor | None = None,
    pdl: bool = False,
) -> DecodePlan:
    """Divide a step's decode work.

    slots     integer [rows]       slot of each row; None where `lengths` are those of rows
    lengths   integer [max_slots]  tokens of each slot, this step's included
    window    positions a row sees, 0 for all
    num_rows  int32 [1] on the device; rows from there on have no work
    skip      integer [1] on the device: leading keys that are attended to elsewhere (cascade); less
              than every live row's length
    """
    rows = len(lengths if slots is None else slots)
    sizes = (rows + 1, rows, rows, config.programs, 1)
    plan = DecodePlan(*(torch.empty(size, dtype=torch.int32, device=lengths.device) for size in sizes))
    _plan[(1,)](
        slots,
        lengths,
        num_rows,
        skip,
        *plan,
        rows,
        config.programs,
        WINDOW=window,
        TILE=config.tile,
        LEAST=config.least,
        BLOCK=max(pow2(rows), 64),  # one kernel for all small graphs: it is compiled anew for each size
        SPAN=16,
        PDL=pdl,
        **options(8, pdl=pdl),
    )
    return plan


@jit
def attend(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    stride: int,
    scale: float,
    v_scale: float,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Queries [n, BLOCK_D] over tiles `first` ... `last - 1` of one row's keys and one KV head: normalised
    float32 [n, BLOCK_D] and base-2 log-sum-exp [n]. None of the tiles is empty, so no maximum stays at
    -inf."""
    d = tl.arange(0, BLOCK_D)
    high = tl.zeros([q.shape[0]], tl.float32) - float("inf")
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    for tile in range(first, last):
        at = tile * TILE + tl.arange(0, TILE)
        seen = (at >= start) & (at < end)
        if PAGE % TILE == 0:  # a tile lies within a page: one page number for all
            page = tl.load(table + tile * TILE // PAGE)
        else:
            page = tl.load(table + at // PAGE, mask=seen, other=0)
        token = page.to(tl.int64 if WIDE else tl.int32) * PAGE + at % PAGE
        place = token[:, None] * stride + d[None, :]
        # What lies in pages past the length is arbitrary. A bad key's score is replaced; a bad value
        # must not be loaded, since 0 × NaN is NaN.
        if DIM == BLOCK_D:
            k = tl.load(k_cache + place)
            v = tl.load(v_cache + place, mask=seen[:, None], other=0.0)
        else:
            k = tl.load(k_cache + place, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(v_cache + place, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if CAP > 0:
            # tanh from a sigmoid: there is no other in both the compiler and the interpreter
            s = CAP * (2 * tl.sigmoid(2 * s / CAP) - 1)
        s = tl.where(seen[None, :], s * LOG2E, float("-inf"))
        top = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(high - top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        high = top
    return acc * (v_scale / total)[:, None], high + tl.log2(total)


@jit
def _merge(
    parts: tl.tensor,
    parts_lse: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Partials `first` ... `last - 1` of heads `head` as one. Past L1: other processors wrote them."""
    high = tl.zeros([head.shape[0]], tl.float32) - float("inf")
    total = tl.zeros([head.shape[0]], tl.float32)
    acc = tl.zeros([head.shape[0], d.shape[0]], tl.float32)
    for at in range(first, last, UNROLL):
        for i in tl.static_range(UNROLL):
            place = at + i
            here = head < tl.where(place < last, HEADS, 0)
            lse_at = parts_lse + place * HEADS + head
            lse = tl.load(lse_at, mask=here, other=float("-inf"), cache_modifier=".cg")
            at_d = parts + (place * HEADS + head)[:, None] * DIM + d[None, :]
            part = tl.load(at_d, mask=here[:, None] & inside, other=0.0, cache_modifier=".cg")
            top = tl.maximum(high, lse)
            # Heads past the group stay at -inf, and so does their maximum.
            level = tl.where(top > float("-inf"), top, 0.0)
            old, new = tl.exp2(high - level), tl.exp2(lse - level)
            acc = acc * old[:, None] + part * new[:, None]
            total = total * old + new
            high = top
    total = tl.where(total > 0, total, 1.0)
    return acc / total[:, None], high + tl.log2(total)


@jit_loose("rows")
def _decode(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    firsts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    owners: tl.tensor,
    share: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: int,
    q_stride: int,
    stride: int,
    table_stride: int,
    scale: float,
    v_scale: float,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    c = tl.program_id(1)
    heads: tl.constexpr = KV * GROUP
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    # Heads past the group get a number past all heads: one comparison masks them everywhere.
    head = tl.where(h < GROUP, kv_head * GROUP + h, heads)
    inside = (head < heads)[:, None] & (d < DIM)[None, :]
    begin(PDL)
    each = tl.load(share)
    row = tl.load(owners + c)
    tile = c * each
    stop_all = tl.minimum(tile + each, tl.load(firsts + rows))
    known = row < rows
    row_first = tl.load(firsts + row, mask=known, other=0)
    row_last = tl.load(firsts + row + 1, mask=known, other=0)
    slot = tl.load(slots + row, mask=known, other=0).to(tl.int64)
    start = tl.load(starts + row, mask=known, other=0)
    end = tl.load(ends + row, mask=known, other=0)
    while tile < stop_all:
        # The next row's numbers are asked for now: found while this row is attended to.
        known = row + 1 < rows
        next_last = tl.load(firsts + row + 2, mask=known, other=0)
        next_slot = tl.load(slots + row + 1, mask=known, other=0).to(tl.int64)
        next_start = tl.load(starts + row + 1, mask=known, other=0)
        next_end = tl.load(ends + row + 1, mask=known, other=0)
        stop = tl.minimum(stop_all, row_last)
        if stop > tile:
            q_at = q + row.to(tl.int64) * q_stride + head[:, None] * DIM + d[None, :]
            queries = tl.load(q_at, mask=inside, other=0.0)
            shift = start // TILE - row_first
            acc, sums = attend(
                queries,
                k_cache + kv_head * DIM,
                v_cache + kv_head * DIM,
                table + slot * table_stride,
                start,
                end,
                tile + shift,
                stop + shift,
                stride,
                scale,
                v_scale,
                DIM,
                PAGE,
                CAP,
                WIDE,
                TILE,
                BLOCK_D,
            )
            mine = (tile == row_first) & (stop == row_last)
            if mine == 0:
                place = c + row
                at = parts + (place * heads + head)[:, None] * DIM + d[None, :]
                tl.store(at, acc, mask=inside)
                tl.store(parts_lse + place * heads + head, sums, mask=head < heads)
                tl.debug_barrier()  # all threads' stores, before the one thread that says so
                first = row_first // each
                last = (row_last - 1) // each + 1
                counter = counters + row * KV + kv_head
                arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
                if arrived == last - first - 1:
                    tl.store(counter, 0)
                    tl.debug_barrier()
                    acc, sums = _merge(parts, parts_lse, first + row, last + row, head, d, inside, heads, DIM)
                    mine = mine == 0  # true: what the others left is in `acc` now
            if mine:
                out_at = out + (row * heads + head)[:, None] * DIM + d[None, :]
                tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)
                if lse is not None:
                    tl.store(lse + row * heads + head, sums, mask=head < heads)
        tile = stop
        row += 1
        row_first, row_last = row_last, next_last
        slot, start, end = next_slot, next_start, next_end


def paged_decode(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table: Tensor,
    slots: Tensor,
    plan: DecodePlan,
    workspace: Workspace,
    config: DecodeConfig,
    *,
    page_size: int,
    scale: float,
    cap: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
    lse: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """One query per row over its keys, grouped heads.

    q           [rows, heads, dim], heads and dim contiguous
    cache       K and V, each [tokens, kv_heads, dim] with (kv_heads, dim) contiguous and equal strides:
                views of a layer's pages flattened to tokens; K of this step already stored
    page_table  integer [max_slots, pages]; entries past a slot's length are not read as keys
    slots       integer [rows]
    plan        of `plan_decode` with the same `slots` and `config`
    cap         scores s become cap · tanh(s / cap); 0 for none
    scales      what K and V of a cache in float8 are multiplied by
    lse         float32 [rows, heads] to fill with the base-2 log-sum-exp of the scaled scores
    returns     [rows, heads * dim] (`out`, or new); padded rows are not written
    """
    k, v = cache
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    _decode[(kv_heads, config.programs)](
        q,
        k,
        v,
        page_table,
        slots,
        *plan,
        *workspace,
        out,
        lse,
        rows,
        q.stride(0),
        k.stride(0),
        page_table.stride(0),
        scale * scales[0],
        scales[1],
        KV=kv_heads,
        GROUP=group,
        DIM=dim,
        PAGE=page_size,
        CAP=cap,
        WIDE=len(k) * k.stride(0) >= 2**31,  # 64-bit places cost 18 to 38 registers a thread
        TILE=config.tile,
        BLOCK_H=max(pow2(group), 16),
        BLOCK_D=pow2(dim),
        PDL=pdl,
        **options(config.warps, config.stages, pdl),
    )
    return out
