"""Between the QKV projection and attention: head norms, rope, and the way into the pages.

A thread holds an element of a head's lower half and the one of the upper half that the rotation mixes it
with, so each is loaded once and nothing is exchanged. (Loading the head a second time, rolled by half,
took loads of two bytes: 88 us instead of 64 for 8,192 rows of 48 heads.)
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import cdiv, jit, launch_dependents, launch_options, padding, pow2, wait

FP8_MAX = tl.constexpr(448.0)
"""The largest e4m3: what is beyond stays there, for the format has no infinity, only NaN."""

HEADS, WARPS = 16, 4
"""Heads per program: two loads of 16 bytes a thread and no other. Measured on an H200 with 48 heads, us:
8,192 rows 64 (8 heads 68, 32 heads 73; 47 by the bytes), 256 rows 2.8, 1 row 1.4."""


@jit
def _to_cache(z: tl.tensor, scale: float, cache: tl.tensor) -> tl.tensor:
    """`z` as its cache keeps it: in float8 divided by `scale`, and saturated; NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv:
        z = tl.clamp(z / scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return z.to(cache.dtype.element_ty)


@jit
def _weight(
    q_weight: tl.tensor, k_weight: tl.tensor, d: tl.tensor, inside: tl.tensor, is_q: tl.tensor
) -> tl.tensor:
    """Norm weights at `d`, of queries where `is_q` [SPAN, 1] and of keys elsewhere: float32 [SPAN, n]."""
    of_q = tl.load(q_weight + d, mask=inside, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + d, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, of_q[None, :], of_k[None, :])


@jit
def _store_heads(
    x: tl.tensor,
    d: tl.tensor,
    inside: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    is_q: tl.tensor,
    is_k: tl.tensor,
    is_v: tl.tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """Each head's elements `d` to where they go: queries, pages of K, pages of V."""
    tl.store(q_row + d[None, :], x.to(q_row.dtype.element_ty), mask=inside & is_q)
    tl.store(k_row + d[None, :], _to_cache(x, k_scale, k_row), mask=inside & is_k)
    tl.store(v_row + d[None, :], _to_cache(x, v_scale, v_row), mask=inside & is_v)


@jit
def _qkv(
    qkv: tl.tensor,
    q_out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    where: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_rows: tl.tensor,
    eps: float,
    k_scale: float,
    v_scale: float,
    row_stride: int,
    out_stride: int,
    k_stride: int,
    v_stride: int,
    Q: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # | Q query heads | KV key heads | KV value heads |, DIM wide each; a program takes SPAN of them. Of a
    # head | low | high | rest | the rotation mixes low with high, and leaves the rest.
    # Attention loads what is older than the product in front of this kernel, while that still runs.
    launch_dependents(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    half: tl.constexpr = ROTARY // 2
    low = tl.arange(0, BLOCK)
    high = half + low
    rest = ROTARY + tl.arange(0, REST)
    turned = low < half
    left = rest < DIM
    is_q = (head < Q)[:, None]
    if q_weight is not None:
        # No kernel writes the weights: they can be loaded before the previous kernel has ended.
        low_w = _weight(q_weight, k_weight, low, turned, is_q)
        high_w = _weight(q_weight, k_weight, high, turned, is_q)
        rest_w = _weight(q_weight, k_weight, rest, left, is_q)
    wait(PDL)
    if padding(row, num_rows):
        return
    known = (head < Q + 2 * KV)[:, None]
    is_v = (head >= Q + KV)[:, None]
    source = qkv + row.to(tl.int64) * row_stride + head[:, None] * DIM
    in_half, in_rest = known & turned[None, :], known & left[None, :]
    a = tl.load(source + low[None, :], mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(source + high[None, :], mask=in_half, other=0.0).to(tl.float32)
    at = tl.load(where + row).to(tl.int64)
    turn = row * ROTARY
    low_c = tl.load(cos + turn + low, mask=turned, other=0.0).to(tl.float32)[None, :]
    low_s = tl.load(sin + turn + low, mask=turned, other=0.0).to(tl.float32)[None, :]
    high_c = tl.load(cos + turn + high, mask=turned, other=0.0).to(tl.float32)[None, :]
    high_s = tl.load(sin + turn + high, mask=turned, other=0.0).to(tl.float32)[None, :]
    c = tl.zeros([SPAN, REST], tl.float32)
    if ROTARY < DIM:
        c = tl.load(source + rest[None, :], mask=in_rest, other=0.0).to(tl.float32)
    x, y, z = a, b, c
    if q_weight is not None:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if ROTARY < DIM:
            squares += tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        x, y, z = a * scale * low_w, b * scale * high_w, c * scale * rest_w
    a = tl.where(is_v, a, x * low_c + y * low_s)
    b = tl.where(is_v, b, y * high_c + x * high_s)
    # In place, a thread must not overwrite what another that holds the same element has still to read.
    tl.debug_barrier()
    q_row = q_out + row.to(tl.int64) * out_stride + head[:, None] * DIM
    k_row = k_cache + at * k_stride + (head[:, None] - Q) * DIM
    v_row = v_cache + at * v_stride + (head[:, None] - Q - KV) * DIM
    is_k = (is_q == 0) & (is_v == 0)
    _store_heads(a, low, in_half, q_row, k_row, v_row, is_q, is_k, is_v, k_scale, v_scale)
    _store_heads(b, high, in_half, q_row, k_row, v_row, is_q, is_k, is_v, k_scale, v_scale)
    if ROTARY < DIM:
        c = tl.where(is_v, c, z)
        _store_heads(c, rest, in_rest, q_row, k_row, v_row, is_q, is_k, is_v, k_scale, v_scale)


def norm_rope_store(
    qkv: Tensor,
    cache: tuple[Tensor, Tensor],
    where: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None = None,
    *,
    q_out: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Norm and rotate queries and keys, store keys and values at their places. Returns the queries.

    qkv       [n, (q_heads + 2 * kv_heads) * dim]; rows may be strided
    cache     K and V, each [tokens, kv_heads, dim] with (kv_heads, dim) contiguous: views of a
              layer's pages flattened to tokens
    where     integer [n]: page * page_size + offset; below page_size it is the dump
    rope      cos and sin [n, (1,) rotary], sin negative in its first half (`gpu.ops.base.Rotation`)
    norms     weights [dim] of queries and keys, and eps; None for families without
    q_out     [n, q_heads * dim]; None writes the queries back into `qkv`
    scales    what K and V are divided by before they are rounded to a cache in float8; unused by others
    num_rows  int32 [1] on the device: rows from there on do nothing
    returns   [n, q_heads, dim], a view of `q_out` or of `qkv`
    """
    k, v = cache
    cos, sin = rope
    kv_heads, dim = k.shape[-2:]
    n, width = qkv.shape
    q_heads = width // dim - 2 * kv_heads
    target = qkv if q_out is None else q_out
    q_weight, k_weight, eps = norms if norms is not None else (None, None, 0.0)
    _qkv[(n, cdiv(q_heads + 2 * kv_heads, HEADS))](
        qkv,
        target,
        k,
        v,
        where,
        q_weight,
        k_weight,
        cos,
        sin,
        num_rows,
        eps,
        *scales,
        qkv.stride(0),
        target.stride(0),
        k.stride(0),
        v.stride(0),
        Q=q_heads,
        KV=kv_heads,
        DIM=dim,
        ROTARY=cos.shape[-1],
        SPAN=HEADS,
        BLOCK=pow2(cos.shape[-1] // 2),
        REST=pow2(max(dim - cos.shape[-1], 1)),
        **launch_options(pdl, WARPS),
    )
    return target[:, : q_heads * dim].view(n, q_heads, dim)
