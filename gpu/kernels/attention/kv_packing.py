"""Keys and values of a step's chunks, out of their pages: side by side, as the copy engine fetches tiles.

FA3 gathers pages row by row, and its copying warps ask anew for every row of every tile. For keys that lie
side by side one thread asks for a tile. On an H200 at its power limit, 32 query and 8 KV heads of 128, 2 x
4,096 tokens take 503 us so and 593 out of pages, 8 x 1,024 take 168 and 205; packing 8,192 tokens takes 19.
Few tokens behind many cached ones are not worth it, and then a step leaves all where they are: a list of each
kind would be two launches, and the second one short of work. The copy of float8 pages has the dtype of the
queries, because FA3 needs that.

    packed    | chunk 0 ......... 0 0 0 | chunk 1 .................. 0 | stale        0: zeros up to a tile
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.prefill_plan import Chunks
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, pow2

SPAN = 16
"""Tokens per program; divides the tile."""


class Packing(NamedTuple):
    """Where a step's keys are.

    places  int32 [C]  where each chunk's keys begin among the packed, -1 where they stay in their pages,
                       which all of a step's do or none
    left    int32 [1]  chunks whose keys stay in their pages
    """

    places: Tensor
    left: Tensor


@jit
def _spans(chunks: Chunks, c: tl.tensor, live: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First position and tokens of chunks `c`, 0 where not `live`."""
    firsts = chunks.firsts + c
    tokens = tl.load(firsts + 1, mask=live, other=0) - tl.load(firsts, mask=live, other=0)
    return tl.load(chunks.starts + c, mask=live, other=0), tokens


@jit_loose("count", "room")
def _plan(
    chunks: Chunks,
    packing: Packing,
    pairs_per_key: float,
    count: int,
    room: int,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    c = tl.arange(0, BLOCK)
    begin(PDL)
    n = tl.minimum(tl.load(chunks.num_chunks).to(tl.int32), count)
    live = c < n
    start, tokens = _spans(chunks, c, live)
    keys = start + tokens
    pairs = tokens.to(tl.float32) * (start + tokens // 2).to(tl.float32)
    size = (keys + TILE - 1) // TILE * TILE
    upto = tl.cumsum(size, 0)
    total = tl.sum(size, 0)
    worth = (total <= room) & (tl.sum(pairs, 0) >= pairs_per_key * tl.sum(keys, 0).to(tl.float32))
    tl.store(packing.places + c, tl.where(live & worth, upto - size, -1), mask=c < count)
    tl.store(packing.left, tl.where(worth, 0, n))


def plan_packing(chunks: Chunks, pairs_per_key: float, room: int, tile: int, *, pdl: bool = False) -> Packing:
    """Decide whether a step's keys are packed.

    pairs_per_key  pairs of query and key from which a key is worth its copy
    room           keys that can be packed
    tile           what a chunk's place is a multiple of
    """
    count = len(chunks.starts)
    packing = Packing(chunks.starts.new_empty(count), chunks.num_chunks.new_empty(1))
    _plan[(1,)](
        chunks,
        packing,
        pairs_per_key,
        count,
        room,
        TILE=tile,
        BLOCK=pow2(count),
        **launch_options(pdl, 4),
    )
    return packing


@jit
def _copy(source: tl.tensor, target: tl.tensor, there: tl.tensor, room: tl.tensor, scale: float) -> None:
    """Copy what is `there`, zeros elsewhere, times `scale` where the dtypes differ."""
    found = tl.load(source, mask=there, other=0.0)
    if found.dtype != target.dtype.element_ty:
        found = found.to(tl.float32) * scale
    tl.store(target, found.to(target.dtype.element_ty), mask=room)


@jit_loose("count", "width")
def _pack(
    k: tl.tensor,
    v: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    packed: tl.tensor,
    chunks: Chunks,
    table: tl.tensor,
    k_stride: int,
    v_stride: int,
    k_scale: float,
    v_scale: float,
    count: int,
    width: int,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0) * SPAN
    c = tl.arange(0, BLOCK)
    begin(PDL)
    first = tl.load(packed + c, mask=c < count, other=-1)
    here = first >= 0
    start, tokens = _spans(chunks, c, here)
    keys = start + tokens
    mine = here & (first <= row) & (row < first + (keys + TILE - 1) // TILE * TILE)
    if tl.sum(mine.to(tl.int32), 0) == 0:
        return
    slot = tl.sum(tl.where(mine, tl.load(chunks.slots + c, mask=mine, other=0), 0), 0)
    keys = tl.sum(tl.where(mine, keys, 0), 0)
    at = row - tl.sum(tl.where(mine, first, 0), 0) + tl.arange(0, SPAN)
    inside = at < keys
    page = tl.load(table + slot.to(tl.int64) * width + at // PAGE, mask=inside, other=0)
    source = (page.to(tl.int64) * PAGE + at % PAGE)[:, None]
    target = (row + tl.arange(0, SPAN)).to(tl.int64)[:, None] * WIDTH
    d = tl.arange(0, COLUMNS)[None, :]
    there = inside[:, None] & (d < WIDTH)
    _copy(k + source * k_stride + d, k_out + target + d, there, d < WIDTH, k_scale)
    _copy(v + source * v_stride + d, v_out + target + d, there, d < WIDTH, v_scale)


def pack(
    cache: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor],
    packed: Tensor,
    chunks: Chunks,
    page_table: Tensor,
    page_size: int,
    tile: int,
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    pdl: bool = False,
) -> None:
    """Copy the keys and values of the chunks that are packed; behind each zeros up to a whole tile, so
    that stale values are not multiplied: 0 x NaN is NaN.

    cache       K and V, each [tokens, kv_heads, dim] with (kv_heads, dim) contiguous
    out         K and V, each contiguous [room, kv_heads, dim]
    packed      `Packing.places`
    page_table  int32 [slots, pages]
    scales      what K and V of float8 pages are multiplied by
    """
    (k, v), (k_out, v_out) = cache, out
    width = k_out[0].numel()
    _pack[(cdiv(len(k_out), SPAN),)](
        k,
        v,
        k_out,
        v_out,
        packed,
        chunks,
        page_table,
        k.stride(0),
        v.stride(0),
        *scales,
        len(packed),
        page_table.stride(0),
        PAGE=page_size,
        WIDTH=width,
        TILE=tile,
        SPAN=SPAN,
        BLOCK=pow2(len(packed)),
        COLUMNS=pow2(width),
        **launch_options(pdl, 8),
    )
