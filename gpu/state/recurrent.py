"""States of linear attention as the layers of a step see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from core.models import LinearSpec
from gpu.kv.states import StatePool
from gpu.state.view import StepView


class DeltaInputs(NamedTuple):
    """What a layer makes of a step's n tokens for the gated delta rule.

    qkv     [n, channels]: queries, keys and values of all heads, before the convolution
    decay   float32 [n, value_heads]: the logarithm of what is left of the memory
    beta    float32 [n, value_heads]: the share of what a key finds that is replaced
    conv    [channels, kernel]: weights of the convolution
    linear  sizes
    """

    qkv: Tensor
    decay: Tensor
    beta: Tensor
    conv: Tensor
    linear: LinearSpec


DeltaRule = Callable[[StatePool, int, StepView, DeltaInputs], Tensor]
"""Convolution with silu, then the gated delta rule, of the tokens of a view: advances the states of its slots
and makes the saves that are due. Returns [n, value_heads, value_dim] in the dtype of `qkv`; rows behind the
true ones are arbitrary. The integer is the layer's number in the pool.

A decode row's state takes in what was accepted of the drafts of its step before (`Pending`), and the row's
last token. The drafts that this step verifies are computed from there and left pending. The token of a row at
its limit is computed for nobody: its states are those of the dump."""


class StepStates(NamedTuple):
    """The states as the layers of one step see them."""

    pool: StatePool
    view: StepView
    rule: DeltaRule

    def mix(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRule`."""
        return self.rule(self.pool, layer, self.view, inputs)
