"""FP8 weights of checkpoints, as the numbers they stand for.

Checkpoints store e4m3 with a scale beside it, named after the weight:

    weight_scale_inv   [out / 128, in / 128]   DeepSeek V3, Qwen3-FP8: a weight is number × scale
    weight_scale       one, [out] or [out, 1], or blocks as above    compressed-tensors, FBGEMM

Weights are dequantised while they are read and run in the model's dtype: the reference for kernels that
multiply in FP8.
"""

from __future__ import annotations

import torch

from core.errors import ModelError
from core.models.quant import BLOCK

FP8 = torch.float8_e4m3fn

SCALES = ("_scale_inv", "_scale")
"""Added to a weight's name, in this order of preference."""

_BESIDE = ("weight_scale_inv", "weight_scale", "input_scale", "k_scale", "v_scale", "weight_scale_ub")


def is_scale(name: str) -> bool:
    """Whether a tensor is no parameter but scales one, or activations (which are not quantised here)."""
    return name.rpartition(".")[2] in _BESIDE


def dequantise(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of e4m3 `weight` and its scale. Raises `ModelError` for a scale that does not fit."""
    rows, columns = weight.shape
    scale = scale.float()
    if tuple(scale.shape) in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return weight.float().mul_(scale.reshape(-1, 1))
    if tuple(scale.shape) != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ModelError(
            f"{name} {[rows, columns]} has scales {list(scale.shape)}: neither one, nor one a row, "
            f"nor one for {BLOCK} x {BLOCK}."
        )
    out = torch.empty(rows, columns, dtype=torch.float32)
    for block, row in enumerate(scale):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        torch.mul(weight[part].float(), row.repeat_interleave(BLOCK)[:columns], out=out[part])
    return out
