"""Gated MLP."""

from __future__ import annotations

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import gated_mlp
from gpu.layers.parameters import Parameters
from gpu.ops.base import Input, Part
from gpu.shard import COLUMN, ROW


class Mlp:
    """down(act(gate(x)) · up(x)), gate and up in one matrix."""

    def __init__(self, spec: ModelSpec, prefix: str, parameters: Parameters) -> None:
        self._activation = spec.activation
        up = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        down = {"down_proj": spec.hidden}
        self._gate_up = parameters.linear(prefix, spec.hidden, up, spec.mlp_bias, spec.held, COLUMN)
        self._down = parameters.linear(prefix, spec.intermediate, down, spec.mlp_bias, spec.held, ROW)

    def __call__(self, ctx: ForwardContext, x: Input) -> Part:
        """Return the output [n, hidden] for `x` [n, hidden], or a product that runs with the next norm."""
        return gated_mlp(x, self._gate_up, self._down, ctx.ops, self._activation)
