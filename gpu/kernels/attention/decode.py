"""Attention of decode rows over pages, with the work cut on the device.

All rows' keys are laid end to end in tiles, and every program takes an equal run of them:

    rows      |   row 0   |       row 1          | row 2 |  ...
    tiles     | . . . . . | . . . . . . . . . .  | . . . |
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ...
    segments  |     0     |   -   2   |  3  |  4  | ...

so long rows get more programs, short ones share one, and no length changes the grid: one captured
graph serves them all. What a program does of one row is a segment. A row of one segment is finished
there. Of a row of several, each stores a partial result; the last program (a counter per row and head)
merges them (`gpu.kernels.attention.split_kv`), which saves the launch of a second kernel. The segment of
program c in the row that is the r-th with any keys lies at c + r: along the staircase above one of the two
grows at each step, so no two share a place, a program's lie side by side, and so do a row's.

A program runs through its tiles in one loop, whatever row they are of: the next row's keys and queries
are on their way while a row ends. (A loop per row ran dry at each end: 512 rows of 96 keys took 89 us
where the bytes take 47, and now 58.) The loop holds no barrier, so the counters are incremented after it.

`plan_decode` runs once a step for all layers of one window, `paged_decode` once a layer. Under dependent
launch at least one kernel stands between the two: the plan is read before the wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import KEPT, attend_tile, load_pages
from gpu.kernels.attention.pages import Keys, Pages, kernel_args
from gpu.kernels.attention.split_kv import Partials, merge_parts, partials, store_segment
from gpu.kernels.jit import (
    begin,
    cdiv,
    jit,
    jit_loose,
    launch_options,
    load_record,
    pow2,
    store_record,
    true_rows,
)

FIELDS: tl.constexpr = tl.constexpr(8)
"""int32 per segment: one sector."""

MERGED = 2048
"""Elements of partial results that a warp of a program merges at once: 64 registers a thread."""

MOST_MERGED = 16
"""Of them at once, however small: the compiler sees each, and 64 are several seconds of its time."""

SOME = 32
"""Rows up to which a third program of a multiprocessor pays more than its copies further ahead."""


class DecodeConfig(NamedTuple):
    """How decode attention is cut. `programs` per KV head; `least` tiles per program: below that a
    program is cheaper than the merge of two. `registers` of a thread at most, 0 for the compiler's choice."""

    tile: int
    warps: int
    stages: int
    programs: int
    least: int = 1
    registers: int = 0


class DecodePlan(NamedTuple):
    """A step's division of work, for `rows` rows and `programs` programs per KV head.

    runs      int32 [programs, 8]  the first six fields of each program's first segment, its place, and
              how many tiles the program takes; where that is 0 the rest is arbitrary
    segments  int32 [programs + rows, 8]  row, slot, its first tile of the row's, the tile behind its last,
              first key position that the row attends to, its length, the row's first segment, and how
              many it has; arbitrary where there is no segment
    """

    runs: Tensor
    segments: Tensor


class Workspace(NamedTuple):
    """Partial results [programs + rows, heads], and `counters` int32 [rows, kv_heads], which must be zero
    before the first call and are zero after each. One for all layers."""

    parts: Partials
    counters: Tensor


def decode_config(
    head_dim: int,
    kv_heads: int,
    processors: int,
    rows: int = 256,
    *,
    group: int = 8,
    few: bool = False,
    deep: bool = True,
) -> DecodeConfig:
    """For a graph of so many rows. `few`: that have few keys of their own, as behind a shared prefix; `deep`:
    a multiprocessor has 228 KiB of shared memory and elements are of two bytes.

    As many programs as a multiprocessor holds, and no fewer. Where there was room for a third of two, they
    took up to a fifth longer under dependent launch (probably some processors got three and others one:
    they are handed out while the kernel before still has its places). Where two are best, registers leave no
    room for it in groups of 8, in smaller ones the copies of a third tile see to that.

    µs on an H200, 8 and 4 KV heads for 32 heads of 128, dependently behind `_qkv`, without its own; in
    parentheses with two programs at all sizes:
    8 x 1,040        14.5  12.4  (19.6  12.9)   from 5 rows three programs, with fewer copies ahead
    16 x 1,040       23.6  15.4  (28.0  17.3)
    32 x 1,040       40.1  23.8  (40.9  25.1)
    256 x 1,040       262   137   (265   138)
    512 x 96         56.5  32.2  (57.6  33.0)   many or `few`: smaller tiles, of which short rows fill more
    """
    narrow = head_dim <= 128
    roomy = narrow and deep
    tile = 64 if narrow else 32
    per_head = processors / kv_heads
    if rows <= 4:
        return DecodeConfig(tile, 4, 2, max(int(2 * per_head), 1))
    if roomy and rows <= SOME and not few:
        return DecodeConfig(tile, 4, 4, max(int(3 * per_head), 1), registers=168)
    if narrow and (few or rows > 256):
        return DecodeConfig(32, 2, 5, max(int(4 * per_head), 1))
    stages = 7 if roomy and group < 8 else 5
    return DecodeConfig(tile, 4, stages, max(int(2 * per_head), 1))


def decode_workspace(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, config: DecodeConfig, device: torch.device
) -> Workspace:
    """For up to `max_rows` rows."""
    return Workspace(
        partials(config.programs + max_rows, heads, head_dim=head_dim, device=device),
        torch.zeros(max_rows, kv_heads, dtype=torch.int32, device=device),
    )


@jit
def _pick(own: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Of `values` [n] those that `own` [m, n] marks, at most one in each row: [m], 0 where there is none."""
    return tl.sum(tl.where(own, values[None, :], 0), 1)


@jit_loose("rows", "programs")
def _plan(
    slots: tl.tensor,
    lengths: tl.tensor,
    num_rows: tl.tensor,
    skip: tl.tensor,
    plan: DecodePlan,
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
    p = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    begin(PDL)
    live = r < true_rows(num_rows, rows)
    slot = tl.load(slots + r, mask=live, other=0).to(tl.int32)
    end = tl.load(lengths + r, mask=live, other=0).to(tl.int32)
    start = tl.zeros([BLOCK], tl.int32)
    if skip is not None:
        start += tl.load(skip).to(tl.int32)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    start = tl.minimum(start, end)
    tiles = tl.where(start < end, (end + TILE - 1) // TILE - start // TILE, 0)
    upto = tl.cumsum(tiles, 0)
    first = upto - tiles
    total = tl.sum(tiles, 0)
    each = tl.maximum((total + programs - 1) // programs, LEAST)
    # Rows without keys have no segments and no rank.
    busy = tiles > 0
    rank = tl.cumsum(busy.to(tl.int32), 0) - 1
    head = rank + first // each
    tail = rank + (upto - 1) // each
    own = busy[None, :] & (head[None, :] <= p[:, None]) & (p[:, None] <= tail[None, :])
    known = tl.sum(own.to(tl.int32), 1) > 0
    c = p - _pick(own, rank)
    own_first = tl.maximum(c * each, _pick(own, first))
    own_last = tl.minimum((c + 1) * each, _pick(own, upto))
    shift = _pick(own, start // TILE - first)
    own_row, own_slot = _pick(own, r), _pick(own, slot)
    own_start, own_end = _pick(own, start), _pick(own, end)
    low, high = own_first + shift, own_last + shift
    at, count = plan.segments + p * FIELDS, _pick(own, tail - head + 1)
    store_record(at, (own_row, own_slot, low, high, own_start, own_end, _pick(own, head), count), known)
    # A program's run is written with its first segment; programs without work get a count of 0 below.
    leads = known & (own_first == c * each)
    at, count = plan.runs + c * FIELDS, tl.minimum(each, total - c * each)
    store_record(at, (own_row, own_slot, low, high, own_start, own_end, p, count), leads)
    idle = (p < programs) & (p * each >= total)
    tl.store(plan.runs + p * FIELDS + 7, tl.zeros([SPAN], tl.int32), mask=idle)


def plan_decode(
    slots: Tensor,
    lengths: Tensor,
    config: DecodeConfig,
    *,
    window: int = 0,
    num_rows: Tensor | None = None,
    skip: Tensor | None = None,
    pdl: bool = False,
) -> DecodePlan:
    """Divide a step's decode work.

    slots     integer [rows]  slot of each row
    lengths   integer [rows]  its tokens, this step's included
    window    positions a row sees, 0 for all
    num_rows  int32 [1] on the device; rows from there on have no work
    skip      integer [1] on the device: leading keys that are attended to elsewhere (cascade); less
              than every live row's length
    """
    rows, device = len(slots), slots.device
    places = rows + config.programs
    plan = DecodePlan(
        torch.empty(config.programs, FIELDS.value, dtype=torch.int32, device=device),
        torch.empty(places, FIELDS.value, dtype=torch.int32, device=device),
    )
    block = max(pow2(rows), 64)  # one kernel for all small graphs: it is compiled anew for each size
    span = min(max(2048 // block, 1), 16)  # times rows: what a program holds in registers
    _plan[(cdiv(places, span),)](
        slots,
        lengths,
        num_rows,
        skip,
        plan,
        rows,
        config.programs,
        WINDOW=window,
        TILE=config.tile,
        LEAST=config.least,
        BLOCK=block,
        SPAN=span,
        **launch_options(pdl, 4),
    )
    return plan


@jit
def _next_record(at: tl.tensor, turns: tl.tensor, record: tl.tensor) -> tl.tensor:
    """The record at `at` where `turns`; nothing is read where not, and `record` stays."""
    found: tl.tensor = ()
    for i in tl.static_range(len(record)):
        found += (tl.load(at + i, mask=turns, other=record[i], eviction_policy=KEPT),)
    return found


@jit
def _decode(
    q: tl.tensor,
    keys: Keys,
    plan: DecodePlan,
    space: Workspace,
    out: tl.tensor,
    lse: tl.tensor,
    q_stride: int,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    UNROLL: tl.constexpr,
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
    k_cache = keys.k + kv_head * dim
    v_cache = keys.v + kv_head * dim
    # The kernel before made the queries and stored this step's keys and values, and may run still. The plan
    # is older: the kernel before released us behind its own wait, so whatever came earlier has ended. It is
    # read past L1, where another step's may lie.
    run, segments = plan.runs + c * FIELDS, plan.segments
    count = tl.load(run + 7, cache_modifier=".cg")
    if count == 0:
        begin(PDL)
        return
    row, slot, tile, last, start, end, segment = load_record(run, 7, ".cg")
    first, pieces = load_record(segments + segment * FIELDS + 6, 2, ".cg")
    lead, lead_row, lead_first, lead_pieces = segment, row, first, pieces
    begin(PDL)
    high = tl.zeros([BLOCK_H], tl.float32) - float("inf")
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, block_d], tl.float32)
    for i in range(count):
        # Anew for each tile: so they come as the keys do, and no row waits for its queries.
        q_at = q + row.to(tl.int64) * q_stride + head[:, None] * dim + d[None, :]
        queries = tl.load(q_at, mask=inside, other=0.0)
        table = keys.table + slot.to(tl.int64) * keys.table_stride
        page = load_pages(table, tile, end, SHAPE.page, TILE)
        high, total, acc = attend_tile(
            queries, k_cache, v_cache, page, tile, start, end, high, total, acc, keys.stride, keys.scale,
            SHAPE, TILE,
        )  # fmt: skip
        ends = tile + 1 == last
        if ends:
            store_segment(
                acc, high, total, row, segment, pieces, space.parts, out, lse, head, keys.v_scale,
                heads, dim,
            )  # fmt: skip
        high = tl.where(ends, float("-inf"), high)
        total = tl.where(ends, 0.0, total)
        acc = tl.where(ends, 0.0, acc)
        # Behind the run's last segment may be none: then its own stands.
        turns = ends & (i + 1 < count)
        segment += tl.where(turns, 1, 0)
        row, slot, tile, last, start, end, first, pieces = _next_record(
            segments + segment * FIELDS, turns, (row, slot, tile + 1, last, start, end, first, pieces)
        )
    # Only a run's first and last segment can be part of a row: both are counted at once.
    two = tl.arange(0, 2)
    whole = tl.where(two == 0, lead_pieces, pieces)
    partial = tl.where((two == 0) | (segment > lead), whole, 1) > 1
    counter = space.counters + tl.where(two == 0, lead_row, row) * SHAPE.kv + kv_head
    tl.debug_barrier()  # all threads' partials, before one thread increments the counters
    arrived = tl.atomic_add(counter, 1, mask=partial, sem="acq_rel", scope="gpu")
    due = tl.where(partial & (arrived + 1 == whole), 1, 0)
    tl.store(counter, 0, mask=due > 0)
    g = tl.arange(0, BLOCK_G)
    head = tl.where(g < group, kv_head * group + g, heads)
    for side in range(2):
        if tl.sum(tl.where(two == side, due, 0), 0) > 0:
            whose = tl.where(side == 0, lead_row, row)
            base, n = tl.where(side == 0, lead_first, first), tl.where(side == 0, lead_pieces, pieces)
            merged, sums = merge_parts(space.parts, base, n, head, d, heads, dim, UNROLL)
            within = (head < heads)[:, None] & (d < dim)[None, :]
            out_at = out + (whose * heads + head)[:, None] * dim + d[None, :]
            tl.store(out_at, merged.to(out.dtype.element_ty), mask=within)
            if lse is not None:
                tl.store(lse + whose * heads + head, sums, mask=head < heads)


def paged_decode(
    q: Tensor,
    pages: Pages,
    plan: DecodePlan,
    workspace: Workspace,
    config: DecodeConfig,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """One query per row over its keys, grouped heads.

    q        [rows, heads, dim], heads and dim contiguous
    plan     of `plan_decode` with the same `config`
    lse      float32 [rows, heads] to fill with the base-2 log-sum-exp of the scaled scores
    returns  [rows, heads * dim] (`out`, or new); padded rows are not written
    """
    rows, heads, dim = q.shape
    keys, shape = kernel_args(q, pages)
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    block_g = pow2(shape.group)
    _decode[(shape.kv, config.programs)](
        q,
        keys,
        plan,
        workspace,
        out,
        lse,
        q.stride(0),
        SHAPE=shape,
        TILE=config.tile,
        BLOCK_H=max(block_g, 8),
        BLOCK_G=block_g,
        UNROLL=min(max(MERGED * config.warps // (block_g * shape.block_d), 2), MOST_MERGED),
        **launch_options(pdl, config.warps, config.stages),
        **({"maxnreg": config.registers} if config.registers and pdl else {}),
    )
    return out
