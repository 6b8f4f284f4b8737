"""Weights of 4 bits on a CPU: w = number × scale + offset. A group of 32 neighbouring inputs of an output
shares scale and offset.

Matrices of .gguf files in Q4_0, Q4_1 and Q4_K and of AWQ, GPTQ and W4A16 checkpoints are stored so without
changing their numbers. A stacked matrix whose parts have several formats is stored in 8 bits, as are all
other formats (`gpu.quant.int8`).

    weight   int32 [outputs, inputs / 8], until `pack` rearranges it. A word has eight inputs: bits 4 n to
             4 n + 3 of its lower half are input 2 n, of its upper half input 2 n + 1. One shift and one mask
             give `gpu.kernels.cpu` a pair of inputs as 16-bit integers
    scale    float16 [outputs, inputs / 32, 2]: scale and offset
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.kernels.cpu import Weight, interleave, kernels
from gpu.quant.int8 import Packed

WORD, GROUP = 8, 32
"""Numbers in a word, and inputs in a group."""

BYTES = 1 / 2 + 2 * 2 / GROUP
"""Bytes of a weight, with its part of scale and offset."""

Blocks = NDArray[np.uint8]


class Numbers(NamedTuple):
    """A matrix before it is stored: `numbers` uint8 [outputs, inputs], 0 to 15, and `scale` float32 [outputs,
    inputs / GROUP, 2]."""

    numbers: NDArray[np.uint8]
    scale: NDArray[np.float32]


def _halves(blocks: Blocks, first: int) -> NDArray[np.float32]:
    """Return the float16 at byte `first` of each block, as float32."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16).astype(np.float32)[..., 0]


def _nibbles(blocks: Blocks, first: int) -> NDArray[np.uint8]:
    """Return the numbers in the bytes from `first` on: all low nibbles, then all high ones."""
    found = blocks[..., first:]
    return np.concatenate([found & 15, found >> 4], -1)


def _q4_0(blocks: Blocks) -> Numbers:
    by = _halves(blocks, 0)
    return Numbers(_nibbles(blocks, 2), np.stack([by, -8 * by], -1))


def _q4_1(blocks: Blocks) -> Numbers:
    return Numbers(_nibbles(blocks, 4), np.stack([_halves(blocks, 0), _halves(blocks, 2)], -1))


def _q4_k(blocks: Blocks) -> Numbers:
    """Read blocks of eight groups, whose scales and offsets have 6 bits each."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], -1)
    offsets = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], -1)
    by = _halves(blocks, 0)[..., None] * scales, -_halves(blocks, 2)[..., None] * offsets
    chunks = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return Numbers(_nibbles(chunks, 0), np.stack(by, -1))


class Format(NamedTuple):
    """Inputs and bytes of a block, and the function that reads blocks [outputs, blocks, bytes]."""

    inputs: int
    bytes: int
    read: Callable[[Blocks], Numbers]


FORMATS: Mapping[str, Format] = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q4_K": Format(256, 144, _q4_k),
}
"""Formats by the names of .gguf files, whose reference is llama.cpp's ggml-quants.c."""


def runs_here() -> bool:
    """Whether this machine has the kernel that multiplies these weights."""
    return kernels() is not None


def takes(group: int) -> bool:
    """Whether quantisation groups of `group` inputs (0: of all inputs) can be stored as groups of `GROUP`."""
    return group % GROUP == 0


def read(kind: str, rows: Blocks) -> Numbers:
    """Read rows [outputs, bytes] of a .gguf file in the format `kind`, one of `FORMATS`."""
    form = FORMATS[kind]
    numbers, scale = form.read(rows.reshape(len(rows), -1, form.bytes))
    return Numbers(numbers.reshape(len(rows), -1), scale.reshape(len(rows), -1, 2))


def store(place: Tensor, scale: Tensor, found: Numbers) -> None:
    """Store `found`, a matrix or some of its outputs, in `place` (rows of a weight) and `scale`."""
    eights = found.numbers.reshape(len(found.numbers), -1, WORD)
    words = eights[..., [0, 4, 1, 5]] | eights[..., [2, 6, 3, 7]] << 4
    place.copy_(torch.from_numpy(words.reshape(len(words), -1).view(np.int32)))
    scale.copy_(torch.from_numpy(found.scale))


def pack(weight: Tensor, scale: Tensor) -> Packed:
    """Rearrange `weight` and `scale` for the kernel, in place where possible. The result is multiplied by
    `gpu.quant.int8.product`."""
    own = kernels()
    assert own is not None, "4 bits without kernels"
    outputs, words = weight.shape
    laid_out = Weight(interleave(weight), interleave(scale.view(torch.int16).flatten(1)), outputs)
    return Packed(outputs, words * WORD, (), scale, (own, laid_out))
