"""Attention of decode rows over pages, with the work cut on the device.

All rows' keys are laid end to end in tiles, and every program takes an equal run of them:

    rows      |   row 0   |       row 1          | row 2 |  ...
    tiles     | . . . . . | . . . . . . . . . .  | . . . |
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ...
    segments  |     0     |   -   2   |  3  |  4  | ...

so long rows get more programs, short ones share one, and no length changes the grid: one captured
graph serves them all. A segment is what one program does of one row. A row of one segment is finished there.
Each segment of a row of several stores a partial result; the last program (a counter per row and head) merges
them, which saves the launch of a second kernel, or with few rows that kernel does
(`gpu.kernels.attention.split_kv`). The segment of program c in the row that is the r-th with any keys lies at
c + r: along the staircase above one of the two grows at each step, so no two share a place, a program's lie
side by side, and so do a row's.

A program runs through its tiles in one loop, whatever row they are of: the next row's keys and queries
are on their way while a row ends. (A loop per row ran dry at each end: 512 rows of 96 keys took 89 us
where the bytes take 47, and now 58.) The loop holds no barrier, so the counters are incremented after it.

With drafts a row has several tokens: neighbours of one slot, each of which sees one key more than the one
before it. Up to `DecodeConfig.queries` of them share one pass over the row's keys: their queries, of all
heads of a group, are the matrix that a tile of keys is multiplied by. Rows are packed and ragged: the plan
finds by the slots where one begins. An early token may see nothing of the row's last tile, and with a window
a late one nothing of its first: such a partial result is empty (-inf), and the merge leaves it out. Where
drafts may be trees, each token has a mask of the keys before its own (`StepView.ancestors`).

With few rows a program has one or two tiles, and spends more time waiting for them than computing. It then
loads the first tile before the wait, without the keys that this step adds (`DecodeConfig.newest`). The kernel
before it, which norms and rotates heads, launches it before its own wait, so the tile is loaded while the
product of queries, keys and values still runs. A program whose run is that tile ends behind it: the code of
the others, with a pipeline's beginning, took 0.3 us to pass by. With both and the merge in a kernel of its
own a lone row of 1,040 keys takes 5.5 us a layer instead of 6.5 on an H200 (8 KV heads; with 4: 4.9 for 6.0).

`plan_decode` runs once a step for all layers of one window, `paged_decode` once a layer. Under dependent
launch at least two kernels stand between them, the first of which waits before it lets the second begin: the
plan is read before the wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.attention.decode_plan import FIELDS, DecodePlan
from gpu.kernels.attention.online_softmax import (
    KEPT,
    attend_tile,
    columns,
    load_ahead,
    load_pages,
    load_tails,
    zero_values,
    zero_where,
)
from gpu.kernels.attention.pages import Keys, Pages, kernel_args
from gpu.kernels.attention.split_kv import (
    Partials,
    merge_parts,
    merge_rows,
    partials,
    store_row,
    store_segment,
)
from gpu.kernels.jit import (
    begin,
    jit,
    launch_options,
    load_record,
    pow2,
)

MERGED = 2048
"""Elements of partial results that a warp of a program merges at once: 64 registers a thread."""

MOST_MERGED = 16
"""Maximum number of partial results that a warp merges at once. The loop over them is unrolled, and with 64
it takes several seconds to compile."""


class Workspace(NamedTuple):
    """Partial results [programs * queries + rows, heads], and `counters` int32 [rows, kv_heads], which must
    be zero before the first call and are zero after each. One for all layers.

    Where several tokens share a pass, those of program c's segment of the tokens from t on lie from
    c * queries + t on. No two segments overlap: along the staircase above a step to the next program leaves
    room for `queries` tokens, and one to the next row for as many as this one has."""

    parts: Partials
    counters: Tensor


def decode_workspace(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, config: DecodeConfig, device: torch.device
) -> Workspace:
    """The workspace of decode attention for up to `max_rows` rows."""
    return Workspace(
        partials(config.programs * config.queries + max_rows, heads, head_dim=head_dim, device=device),
        torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device),
    )


@jit
def _next_record(at: tl.tensor, turns: tl.tensor, record: tl.tensor) -> tl.tensor:
    """The record at `at` where `turns`; nothing is read where not, and `record` stays."""
    found: tl.tensor = ()
    for i in tl.static_range(len(record)):
        found += (tl.load(at + i, mask=turns, other=record[i], eviction_policy=KEPT),)
    return found


@jit
def _lanes(
    lane: tl.tensor,
    more: tl.tensor,
    kv_head: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
) -> tl.tensor:
    """The heads of a row's first query and of `more` others, GROUP lanes each: HEADS further from one query
    to the next. Lanes behind them get a number past all."""
    query = lane // GROUP
    return tl.where(query <= more, query * HEADS + kv_head * GROUP + lane % GROUP, HEADS * QUERIES)


@jit
def _page(
    keys: Keys,
    slot: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    ahead: tl.tensor | None,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    CACHE: tl.constexpr,
) -> tl.tensor:
    """Return the pages of a tile, as `load_pages` does. A tile that was loaded `ahead` already has them."""
    if ahead is not None:
        page = ahead[0]
    else:
        table = keys.table + slot.to(tl.int64) * keys.table_stride
        page = load_pages(table, tile, end, SHAPE.page, TILE, CACHE)
    return page


@jit
def _merge_last(
    space: Workspace,
    kv_head: tl.tensor,
    lead: tl.tensor,
    latter: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    keys: Keys,
    SHAPE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Add a run's partial results to the counters of their rows, and merge each row that is now complete.

    Only a run's first and last segment can be part of a row. Both are counted at once: `lead` and `latter`
    hold the segment's place, its row, the row's first segment, and how many segments the row has."""
    dim: tl.constexpr = SHAPE.dim
    group: tl.constexpr = SHAPE.group
    heads: tl.constexpr = SHAPE.kv * group
    block_d: tl.constexpr = SHAPE.block_d
    two = tl.arange(0, 2)
    whole = tl.where(two == 0, lead[3], latter[3])
    partial = tl.where((two == 0) | (latter[0] > lead[0]), whole, 1) > 1
    counter = space.counters + tl.where(two == 0, lead[1], latter[1]) // QUERIES * SHAPE.kv + kv_head
    tl.debug_barrier()  # all threads' partials, before one thread increments the counters
    arrived = tl.atomic_add(counter, 1, mask=partial, sem="acq_rel", scope="gpu")
    due = tl.where(partial & (arrived + 1 == whole), 1, 0)
    tl.store(counter, 0, mask=due > 0)
    d = tl.arange(0, block_d)
    g = tl.arange(0, BLOCK_G)
    head = tl.where(g < group, kv_head * group + g, heads)
    for side in range(2):
        if tl.sum(tl.where(two == side, due, 0), 0) > 0:
            row = tl.where(side == 0, lead[1], latter[1])
            first, count = tl.where(side == 0, lead[2], latter[2]), tl.where(side == 0, lead[3], latter[3])
            if QUERIES > 1:
                head = _lanes(g, row % QUERIES, kv_head, group, heads, QUERIES)
                row = row // QUERIES
            merged, sums = merge_parts(space.parts, first, count, head, d, heads, dim, UNROLL, QUERIES)
            store_row(merged, sums, row, head, out, lse, keys.sinks, heads, dim, QUERIES)


@jit
def _decode(
    q: tl.tensor,
    keys: Keys,
    plan: DecodePlan,
    space: Workspace,
    out: tl.tensor,
    lse: tl.tensor,
    ancestors: tl.tensor | None,
    q_stride: int,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
    NEWEST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    c = tl.program_id(1)
    dim: tl.constexpr = SHAPE.dim
    block_d: tl.constexpr = SHAPE.block_d
    group: tl.constexpr = SHAPE.group
    heads: tl.constexpr = SHAPE.kv * group
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, block_d)
    # Heads past the group get a number past all heads: one comparison masks them everywhere.
    head = tl.where(h < group, kv_head * group + h, heads)
    inside = (head < heads)[:, None] & (d < dim)[None, :]
    query, own = h // group, kv_head * group + h % group
    k_cache = keys.k + kv_head * SHAPE.step
    v_cache = keys.v + kv_head * SHAPE.step
    # The kernel before makes the queries and stores this step's keys and values, of what the one before that
    # made: both may run still. The plan, the table and all other keys are older. They are read past L1, where
    # another step's may lie.
    run, segments = plan.runs + c * FIELDS, plan.segments
    row, slot, tile, last, start, end, segment, count = load_record(run, 8, ".cg")
    if count == 0:
        begin(PDL)
        return
    first, pieces = load_record(segments + segment * FIELDS + 6, 2, ".cg")
    lead = (segment, row, first, pieces)
    # Where the first tile was loaded ahead, it is a loop of its own: the others, if any, are pipelined.
    stops: tl.tensor = (count,)
    held: tl.tensor = (None,)
    if NEWEST > 0:
        page = _page(keys, slot, tile, end, None, SHAPE, TILE, ".cg")
        ahead = load_ahead(k_cache, v_cache, page, tile, start, end, keys.stride, SHAPE, TILE, NEWEST)
        stops, held = (1, count), (ahead, None)
    begin(PDL)
    if QUERIES > 1:
        opens = count > 0
        queries = tl.zeros([BLOCK_H, block_d], q.dtype.element_ty)
    high = tl.zeros([BLOCK_H], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = zero_values(BLOCK_H, SHAPE)
    for run_of in tl.static_range(len(stops)):
        if run_of > 0 and count == 1:
            return
        for i in range(run_of, stops[run_of]):
            if QUERIES == 1:
                # Queries are loaded again for each tile: pipelined like the keys, they keep no row waiting.
                q_row = q + row.to(tl.int64) * q_stride + head[:, None] * (dim + SHAPE.tail)
                queries = tl.load(q_row + d[None, :], mask=inside, other=0.0)
                q_tail = load_tails(q_row, (head < heads)[:, None], SHAPE)
                token, place, own_ends, seen = row, segment, None, None
                if ancestors is not None:
                    own_ends = tl.zeros([BLOCK_H], tl.int32) + end
                    seen = tl.zeros([BLOCK_H], tl.int32) + tl.load(ancestors + row)
            else:
                # Once for each row: these are up to half as many bytes as a tile of keys.
                token, more, q_tail = row // QUERIES, row % QUERIES, None
                if opens:
                    q_at = (
                        q + (token + query).to(tl.int64)[:, None] * q_stride + own[:, None] * dim + d[None, :]
                    )
                    queries = tl.load(q_at, mask=(query <= more)[:, None] & (d < dim)[None, :], other=0.0)
                head = _lanes(h, more, kv_head, group, heads, QUERIES)
                place, own_ends, seen = c * QUERIES + token, end - more + query, None
                if ancestors is not None:
                    seen = tl.load(ancestors + token + query, mask=query <= more, other=-1)
            page = _page(keys, slot, tile, end, held[run_of], SHAPE, TILE, "")
            high, total, acc = attend_tile(
                queries, k_cache, v_cache, page, tile, start, end, high, total, acc, keys.stride,
                keys.scale, SHAPE, TILE, own_ends, WINDOW, seen, q_tail, held[run_of], NEWEST,
            )  # fmt: skip
            ends = tile + 1 == last
            if ends:
                store_segment(
                    columns(acc, SHAPE), high, total, token, place, pieces, space.parts, out, lse, head,
                    keys.v_scale, keys.sinks, heads, dim, QUERIES,
                )  # fmt: skip
            if QUERIES > 1:
                opens = ends
            high = tl.where(ends, float("-inf"), high)
            total = tl.where(ends, 0.0, total)
            acc = zero_where(ends, acc, SHAPE)
            # Behind the run's last segment may be none: then its own stands.
            turns = ends & (i + 1 < count)
            segment += tl.where(turns, 1, 0)
            row, slot, tile, last, start, end, first, pieces = _next_record(
                segments + segment * FIELDS, turns, (row, slot, tile + 1, last, start, end, first, pieces)
            )
    if NEWEST == 0:
        latter = (segment, row, first, pieces)
        _merge_last(space, kv_head, lead, latter, out, lse, keys, SHAPE, QUERIES, BLOCK_G, UNROLL)


def paged_decode(
    q: Tensor,
    pages: Pages,
    plan: DecodePlan,
    workspace: Workspace,
    config: DecodeConfig,
    *,
    window: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    ancestors: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """One query per row over its keys, grouped heads.

    q        [rows, heads, dim], over latents [rows, heads, dim + tail], heads and dim contiguous
    plan     of `plan_decode` with the same `config` and `window`
    lse      float32 [rows, heads] to fill with the base-2 log-sum-exp of the scaled scores, without sinks
    ancestors  see `StepView.ancestors`
    returns  [rows, heads * dim] (`out`, or new); padded rows are not written
    """
    rows, heads, _ = q.shape
    keys, shape = kernel_args(q, pages)
    assert not shape.tail or config.queries == 1, "tokens over latents are rows of their own"
    assert not config.newest or config.queries == 1, "rows that are few are not read in passes"
    if out is None:
        out = torch.empty(rows, heads * shape.dim, dtype=q.dtype, device=q.device)
    ragged = config.queries > 1
    block_g = pow2(shape.group * config.queries)
    block_h, least = (max(block_g, 16), 1) if ragged else (max(block_g, 8), 2)
    _decode[(shape.kv, config.programs)](
        q,
        keys,
        plan,
        workspace,
        out,
        lse,
        ancestors,
        q.stride(0),
        SHAPE=shape,
        TILE=config.tile,
        QUERIES=config.queries,
        WINDOW=window if ragged or ancestors is not None else 0,
        BLOCK_H=block_h,
        BLOCK_G=block_g,
        NEWEST=config.newest,
        UNROLL=min(max(MERGED * config.warps // (block_g * shape.block_d), least), MOST_MERGED),
        **launch_options(pdl, config.warps, config.stages),
        **({"maxnreg": config.registers} if config.registers and pdl else {}),
    )
    if config.newest:
        merge_rows(plan.rows, workspace.parts, out, lse, keys.sinks, heads, pdl=pdl)
    return out
