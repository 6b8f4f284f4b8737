"""RMSNorm: alone, after and before the addition to the residual, of an embedding beside a hidden state, and
over all query or key heads together."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, padding, pow2


def _warps(block: int) -> int:
    """Warps of a program that holds a row of `block` elements."""
    return min(max(block // 512, 1), 8)


@jit
def normed(v: tl.tensor, w: tl.tensor, eps: float, WIDTH: tl.constexpr) -> tl.tensor:
    """float32 RMSNorm of a row `v`, with zeros behind WIDTH, by its float32 weights `w`."""
    f = v.to(tl.float32)
    return f * tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps) * w


@jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    keep: tl.tensor | None,
    num_rows: tl.tensor,
    keep_stride: int | None,
    eps: float,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)  # no kernel writes it: no wait
    begin(PDL)
    if padding(row, num_rows):
        return
    v = tl.load(x + row * WIDTH + cols, mask=mask, other=0.0)
    if residual is not None:
        at = residual + row * WIDTH + cols
        # Rounded before the norm, as the model's own dtype rounds it in plain torch.
        v = (v.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(at, v, mask=mask)
    if keep is not None:
        tl.store(keep + row.to(tl.int64) * keep_stride + cols, v, mask=mask)
    tl.store(out + row * WIDTH + cols, normed(v, w, eps, WIDTH).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    keep: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight: `x` contiguous [n, width], `weight` [width]; a new tensor. With a
    `residual`, contiguous [n, width], `x` is added to it in place, and the sum is normed. What is normed is
    also stored in `keep` [n, width], whose rows may be strided.

    `num_rows` int32 [1] on the device: rows from there on are neither read nor written.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    block = pow2(width)
    _rms_norm[(rows,)](
        x, residual, weight, out, keep, num_rows, None if keep is None else keep.stride(0), eps,
        WIDTH=width, BLOCK=block, **launch_options(pdl, _warps(block)),
    )  # fmt: skip
    return out


@jit
def _add_normed(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    num_rows: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)  # no kernel writes it: no wait
    begin(PDL)
    if padding(row, num_rows):
        return
    v = tl.load(x + row * WIDTH + cols, mask=mask, other=0.0)
    at = residual + row * WIDTH + cols
    # Rounded before it is added, as in plain torch.
    f = normed(v, w, eps, WIDTH).to(v.dtype).to(tl.float32)
    tl.store(at, (f + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(v.dtype), mask=mask)


def add_normed(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Add x / sqrt(mean(x²) + eps) · weight to `residual` in place: both contiguous [n, width], `weight`
    [width]. `num_rows` as for `rms_norm`."""
    rows, width = x.shape
    block = pow2(width)
    _add_normed[(rows,)](
        x, residual, weight, num_rows, eps, WIDTH=width, BLOCK=block,
        **launch_options(pdl, _warps(block)),
    )  # fmt: skip


@jit
def _mean_squares(
    qkv: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    stride: int,
    Q: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)  # of queries, of keys
    begin(PDL)
    if padding(row, num_rows):
        return
    width = tl.where(part == 0, Q, K)
    cols = tl.arange(0, BLOCK)
    at = qkv + row.to(tl.int64) * stride + part * Q + cols
    f = tl.load(at, mask=cols < width, other=0.0).to(tl.float32)
    tl.store(out + row * 2 + part, tl.sum(f * f, 0) / width)


def mean_squares(
    qkv: Tensor, sizes: tuple[int, int], *, num_rows: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """Mean squares of the first columns of `qkv` [n, any], whose rows may be strided, and of those behind
    them, as many as `sizes` say: a new float32 [n, 2]. `num_rows` as for `rms_norm`."""
    out = qkv.new_empty(len(qkv), 2, dtype=torch.float32)
    block = pow2(max(sizes))
    _mean_squares[(len(qkv), 2)](
        qkv, out, num_rows, qkv.stride(0), Q=sizes[0], K=sizes[1], BLOCK=block,
        **launch_options(pdl, _warps(block)),
    )  # fmt: skip
    return out


@jit
def _norm_wide(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    means: tl.tensor | None,
    num_rows: tl.tensor,
    stride: int,
    eps: float,
    Q: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row, part = tl.program_id(0), tl.program_id(1)
    width = tl.where(part == 0, Q, K)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    # No kernel writes the weights: no wait.
    w = tl.load(q_weight + cols, mask=mask & (part == 0), other=0.0).to(tl.float32)
    w += tl.load(k_weight + cols, mask=mask & (part == 1), other=0.0).to(tl.float32)
    begin(PDL)
    if padding(row, num_rows):
        return
    at = qkv + row.to(tl.int64) * stride + part * Q + cols
    v = tl.load(at, mask=mask, other=0.0)
    f = v.to(tl.float32)
    mean = tl.sum(f * f, 0) / width if means is None else tl.load(means + row * 2 + part)
    tl.store(at, (f * tl.rsqrt(mean + eps) * w).to(v.dtype), mask=mask)


def norm_wide(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float],
    means: Tensor | None = None,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Norm a row's queries, and its keys, in place, as by `rms_norm`. `num_rows` as there.

    qkv    [n, q_size + k_size + any]; rows may be strided
    norms  weights [q_size] and [k_size], and eps
    means  [n, 2], in place of the rows' own `mean_squares`
    """
    q_weight, k_weight, eps = norms
    block = pow2(max(len(q_weight), len(k_weight)))
    _norm_wide[(len(qkv), 2)](
        qkv, q_weight, k_weight, means, num_rows, qkv.stride(0), eps, Q=len(q_weight), K=len(k_weight),
        BLOCK=block, **launch_options(pdl, _warps(block)),
    )  # fmt: skip


@jit
def _embed_beside(
    table: tl.tensor,
    ids: tl.tensor,
    hidden: tl.tensor,
    table_weight: tl.tensor | None,
    hidden_weight: tl.tensor | None,
    out: tl.tensor,
    num_rows: tl.tensor,
    eps: float,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row, half = tl.program_id(0), tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    begin(PDL)
    if padding(row, num_rows):
        return
    if half == 0:
        v = tl.load(table + tl.load(ids + row).to(tl.int64) * WIDTH + cols, mask=mask, other=0.0)
        if table_weight is not None:
            w = tl.load(table_weight + cols, mask=mask, other=0.0).to(tl.float32)
            v = normed(v, w, eps, WIDTH).to(v.dtype)
    else:
        v = tl.load(hidden + row * WIDTH + cols, mask=mask, other=0.0)
        if hidden_weight is not None:
            w = tl.load(hidden_weight + cols, mask=mask, other=0.0).to(tl.float32)
            v = normed(v, w, eps, WIDTH).to(v.dtype)
    tl.store(out + (row * 2 + half) * WIDTH + cols, v, mask=mask)


def embed_beside(
    table: Tensor,
    ids: Tensor,
    hidden: Tensor,
    weights: tuple[Tensor, Tensor] | None,
    eps: float,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Rows `ids` [n] of `table` [vocab, width] beside `hidden` [n, width], all contiguous: a new
    [n, 2 * width], each half normed as by `rms_norm` where `weights` [width] are given. `num_rows` as
    there."""
    rows, width = hidden.shape
    out = hidden.new_empty(rows, 2 * width)
    block = pow2(width)
    _embed_beside[(rows, 2)](
        table, ids, hidden, *(weights or (None, None)), out, num_rows, eps, WIDTH=width, BLOCK=block,
        **launch_options(pdl, _warps(block)),
    )  # fmt: skip
    return out
