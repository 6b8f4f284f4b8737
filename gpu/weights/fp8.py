"""FP8 and int8 weights of checkpoints: scales, dequantising, quantising.

Checkpoints store e4m3 or int8 with a scale beside it, named after the weight:

    weight_scale_inv   [out / 128, in / 128]   DeepSeek V3, Qwen3-FP8: a weight is number × scale
    weight_scale       one, [out] or [out, 1], or of e4m3 blocks as above    compressed-tensors, FBGEMM

A model that holds its matrices so (`ModelSpec.fp8`, `ModelSpec.w8a8`) takes numbers and scales as they are,
where they fit its own. For any other weights are dequantised while they are read, and quantised anew if need
be: the reference for kernels that multiply in 8 bits.
"""

from __future__ import annotations

import torch

from core.errors import ModelError
from core.models.quant import BLOCK
from gpu.quant.scaled import quantise_like
from gpu.weights.stage import Copy

SCALES = ("_scale_inv", "_scale")
"""Added to a weight's name, in this order of preference."""

SLAB = 2**24
"""Numbers that are quantised at once: 160 MiB in passing, 200 by blocks, in each of the reading threads."""

_BESIDE = ("weight_scale_inv", "weight_scale", "input_scale", "k_scale", "v_scale", "weight_scale_ub")


def is_scale(name: str) -> bool:
    """Whether a tensor is no parameter but scales one, or activations (which are not quantised here)."""
    return name.rpartition(".")[2] in _BESIDE


def as_place_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """`scale` as float32 of `shape`, [out] or [out / 128, in / 128]; None where it scales otherwise."""
    if scale.numel() == 1:
        return scale.float().reshape(-1)[0].expand(shape).contiguous()
    if tuple(scale.shape) in (shape, (*shape, 1)):
        return scale.float().reshape(shape)
    return None


def store(place: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, copy: Copy) -> None:
    """Quantise `weight` [out, in] into `place`, e4m3 or int8, and `scale`, float32 [out] or [out / 128, in /
    128], on their device, where it takes a slab at a time."""
    each = len(weight) // len(scale)
    step = max(SLAB // weight.shape[1] // each, 1)
    for first in range(0, len(scale), step):
        part = slice(first * each, (first + step) * each)
        slab = torch.empty_like(weight[part], device=place.device)
        copy(slab, weight[part])
        numbers, scales = quantise_like(slab, scale, place.dtype)
        place[part].copy_(numbers)
        scale[first : first + step].copy_(scales)


def dequantise(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of `weight`, e4m3 or int8, and its scale. Raises `ModelError` for one that does not
    fit."""
    rows, columns = weight.shape
    if (each := as_place_scale(scale, (rows,))) is not None:
        return weight.float().mul_(each[:, None])
    if tuple(scale.shape) != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ModelError(
            f"{name} {[rows, columns]} has scales {list(scale.shape)}: neither one, nor one a row, "
            f"nor one for {BLOCK} x {BLOCK}."
        )
    out = torch.empty(rows, columns, dtype=torch.float32)
    for block, row in enumerate(scale.float()):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        torch.mul(weight[part].float(), row.repeat_interleave(BLOCK)[:columns], out=out[part])
    return out
