"""What the runner and the loader ask of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import Places


class CausalModel(Protocol):
    """A decoder-only model on one device."""

    spec: ModelSpec

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] after the last norm, of token ids [n]; [s, hidden] where
        `ctx.wanted` names s rows."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab_size] of hidden states [n, hidden]."""
        ...

    def seal(self) -> None:
        """Called once, after filling and before the first forward: the weights are final and may
        be laid out for the device. `places` is void from here on."""
        ...

    def places(self) -> Places:
        """Every checkpoint name the model wants and the view it fills."""
        ...
