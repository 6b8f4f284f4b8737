"""What a layer may ask about the step it runs in. An argument, never a global."""

from __future__ import annotations

import torch

from gpu.attention.base import AttentionBackend


class ForwardContext:
    """Owner: launch thread, for one step.

    `positions` int64 [num_tokens]; `attention` is prepared for this step.
    """

    __slots__ = ("attention", "positions")

    def __init__(self, positions: torch.Tensor, attention: AttentionBackend) -> None:
        self.positions = positions
        self.attention = attention
