"""Between the QKV projection and attention: head norms, rope, and the way into the pages."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, options, padding, pow2

FP8_MAX = tl.constexpr(448.0)
"""The largest e4m3: what is beyond stays there, for the format has no infinity, only NaN."""

HEADS = 8
"""Heads per program: 1,024 elements of head_dim 128, 8 per thread of four warps."""


@jit
def _stored(z: tl.tensor, scale: float, cache: tl.tensor) -> tl.tensor:
    """`z` as its cache keeps it: in float8 divided by `scale`, and saturated; NaN stays NaN."""
    if cache.dtype.element_ty == tl.float8e4nv:
        z = tl.clamp(z / scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return z.to(cache.dtype.element_ty)


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
    PDL: tl.constexpr,
) -> None:
    # | Q query heads | KV key heads | KV value heads |, DIM wide each; a program takes SPAN of them
    row = tl.program_id(0)
    head = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    d = tl.arange(0, BLOCK)
    # roll(x, ROTARY / 2): what the rotation mixes into d. Past ROTARY nothing is turned.
    other = tl.where(d < ROTARY, (d + ROTARY // 2) % ROTARY, d)
    begin(PDL)
    if padding(row, num_rows):
        return
    mask = (head < Q + 2 * KV)[:, None] & (d < DIM)[None, :]
    is_q = (head < Q)[:, None]
    is_v = (head >= Q + KV)[:, None]
    source = qkv + row.to(tl.int64) * row_stride + head[:, None] * DIM
    x = tl.load(source + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    raw = x
    if q_weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        inside = d < DIM
        qw = tl.load(q_weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        kw = tl.load(k_weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        qo = tl.load(q_weight + other, mask=inside, other=0.0).to(tl.float32)[None, :]
        ko = tl.load(k_weight + other, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = x * scale * tl.where(is_q, qw, kw)
        y = y * scale * tl.where(is_q, qo, ko)
    turned = d < ROTARY
    c = tl.load(cos + row * ROTARY + d, mask=turned, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + row * ROTARY + d, mask=turned, other=0.0).to(tl.float32)[None, :]
    z = tl.where(is_v, raw, x * c + y * s)
    at = tl.load(where + row).to(tl.int64)
    key = head[:, None] - Q
    # In place, a warp must not overwrite what another has still to read as its `other`.
    tl.debug_barrier()
    q_at = q_out + row.to(tl.int64) * out_stride + head[:, None] * DIM + d[None, :]
    tl.store(q_at, z.to(q_out.dtype.element_ty), mask=mask & is_q)
    k_at = k_cache + at * k_stride + key * DIM + d[None, :]
    tl.store(k_at, _stored(z, k_scale, k_cache), mask=mask & (is_q == 0) & (is_v == 0))
    v_at = v_cache + at * v_stride + (key - KV) * DIM + d[None, :]
    tl.store(v_at, _stored(z, v_scale, v_cache), mask=mask & is_v)


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
        BLOCK=pow2(dim),
        PDL=pdl,
        **options(4, pdl=pdl),
    )
    return target[:, : q_heads * dim].view(n, q_heads, dim)
