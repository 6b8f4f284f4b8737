"""cos and sin of a step's positions, for all layers."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, padding, pow2


@jit
def _rope_rows(
    positions: tl.tensor,
    frequencies: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_rows: tl.tensor,
    scale: float,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    mask = d < HALF
    turns = tl.load(frequencies + d, mask=mask, other=0.0)  # no kernel writes them: loaded before the wait
    begin(PDL)
    if padding(row, num_rows):
        return
    angle = tl.load(positions + row).to(tl.float32) * turns
    c = (tl.cos(angle) * scale).to(cos.dtype.element_ty)
    s = (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    at = row.to(tl.int64) * (2 * HALF) + d
    tl.store(cos + at, c, mask=mask)
    tl.store(cos + at + HALF, c, mask=mask)
    tl.store(sin + at, -s, mask=mask)
    tl.store(sin + at + HALF, s, mask=mask)


def rope_rows(
    positions: Tensor,
    frequencies: Tensor,
    scale: float,
    dtype: torch.dtype,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """cos and sin [n, 1, 2 * half] of integer `positions` [n] times float32 `frequencies` [half]: each
    twice side by side, sin negative in its first half, both times `scale`. Computed in float32.

    `num_rows` int32 [1] on the device: rows from there on are not written.
    """
    n, half = len(positions), len(frequencies)
    cos, sin = (torch.empty(n, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    _rope_rows[(n,)](
        positions, frequencies, cos, sin, num_rows, scale, HALF=half, BLOCK=pow2(half),
        **launch_options(pdl, 1),
    )  # fmt: skip
    return cos, sin
