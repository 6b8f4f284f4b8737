"""Weights of 4 bits on a CPU: number × scale + offset, which 32 neighbouring inputs of an output share.

Those of .gguf files in Q4_0, Q4_1 and Q4_K are of this kind, and those of AWQ, GPTQ and W4A16: their numbers
stay as they are. Matrices of several formats, and those that are not in 4 bits, have 8 (`gpu.quant.int8`).

    weight   int32 [outputs, inputs / 8], or what `pack` made of it. Bits 4 n to 4 n + 3 of a word's lower
             half are input 2 n of eight, of its upper half input 2 n + 1: `gpu.kernels.cpu` has a pair of
             inputs by one shift
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
"""Numbers in a word, and inputs that share a scale."""

BYTES = 1 / 2 + 2 * 2 / GROUP
"""Of a weight, with its part of scale and offset."""

Blocks = NDArray[np.uint8]


class Numbers(NamedTuple):
    """Of a matrix: uint8 [outputs, inputs] from 0 to 15, and float32 [outputs, inputs / GROUP, 2]."""

    numbers: NDArray[np.uint8]
    scale: NDArray[np.float32]


def _halves(blocks: Blocks, first: int) -> NDArray[np.float32]:
    """The float16 at byte `first` of each block."""
    return np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16).astype(np.float32)[..., 0]


def _nibbles(blocks: Blocks, first: int) -> NDArray[np.uint8]:
    """Numbers [..., 32] of 16 bytes, or [..., chunks, 64] of 32 bytes each: the lower halves come first."""
    found = blocks[..., first:]
    return np.concatenate([found & 15, found >> 4], -1)


def _q4_0(blocks: Blocks) -> Numbers:
    by = _halves(blocks, 0)
    return Numbers(_nibbles(blocks, 2), np.stack([by, -8 * by], -1))


def _q4_1(blocks: Blocks) -> Numbers:
    return Numbers(_nibbles(blocks, 4), np.stack([_halves(blocks, 0), _halves(blocks, 2)], -1))


def _q4_k(blocks: Blocks) -> Numbers:
    """Of blocks of eight groups, whose scales and offsets are of 6 bits."""
    packed = blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], -1)
    offsets = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], -1)
    by = _halves(blocks, 0)[..., None] * scales, -_halves(blocks, 2)[..., None] * offsets
    chunks = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return Numbers(_nibbles(chunks, 0), np.stack(by, -1))


class Format(NamedTuple):
    """Inputs and bytes of a block, and how blocks [outputs, blocks, bytes] are read."""

    inputs: int
    bytes: int
    read: Callable[[Blocks], Numbers]


FORMATS: Mapping[str, Format] = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q4_K": Format(256, 144, _q4_k),
}
"""By the names of .gguf files, whose reference is llama.cpp's ggml-quants.c."""


def runs_here() -> bool:
    """Whether this machine has the product."""
    return kernels() is not None


def takes(group: int) -> bool:
    """Whether groups of so many inputs, or of all (0), have scales that `GROUP` inputs share."""
    return group % GROUP == 0


def read(kind: str, rows: Blocks) -> Numbers:
    """Of rows [outputs, bytes] in one of `FORMATS`."""
    form = FORMATS[kind]
    numbers, scale = form.read(rows.reshape(len(rows), -1, form.bytes))
    return Numbers(numbers.reshape(len(rows), -1), scale.reshape(len(rows), -1, 2))


def store(place: Tensor, scale: Tensor, found: Numbers) -> None:
    """Copy a matrix, or some of its outputs, into a `weight` and its `scale`."""
    eights = found.numbers.reshape(len(found.numbers), -1, WORD)
    words = eights[..., [0, 4, 1, 5]] | eights[..., [2, 6, 3, 7]] << 4
    place.copy_(torch.from_numpy(words.reshape(len(words), -1).view(np.int32)))
    scale.copy_(torch.from_numpy(found.scale))


def pack(weight: Tensor, scale: Tensor) -> Packed:
    """Lay out a `weight` and its `scale`, which are used up, for `gpu.quant.int8.product`."""
    own = kernels()
    assert own is not None, "4 bits without kernels"
    outputs, words = weight.shape
    laid_out = Weight(interleave(weight), interleave(scale.view(torch.int16).flatten(1)), outputs)
    return Packed(outputs, words * WORD, (), scale, (own, laid_out))
