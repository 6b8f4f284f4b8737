"""MXFP4: floats of 4 bits (e2m1) with a power of two (e8m0) for each 32 inputs of an output, as the OCP
Microscaling Formats 1.0 have them. In memory they lie as checkpoints of gpt-oss store them:

    numbers  uint8 [outputs, inputs / 2]: two neighbouring inputs a byte, the first in its low bits. The
             highest bit of each is the sign, then two of the exponent, then one behind the point
    scale    uint8 [outputs, inputs / 32]: exponents of two, plus 127
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from core.models.quant import MXFP4_GROUP

BIAS = 127
"""What a scale is less, as an exponent."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-each for each in _POSITIVE))
"""By the four bits."""


def restore(numbers: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., outputs, inputs] of a matrix as it lies in memory."""
    table = torch.tensor(VALUES, device=numbers.device)
    codes = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
    found = table[codes.int()].view(*scale.shape, MXFP4_GROUP)
    return torch.ldexp(found, scale.int().sub_(BIAS)[..., None]).flatten(-2)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scale of `weight` [..., outputs, inputs]. Each group's exponent is its largest number's
    less that of 6, as the standard has it; what then is above 6 becomes 6."""
    *many, inputs = weight.shape
    grouped = weight.float().reshape(*many, inputs // MXFP4_GROUP, MXFP4_GROUP)
    exponent = torch.frexp(grouped.abs().amax(-1)).exponent - 1 - 2
    scaled = torch.ldexp(grouped, -exponent[..., None]).flatten(-2)
    edges = torch.tensor([(a + b) / 2 for a, b in pairwise(_POSITIVE)])
    codes = torch.bucketize(scaled.abs().contiguous(), edges.to(scaled.device)) + 8 * (scaled < 0)
    low, high = codes.to(torch.uint8).view(*many, inputs // 2, 2).unbind(-1)
    return low | high << 4, (exponent + BIAS).clamp(0, 254).to(torch.uint8)
