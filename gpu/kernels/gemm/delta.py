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
    """Of an `h` in `parts` parts."""
    places, rank = len(lora.b), lora.rank
    return DeltaShape(
        places, pow2(places), rank, pow2(rank), lora.b.stride(0), lora.ranks.stride(0), parts, lora.parts
    )


def fits(lora: LoraMatrix, block_n: int) -> bool:
    """Whether a product cut into tiles of `block_n` outputs can add the deltas of `lora`."""
    factors = pow2(len(lora.b)) * pow2(lora.rank)
    return 16 <= factors <= MOST_FACTORS and all(size % block_n == 0 for size in lora.parts)


@jit
def add_delta(
    acc: tl.tensor,
    delta: Delta,
    cols: tl.tensor,
    n: tl.tensor,
    m: tl.tensor,
    rows: int,
    DELTA: tl.constexpr,
) -> tl.tensor:
    """`acc` float32 [outputs, rows] and the deltas of the first `rows` of rows `m`; `cols` are the outputs,
    from `n` on, all of one of the fused matrices."""
    R: tl.constexpr = DELTA.rank
    BLOCK_P: tl.constexpr = DELTA.block_p
    BLOCK_R: tl.constexpr = DELTA.block_r
    WIDE: tl.constexpr = DELTA.rank * len(DELTA.outputs)
    PARTS: tl.constexpr = DELTA.parts
    column = tl.arange(0, BLOCK_P * BLOCK_R)
    p, r = column // BLOCK_R, column % BLOCK_R
    real = p < DELTA.places
    changed = tl.load(delta.ranks + p.to(tl.int64) * DELTA.ranks_by_place, mask=real, other=0) > 0
    starts = delta.rows.starts + p
    used = tl.load(starts + 1, mask=real, other=0) > tl.load(starts, mask=real, other=0)
    at = delta.b + p.to(tl.int64)[None, :] * DELTA.b_by_place + cols[:, None] * R + r[None, :]
    factors = tl.load(at, mask=(changed & used & (r < R))[None, :], other=0.0)
    part = n * 0
    begins = DELTA.outputs[0]
    for i in tl.static_range(1, len(DELTA.outputs)):
        part += (n >= begins).to(tl.int32)
        begins += DELTA.outputs[i]
    inside = m < rows
    place = tl.load(delta.rows.places + m, mask=inside, other=-1)
    own = tl.load(delta.ranks + place.to(tl.int64) * DELTA.ranks_by_place, mask=place >= 0, other=0) > 0
    r = tl.arange(0, BLOCK_R)
    h_at = delta.h + (m[:, None] * WIDE + part * R + r[None, :])
    there = own[:, None] & (r < R)[None, :]
    sums = tl.zeros([m.shape[0], BLOCK_R], tl.float32)
    for i in tl.static_range(PARTS):
        # Past L1: under dependent launch this kernel may be older than the values.
        sums += tl.load(h_at + i * rows * WIDE, mask=there, other=0.0, cache_modifier=".cg")
    p = tl.arange(0, BLOCK_P)
    mine = place[:, None, None] == p[None, :, None]
    spread = tl.where(mine, sums[:, None, :], 0.0).to(factors.dtype)
    spread = tl.trans(tl.reshape(spread, [m.shape[0], BLOCK_P * BLOCK_R]))
    return tl.dot(factors, spread, acc, input_precision="ieee")
