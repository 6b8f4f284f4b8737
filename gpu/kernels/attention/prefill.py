"""Attention of prompt chunks over pages: flash attention whose work list is made on the device.

Queries of several chunks lie packed in rows; a chunk's keys are its slot's pages from position 0 up to
the chunk's own tokens, which are stored already. The query heads of a KV head's group and the tokens
are laid along one axis, so that a tile of 128 queries is 16 tokens of 8 heads: K and V are gathered once
for all of them, and the causal edge crosses one tile of keys instead of two.

    queries    t0h0 t0h1 ... t0h7 t1h0 ... | t16h0 ...      one block of a chunk and KV head: a program
    keys       | whole tiles: every query sees every key | the edge: masked |

`plan_prefill` runs once a step for all layers: it lists the blocks of all chunks, those with the most
keys first, so that the device ends on short ones, or parts of their keys where there are few
(`gpu.kernels.attention.prefill_plan`, `prefill_join`). The grid is the most entries that the graph could
have; programs behind the list find an empty one and end. (A grid of as many programs as the device holds,
each walking the list, costs the registers that let the compiler overlap products and exponentials.)

The tensor cores are kept busy during the exponentials: a tile's scores are asked for one tile ahead, so
that the product with K of tile i + 1 runs while the warps are at the softmax of tile i.

A page of 16 tokens is no box that the copy engine could fetch as part of a tile, so K and V are gathered
row by row with cp.async, 16 bytes a thread; the pages' numbers are asked for a tile before their keys.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import LOG2E
from gpu.kernels.attention.prefill_merge import PrefillSpace, join_parts
from gpu.kernels.attention.prefill_plan import FIELDS, PrefillConfig, PrefillPlan, reach
from gpu.kernels.jit import begin, jit, launch_options, pow2


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
    parts: tl.tensor,
    parts_lse: tl.tensor,
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
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0)
    entry = tl.program_id(1)
    item = items + entry * FIELDS
    begin(PDL)
    slot = tl.load(item).to(tl.int64)
    row = tl.load(item + 1).to(tl.int64)
    start = tl.load(item + 2)
    tokens = tl.load(item + 3)
    at = tl.load(item + 4)
    part = tl.load(item + 6)
    pieces, first, last, end = reach(
        start, tokens, at, part, tl.load(item + 7), GROUP, WINDOW, QUERIES, TILE, LEAST
    )
    if (tokens == 0) | (part >= pieces):
        return
    i = at + tl.arange(0, QUERIES)
    token = i // GROUP
    head = kv_head * GROUP + i % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = (token < tokens)[:, None] & (d < DIM)[None, :]
    q_at = q + (row + token)[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    queries = tl.load(q_at, mask=inside, other=0.0)
    position = start + token
    high = tl.zeros([QUERIES], tl.float32) - float("inf")
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    k_cache += kv_head * DIM
    v_cache += kv_head * DIM
    table += slot * table_stride
    if AHEAD:
        page = _pages(table, first, end, PAGE, TILE)
        place = _places(page, first, stride, PAGE, WIDE, TILE, BLOCK_D)
        ahead = _scores(queries, k_cache + place, DIM, BLOCK_D)
    rate = 1.0 if CAP > 0 else scale * LOG2E  # of the scores that `s` holds to powers of two
    edge = (start + at // GROUP + 1) // TILE
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
        if WINDOW > 0 or parts is not None:  # a query may have seen nothing yet; else all have seen key 0
            level = tl.where(top > float("-inf"), top, 0.0)
        p = tl.exp2(s * rate - level[:, None])
        shrink = tl.exp2(high - level)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(queries.dtype), v.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
        high = top
    out_at = out + (row + token)[:, None] * (KV * GROUP * DIM) + head[:, None] * DIM + d[None, :]
    if parts is None:
        tl.store(out_at, (acc * (v_scale / total)[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        # Of this part's keys a query may see none.
        found = acc * tl.where(total > 0, v_scale / total, 0.0)[:, None]
        if pieces == 1:
            tl.store(out_at, found.to(out.dtype.element_ty), mask=inside)
        else:
            left = (entry * KV + kv_head) * QUERIES + tl.arange(0, QUERIES)
            tl.store(parts + left[:, None] * DIM + d[None, :], found, mask=inside)
            tl.store(parts_lse + left, high + tl.log2(total))


def paged_prefill(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table: Tensor,
    plan: PrefillPlan,
    config: PrefillConfig,
    space: PrefillSpace | None = None,
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
    space       of `prefill_space`, likewise; None leaves keys whole
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
        *(space or (None, None)),
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
        LEAST=config.least,
        **launch_options(pdl, config.warps, config.stages),
    )
    if space is not None:
        join_parts(plan, space, config, out, heads // kv_heads, window=window, pdl=pdl)
    return out
