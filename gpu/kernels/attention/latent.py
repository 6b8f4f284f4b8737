"""Between MLA's projections and attention: the latent's norm, rope, and the way into the pages.

One program of a row has the latent and the shared key; each of the others has the rotated parts of SPAN query
heads. The part of queries that meets latents is there already, by a product.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2

SPAN, WARPS = 16, 4
"""Query heads of a program, by reasoning: two loads of two bytes a thread, as `qk_norm_rope_store`."""


@jit
def _turn(
    source: tl.tensor,
    target: tl.tensor,
    low: tl.tensor,
    inside: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Apply rope to the vectors at `source` [n, 1] and write them to `target` [n, 1], where `inside`
    [n, BLOCK]."""
    if INTERLEAVED:
        a_at, b_at = source + 2 * low, source + 2 * low + 1
    else:
        a_at, b_at = source + low, source + HALF + low
    a = tl.load(a_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
    turns = low < HALF
    low_c = tl.load(cos + low, mask=turns, other=0.0).to(tl.float32)
    low_s = tl.load(sin + low, mask=turns, other=0.0).to(tl.float32)
    high_c = tl.load(cos + HALF + low, mask=turns, other=0.0).to(tl.float32)
    high_s = tl.load(sin + HALF + low, mask=turns, other=0.0).to(tl.float32)
    tl.store(target + low, (a * low_c + b * low_s).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF + low, (b * high_c + a * high_s).to(target.dtype.element_ty), mask=inside)


@jit
def _latent(
    q: tl.tensor,
    turned: tl.tensor,
    kv: tl.tensor,
    cache: tl.tensor,
    where: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_rows: tl.tensor,
    eps: float,
    turned_stride: int,
    head_stride: int,
    kv_stride: int,
    cache_stride: int,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.program_id(1)
    half: tl.constexpr = ROTARY // 2
    low = tl.arange(0, BLOCK)[None, :]
    begin(PDL)
    if padding(row, num_rows):
        return
    cos += row * ROTARY
    sin += row * ROTARY
    if part == 0:
        own = kv + row.to(tl.int64) * kv_stride
        place = cache + tl.load(where + row).to(tl.int64) * cache_stride
        r = tl.arange(0, BLOCK_R)
        x = tl.load(own + r, mask=r < RANK, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        normed = x * scale * tl.load(weight + r, mask=r < RANK, other=0.0).to(tl.float32)
        tl.store(place + r, normed.to(cache.dtype.element_ty), mask=r < RANK)
        one = tl.zeros([1, 1], tl.int32) + RANK
        _turn(own + one, place + one, low, low < half, cos, sin, half, INTERLEAVED)
    else:
        head = ((part - 1) * SPAN + tl.arange(0, SPAN))[:, None]
        source = turned + row.to(tl.int64) * turned_stride + head * head_stride
        target = q + (row.to(tl.int64) * HEADS + head) * (RANK + ROTARY) + RANK
        _turn(source, target, low, (head < HEADS) & (low < half), cos, sin, half, INTERLEAVED)


def latent_store(
    q: Tensor,
    turned: Tensor,
    kv: Tensor,
    cache: Tensor,
    where: Tensor,
    rope: tuple[Tensor, Tensor],
    norm: tuple[Tensor, float],
    interleaved: bool,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Norm a latent, rotate its key and the queries, store latent and key at their place.

    q         [n, heads, rank + rope], contiguous: gets what is rotated of `turned`
    turned    [n, heads, rope]; rows and heads may be strided
    kv        [n, rank + rope]; rows may be strided
    cache     [tokens, 1, rank + rope]: a view of a layer's pages flattened to tokens
    where     integer [n]: page * page_size + offset; below page_size it is the dump
    rope      cos and sin [n, (1,) rope], sin negative in its first half (`gpu.ops.base.Rotation`)
    norm      weight [rank] and eps
    interleaved  neighbouring dimensions rotate together; they leave as halves
    num_rows  int32 [1] on the device: rows from there on do nothing
    """
    n, heads, rotary = turned.shape
    (weight, eps), (cos, sin) = norm, rope
    rank = len(weight)
    _latent[(n, 1 + cdiv(heads, SPAN))](
        q,
        turned,
        kv,
        cache,
        where,
        weight,
        cos,
        sin,
        num_rows,
        eps,
        turned.stride(0),
        turned.stride(1),
        kv.stride(0),
        cache.stride(0),
        HEADS=heads,
        RANK=rank,
        ROTARY=rotary,
        SPAN=SPAN,
        BLOCK=pow2(rotary // 2),
        BLOCK_R=pow2(rank),
        INTERLEAVED=interleaved,
        **launch_options(pdl, WARPS),
    )
