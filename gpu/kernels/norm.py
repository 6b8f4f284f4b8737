"""RMSNorm, alone and after the addition to the residual."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, padding, pow2


@jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
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
    if residual is not None:
        at = residual + row * WIDTH + cols
        # Rounded before the norm, as the model's own dtype rounds it in plain torch.
        v = (v.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(at, v, mask=mask)
    f = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(f * f, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + cols, (f * scale * w).to(out.dtype.element_ty), mask=mask)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight: `x` contiguous [n, width], `weight` [width]; a new tensor. With a
    `residual`, contiguous [n, width], `x` is added to it in place, and the sum is normed.

    `num_rows` int32 [1] on the device: rows from there on are neither read nor written.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    block = pow2(width)
    warps = min(max(block // 512, 1), 8)
    _rms_norm[(rows,)](
        x, residual, weight, out, num_rows, eps, WIDTH=width, BLOCK=block, **launch_options(pdl, warps)
    )
    return out
