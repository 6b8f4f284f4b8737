"""Gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from core.models import ModelSpec
from gpu.layers.linear import Linear, Places

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gate(both: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """act(first half) · second half of [n, 2 * width], [n, width]."""
    width = both.shape[-1] // 2
    return act(both[:, :width]).mul_(both[:, width:])


class Mlp:
    """down(act(gate(x)) · up(x)), gate and up in one matrix."""

    __slots__ = ("_act", "_down", "_gate_up")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._act = ACTIVATIONS[spec.activation]
        parts = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        self._gate_up = Linear(spec.hidden, parts, dtype, device, spec.mlp_bias)
        self._down = Linear(spec.intermediate, {"down_proj": spec.hidden}, dtype, device, spec.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        return self._down(gate(self._gate_up(x), self._act))

    def seal(self) -> None:
        self._gate_up.seal()
        self._down.seal()

    def places(self, prefix: str) -> Places:
        return self._gate_up.places(prefix) | self._down.places(prefix)
