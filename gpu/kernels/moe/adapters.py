"""Adapters of routed experts: the delta of each pair of a row and an expert, by the row's own adapter.

    shrink_pairs      h[index] = A[place, expert] x[row]    over the tiles of `gpu.kernels.moe.route`
    add_pair_delta    sums    += B[place, expert] h[index]  last in a tile of the grouped GEMMs: gate and up
                                                            before silu, down before the rows' weights

Both take the tiles of the layer's own GEMMs, whose rows share an expert but not an adapter: a tile goes over
the adapters that its rows have, each with the other rows masked. So no pair is sorted anew, A and B of an
expert are read once a tile by whom it takes, and the delta makes no trip to memory. Rows of a prompt stand
side by side, and so do their pairs of an expert: nearly all tiles of a large step have one adapter. Decode
rows of an expert mostly have different ones, whose matrices are read several at a time (`_group`): read one
after the other, each would wait for memory anew. The GEMM behind `shrink_pairs` begins beside it
(`gpu.kernels.moe.tile_dependency`).

`index` is a pair's in the sorted list of `Tiles`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.gemm.skinny import PROCESSORS
from gpu.kernels.jit import cdiv, jit, jit_loose, launch_options, pow2, pow2_divisor
from gpu.kernels.lora.dense import split_inputs
from gpu.kernels.moe.route import Tiles
from gpu.kernels.moe.tile_dependency import finish, take_tile, wait_for
from gpu.lora import LoraMatrix, LoraRows

_NONE: tl.constexpr = tl.constexpr(2**30)

LOW = 32
"""Height of tiles up to which several adapters are taken at a time: those of decode steps."""
TOGETHER = 128
"""Ranks of these adapters, with padding: of rank 16 four of gate and up and eight of down. On an H200 a layer
of Qwen3-30B-A3B takes 63 us more with eight adapters than without at 128 rows, 94 at 256 and 44 at 32; with
half as many at a time 70, 111 and 45, with one 107, 193 and 59."""


class PairDeltaShape(NamedTuple):
    """Constants of a delta: pairs of a row, elements of B from one place to the next and from one expert to
    the next, and of `ranks` from one place to the next, the adapters' rank, that of all parts together and
    the power of two that holds it, the parts of `h`, and how many adapters are taken at a time."""

    top_k: int
    by_place: int
    by_expert: int
    rank_by_place: int
    rank: int
    wide: int
    block_r: int
    parts: int
    group: int


class PairDelta(NamedTuple):
    """What `shrink_pairs` found, for `add_pair_delta`.

    h       float32 [parts, T * k, all ranks]
    b       [places, experts, outputs, rank]
    ranks   int32 [places], as far apart as the places
    places  int32 [T], -1 for none
    """

    h: Tensor
    b: Tensor
    ranks: Tensor
    places: Tensor


@jit
def _adapters(
    places: tl.tensor, ranks: tl.tensor, row: tl.tensor, inside: tl.tensor, BY_PLACE: tl.constexpr
) -> tl.tensor:
    """The places of the rows `inside`; _NONE of others and of those whose adapter leaves the matrix alone.
    `ranks` of places are BY_PLACE words apart."""
    place = tl.load(places + row, mask=inside, other=-1)
    rank = tl.load(ranks + place.to(tl.int64) * BY_PLACE, mask=place >= 0, other=0)
    return tl.where(rank > 0, place, _NONE)


@jit
def _group(
    adapter: tl.tensor, current: tl.tensor, BLOCK_R: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The next GROUP places from `current` on among those of the rows (`adapter`), by ranks [GROUP *
    BLOCK_R], _NONE where there are fewer; and the place behind them."""
    at = tl.arange(0, GROUP * BLOCK_R) // BLOCK_R
    found = at + _NONE
    for i in tl.static_range(GROUP):
        found = tl.where(at == i, current, found)
        current = tl.min(tl.where(adapter > current, adapter, _NONE), 0)
    return found, current


@jit_loose("total", "count")
def _shrink_pairs(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    places: tl.tensor,
    tiles: Tiles,
    h: tl.tensor,
    total: int,
    count: int,
    K: tl.constexpr,
    BY_PLACE: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    RANK_BY_PLACE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    part = tl.program_id(0) % PARTS
    expert, start, height, done, seen = take_tile(
        tiles.blocks, total, tl.program_id(0) // PARTS, AFTER, AFTER > 0, PDL
    )
    if AFTER > 0 and height > 0:
        wait_for(done, seen, AFTER, False)
    r = tl.arange(0, GROUP * BLOCK_R) % BLOCK_R
    d = tl.arange(0, BLOCK_K)
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    for first in range(0, height, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        inside = m < height
        index = start + m
        row = tl.load(tiles.pairs + index, mask=inside, other=0) // TOP_K
        adapter = _adapters(places, ranks, row, inside, RANK_BY_PLACE)
        source = row if GATHERED else index
        current = tl.min(adapter, 0)
        while current < _NONE:
            lowest = current
            place, current = _group(adapter, current, BLOCK_R, GROUP)
            mine = (adapter >= lowest) & (adapter < current)
            known = (r < R) & (place < _NONE)
            x_at = x + source.to(tl.int64)[:, None] * K + d[None, :]
            a_at = a + expert.to(tl.int64) * BY_EXPERT + place.to(tl.int64)[:, None] * BY_PLACE
            acc = tl.zeros([BLOCK_M, GROUP * BLOCK_R], tl.float32)
            for k in range(steps * part // PARTS * BLOCK_K, steps * (part + 1) // PARTS * BLOCK_K, BLOCK_K):
                there = (k + d < K)[None, :]
                # Past L1: with AFTER `gate_up` has just written it.
                some = tl.load(x_at + k, mask=mine[:, None] & there, other=0.0, cache_modifier=".cg")
                at = a_at + k + r[:, None] * K + d[None, :]
                weights = tl.load(at, mask=known[:, None] & there, other=0.0)
                acc = tl.dot(some, tl.trans(weights), acc, input_precision="ieee")
            at = h + (part * count + index).to(tl.int64)[:, None] * R + r[None, :]
            tl.store(at, acc, mask=(adapter[:, None] == place[None, :]) & known[None, :])
    if AFTER > 0:
        finish(PDL)


def shrink_pairs(
    x: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    tiles: Tiles,
    block_m: int,
    top_k: int,
    *,
    gathered: bool,
    after: int = 0,
    pdl: bool = False,
) -> tuple[PairDelta, PairDeltaShape]:
    """A[place, expert] x of every pair, for `grouped_gemm`.

    x        contiguous, in the dtype of A: with `gathered` [T, inputs], a row of each `top_k` pairs, else
             [T * top_k, inputs] in the order of `tiles`
    rows     of the T rows; those without a place are not computed
    block_m  what `tiles` was cut with
    after    programs of the `gate_up` launched right before that a tile waits for; 0: for all of it
    """
    count, size, total = len(tiles.pairs), x.shape[1], tiles.blocks.shape[1]
    wide, block_k = lora.a.shape[-2], 128
    block_r = max(pow2(wide), 16)
    group = max(TOGETHER // block_r, 1) if block_m <= LOW else 1
    parts = split_inputs(2 * PROCESSORS // total, cdiv(size, block_k))
    h = x.new_empty(parts, count, wide, dtype=torch.float32)
    _shrink_pairs[(total * parts,)](
        x,
        lora.a,
        lora.ranks,
        rows.places,
        tiles,
        h,
        total,
        count,
        K=size,
        BY_PLACE=lora.a.stride(0),
        BY_EXPERT=lora.a.stride(1),
        RANK_BY_PLACE=lora.ranks.stride(0),
        R=wide,
        BLOCK_R=block_r,
        TOP_K=top_k,
        GATHERED=gathered,
        PARTS=parts,
        GROUP=group,
        BLOCK_M=min(pow2_divisor(block_m), 64),
        BLOCK_K=block_k if block_r <= 64 else block_k // 2,
        AFTER=after,
        **launch_options(pdl, 4, 4),
    )
    apart = lora.b.stride(0), lora.b.stride(1), lora.ranks.stride(0)
    shape = PairDeltaShape(top_k, *apart, lora.rank, wide, block_r, parts, group)
    return PairDelta(h, lora.b, lora.ranks, rows.places), shape


@jit
def adapters_of(
    delta: PairDelta, pairs: tl.tensor, index: tl.tensor, inside: tl.tensor, DELTA: tl.constexpr
) -> tl.tensor:
    """The adapters' places for the pairs at `index` that are `inside`, for `add_pair_delta`. All that is read
    is older than `shrink_pairs`: loaded in front of a product's loop, it is there behind it."""
    row = tl.load(pairs + index, mask=inside, other=0) // DELTA.top_k
    return _adapters(delta.places, delta.ranks, row, inside, DELTA.rank_by_place)


@jit
def add_pair_delta(
    acc: tl.tensor,
    delta: PairDelta,
    adapter: tl.tensor,
    index: tl.tensor,
    expert: tl.tensor,
    cols: tl.tensor,
    part: tl.tensor,
    last: tl.tensor,
    count: int,
    DELTA: tl.constexpr,
    SWAP: tl.constexpr,
) -> tl.tensor:
    """Add the deltas of the pairs at `index`, by `adapter`, to `acc` [rows, cols], with SWAP [cols, rows].
    `cols` are outputs, all of part `part` of them (gate 0, up 1) or each of one of a vector; those from
    `last` on have no weights. `count` is how many pairs `h` has room for."""
    R: tl.constexpr = DELTA.rank
    BLOCK_R: tl.constexpr = DELTA.block_r
    r = tl.arange(0, DELTA.group * BLOCK_R) % BLOCK_R
    i = tl.arange(0, DELTA.parts)[:, None, None]
    h_at = delta.h + (i * count + index[None, :, None]).to(tl.int64) * DELTA.wide + r[None, None, :]
    own = r[:, None] - (tl.zeros(cols.shape, tl.int32) + part)[None, :] * R
    there = (own >= 0) & (own < R) & (cols < last)[None, :]
    b_at = delta.b + expert.to(tl.int64) * DELTA.by_expert + cols[None, :] * R + own
    current = tl.min(adapter, 0)
    while current < _NONE:
        place, current = _group(adapter, current, BLOCK_R, DELTA.group)
        known = place < _NONE
        mask = (adapter[:, None] == place[None, :]) & (known & (r < DELTA.wide))[None, :]
        # All parts in one load: loaded one after another, each waits for the one before.
        sums = tl.sum(tl.load(h_at, mask=mask[None, :, :], other=0.0), 0)
        own_b = b_at + place.to(tl.int64)[:, None] * DELTA.by_place
        weights = tl.load(own_b, mask=there & known[:, None], other=0.0)
        factors = sums.to(weights.dtype)
        if SWAP:
            # Not with the weights on the left, as the GEMM has them: of two products that share a descriptor
            # the ptxas of Triton 3.6 read the second one's out of a register that was never written, where
            # the GEMM's loop has one step.
            acc += tl.trans(tl.dot(factors, weights, input_precision="ieee"))
        else:
            acc = tl.dot(factors, weights, acc, input_precision="ieee")
    return acc
