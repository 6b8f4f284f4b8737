"""Numbers of 8 bits with float32 scales beside them, x ≈ number × scale: e4m3, which has no infinity and
three bits behind the point, or int8.

    rows      a scale for each row: weights by output, activations by token
    blocks    a scale for each 128 x 128 weights, and for each 128 numbers of a token; e4m3 alone
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from core.models import Fp8
from core.models.quant import BLOCK
from core.models.spec import W8A8

FP8, INT8 = torch.float8_e4m3fn, torch.int8
EIGHT_BITS = (FP8, INT8)

TOP, TOP_INT8 = 448.0, 127.0
"""The largest e4m3, and the largest int8 whose negative there is, too."""

LEAST = 1e-12
"""Lower bound of the largest number under a scale, so that zeros have one."""

EXACT = 1024
"""Products of int8 whose sums float32 has exactly: 127 · 128 · 1024 < 2^24."""

ALIGN = 16
"""Matrices whose sides this does not divide no product of 8 bits takes (cuBLAS, and descriptors of tensors):
they stay as they are."""


def quantise(x: Tensor, dtype: torch.dtype = FP8) -> tuple[Tensor, Tensor]:
    """e4m3 or int8 [..., n, k] of `x` and scales float32 [..., n]: each row's largest number becomes the
    `dtype`'s. A row that is not finite has such a scale: int8 has no NaN."""
    f = x.float()
    scale = f.abs().amax(-1).clamp(min=LEAST) / (TOP_INT8 if dtype == INT8 else TOP)
    f = f / scale[..., None]
    return (f.round_() if dtype == INT8 else f).to(dtype), scale


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
    """float32 [..., n, k] of numbers and the scales of their rows, groups or blocks."""
    if scale.dim() < numbers.dim():
        return numbers.float() * scale[..., None]
    rows, columns = (numbers.shape[i] // scale.shape[i] for i in (-2, -1))
    return numbers.float() * scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)


def quantise_like(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise `weight` [..., n, k] to `dtype` with a scale for each row if `scale` has one dimension fewer
    than `weight`, else to e4m3 with a scale for each block."""
    return quantise(weight, dtype) if scale.dim() < weight.dim() else quantise_blocks(weight)


def dtype_of(held: Fp8 | W8A8) -> torch.dtype:
    """The dtype of a matrix's numbers in this format."""
    return INT8 if isinstance(held, W8A8) else FP8


def sum_dtype(numbers: torch.dtype) -> torch.dtype:
    """The dtype of sums of products of such numbers."""
    return torch.int32 if numbers == INT8 else torch.float32


def integer_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ of int8 `x` [n, inputs] without -128 and `weight` [outputs, inputs]: exact, [n, outputs] of some
    dtype. On a GPU torch has no such product of fewer rows than 17, but that of float64."""
    if x.is_cuda:
        return x.double() @ weight.double().t()
    if int_mm_is_exact():
        return torch._int_mm(x, weight.t())
    found = torch.zeros(len(x), len(weight), dtype=torch.int32)
    for first in range(0, x.shape[1], EXACT):
        part = slice(first, first + EXACT)
        found += (x[:, part].float() @ weight[:, part].float().t()).int()
    return found


@cache
def int_mm_is_exact() -> bool:
    """Whether torch's product of int8 is on this CPU. On x86 without VNNI oneDNN adds pairs of products in 16
    bits, which saturate."""
    weight = torch.full((64, 256), 127, dtype=INT8)
    some = torch.full((64, 256), -127, dtype=INT8)
    return all(
        bool((torch._int_mm(x, weight.t()) == int(x[0, 0]) * 127 * 256).all())
        for each in (some, -some)
        for x in (each[:1], each)
    )


def scale_shape(held: Fp8 | W8A8, outputs: list[int], inputs: int) -> tuple[int, ...] | None:
    """The shape of the scale of a matrix whose rows are those of parts of `outputs` one after the other; None
    where it cannot be held so, and stays as it is: a side is no multiple of what a product needs, or a block
    would have rows of two parts."""
    blocks = held == "blocks"
    each = BLOCK if blocks else ALIGN
    if not held or inputs % each or (any(n % each for n in outputs) if blocks else sum(outputs) % each):
        return None
    return (sum(outputs) // BLOCK, inputs // BLOCK) if blocks else (sum(outputs),)
