"""The weights of adapters as the device holds them, and which rows of a step use which."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LoraMatrix(NamedTuple):
    """The factors of one matrix of the base model, for every place: y += B[place] A[place] x.

    a      [places, parts * rank, inputs]   part i has the rows i * rank ... of its own A
    b      [places, outputs, rank]          with the adapter's scale; rows of part i multiply its rank rows
    ranks  int32 [places]                   of the adapter there; 0 where it leaves this matrix as it is
    parts  output sizes of the fused matrices, in order

    What an adapter has no value for is zero: rows of `a` and columns of `b` from its own rank on, and parts
    that it does not change. The embedding's has the vocabulary as inputs. Within a place a matrix is
    contiguous and begins at a multiple of 256 bytes; places are further apart than that (`stride(0)`).
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    parts: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank of an adapter."""
        return self.b.shape[-1]


class LoraExperts(NamedTuple):
    """The same for one layer's experts, [places, experts, ...] in `a` and `b`: `up` of the fused gate and up
    matrices (two parts), `down` of the other."""

    up: LoraMatrix
    down: LoraMatrix


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
        """Those of the first `count` rows, where no row from there on has a place."""
        return self._replace(places=self.places[:count], order=self.order[:count])


class StepAdapters(NamedTuple):
    """The rows of one step: its tokens, and its samples."""

    tokens: LoraRows
    samples: LoraRows
