"""What a tile of keys in pages adds to what queries have found."""

from __future__ import annotations

import triton.language as tl

from gpu.kernels.jit import jit

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

KEPT: tl.constexpr = tl.constexpr("evict_last")
"""How L2 takes what all layers read: the keys and values of one pass through it before the next."""


@jit
def find_pages(
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The pages of a tile's keys, [TILE], or one for all. Those behind `end` are page 0."""
    if PAGE % TILE == 0:
        page = tl.load(table + tile // (PAGE // TILE), mask=tile * TILE < end, other=0, eviction_policy=KEPT)
    else:
        i = tl.arange(0, TILE)
        at = tile * TILE + i
        page = tl.load(table + at // PAGE, mask=at < end, other=0, eviction_policy=KEPT)
    return page


@jit
def fold(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,
    tile: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    stride: int,
    scale: float,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile of keys, `start` to `end` of them seen and not none, to what queries [n, BLOCK_D] found:
    greatest score in powers of two, their sum relative to it [n], weighted values [n, BLOCK_D]."""
    d = tl.arange(0, BLOCK_D)
    at = tile * TILE + tl.arange(0, TILE)
    seen = (at >= start) & (at < end)
    token = page.to(tl.int64 if WIDE else tl.int32) * PAGE + at % PAGE
    place = token[:, None] * stride + d[None, :]
    # What lies in pages past the length is arbitrary. A bad key's score is replaced; a bad value
    # must not be loaded, since 0 × NaN is NaN.
    if DIM == BLOCK_D:
        k = tl.load(k_cache + place, mask=seen[:, None], other=0.0)
        v = tl.load(v_cache + place, mask=seen[:, None], other=0.0)
    else:
        k = tl.load(k_cache + place, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
        v = tl.load(v_cache + place, mask=seen[:, None] & (d < DIM)[None, :], other=0.0)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
    if CAP > 0:
        # tanh from a sigmoid: there is no other in both the compiler and the interpreter
        s = CAP * (2 * tl.sigmoid(2 * s / CAP) - 1)
    s = tl.where(seen[None, :], s * LOG2E, float("-inf"))
    top = tl.maximum(high, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(high - top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return top, total, acc
