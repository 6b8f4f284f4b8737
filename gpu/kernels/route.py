"""From router logits to tiles of work for the grouped GEMMs.

Two kernels, or one where a single program can do both (up to SMALL rows):

    route    per row the best experts and their weights; per chunk of rows a histogram of experts, and
             for each (row, expert) pair its rank among the chunk's pairs of that expert
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

from gpu.kernels.jit import begin, cdiv, jit, jit_loose, options, pow2

SMALL = 64
"""Rows up to which one program routes and scatters: a launch less, at about 1 µs per 16 rows more."""

CHUNKS = 128
"""Programs of the two-kernel path at most; each reads all histograms (64 KiB at 128 experts)."""

SPAN = 16
"""Rows that a program holds at once: 16 × 128 logits are 16 registers of 128 threads."""

_LEAST: tl.constexpr = tl.constexpr(-(2**63))


class Routing(NamedTuple):
    """Which experts each of T rows goes to; k experts per row.

    weights  float32 [T, k]   0 in padded rows
    experts  int32 [T, k]     best first, -1 in padded rows
    """

    weights: Tensor
    experts: Tensor


class Tiles(NamedTuple):
    """The pairs of a routing in the order in which the GEMMs take them.

    pairs   int32 [T * k]      pair number row * k + j of each place in the list
    blocks  int32 [3, count]   expert, first place and rows of each tile; rows 0 behind the last tile
    """

    pairs: Tensor
    blocks: Tensor


@jit
def _best(
    logits: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weights and experts [rows, BLOCK_K], and which experts were taken, int32 [rows, BLOCK_E]."""
    e = tl.arange(0, BLOCK_E)
    j = tl.arange(0, BLOCK_K)[None, :]
    at = logits + rows.to(tl.int64)[:, None] * E + e[None, :]
    x = tl.load(at, mask=live[:, None] & (e < E)[None, :], other=0.0).to(tl.float32) + 0.0
    # Value and index in one integer whose order is that of the values, lowest expert first on ties:
    # one reduction finds both. (+ 0.0 above makes -0 equal to 0.)
    word = x.to(tl.int32, bitcast=True)
    order = (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.int64)
    keys = (order << 32) | (BLOCK_E - 1 - e)[None, :]
    keys = tl.where((e < E)[None, :], keys, _LEAST)
    value = tl.zeros([rows.shape[0], BLOCK_K], tl.float32) - float("inf")
    expert = tl.zeros([rows.shape[0], BLOCK_K], tl.int32)
    taken = tl.zeros([rows.shape[0], BLOCK_E], tl.int32)
    for i in tl.static_range(K):
        top = tl.max(keys, 1)
        high = (top >> 32).to(tl.int32)
        best = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        index = BLOCK_E - 1 - (top & 0xFFFFFFFF).to(tl.int32)
        value = tl.where(j == i, best[:, None], value)
        expert = tl.where(j == i, index[:, None], expert)
        hit = keys == top[:, None]
        taken = tl.where(hit, 1, taken)
        keys = tl.where(hit, _LEAST, keys)
    top = tl.max(value, 1)[:, None]
    share = tl.where(j < K, tl.exp(value - top), 0.0)
    total = tl.sum(share, 1)[:, None]
    if not RENORM:
        total = tl.sum(tl.where((e < E)[None, :], tl.exp(x - top), 0.0), 1)[:, None]
    weight = tl.where(live[:, None], share / total, 0.0)
    expert = tl.where(live[:, None], expert, -1)
    return weight, expert, tl.where(live[:, None], taken, 0)


@jit
def _route_chunk(
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    ranks: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    n: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORM: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Route rows `first` ... `last - 1`; returns how many pairs each expert got, int32 [BLOCK_E]."""
    e = tl.arange(0, BLOCK_E)
    j = tl.arange(0, BLOCK_K)[None, :]
    seen = tl.zeros([BLOCK_E], tl.int32)
    for start in range(first, last, SPAN):
        rows = start + tl.arange(0, SPAN)
        live = rows < n
        weight, expert, taken = _best(logits, rows, live, E, K, RENORM, BLOCK_E, BLOCK_K)
        before = tl.cumsum(taken, 0) - taken + seen[None, :]
        rank = tl.zeros([SPAN, BLOCK_K], tl.int32)
        for i in tl.static_range(K):
            mine = tl.sum(tl.where(j == i, expert, 0), 1)
            found = tl.sum(tl.where(e[None, :] == mine[:, None], before, 0), 1)
            rank = tl.where(j == i, found[:, None], rank)
        at = rows[:, None] * K + j
        inside = (rows < last)[:, None] & (j < K)
        tl.store(weights + at, weight, mask=inside)
        tl.store(experts + at, expert, mask=inside)
        tl.store(ranks + at, rank, mask=inside)
        seen += tl.sum(taken, 0)
    return seen


@jit
def _scatter_chunk(
    experts: tl.tensor,
    ranks: tl.tensor,
    base: tl.tensor,
    pairs: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    SPAN: tl.constexpr,
) -> None:
    """Put pairs `first` ... `last - 1` at base[expert] + rank."""
    for start in range(first, last, SPAN):
        pair = start + tl.arange(0, SPAN)
        inside = pair < last
        expert = tl.load(experts + pair, mask=inside, other=-1)
        live = expert >= 0
        place = tl.load(base + expert, mask=live, other=0) + tl.load(ranks + pair, mask=live, other=0)
        tl.store(pairs + place, pair, mask=live)


@jit
def _write_blocks(
    counts: tl.tensor,
    blocks: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    total: int,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Entries `first` ... `last - 1` of the table, from the pairs of each expert, int32 [BLOCK_E]."""
    e = tl.arange(0, BLOCK_E)[None, :]
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    for start in range(first, last, SPAN):
        b = start + tl.arange(0, SPAN)
        past = ends[None, :] <= b[:, None]
        expert = tl.sum(past.to(tl.int32), 1)
        place = tl.sum(tl.where(past, counts[None, :], 0), 1)
        done = (b - tl.sum(tl.where(past, tiles[None, :], 0), 1)) * BLOCK_M
        own = tl.sum(tl.where(e == expert[:, None], counts[None, :], 0), 1)
        inside = b < last
        tl.store(blocks + b, expert, mask=inside)
        tl.store(blocks + total + b, place + done, mask=inside)
        rows = tl.where(expert < BLOCK_E, tl.minimum(own - done, BLOCK_M), 0)
        tl.store(blocks + 2 * total + b, rows, mask=inside)


@jit_loose("rows", "chunk", "total")
def _route(
    logits: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    ranks: tl.tensor,
    hist: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_rows: tl.tensor,
    rows: int,
    chunk: int,
    total: int,
    E: tl.constexpr,
    K: tl.constexpr,
    RENORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    n = rows
    if num_rows is not None:
        n = tl.minimum(tl.load(num_rows).to(tl.int32), rows)
    g = tl.program_id(0)
    first = g * chunk
    last = tl.minimum(first + chunk, rows)
    counts = _route_chunk(
        logits, weights, experts, ranks, first, last, n, E, K, RENORM, SPAN, BLOCK_E, BLOCK_K
    )
    e = tl.arange(0, BLOCK_E)
    if ALL:
        tl.store(hist + e, tl.cumsum(counts, 0) - counts)
        tl.debug_barrier()  # what other threads of this program stored is loaded next
        _scatter_chunk(experts, ranks, hist, pairs, 0, rows * K, 8 * BLOCK_E)
        _write_blocks(counts, blocks, 0, total, total, BLOCK_M, BLOCK_E, 32)
    else:
        tl.store(hist + g * BLOCK_E + e, counts)


@jit_loose("rows", "chunk", "chunks", "total", "share")
def _scatter(
    experts: tl.tensor,
    ranks: tl.tensor,
    hist: tl.tensor,
    base: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    rows: int,
    chunk: int,
    chunks: int,
    total: int,
    share: int,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    g = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, chunks, SPAN):
        c = start + tl.arange(0, SPAN)
        at = hist + c[:, None] * BLOCK_E + e[None, :]
        h = tl.load(at, mask=(c < chunks)[:, None], other=0)
        counts += tl.sum(h, 0)
        before += tl.sum(tl.where((c < g)[:, None], h, 0), 0)
    own = base + g * BLOCK_E
    tl.store(own + e, tl.cumsum(counts, 0) - counts + before)
    tl.debug_barrier()  # what other threads of this program stored is loaded next
    last = tl.minimum((g + 1) * chunk, rows)
    _scatter_chunk(experts, ranks, own, pairs, g * chunk * K, last * K, 4 * BLOCK_E)
    end = tl.minimum((g + 1) * share, total)
    _write_blocks(counts, blocks, g * share, end, total, BLOCK_M, BLOCK_E, SPAN)


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
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Routing, Tiles]:
    """Softmax over all experts, the best `top_k`, and their pairs in tiles of at most `block_m` rows.

    `logits` float [T, experts], contiguous; the softmax is float32. `renormalise` makes a row's weights
    sum to 1. `num_rows` int32 [1] on the device: rows from there on go to expert -1 and into no tile.
    """
    rows, experts = logits.shape
    block_e, block_k = max(pow2(experts), 16), max(pow2(top_k), 2)
    alone = rows <= SMALL
    chunk = rows if alone else max(SPAN, SPAN * cdiv(rows, SPAN * CHUNKS))
    chunks = cdiv(rows, chunk)
    total = max_blocks(rows, experts, top_k, block_m)
    device = logits.device
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=device)
    found, ranks = (torch.empty(rows, top_k, dtype=torch.int32, device=device) for _ in range(2))
    hist = torch.empty(chunks, block_e, dtype=torch.int32, device=device)
    pairs = torch.empty(rows * top_k, dtype=torch.int32, device=device)
    blocks = torch.empty(3, total, dtype=torch.int32, device=device)
    _route[(chunks,)](
        logits,
        weights,
        found,
        ranks,
        hist,
        pairs,
        blocks,
        num_rows,
        rows,
        chunk,
        total,
        E=experts,
        K=top_k,
        RENORM=renormalise,
        BLOCK_M=block_m,
        SPAN=min(SPAN, pow2(rows)),
        BLOCK_E=block_e,
        BLOCK_K=block_k,
        ALL=alone,
        PDL=pdl,
        **options(4, pdl=pdl),
    )
    if not alone:
        _scatter[(chunks,)](
            found,
            ranks,
            hist,
            torch.empty_like(hist),
            pairs,
            blocks,
            rows,
            chunk,
            chunks,
            total,
            cdiv(total, chunks),
            K=top_k,
            BLOCK_M=block_m,
            BLOCK_E=block_e,
            SPAN=16,
            PDL=pdl,
            **options(4, pdl=pdl),
        )
    return Routing(weights, found), Tiles(pairs, blocks)
