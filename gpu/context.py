"""What a layer may ask about the step it runs in. An argument, never a global."""

from __future__ import annotations

import torch

from gpu.ops.base import Ops


class ForwardContext:
    """Owner: launch thread, for one step.

    `positions` integer [num_tokens]; `ops` are this step's operations, attention among them. `segments`
    int64 [num_tokens] says which text of a pair a token is of, None where all are of the first. `wanted`
    integer [s] are the rows whose hidden states a decoder shall return, those of `ops.for_samples()`, None
    for all: past the last layer's attention no row reads another.
    """

    __slots__ = ("ops", "positions", "segments", "wanted")

    def __init__(
        self,
        positions: torch.Tensor,
        ops: Ops,
        segments: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
    ) -> None:
        self.positions = positions
        self.ops = ops
        self.segments = segments
        self.wanted = wanted
