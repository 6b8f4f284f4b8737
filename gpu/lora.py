"""The weights of adapters as the device holds them, and which rows of a step use which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.shard import Slice, Slices


class LoraShape(NamedTuple):
    """What adapters may change of one product.

    parts    names of the fused matrices, as checkpoints have them, and their output sizes, in order
    inputs   the vocabulary's size for an embedding
    experts  how many have such matrices, each named without its number; 0: not one of experts
    slices   of the parts whose matrix [outputs, inputs] a rank has a part of
    """

    parts: Mapping[str, int]
    inputs: int
    experts: int = 0
    slices: Slices = MappingProxyType({})

    def slice(self, name: str) -> Slice:
        """The slice of a part's whole matrix that this rank holds."""
        size = self.parts[name]
        return self.slices.get(name) or Slice(0, 0, size, (size, self.inputs))

    @property
    def targets(self) -> set[str]:
        """The last words of the names."""
        return {name.rpartition(".")[2] for name in self.parts}


class LoraMatrix(NamedTuple):
    """The factors of one matrix of the base model, for every place: y += B[place] A[place] x.

    a      [places, parts * rank, inputs]   part i has the rows i * rank ... of its own A
    b      [places, outputs, rank]          with the adapter's scale; rows of part i multiply its rank rows
    ranks  int32 [places]                   of the adapter there; 0 where it leaves this matrix as it is
    parts  output sizes of the fused matrices, in order

    What an adapter has no value for is zero: rows of `a` and columns of `b` from its own rank on, and parts
    that it does not change. The embedding's has the vocabulary as inputs. Within a place a matrix is
    contiguous and begins at a multiple of 256 bytes; places are further apart than that (`stride(0)`). Of
    experts' matrices `a` and `b` are [places, experts, ...].
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    parts: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank of an adapter."""
        return self.b.shape[-1]


class Adaptable(NamedTuple):
    """One product of a model, and what gives it the factors for all places."""

    shape: LoraShape
    adapt: Callable[[LoraMatrix], None]


class LoraExperts(NamedTuple):
    """LoRA matrices of one layer's experts: `up` for the fused gate and up matrices (two parts), `down` for
    the other; None for what adapters do not change."""

    up: LoraMatrix | None = None
    down: LoraMatrix | None = None


class LoraRows(NamedTuple):
    """Which rows use which place, made once a step.

    places  int32 [n]: of each row, -1 for none and behind the step's true rows
    order   int32 [n]: the rows that have a place, sorted by place and then by row; arbitrary behind them
    starts  int32 [places + 1]: where the rows of each place begin in `order`; the last is how many there are
    """

    places: Tensor
    order: Tensor
    starts: Tensor

    def first(self, count: int) -> LoraRows:
        """The first `count` rows alone, where no row from there on has a place."""
        return self._replace(places=self.places[:count], order=self.order[:count])


def empty_rows(count: int, places: int, device: torch.device) -> LoraRows:
    """`LoraRows` for up to `count` rows, none of which has a place."""
    sizes = (count, count, places + 1)
    each, order, starts = (torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
    return LoraRows(each.fill_(-1), order, starts)


def rows_of_one(place: Tensor, count: int, places: int) -> LoraRows:
    """`count` rows of one place, int32 [1] on the device, -1 for none."""
    order = torch.arange(count, dtype=torch.int32, device=place.device)
    after = torch.arange(places + 1, dtype=torch.int32, device=place.device) > place
    return LoraRows(place.repeat(count), order, (after & (place >= 0)).int() * count)


class StepAdapters(NamedTuple):
    """The rows of one step: its tokens, and its samples."""

    tokens: LoraRows
    samples: LoraRows
