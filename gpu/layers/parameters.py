"""Parameters of one model, allocated under the names that checkpoints give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.models import Fp8
from gpu.layers.linear import Linear, Places
from gpu.lora import Adaptable, LoraShape


class Parameters:
    """What the layers of one model allocate while it is built.

    `places` maps each name of a checkpoint to the exact view that the named tensor is copied into; the
    views cover the parameters once.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.linears: list[Linear] = []
        self.adaptable: list[Adaptable] = []
        """What adapters may change."""
        self.places: Places = {}

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of its own, uninitialised."""
        self.places[name] = found = torch.empty(shape, dtype=self.dtype, device=self.device)
        return found

    def linear(
        self, prefix: str, inputs: int, parts: Mapping[str, int], bias: bool = False, fp8: Fp8 = ""
    ) -> Linear:
        """See `Linear`. `prefix` stands before the names of its parts."""
        linear = Linear(inputs, parts, self.dtype, self.device, bias, fp8)
        self.linears.append(linear)
        shape = LoraShape({prefix + name: size for name, size in parts.items()}, inputs)
        self.adaptable.append(Adaptable(shape, linear.adapt))
        self.places |= linear.places(prefix)
        return linear
