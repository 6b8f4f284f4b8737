"""Attention results over different keys as one: what cascade attention ends with."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import beside_sinks
from gpu.kernels.jit import begin, cdiv, jit_loose, launch_options, padding, pow2

HEADS = 8


@jit_loose("rows")
def _merge_state(
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    sinks: tl.tensor | None,
    num_rows: tl.tensor,
    rows: int,
    H: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    h = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    d = tl.arange(0, BLOCK_D)
    begin(PDL)
    if padding(row, num_rows):
        return
    inside = (h < H)[:, None] & (d < DIM)[None, :]
    own = row * H + h
    high = tl.load(lse + own, mask=h < H, other=float("-inf"))
    # -inf: nothing was attended to, and what stands there as its result may be NaN.
    at = own[:, None] * DIM + d[None, :]
    acc = tl.load(out + at, mask=inside & (high > float("-inf"))[:, None], other=0.0).to(tl.float32)
    total = tl.where(high > float("-inf"), 1.0, 0.0)
    for i in tl.static_range(PARTS):
        place = (i * rows + row) * H + h
        sums = tl.load(parts_lse + place, mask=h < H, other=float("-inf"))
        known = inside & (sums > float("-inf"))[:, None]
        part = tl.load(parts + place.to(tl.int64)[:, None] * DIM + d[None, :], mask=known, other=0.0)
        top = tl.maximum(high, sums)
        level = tl.where(top > float("-inf"), top, 0.0)
        old, new = tl.exp2(high - level), tl.exp2(sums - level)
        acc = acc * old[:, None] + part.to(tl.float32) * new[:, None]
        total = total * old + new
        high = top
    total = tl.where(total > 0, total, 1.0)
    found, sums = acc / total[:, None], high + tl.log2(total)
    found = beside_sinks(found, sums, sinks, h, h < H)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + own, sums, mask=h < H)


def merge_state(
    out: Tensor,
    lse: Tensor,
    parts: Tensor,
    parts_lse: Tensor,
    *,
    sinks: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Merge one or more results into `out`, in place, by their base-2 log-sum-exps.

    out        [rows, heads, dim], contiguous; lse float32 [rows, heads], which becomes that of all
    parts      [n, rows, heads, dim] or [rows, heads, dim], contiguous; parts_lse float32 likewise
    sinks      [heads]: scores of a key without a value that counts beside all others, in `out` alone
    num_rows   int32 [1] on the device; rows from there on stay as they are

    A side whose log-sum-exp is -inf counts nothing, whatever stands there; only such sides give 0.
    """
    rows, heads, dim = out.shape
    _merge_state[(rows, cdiv(heads, HEADS))](
        out,
        lse,
        parts,
        parts_lse,
        sinks,
        num_rows,
        rows,
        H=heads,
        DIM=dim,
        PARTS=parts.numel() // out.numel(),
        SPAN=HEADS,
        BLOCK_D=pow2(dim),
        **launch_options(pdl, 4),
    )
    return out
