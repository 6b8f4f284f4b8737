"""From router logits to tiles of work for the grouped GEMMs.

Up to SMALL rows, where launches and trips to memory are the time:

    choose   per row the best experts and their weights, a warp a row
    sort     the place of a (row, expert) pair is how many pairs come before it: each is compared with
             all. One program more counts the experts' pairs and writes the table of blocks

Above, where that would be too many comparisons:

    route    as choose, and per chunk of rows a histogram of experts, and for each pair its rank among
             the chunk's pairs of that expert
    scatter  every program sums the histograms into each expert's first place in the sorted list,
             writes its own chunk's pairs there, and its share of the table of blocks

The list is sorted by expert and then by row, without atomics: the same routing gives the same list.
Nothing is padded in it. A block is (expert, first place, count <= block_m); entries behind the last
block have count 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.experts import PLAIN, Choice
from gpu.kernels.jit import add_pairs, begin, cdiv, jit, jit_loose, launch_options, options, pow2, true_rows

SMALL = 128
"""Rows up to which pairs are sorted by comparing each with all: 3.4 µs at 128, where chunks took 8.7."""

WORD = 64
"""Rows of a span at most: as many as a word has bits."""

CHUNKS = 128
"""Chunks at most; each program of `scatter` reads all histograms (32 KiB at 128 experts), at once."""

_LEAST: tl.constexpr = tl.constexpr(-(2**31))

_TINY: tl.constexpr = tl.constexpr(1e-20)
"""Added to a sum of sigmoids, which may all be 0."""


class Routing(NamedTuple):
    """Which experts each of T rows goes to; k experts per row.

    weights  float32 [T, k]   0 in padded rows
    experts  int32 [T, k]     best first, -1 in padded rows
    """

    weights: Tensor
    experts: Tensor


class Router(NamedTuple):
    """Constants of a kernel that routes. `renormalise` makes a row's weights sum to 1; the blocks are
    powers of two of at least `experts`, `top_k` and `groups`. The others are those of `Choice`."""

    experts: int
    top_k: int
    renormalise: bool
    block_e: int
    block_k: int
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    block_g: int = 2
    scale: float = 1.0


def router(experts: int, top_k: int, renormalise: bool, choice: Choice = PLAIN) -> Router:
    """The router with the blocks that its sizes need."""
    sigmoid, _, groups, top_groups, scale = choice
    blocks = max(pow2(experts), 16), max(pow2(top_k), 2)
    block_g = max(pow2(groups), 2)
    return Router(experts, top_k, renormalise, *blocks, sigmoid, groups, top_groups, block_g, scale)


class Tiles(NamedTuple):
    """The pairs of a routing in the order in which the GEMMs take them.

    pairs   int32 [T * k]      pair number row * k + j of each place in the list
    blocks  int32 [4, count]   expert, first place and rows of each tile, rows 0 behind the last tile; and 0,
                               where `gate_up` counts what it has done of the tile's outputs
    """

    pairs: Tensor
    blocks: Tensor


@jit
def _close_groups(merit: tl.tensor, e: tl.tensor, ROUTER: tl.constexpr) -> tl.tensor:
    """`merit` [rows, block_e] of experts `e`, -inf outside the best groups, the first ones on ties. Groups
    may have any size: each is a mask over all experts."""
    E: tl.constexpr = ROUTER.experts
    EACH: tl.constexpr = ROUTER.experts // ROUTER.groups
    BLOCK_E: tl.constexpr = ROUTER.block_e
    BLOCK_G: tl.constexpr = ROUTER.block_g
    GROUPS: tl.constexpr = ROUTER.groups
    TOP: tl.constexpr = ROUTER.top_groups
    g = tl.arange(0, BLOCK_G)[None, :]
    worth = tl.zeros([merit.shape[0], BLOCK_G], tl.float32) - float("inf")
    for i in tl.static_range(GROUPS):
        own = tl.where((e // EACH == i) & (e < E), merit, float("-inf"))
        best = tl.max(own, 1)
        if ROUTER.sigmoid:
            index = tl.min(tl.where(own == best[:, None], e, BLOCK_E), 1)
            best += tl.max(tl.where(e == index[:, None], float("-inf"), own), 1)
        worth = tl.where(g == i, best[:, None], worth)
    is_open = (merit != merit) & (e < 0)
    for _ in tl.static_range(TOP):
        best = tl.max(worth, 1)
        index = tl.min(tl.where(worth == best[:, None], g, BLOCK_G), 1)
        is_open = is_open | (e // EACH == index[:, None])
        worth = tl.where(g == index[:, None], float("-inf"), worth)
    return tl.where(is_open, merit, float("-inf"))


@jit
def _best(
    logits: tl.tensor,
    bias: tl.tensor | None,
    rows: tl.tensor,
    live: tl.tensor,
    ROUTER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights and experts [rows, block_k], and which experts were taken, bool [rows, block_e]."""
    E: tl.constexpr = ROUTER.experts
    K: tl.constexpr = ROUTER.top_k
    BLOCK_E: tl.constexpr = ROUTER.block_e
    BLOCK_K: tl.constexpr = ROUTER.block_k
    e = tl.arange(0, BLOCK_E)[None, :]
    j = tl.arange(0, BLOCK_K)[None, :]
    packed: tl.constexpr = logits.dtype.element_ty == tl.bfloat16 and not ROUTER.sigmoid
    at = logits + rows.to(tl.int64)[:, None] * E + e
    x = tl.load(at, mask=live[:, None] & (e < E), other=0.0).to(tl.float32) + 0.0
    if ROUTER.sigmoid:
        x = tl.sigmoid(x)
    merit = x
    if bias is not None:
        merit = x + tl.load(bias + e, mask=e < E, other=0.0)
    if ROUTER.groups > 1:
        merit = _close_groups(merit, e, ROUTER)
    # Integers in the order of the values (+ 0.0 above makes -0 equal to 0), the lowest expert first on
    # ties. A bfloat16 leaves room for the expert in the same word, so that one reduction finds both.
    word = merit.to(tl.int32, bitcast=True)
    order = tl.maximum(word ^ ((word >> 31) & 0x7FFFFFFF), _LEAST + 1)
    if packed:
        order = (order & -65536) | (BLOCK_E - e)
    order = tl.where(e < E, order, _LEAST)
    value = tl.zeros([rows.shape[0], BLOCK_K], tl.float32) - float("inf")
    expert = tl.zeros([rows.shape[0], BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        top = tl.max(order, 1)
        if packed:
            index = BLOCK_E - (top & 0xFFFF)
            top = top & -65536
        else:
            index = tl.min(tl.where(order == top[:, None], e, BLOCK_E), 1)
        best = (top ^ ((top >> 31) & (0x7FFF0000 if packed else 0x7FFFFFFF))).to(tl.float32, bitcast=True)
        if ROUTER.sigmoid:
            best = tl.sum(tl.where(e == index[:, None], x, 0.0), 1)
        value = tl.where(j == i, best[:, None], value)
        expert = tl.where(j == i, index[:, None], expert)
        order = tl.where(e == index[:, None], _LEAST, order)
    if ROUTER.sigmoid:
        share = tl.where(j < K, value, 0.0)
        total = tl.sum(share, 1)[:, None] + _TINY if ROUTER.renormalise else 1.0
    else:
        top = tl.max(value, 1)[:, None]
        share = tl.where(j < K, tl.exp(value - top), 0.0)
        total = tl.sum(share, 1)[:, None]
        if not ROUTER.renormalise:
            total = tl.sum(tl.where(e < E, tl.exp(x - top), 0.0), 1)[:, None]
    weight = tl.where(live[:, None], share / total * ROUTER.scale, 0.0)
    expert = tl.where(live[:, None] & (j < K), expert, -1)
    return weight, expert, live[:, None] & (order == _LEAST) & (e < E)


@jit
def _bits(word: tl.tensor) -> tl.tensor:
    """How many bits of each uint64 are set, int32 (Hacker's Delight, 5-1)."""
    word -= (word >> 1) & 0x5555555555555555
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56).to(tl.int32)


@jit
def _route_rows(
    logits: tl.tensor,
    bias: tl.tensor | None,
    routing: Routing,
    rows: tl.tensor,
    last: tl.tensor,
    n: tl.tensor,
    ROUTER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Route `rows`, of which those up to `last` are stored, those up to `n` being true. Returns experts and
    which were taken, as `_best`."""
    K: tl.constexpr = ROUTER.top_k
    j = tl.arange(0, ROUTER.block_k)[None, :]
    weight, expert, taken = _best(logits, bias, rows, rows < tl.minimum(n, last), ROUTER)
    at = rows[:, None] * K + j
    inside = (rows < last)[:, None] & (j < K)
    tl.store(routing.weights + at, weight, mask=inside)
    tl.store(routing.experts + at, expert, mask=inside)
    return expert, taken


@jit
def _write_blocks(
    counts: tl.tensor,
    firsts: tl.tensor,
    blocks: tl.tensor,
    total: int,
    part: tl.tensor,
    parts: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Write one of `parts` parts of the table, from the pairs of each expert and where they begin, int32
    [BLOCK_E]: of every expert the tiles `part`, `part` + `parts` and so on, and entries behind all.

    An expert's tiles are as few as can be and differ by one unit at most, the greatest power of two that
    divides BLOCK_M: 256 rows in tiles of 192 are 128 and 128, which read less than 192 and 64."""
    e = tl.arange(0, BLOCK_E)
    unit: tl.constexpr = BLOCK_M & -BLOCK_M
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    units = (counts + unit - 1) // unit
    least = units // tl.maximum(tiles, 1)
    taller = units - least * tiles
    starts = tl.cumsum(tiles, 0) - tiles
    for i in range(part, tl.max(tiles, 0), parts):
        own = i < tiles
        before = (least * i + tl.minimum(taller, i)) * unit
        height = (least + (i < taller).to(tl.int32)) * unit
        tl.store(blocks + starts + i, e, mask=own)
        tl.store(blocks + total + starts + i, firsts + before, mask=own)
        tl.store(blocks + 2 * total + starts + i, tl.minimum(counts - before, height), mask=own)
        tl.store(blocks + 3 * total + starts + i, 0, mask=own)
    for start in range(tl.sum(tiles, 0) + part * BLOCK_E, total, parts * BLOCK_E):
        b = start + e
        tl.store(blocks + b, 0, mask=b < total)
        tl.store(blocks + total + b, 0, mask=b < total)
        tl.store(blocks + 2 * total + b, 0, mask=b < total)


@jit_loose("rows")
def _choose(
    logits: tl.tensor,
    bias: tl.tensor | None,
    routing: Routing,
    num_rows: tl.tensor,
    rows: int,
    SPAN: tl.constexpr,
    ROUTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    row = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    _route_rows(logits, bias, routing, row, rows, true_rows(num_rows, rows), ROUTER)


@jit_loose("count", "total")
def _sort(
    experts: tl.tensor,
    tiles: Tiles,
    count: int,
    total: int,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    q = tl.arange(0, BLOCK_P)
    other = tl.load(experts + q, mask=q < count, other=-1)
    other = tl.where(other < 0, BLOCK_E, other)
    p = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    if tl.program_id(0) + 1 < tl.num_programs(0):
        own = tl.load(experts + p, mask=p < count, other=-1)
        before = (other * BLOCK_P + q)[None, :] < (own * BLOCK_P + p)[:, None]
        place = tl.sum(before.to(tl.int32), 1)
        tl.store(tiles.pairs + place, p, mask=own >= 0)
    else:
        # Pairs of padded rows are counted behind the last expert.
        counts = tl.histogram(other, 2 * BLOCK_E)
        counts = tl.where(tl.arange(0, 2 * BLOCK_E) < BLOCK_E, counts, 0)
        firsts = tl.cumsum(counts, 0) - counts
        _write_blocks(counts, firsts, tiles.blocks, total, 0, 1, BLOCK_M, 2 * BLOCK_E)


@jit_loose("rows", "chunk")
def _route(
    logits: tl.tensor,
    bias: tl.tensor | None,
    routing: Routing,
    ranks: tl.tensor,
    hist: tl.tensor,
    num_rows: tl.tensor,
    rows: int,
    chunk: int,
    SPAN: tl.constexpr,
    ROUTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    n = true_rows(num_rows, rows)
    g = tl.program_id(0)
    last = tl.minimum((g + 1) * chunk, rows)
    K: tl.constexpr = ROUTER.top_k
    BLOCK_E: tl.constexpr = ROUTER.block_e
    BLOCK_K: tl.constexpr = ROUTER.block_k
    seen = tl.zeros([BLOCK_E], tl.int32)
    for first in range(g * chunk, last, SPAN):
        # Ranks come from words: bit r of an expert's is set where row r of the span chose it, so the rows
        # before one are a mask and a count of bits. A scan over rows would cost a trip through shared memory
        # a warp.
        rows_here = first + tl.arange(0, SPAN)
        chosen, taken = _route_rows(logits, bias, routing, rows_here, last, n, ROUTER)
        bit = tl.full([SPAN], 1, tl.uint64) << tl.arange(0, SPAN).to(tl.uint64)
        words = tl.sum(tl.where(taken, bit[:, None], 0), 0)
        expert = tl.reshape(chosen, [SPAN * BLOCK_K])
        place = tl.arange(0, SPAN * BLOCK_K)
        row = place // BLOCK_K
        before = (tl.full([SPAN * BLOCK_K], 1, tl.uint64) << row.to(tl.uint64)) - 1
        rank = _bits(tl.gather(words, tl.maximum(expert, 0), 0) & before)
        pair = tl.where(expert >= 0, (first + row) * K + place % BLOCK_K, -1)
        counts = _bits(words)
        rank += tl.gather(seen, tl.maximum(expert, 0), 0)
        tl.store(ranks + pair, rank, mask=pair >= 0)
        seen += counts
    tl.store(hist + g * BLOCK_E + tl.arange(0, BLOCK_E), seen.to(hist.dtype.element_ty))


@jit_loose("rows", "chunk", "chunks", "total")
def _scatter(
    experts: tl.tensor,
    ranks: tl.tensor,
    hist: tl.tensor,
    tiles: Tiles,
    rows: int,
    chunk: int,
    chunks: int,
    total: int,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    g = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)[:, None]
    at = hist + c * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
    h = tl.load(at, mask=c < chunks, other=0).to(tl.int32)
    counts, before = tl.reduce((h, tl.where(c < g, h, 0)), 0, add_pairs)
    firsts = tl.cumsum(counts, 0) - counts
    base = firsts + before
    last = tl.minimum((g + 1) * chunk, rows) * K
    for start in range(g * chunk * K, last, SPAN):
        pair = start + tl.arange(0, SPAN)
        expert = tl.load(experts + pair, mask=pair < last, other=-1)
        rank = tl.load(ranks + pair, mask=expert >= 0, other=0)
        place = tl.gather(base, tl.maximum(expert, 0), 0) + rank
        tl.store(tiles.pairs + place, pair, mask=expert >= 0)
    _write_blocks(counts, firsts, tiles.blocks, total, g, chunks, BLOCK_M, BLOCK_E)


def max_blocks(rows: int, experts: int, top_k: int, block_m: int) -> int:
    """The most tiles any routing of `rows` rows can need."""
    pairs = rows * top_k
    return min(pairs, (pairs + min(pairs, experts) * (block_m - 1)) // block_m)


def route(
    logits: Tensor,
    top_k: int,
    block_m: int,
    *,
    renormalise: bool = True,
    choice: Choice = PLAIN,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Routing, Tiles]:
    """The best `top_k` experts by `choice`, and their pairs in tiles of at most `block_m` rows.

    `logits` float [T, experts], contiguous; scores are float32. `renormalise` makes a row's weights
    sum to 1, before they are scaled. `num_rows` int32 [1] on the device: rows from there on go to expert -1
    and into no tile.
    """
    rows, experts = logits.shape
    use = router(experts, top_k, renormalise, choice)
    total = max_blocks(rows, experts, top_k, block_m)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    routing = Routing(empty(rows, top_k, dtype=torch.float32), empty(rows, top_k))
    tiles = Tiles(empty(rows * top_k), empty(4, total))
    if rows <= SMALL:
        _choose[(cdiv(rows, 4),)](
            logits, choice.bias, routing, num_rows, rows, SPAN=4, ROUTER=use, **launch_options(pdl, 4)
        )
        span = 16
        _sort[(cdiv(rows * top_k, span) + 1,)](
            routing.experts,
            tiles,
            rows * top_k,
            total,
            BLOCK_M=block_m,
            BLOCK_E=use.block_e,
            BLOCK_P=pow2(rows * top_k),
            SPAN=span,
            **launch_options(pdl, 4),
        )
        return routing, tiles
    # Beyond 128 experts as many numbers to a thread, and no more than 16 warps.
    wider = max(use.block_e // 128, 1)
    span = max(min(max(16, pow2(cdiv(rows, CHUNKS))), WORD // wider), 1)
    chunk = span * cdiv(rows, span * CHUNKS)
    chunks = cdiv(rows, chunk)
    ranks, hist = empty(rows, top_k), empty(chunks, use.block_e, dtype=torch.int16)
    _route[(chunks,)](
        logits,
        choice.bias,
        routing,
        ranks,
        hist,
        num_rows,
        rows,
        chunk,
        SPAN=span,
        ROUTER=use,
        **launch_options(pdl, max(span // 4 * wider, 4)),
    )
    # Launched early it took 26 µs instead of 15 at 8,192 rows: its programs crowd, it seems, onto the few
    # multiprocessors that `route` leaves free.
    early = pdl and rows < 1024
    _scatter[(chunks,)](
        routing.experts,
        ranks,
        hist,
        tiles,
        rows,
        chunk,
        chunks,
        total,
        K=top_k,
        BLOCK_M=block_m,
        BLOCK_E=use.block_e,
        BLOCK_C=pow2(chunks),
        SPAN=pow2(span * top_k),
        PDL=pdl,
        **options(min(4 * wider, 16), pdl=early),
    )
    return routing, tiles
