"""What a layer may ask about the step it runs in. An argument, never a global."""

from __future__ import annotations

import torch

from gpu.embeds import Embedded
from gpu.ops.base import Ops


class ForwardContext:
    """Owner: launch thread, for one step.

    `positions` integer [num_tokens]; `ops` are this step's operations, attention among them. `segments`
    int64 [num_tokens] says which text of a pair a token is of, None where all are of the first. `wanted`
    integer [s] are the rows whose hidden states a decoder shall return, those of `ops.for_samples()`, None
    for all: past the last layer's attention no row reads another. `routes` gets what the router of each
    layer chooses, integers [num_tokens, experts per token], None where nobody asks. `brief` asks a decoder
    for those layers alone that differ in what they launch: kernels are compiled and libraries choose theirs,
    and what comes out means nothing. `embedded` are rows whose ids are placeholders.
    """

    __slots__ = ("brief", "embedded", "ops", "positions", "routes", "segments", "wanted")

    def __init__(
        self,
        positions: torch.Tensor,
        ops: Ops,
        segments: torch.Tensor | None = None,
        wanted: torch.Tensor | None = None,
        brief: bool = False,
        embedded: Embedded | None = None,
        routes: list[torch.Tensor] | None = None,
    ) -> None:
        self.positions = positions
        self.ops = ops
        self.segments = segments
        self.wanted = wanted
        self.brief = brief
        self.embedded = embedded
        self.routes = routes
