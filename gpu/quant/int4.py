"""Weights of 4 bits with a scale and a zero point for each group of inputs, w = (number - zero) × scale. One
layout in memory, into which every format of checkpoints is repacked while loading (`gpu.weights.int4`):

    weight   int16 [outputs, inputs / 4]: four numbers a word. Of each 4 `span` inputs word i has the inputs
             i, span + i, 2 span + i and 3 span + i, the first in its lowest bits. A kernel so gets four tiles
             of neighbouring inputs out of one tile of words, without moving numbers between threads
    scale    [inputs / group, outputs, 2]: scale and zero point beside each other, in the dtype of the
             products. A tile of outputs reads them side by side
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 4
"""Numbers in a word."""

TOP = 15
"""The largest number; the smallest is 0."""

SPANS = (64, 32)
"""Values that `span` may have, the best first."""

LEAST = 1e-6
"""The least that the largest weight of a group is taken for: zeros have a scale all the same."""


def span(inputs: int, group: int) -> int:
    """How far the numbers of a word are apart, of a matrix of so many `inputs` in groups of `group`: each
    part of that many inputs lies in one group. 0 where there is no such layout: 128 must divide the inputs
    and 32 the group."""
    return next((each for each in SPANS if inputs % (WORD * each) == 0 and group % each == 0), 0)


def pack(numbers: Tensor, span: int) -> Tensor:
    """int16 [outputs, inputs / 4] of `numbers` [outputs, inputs], integers from 0 to 15."""
    parts = numbers.reshape(len(numbers), -1, WORD, span).to(torch.int16)
    words = parts[:, :, 0]
    for at in range(1, WORD):
        words = words | parts[:, :, at] << 4 * at
    return words.flatten(1)


def unpack(words: Tensor, span: int) -> Tensor:
    """The numbers, uint8 [outputs, inputs], of `words` int16 [outputs, inputs / 4]."""
    parts = words.view(len(words), -1, 1, span)
    shifts = torch.arange(0, 4 * WORD, 4, dtype=torch.int16, device=words.device)
    return (parts >> shifts[:, None] & TOP).to(torch.uint8).flatten(1)


def restore(words: Tensor, scale: Tensor) -> Tensor:
    """float32 [outputs, inputs] of a matrix as it lies in memory."""
    inputs = words.shape[1] * WORD
    group = inputs // len(scale)
    return expand(unpack(words, span(inputs, group)), scale)


def expand(numbers: Tensor, scale: Tensor) -> Tensor:
    """float32 [outputs, inputs] of `numbers` [outputs, inputs] and `scale` [groups, outputs, 2]."""
    by, zero = scale.float().permute(2, 1, 0).unsqueeze(-1)
    grouped = numbers.reshape(len(numbers), len(scale), -1).float()
    found: Tensor = ((grouped - zero) * by).flatten(1)
    return found


def quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Numbers uint8 [outputs, inputs] and scale float32 [groups, outputs, 2] of `weight` [outputs, inputs],
    from each group's smallest to its largest, 0 among them."""
    grouped = weight.float().view(len(weight), -1, group)
    least, most = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=LEAST)
    by = (most - least) / TOP
    zero = (-least / by).round()
    numbers = (grouped / by[..., None] + zero[..., None]).round().clamp(0, TOP)
    return numbers.flatten(1).to(torch.uint8), torch.stack([by, zero], -1).transpose(0, 1).contiguous()
