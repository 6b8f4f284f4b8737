"""Attention of prompt chunks over pages: flash attention whose work list is made on the device.

Queries of several chunks lie packed in rows; a chunk's keys are its slot's pages from position 0 up to
the chunk's own tokens, which are stored already. The query heads of a KV head's group and the tokens
are laid along one axis, so that a tile of 128 queries is 16 tokens of 8 heads: K and V are gathered once
for all of them, and the causal edge crosses one tile of keys instead of two.

    queries    t0h0 t0h1 ... t0h7 t1h0 ... | t16h0 ...      one block of a chunk and KV head: a program
    keys       | whole tiles: every query sees every key | the edge: masked |

`plan_prefill` runs once a step for all layers: it lists the blocks of all chunks, those with the most
keys first, so that the device ends on short ones, or parts of their keys where there are few
(`gpu.kernels.attention.prefill_plan`, `prefill_merge`). The grid is the most entries that the graph could
have; programs behind the list find an empty one and end. (A grid of as many programs as the device holds,
each walking the list, costs the registers that let the compiler overlap products and exponentials.)

The tensor cores are kept busy during the exponentials: a tile's scores are computed one tile ahead, so
that the product with K of tile i + 1 runs while the warps are at the softmax of tile i.

A page of 16 tokens is no box that the copy engine could fetch as part of a tile, so K and V are gathered
row by row with cp.async, 16 bytes a thread; the pages' numbers are loaded a tile before their keys.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import LOG2E, add_tail_scores, beside_sinks, load_tails
from gpu.kernels.attention.pages import Keys, Pages, kernel_args
from gpu.kernels.attention.prefill_merge import merge_blocks
from gpu.kernels.attention.prefill_plan import FIELDS, PrefillConfig, read_entry
from gpu.kernels.attention.split_kv import Partials
from gpu.kernels.jit import begin, jit, launch_options


@jit
def _places(
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    stride: int,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Offsets of BLOCK columns of a tile's keys in the KV cache, [TILE, BLOCK]. Keys at `end` or later read
    page 0."""
    PAGE: tl.constexpr = SHAPE.page
    i = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK)
    offset: tl.constexpr = tl.int64 if SHAPE.wide else tl.int32
    if PAGE % TILE == 0:
        page = tl.load(table + tile // (PAGE // TILE), mask=tile * TILE < end, other=0).to(offset)
        place = (page * PAGE + tile % (PAGE // TILE) * TILE) * stride + (i[:, None] * stride + d[None, :])
    else:
        # Pages per tile are a whole number, so that the divisions stay outside the loop.
        at = table + tile * (TILE // PAGE) + i // PAGE
        page = tl.load(at, mask=i < end - tile * TILE, other=0).to(offset)
        place = (page * (PAGE * stride))[:, None] + ((i % PAGE)[:, None] * stride + d[None, :])
    return place


@jit
def _scores(q: tl.tensor, k_at: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Scores of all queries with the keys at `k_at`. Those behind the end may be NaN: they are replaced
    later."""
    if SHAPE.dim == SHAPE.block_d:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(tl.arange(0, SHAPE.block_d) < SHAPE.dim)[None, :], other=0.0)
    return tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")


@jit
def _values(v_at: tl.tensor, seen: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Values at `v_at` [TILE, block_d] of keys that are `seen` [TILE, 1]: a bad value must not be loaded,
    since 0 × NaN is NaN."""
    if SHAPE.dim != SHAPE.block_d:
        seen = seen & (tl.arange(0, SHAPE.block_d) < SHAPE.dim)[None, :]
    return tl.load(v_at, mask=seen, other=0.0)


@jit
def _prefill(
    q: tl.tensor,
    keys: Keys,
    items: tl.tensor,
    out: tl.tensor,
    space: Partials | None,
    q_stride: int,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONFIG: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    dim: tl.constexpr = SHAPE.dim
    group: tl.constexpr = SHAPE.group
    cap: tl.constexpr = SHAPE.cap
    queries_n: tl.constexpr = CONFIG.queries
    TILE: tl.constexpr = CONFIG.tile
    block_d: tl.constexpr = SHAPE.block_d
    kv_head = tl.program_id(0)
    entry = tl.program_id(1)
    item = items + entry * FIELDS
    begin(PDL)
    slot = tl.load(item).to(tl.int64)
    row, start, tokens, at, part, pieces, first, last, end = read_entry(item, group, WINDOW, CONFIG, "")
    if (tokens == 0) | (part >= pieces):
        return
    i = at + tl.arange(0, queries_n)
    token = i // group
    head = kv_head * group + i % group
    d = tl.arange(0, block_d)
    inside = (token < tokens)[:, None] & (d < dim)[None, :]
    q_row = q + (row + token)[:, None] * q_stride + head[:, None] * (dim + SHAPE.tail)
    queries = tl.load(q_row + d[None, :], mask=inside, other=0.0)
    q_tail = load_tails(q_row, (token < tokens)[:, None], SHAPE)
    position = start + token
    high = tl.zeros([queries_n], tl.float32) - float("inf")
    total = tl.zeros([queries_n], tl.float32)
    acc = tl.zeros([queries_n, block_d], tl.float32)
    k_cache = keys.k + kv_head * SHAPE.step
    v_cache = keys.v + kv_head * SHAPE.step
    table = keys.table + slot * keys.table_stride
    if CONFIG.ahead:
        place = _places(table, first, end, keys.stride, SHAPE, TILE, block_d)
        ahead = _scores(queries, k_cache + place, SHAPE)
    rate = 1.0 if cap > 0 else keys.scale * LOG2E  # of the scores that `s` holds to powers of two
    edge = (start + at // group + 1) // TILE
    for tile in range(first, last):
        place = _places(table, tile, end, keys.stride, SHAPE, TILE, block_d)
        v_at = v_cache + place
        key = tile * TILE + tl.arange(0, TILE)
        seen = (key < end)[:, None]
        if SHAPE.tail > 0:
            # A latent is loaded once, and is both.
            v = _values(v_at, seen, SHAPE)
            s = tl.dot(queries, tl.trans(v.to(queries.dtype)), input_precision="ieee")
            tail_at = k_cache + dim + _places(table, tile, end, keys.stride, SHAPE, TILE, SHAPE.block_t)
            s = add_tail_scores(s, q_tail, tail_at, seen, SHAPE)
        elif CONFIG.ahead:
            s = ahead
            # Behind the last tile this is page 0 or one page's keys, of which nothing is used.
            place = _places(table, tile + 1, end, keys.stride, SHAPE, TILE, block_d)
            ahead = _scores(queries, k_cache + place, SHAPE)
            v = _values(v_at, seen, SHAPE)
        else:
            s = _scores(queries, k_cache + place, SHAPE)
            v = _values(v_at, seen, SHAPE)
        if cap > 0:
            # tanh from a sigmoid: there is no other in both the compiler and the interpreter
            s = (2 * tl.sigmoid(s * (2 * keys.scale / cap)) - 1) * (cap * LOG2E)
        if WINDOW > 0:
            shown = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - WINDOW)
            s = tl.where(shown, s, float("-inf"))
        elif tile >= edge:
            s = tl.where(key[None, :] <= position[:, None], s, float("-inf"))
        top = tl.maximum(high, tl.max(s, 1) * rate)
        level = top
        if WINDOW > 0 or space is not None:  # a query may have seen nothing yet; else all have seen key 0
            level = tl.where(top > float("-inf"), top, 0.0)
        p = tl.exp2(s * rate - level[:, None])
        shrink = tl.exp2(high - level)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(queries.dtype), v.to(queries.dtype), acc * shrink[:, None], input_precision="ieee")
        high = top
    out_at = out + (row + token)[:, None] * (SHAPE.kv * group * dim) + head[:, None] * dim + d[None, :]
    known = token < tokens
    if space is None:
        found = acc * (keys.v_scale / total)[:, None]
        found = beside_sinks(found, high + tl.log2(total), keys.sinks, head, known)
        tl.store(out_at, found.to(out.dtype.element_ty), mask=inside)
    else:
        # A query may see none of this part's keys.
        found = acc * tl.where(total > 0, keys.v_scale / total, 0.0)[:, None]
        if pieces == 1:
            found = beside_sinks(found, high + tl.log2(total), keys.sinks, head, known)
            tl.store(out_at, found.to(out.dtype.element_ty), mask=inside)
        else:
            left = (entry * SHAPE.kv + kv_head) * queries_n + tl.arange(0, queries_n)
            tl.store(space.out + left[:, None] * dim + d[None, :], found, mask=inside)
            tl.store(space.lse + left, high + tl.log2(total))


def paged_prefill(
    q: Tensor,
    pages: Pages,
    items: Tensor,
    config: PrefillConfig,
    space: Partials | None = None,
    *,
    window: int = 0,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Causal attention of chunks, grouped heads.

    q        [n, heads, dim], over latents [n, heads, dim + tail], heads and dim contiguous
    items    of `plan_prefill` with the same `config`
    space    of `prefill_space`, likewise; None leaves keys whole
    window   positions a token sees, itself included; 0 for all
    returns  [n, heads * dim] (`out`, or new, contiguous); rows of no chunk are not written
    """
    n, heads, _ = q.shape
    keys, shape = kernel_args(q, pages)
    assert not (shape.tail and config.ahead), "a latent is multiplied when it is there"
    if out is None:
        out = torch.empty(n, heads * shape.dim, dtype=q.dtype, device=q.device)
    _prefill[(shape.kv, len(items))](
        q,
        keys,
        items,
        out,
        space,
        q.stride(0),
        SHAPE=shape,
        WINDOW=window,
        CONFIG=config,
        **launch_options(pdl, config.warps, config.stages),
    )
    if space is not None:
        merge_blocks(items, space, config, out, shape, keys.sinks, window=window, pdl=pdl)
    return out
