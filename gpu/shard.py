"""Which part of a model's tensors a rank holds. Layers declare it once; loading, dummy weights and adapters
read what follows from it.

    column  outputs are divided: each rank computes its own heads, or its part of the MLP's width
    row     inputs are divided: each rank makes a partial sum of all outputs
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor


class Shard(NamedTuple):
    """The rank of that number, from 0, of so many `ranks`."""

    rank: int = 0
    ranks: int = 1


ALONE = Shard()


class Split(NamedTuple):
    """How ranks divide a matrix [outputs, inputs].

    dim     the side that is divided
    copies  of parts that are divided into fewer pieces than there are ranks: neighbours that hold the same
    total   size of the whole side where ranks do not divide it, and the last ones hold less; 0: they do
    """

    dim: int
    copies: Mapping[str, int] = MappingProxyType({})
    total: int = 0


COLUMN = Split(0)
ROW = Split(1)


class Slice(NamedTuple):
    """The `size` entries from `start` on along dimension `dim` of a tensor of `shape`."""

    dim: int
    start: int
    size: int
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """A view of `tensor`, which has the whole shape."""
        return tensor.narrow(self.dim, self.start, self.size)

    @property
    def transposed(self) -> Slice:
        """The same slice of the transposed matrix."""
        return Slice(1 - self.dim, self.start, self.size, self.shape[::-1])


Slices = Mapping[str, Slice]
"""Slices by checkpoint name, for the tensors of which a rank holds a part."""


def slice_of(shard: Shard, shape: tuple[int, ...], split: Split, copies: int = 1) -> Slice:
    """The part that `shard` holds of a tensor for which each rank has room for `shape`. `copies` neighbours
    hold the same part."""
    size = shape[split.dim]
    total = split.total or size * shard.ranks // copies
    start = min(size * (shard.rank // copies), total)
    whole = tuple(total if dim == split.dim else each for dim, each in enumerate(shape))
    return Slice(split.dim, start, min(size, total - start), whole)
