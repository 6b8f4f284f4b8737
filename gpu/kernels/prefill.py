"""Attention of prompt chunks over pages: flash attention whose work list is made on the device.

Queries of several chunks lie packed in rows; a chunk's keys are its slot's pages from position 0 up to
the chunk's own tokens, which are stored already. The query heads of a KV head's group and the tokens
are laid along one axis, so that a tile of 128 queries is 16 tokens of 8 heads: K and V are gathered once
for all of them, and the causal edge crosses one tile of keys instead of two.

    queries    t0h0 t0h1 ... t0h7 t1h0 ... | t16h0 ...      one block of a chunk and KV head: a program
    keys       | whole tiles: every query sees every key | the edge: masked |

`plan_prefill` runs once a step for all layers: it lists the blocks of all chunks, those with the most
keys first, so that the device ends on short ones. The grid is the most blocks that the graph could have;
programs behind the list find an empty entry and end. (A grid of as many programs as the device holds,
each walking the list, costs the registers that let the compiler overlap products and exponentials.)

The tensor cores are kept busy during the exponentials: a tile's scores are asked for one tile ahead, so
that the product with K of tile i + 1 runs while the warps are at the softmax of tile i.

A page of 16 tokens is no box that the copy engine could fetch as part of a tile, so K and V are gathered
row by row with cp.async, 16 bytes a thread; the pages' numbers are asked for a tile before their keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.decode import LOG2E
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, options, pow2

FIELDS: tl.constexpr = tl.constexpr(8)
"""int32 per entry of the work list: one sector."""


class PrefillConfig(NamedTuple):
    """How chunks are cut: queries (tokens times heads of a group) and keys per tile. With `ahead` a tile's
    scores are asked for before those of the tile before are looked at."""

    queries: int
    tile: int
    warps: int
    stages: int
    ahead: bool = True


class PrefillPlan(NamedTuple):
    """A step's work list.

    items  int32 [blocks, 8]: slot, row of the chunk's first token, its position, tokens of the chunk,
           the block's first query within the chunk, counted in heads of a group, the chunk; the rest
           unused. Tokens are 0 behind the list's end
    """

    items: Tensor


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """Sizes by reasoning and by what the compiler makes of them; float32 is for correctness alone.

    128 queries are a tile for two warpgroups; L2 then delivers K and V at 4 TB/s where 64 queries would ask
    8 of it. 64 keys leave registers for the scores of two tiles. With five stages K is waited for two tiles
    after it was asked for, with three at once (148 KiB of 227). Above head_dim 128 the accumulators leave
    no registers for a second tile's scores.

    TFLOP/s on an H200 with 8 and 4 KV heads for 32 heads of 128, the fastest of eight cuts but for the last
    two steps; in parentheses 64 queries, 64 keys, 4 warps, 3 stages, not ahead, whose blocks are shorter.
    What a step's chunks are like is not known when its graph is made, so one cut serves all.
    1 x 8,192            414  412  (380  391)
    4 x 2,048 at 2,048   398  394  (350  368)
    2 x 4,096            382  381  (361  379)
    8 x 1,024            273  273  (280  301)
    2 x 1,024            261  271  (285  295)
    """
    if dtype == torch.float32:
        tile = 32 if head_dim <= 128 else 16
        return PrefillConfig(tile, tile, 4, 2, ahead=False)
    if head_dim <= 128:
        return PrefillConfig(128, 64, 8, 5)
    return PrefillConfig(128, 64, 8, 3, ahead=False)


def max_blocks(tokens: int, max_chunks: int, group: int, config: PrefillConfig) -> int:
    """Blocks that so many tokens in so many chunks can make: each chunk ends in a part of one."""
    return cdiv(tokens * group, config.queries) + max_chunks - 1


@jit_loose("chunks", "blocks")
def _plan(
    slots: tl.tensor,
    starts: tl.tensor,
    firsts: tl.tensor,
    num_chunks: tl.tensor,
    items: tl.tensor,
    chunks: int,
    blocks: int,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    p = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    c = tl.arange(0, BLOCK)
    begin(PDL)
    n = tl.minimum(tl.load(num_chunks).to(tl.int32), chunks)
    live = c < n
    row = tl.load(firsts + c, mask=live, other=0).to(tl.int32)
    tokens = tl.load(firsts + c + 1, mask=live, other=0).to(tl.int32) - row
    start = tl.load(starts + c, mask=live, other=0).to(tl.int32)
    count = (tokens * GROUP + QUERIES - 1) // QUERIES
    upto = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    # Block p in the chunks' own order belongs to chunk `own`, the first that ends behind it.
    own = tl.sum((upto[None, :] <= p[:, None]).to(tl.int32), 1)
    mine = own[:, None] == c[None, :]
    before = tl.sum(tl.where(mine, (upto - count)[None, :], 0), 1)
    own_count = tl.sum(tl.where(mine, count[None, :], 0), 1)
    own_tokens = tl.sum(tl.where(mine, tokens[None, :], 0), 1)
    own_start = tl.sum(tl.where(mine, start[None, :], 0), 1)
    own_row = tl.sum(tl.where(mine, row[None, :], 0), 1)
    block = p - before
    keys = own_start + tl.minimum(((block + 1) * QUERIES - 1) // GROUP + 1, own_tokens)
    # Its place: blocks of other chunks with more keys (of earlier chunks: as many), later ones of its own.
    # Block b of chunk c has more than x of its chunk's keys from b = ceil((x * GROUP + 1) / QUERIES) - 1 on.
    x = keys[:, None] - start[None, :] - (c[None, :] < own[:, None]).to(tl.int32)
    least = (tl.maximum(x, 0) * GROUP + QUERIES) // QUERIES - 1
    ahead = tl.where(tokens[None, :] > x, count[None, :] - least, 0)
    ahead = tl.where(mine, (own_count - 1 - block)[:, None], ahead)
    known = p < total
    at = items + tl.where(known, tl.sum(ahead, 1), p) * FIELDS
    there = p < blocks
    tl.store(at, tl.load(slots + own, mask=known, other=0).to(tl.int32), mask=there)
    tl.store(at + 1, own_row, mask=there)
    tl.store(at + 2, own_start, mask=there)
    tl.store(at + 3, tl.where(known, own_tokens, 0), mask=there)
    tl.store(at + 4, block * QUERIES, mask=there)
    tl.store(at + 5, own, mask=there)


def plan_prefill(
    slots: Tensor,
    starts: Tensor,
    firsts: Tensor,
    num_chunks: Tensor,
    tokens: int,
    group: int,
    config: PrefillConfig,
    *,
    pdl: bool = False,
) -> PrefillPlan:
    """List a step's blocks, those with the most keys first.

    slots       integer [C]      slot of each chunk
    starts      integer [C]      position of its first token
    firsts      integer [C + 1]  row of its first token; entry i + 1 is where chunk i ends
    num_chunks  int32 [1] on the device; entries from there on are not read
    tokens      rows of the graph: no chunks together have more
    group       query heads per KV head
    """
    blocks = max_blocks(tokens, len(slots), group, config)
    items = torch.empty(blocks, FIELDS.value, dtype=torch.int32, device=slots.device)
    span = min(max(2048 // pow2(len(slots)), 1), 64)  # times chunks: what a program holds in registers
    _plan[(cdiv(blocks, span),)](
        slots,
        starts,
        firsts,
        num_chunks,
        items,
        len(slots),
        blocks,
        GROUP=group,
        QUERIES=config.queries,
        BLOCK=pow2(len(slots)),
        SPAN=span,
        PDL=pdl,
        **options(4, pdl=pdl),
    )
    return PrefillPlan(items)


@jit
def _pages(
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The pages of a tile's keys, [TILE], or one for all. Those behind `end` are page 0."""
    if PAGE % TILE == 0:
        page = tl.load(table + tile // (PAGE // TILE), mask=tile * TILE < end, other=0)
    else:
        # Pages per tile are a whole number, so that the divisions stay outside the loop.
        i = tl.arange(0, TILE)
        at = table + tile * (TILE // PAGE) + i // PAGE
        page = tl.load(at, mask=i < end - tile * TILE, other=0)
    return page


@jit
def _places(
    page: tl.tensor,
    tile: tl.tensor,
    stride: int,
    PAGE: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Where a tile's keys lie in the cache, [TILE, BLOCK_D]."""
    i = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    page = page.to(tl.int64 if WIDE else tl.int32)
    if PAGE % TILE == 0:
        place = (page * PAGE + tile % (PAGE // TILE) * TILE) * stride + (i[:, None] * stride + d[None, :])
    else:
        place = (page * (PAGE * stride))[:, None] + ((i % PAGE)[:, None] * stride + d[None, :])
    return place


@jit
def _scores(q: tl.tensor, k_at: tl.tensor, DIM: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Of all queries with the keys at `k_at`. Those behind the end may be NaN: they are replaced later."""
    if DIM == BLOCK_D:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(tl.arange(0, BLOCK_D) < DIM)[None, :], other=0.0)
    return tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")


@jit
def _prefill(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    items: tl.tensor,
    out: tl.tensor,
    q_stride: int,
    stride: int,
    table_stride: int,
    scale: float,
    v_scale: float,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    begin(PDL)
    slot = tl.load(item).to(tl.int64)
    row = tl.load(item + 1).to(tl.int64)
    start = tl.load(item + 2)
    tokens = tl.load(item + 3)
    at = tl.load(item + 4)
    if tokens == 0:
        return
    i = at + tl.arange(0, QUERIES)
    token = i // GROUP
    head = kv_head * GROUP + i % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q_at = q + (row + token)[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    position = start + token
    lowest = start + at // GROUP
    end = start + tl.minimum((at + QUERIES - 1) // GROUP + 1, tokens)
    high = tl.zeros([QUERIES], tl.float32) - float("inf")
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    k_cache += kv_head * DIM
    v_cache += kv_head * DIM
    table += slot * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest + 1 - WINDOW, 0) // TILE
    if AHEAD:
        page = _pages(table, first, end, PAGE, TILE)
        place = _places(page, first, stride, PAGE, WIDE, TILE, BLOCK_D)
        ahead = _scores(queries, k_cache + place, DIM, BLOCK_D)
    rate = 1.0 if CAP > 0 else scale * LOG2E  # of the scores that `s` holds to powers of two
    edge = (lowest + 1) // TILE
    last = (end + TILE - 1) // TILE
    for tile in range(first, last):
        page = _pages(table, tile, end, PAGE, TILE)
        place = _places(page, tile, stride, PAGE, WIDE, TILE, BLOCK_D)
        v_at = v_cache + place
        if AHEAD:
            s = ahead
            # Behind the last tile this is page 0 or one page's keys, of which nothing is used.
            page = _pages(table, tile + 1, end, PAGE, TILE)
            place = _places(page, tile + 1, stride, PAGE, WIDE, TILE, BLOCK_D)
            ahead = _scores(queries, k_cache + place, DIM, BLOCK_D)
        else:
            s = _scores(queries, k_cache + place, DIM, BLOCK_D)
        key = tile * TILE + tl.arange(0, TILE)
        # A bad value must not be loaded, since 0 × NaN is NaN.
        if DIM == BLOCK_D:
            v = tl.load(v_at, mask=(key < end)[:, None], other=0.0)
        else:
            v = tl.load(v_at, mask=(key < end)[:, None] & (d < DIM)[None, :], other=0.0)
        if CAP > 0:
            # tanh from a sigmoid: there is no other in both the compiler and the interpreter
            s = (2 * tl.sigmoid(s * (2 * scale / CAP)) - 1) * (CAP * LOG2E)
        if WINDOW > 0:
            seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, float("-inf"))
        elif tile >= edge:
            s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(high, tl.max(s, 1) * rate)
        level = top
        if WINDOW > 0:  # a query may have seen nothing yet; without, all have seen key 0
            level = tl.where(top > float("-inf"), top, 0.0)
        p = tl.exp2(s * rate - level[:, None])
        shrink = tl.exp2(high - level)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(queries.dtype), v.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
        high = top
    out_at = out + (row + token)[:, None] * (KV * GROUP * DIM) + head[:, None] * DIM + d[None, :]
    tl.store(out_at, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=inside)


def paged_prefill(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table: Tensor,
    plan: PrefillPlan,
    config: PrefillConfig,
    *,
    page_size: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of chunks, grouped heads.

    q           [n, heads, dim], heads and dim contiguous
    cache       K and V, each [tokens, kv_heads, dim] with (kv_heads, dim) contiguous and equal strides:
                views of a layer's pages flattened to tokens; the chunks' own K and V already stored
    page_table  integer [max_slots, pages]; entries past a chunk's end are not read as keys
    plan        of `plan_prefill` with the same `config`
    window      positions a token sees, itself included; 0 for all
    cap         scores s become cap · tanh(s / cap); 0 for none
    scales      what K and V of a cache in float8 are multiplied by
    returns     [n, heads * dim] (`out`, or new, contiguous); rows of no chunk are not written
    """
    k, v = cache
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    if out is None:
        out = torch.empty(n, heads * dim, dtype=q.dtype, device=q.device)
    _prefill[(kv_heads, len(plan.items))](
        q,
        k,
        v,
        page_table,
        *plan,
        out,
        q.stride(0),
        k.stride(0),
        page_table.stride(0),
        scale * scales[0],
        scales[1],
        KV=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        PAGE=page_size,
        WINDOW=window,
        CAP=cap,
        WIDE=len(k) * k.stride(0) >= 2**31,
        QUERIES=config.queries,
        TILE=config.tile,
        BLOCK_D=pow2(dim),
        AHEAD=config.ahead,
        PDL=pdl,
        **options(config.warps, config.stages, pdl),
    )
    return out
