"""Where the weights of adapters lie: one buffer for each, the same on the host and on the device.

    | matrix 0: A | B | ranks | matrix 1: A | B | ranks | ...      every piece from a multiple of 256 bytes

A buffer has room for an adapter of the largest rank that changes everything: any adapter fits any place, and
is copied there in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from core.adapters import AdapterLimits
from gpu.lora import Adaptable, LoraMatrix, LoraShape

ALIGN = 256
"""Bytes: what a kernel's widest loads want, and more than a line of the cache."""


class _Pieces(NamedTuple):
    """Shapes of a matrix's A and B in one place."""

    a: tuple[int, ...]
    b: tuple[int, ...]


class AdapterLayout:
    """Which matrices adapters may change, and where theirs begin."""

    def __init__(self, shapes: Sequence[LoraShape], limits: AdapterLimits, dtype: torch.dtype) -> None:
        """`shapes` of all matrices of a model; those that have none of the targets are left out."""
        self.targets = frozenset(limits.targets)
        self.shapes = [shape for shape in shapes if self.targets & shape.targets]
        self.rank, self._dtype = limits.max_rank, dtype
        self._pieces = [self._of(shape) for shape in self.shapes]
        self.bytes = sum(
            _aligned(math.prod(piece) * dtype.itemsize) for both in self._pieces for piece in both
        )
        self.bytes += ALIGN * len(self.shapes)

    def views(self, buffers: Tensor) -> list[LoraMatrix]:
        """The matrices of `buffers`, uint8 [places, bytes], in the order of `shapes`."""
        found, at = [], 0

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal at
            size = math.prod(shape) * dtype.itemsize
            piece = buffers[:, at : at + size].view(dtype).view(len(buffers), *shape)
            at += _aligned(size)
            return piece

        for own, (a, b) in zip(self.shapes, self._pieces, strict=True):
            factors = take(a, self._dtype), take(b, self._dtype)
            found.append(LoraMatrix(*factors, take((1,), torch.int32)[:, 0], tuple(own.parts.values())))
        return found

    def bind(self, pool: Tensor, adaptable: Sequence[Adaptable]) -> None:
        """Give the matrices of a model what adapters in the places of `pool` add to them."""
        wanted = [each for each in adaptable if self.targets & each.shape.targets]
        for each, lora in zip(wanted, self.views(pool), strict=True):
            each.adapt(lora)

    def _of(self, shape: LoraShape) -> _Pieces:
        experts = (shape.experts,) if shape.experts else ()
        parts, outputs = len(shape.parts), sum(shape.parts.values())
        return _Pieces((*experts, parts * self.rank, shape.inputs), (*experts, outputs, self.rank))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
