"""e4m3 numbers with a float32 scale for each row, x ≈ number × scale: weights by output, activations by
token. The format has no infinity and three bits behind the point."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn

TOP = 448.0
"""The largest e4m3."""

LEAST = 1e-12
"""What a row's largest number is taken for at least: a row of zeros has a scale all the same."""

ALIGN = 16
"""Matrices whose sides this does not divide no product of FP8 takes (cuBLAS): they stay as they are."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., n, k] of `x` and scales float32 [..., n]: each row's largest number becomes `TOP`."""
    f = x.float()
    scale = f.abs().amax(-1).clamp(min=LEAST) / TOP
    return (f / scale[..., None]).to(FP8), scale


def restore(numbers: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., n, k] of e4m3 numbers and the scales of their rows."""
    return numbers.float() * scale[..., None]
