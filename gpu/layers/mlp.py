"""Gated MLP."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import Linear, Places


class Mlp:
    """down(act(gate(x)) · up(x)), gate and up in one matrix."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._activation = spec.activation
        parts = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        self._gate_up = Linear(spec.hidden, parts, dtype, device, spec.mlp_bias, spec.fp8)
        down = {"down_proj": spec.hidden}
        self._down = Linear(spec.intermediate, down, dtype, device, spec.mlp_bias, spec.fp8)

    def __call__(self, ctx: ForwardContext, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        return self._down(self._gate_up.gated(x, ctx.ops, self._activation), ctx.ops)

    def seal(self) -> None:
        self._gate_up.seal()
        self._down.seal()

    def places(self, prefix: str) -> Places:
        return self._gate_up.places(prefix) | self._down.places(prefix)
