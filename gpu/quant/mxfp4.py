"""MXFP4: floats of 4 bits (e2m1) with a power of two (e8m0) for each 32 inputs of an output, as the OCP
Microscaling Formats 1.0 have them. In checkpoints of gpt-oss, and in places, they lie as

    numbers  uint8 [outputs, inputs / 2]: two neighbouring inputs a byte, the first in its low bits. The
             highest bit of each is the sign, then two of the exponent, then one behind the point
    scale    uint8 [outputs, inputs / 32]: exponents of two, plus 127

and, once weights are final, packed for kernels, which so get four tiles of neighbouring inputs, each with a
scale of its own, out of one tile of words:

    numbers  int16 [outputs, 32 * n]: as `gpu.quant.int4` has them at a span of 32, four numbers a word
    scale    int32 [n, outputs]: those of 4 groups in a word, the first in its lowest bits

Behind the last input are zeros.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import ModelError
from core.models.quant import MXFP4_GROUP
from gpu.quant import int4
from gpu.quant.int4 import WORD

BIAS = 127
"""Exponent bias of a scale."""

NAN = 255
"""The scale that marks a group as not a number."""

MOST = 128
"""The greatest scale that kernels read: weights of up to 12. Those of gpt-oss are far below 1."""

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_POSITIVE, *(-each for each in _POSITIVE))
"""The numbers that the four bits stand for."""


def restore(numbers: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., outputs, inputs] of a matrix that is not packed."""
    found = torch.tensor(VALUES, device=numbers.device)[_codes(numbers).int()].view(*scale.shape, MXFP4_GROUP)
    exponent = scale.int().sub_(BIAS)[..., None]
    return torch.ldexp(found, exponent).masked_fill_(exponent == NAN - BIAS, torch.nan).flatten(-2)


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


def from_blocks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scale of rows as GGML has them: uint8 [outputs, inputs / 32 * 17], of each group its scale
    and 16 bytes, whose low bits are the first half of the inputs."""
    blocks = rows.view(len(rows), -1, 1 + MXFP4_GROUP // 2)
    halves = blocks[..., 1:]
    low, high = torch.cat([halves & 15, halves >> 4], -1).flatten(1).view(len(rows), -1, 2).unbind(-1)
    return low | high << 4, blocks[..., 0].contiguous()


def check(name: str, scale: Tensor) -> None:
    """Raise `ModelError` where weights of the tensor `name` are too large for kernels."""
    if bool((scale > MOST).any()):
        raise ModelError(f"{name} has weights above 12, which no kernel reads: use --quantization none.")


def pack(numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scale of a matrix [outputs, inputs], packed."""
    codes = _codes(numbers)
    words = int4.pack(F.pad(codes, (0, -codes.shape[1] % (WORD * MXFP4_GROUP))), MXFP4_GROUP)
    return words, F.pad(scale, (0, -scale.shape[1] % WORD)).contiguous().view(torch.int32).T.contiguous()


def unpack(words: Tensor, scale: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Numbers and scale of a packed matrix [outputs, `inputs`] as they lay before."""
    low, high = int4.unpack(words, MXFP4_GROUP)[:, :inputs].reshape(len(words), -1, 2).unbind(-1)
    rows = scale.T.clone(memory_format=torch.contiguous_format)
    return low | high << 4, rows.view(torch.uint8)[:, : inputs // MXFP4_GROUP]


def pack_all(numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`pack` of many matrices [experts, outputs, inputs], one after the other."""
    experts, outputs, _ = numbers.shape
    steps = -(-scale.shape[2] // WORD)
    words = torch.empty(experts, outputs, steps * MXFP4_GROUP, dtype=torch.int16, device=numbers.device)
    scales = torch.empty(experts, steps, outputs, dtype=torch.int32, device=numbers.device)
    for expert, (own, by) in enumerate(zip(numbers, scale, strict=True)):
        words[expert], scales[expert] = pack(own, by)
    return words, scales


def _codes(numbers: Tensor) -> Tensor:
    """uint8 [..., inputs], one number each, of two a byte."""
    return torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)
