"""What every runner is made of, whatever its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from core.models import ModelSpec
from gpu.device import CudaFacts
from gpu.sample.processors import Processor
from gpu.upkeep import Upkeep


class Target(NamedTuple):
    """Where a model runs, in what dtype, and whether as captured steps: a GPU's, of models that generate."""

    device: torch.device
    dtype: torch.dtype
    facts: CudaFacts

    def captures(self, spec: ModelSpec) -> bool:
        return self.device.type == "cuda" and spec.causal


class Sizes(NamedTuple):
    """What a runner holds: rows at once, tokens of a step, tokens of a request."""

    rows: int
    tokens: int
    context: int


class Parts(NamedTuple):
    """Before there is a runner."""

    spec: ModelSpec
    target: Target
    sizes: Sizes
    processors: Mapping[str, Processor]
    upkeep: Upkeep
