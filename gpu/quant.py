"""e4m3 numbers with float32 scales beside them, x ≈ number × scale. The format has no infinity and three bits
behind the point.

    rows      a scale for each row: weights by output, activations by token
    blocks    a scale for each 128 x 128 weights, and for each 128 numbers of a token
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.models import Fp8
from core.models.quant import BLOCK

FP8 = torch.float8_e4m3fn

TOP = 448.0
"""The largest e4m3."""

LEAST = 1e-12
"""What the largest number under a scale is taken for at least: zeros have a scale all the same."""

ALIGN = 16
"""Matrices whose sides this does not divide no product of FP8 takes (cuBLAS): they stay as they are."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., n, k] of `x` and scales float32 [..., n]: each row's largest number becomes `TOP`."""
    f = x.float()
    scale = f.abs().amax(-1).clamp(min=LEAST) / TOP
    return (f / scale[..., None]).to(FP8), scale


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [n, k] of `x` and scales float32 [n, k / 128] of its groups; 128 divides k."""
    numbers, scale = quantise(x.reshape(len(x), -1, BLOCK))
    return numbers.flatten(-2), scale


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., n, k] of `weight` and scales float32 [..., n / 128, k / 128]; 128 divides both sides."""
    *many, rows, columns = weight.shape
    tiles = weight.reshape(*many, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(-2, -3)
    numbers, scale = quantise(tiles.flatten(-2))
    return numbers.view(tiles.shape).transpose(-2, -3).reshape(weight.shape), scale


def restore(numbers: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., n, k] of e4m3 numbers and the scales of their rows, groups or blocks."""
    if scale.dim() < numbers.dim():
        return numbers.float() * scale[..., None]
    rows, columns = (numbers.shape[i] // scale.shape[i] for i in (-2, -1))
    return numbers.float() * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def quantise_like(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [..., n, k] by rows or by blocks: what gives scales of as many dimensions as `scale` has."""
    return quantise(weight) if scale.dim() < weight.dim() else quantise_blocks(weight)


def scale_shape(fp8: Fp8, outputs: list[int], inputs: int) -> tuple[int, ...] | None:
    """Of a matrix whose rows are those of parts of `outputs` one after the other; None where it cannot be
    held so, and stays as it is: a side is no multiple of what a product needs, or a block would have rows
    of two parts."""
    each = BLOCK if fp8 == "blocks" else ALIGN
    if not fp8 or inputs % each or (sum(outputs) % each if fp8 == "rows" else any(n % each for n in outputs)):
        return None
    return (sum(outputs) // BLOCK, inputs // BLOCK) if fp8 == "blocks" else (sum(outputs),)
