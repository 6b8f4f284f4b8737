"""Two attention results over different keys as one: what cascade attention ends with."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, options, padding, pow2

HEADS = 8


@jit
def _merge_state(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    num_rows: tl.tensor,
    H: tl.constexpr,
    DIM: tl.constexpr,
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
    a = tl.load(lse + row * H + h, mask=h < H, other=float("-inf"))
    b = tl.load(other_lse + row * H + h, mask=h < H, other=float("-inf"))
    top = tl.maximum(a, b)
    # -inf: nothing was attended to, and what stands there as its result may be NaN.
    level = tl.where(top > float("-inf"), top, 0.0)
    wa, wb = tl.exp2(a - level), tl.exp2(b - level)
    total = wa + wb
    inside = (h < H)[:, None] & (d < DIM)[None, :]
    at = (row * H + h)[:, None] * DIM + d[None, :]
    x = tl.load(out + at, mask=inside & (wa > 0)[:, None], other=0.0).to(tl.float32)
    y = tl.load(other + at, mask=inside & (wb > 0)[:, None], other=0.0).to(tl.float32)
    z = (x * wa[:, None] + y * wb[:, None]) / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at, z.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row * H + h, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=h < H)


def merge_state(
    out: Tensor,
    lse: Tensor,
    other: Tensor,
    other_lse: Tensor,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Merge `other` into `out`, both contiguous [rows, heads, dim], by their base-2 log-sum-exps, float32
    [rows, heads], in place; `lse` becomes that of both. A side whose log-sum-exp is -inf counts nothing;
    two such sides give 0. Rows from `num_rows` (int32 [1], device) on stay as they are."""
    rows, heads, dim = out.shape
    _merge_state[(rows, cdiv(heads, HEADS))](
        out,
        lse,
        other,
        other_lse,
        num_rows,
        H=heads,
        DIM=dim,
        SPAN=HEADS,
        BLOCK_D=pow2(dim),
        PDL=pdl,
        **options(4, pdl=pdl),
    )
    return out
