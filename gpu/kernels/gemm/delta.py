"""Adapter deltas in a GEMM's epilogue: y = x Wᵀ + B[place] h, for decode steps of up to 64 rows.

`shrink` has left h = A[place] x. What the places' B add to a tile of outputs is one product more: B of all
places side by side, times h spread so that each row meets its own place alone,

    [outputs, places * rank] · [places * rank, rows]

which costs one wait for memory, where going over the places would cost one for each.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import jit, pow2
from gpu.lora import LoraMatrix, LoraRows

MOST_FACTORS = 256
"""Places times rank: as many columns of B a program holds for each of its outputs."""


class Delta(NamedTuple):
    """What a product adds.

    h      float32 [parts, n, all ranks], to be summed over parts; rows without an adapter, or whose adapter
           leaves the matrix alone, hold anything
    b      [places, outputs, rank]
    ranks  int32 [places], as far apart as the places
    rows   whose place is whose
    """

    h: Tensor
    b: Tensor
    ranks: Tensor
    rows: LoraRows


class DeltaShape(NamedTuple):
    """Constants of a `Delta`: places and rank with the powers of two that hold them, elements of B and words
    of `ranks` from one place to the next, the parts of `h`, and the outputs of each fused matrix, of which
    each has `rank` columns of `h`."""

    places: int
    block_p: int
    rank: int
    block_r: int
    b_by_place: int
    ranks_by_place: int
    parts: int
    outputs: tuple[int, ...]


def delta_shape(lora: LoraMatrix, parts: int) -> DeltaShape:
    """The shape of an `h` in `parts` parts."""
    places, rank = len(lora.b), lora.rank
    return DeltaShape(
        places, pow2(places), rank, pow2(rank), lora.b.stride(0), lora.ranks.stride(0), parts, lora.parts
    )


def fits(lora: LoraMatrix, block_n: int) -> bool:
    """Whether a product cut into tiles of `block_n` outputs can add the deltas of `lora`."""
    factors = pow2(len(lora.b)) * pow2(lora.rank)
    return 16 <= factors <= MOST_FACTORS and all(size % block_n == 0 for size in lora.parts)


@jit
def delta_rows(
    delta: Delta, m: tl.tensor, rows: int, DELTA: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What `add_delta` needs to know of the adapters of the first `rows` of rows `m`: whether each of the
    places, `block_r` times in turn, has a row that it changes; each row's place; and whether that changes it.
    All is older than the kernel in front: loaded early, it is there when the product is."""
    p = tl.arange(0, DELTA.block_p * DELTA.block_r) // DELTA.block_r
    real = p < DELTA.places
    changed = tl.load(delta.ranks + p.to(tl.int64) * DELTA.ranks_by_place, mask=real, other=0) > 0
    starts = delta.rows.starts + p
    used = tl.load(starts + 1, mask=real, other=0) > tl.load(starts, mask=real, other=0)
    place = tl.load(delta.rows.places + m, mask=m < rows, other=-1)
    own = tl.load(delta.ranks + place.to(tl.int64) * DELTA.ranks_by_place, mask=place >= 0, other=0) > 0
    return changed & used, place, own


@jit
def add_delta(
    acc: tl.tensor,
    delta: Delta,
    of_rows: tl.tensor,
    cols: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    rows: int,
    DELTA: tl.constexpr,
) -> tl.tensor:
    """`acc` float32 [outputs, rows] and the deltas of the first `rows` of rows `m`, of which `of_rows` is
    `delta_rows`; `cols` are the outputs, from `n` on, all of one of the fused matrices."""
    R: tl.constexpr = DELTA.rank
    BLOCK_P: tl.constexpr = DELTA.block_p
    BLOCK_R: tl.constexpr = DELTA.block_r
    WIDE: tl.constexpr = DELTA.rank * len(DELTA.outputs)
    used, place, own = of_rows
    column = tl.arange(0, BLOCK_P * BLOCK_R)
    p, r = column // BLOCK_R, column % BLOCK_R
    at = delta.b + p.to(tl.int64)[None, :] * DELTA.b_by_place + cols[:, None] * R + r[None, :]
    factors = tl.load(at, mask=(used & (r < R))[None, :], other=0.0)
    part = n * 0
    begins = DELTA.outputs[0]
    for i in tl.static_range(1, len(DELTA.outputs)):
        part += (n >= begins).to(tl.int32)
        begins += DELTA.outputs[i]
    # All parts in one load: loaded one after another, each waited for the one before (0.35 µs each).
    i = tl.arange(0, DELTA.parts)[:, None, None]
    r = tl.arange(0, BLOCK_R)[None, None, :]
    h_at = delta.h + ((i * rows + m[None, :, None]) * WIDE + part * R + r)
    # Past L1: under dependent launch this kernel may be older than the values.
    h = tl.load(h_at, mask=own[None, :, None] & (r < R), other=0.0, cache_modifier=".cg")
    p = tl.arange(0, BLOCK_P)
    mine = place[:, None, None] == p[None, :, None]
    spread = tl.where(mine, tl.sum(h, 0)[:, None, :], 0.0).to(factors.dtype)
    spread = tl.trans(tl.reshape(spread, [m.shape[0], BLOCK_P * BLOCK_R]))
    return tl.dot(factors, spread, acc, input_precision="ieee")
