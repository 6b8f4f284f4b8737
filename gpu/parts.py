"""What every runner is made of, whatever its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from core.adapters import AdapterLimits
from core.models import ModelSpec
from gpu.attention.backend import silent
from gpu.device import CudaFacts
from gpu.draft.build import Draft
from gpu.kernels.cpu import Kernels
from gpu.maintenance import Maintenance
from gpu.ranks import Rank
from gpu.sample.processors import Processor
from gpu.step.buffers import HiddenShape
from gpu.step.shape import Shape


class Target(NamedTuple):
    """The device and dtype that a model runs in, and whether its steps are captured: on a GPU, for models
    that generate."""

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
    """What a runner is made of. `rank` is this runner's rank of several; `spec` is that of its part. With
    `paced` it measures what chunks cost when it starts. `progress` is told what making it waits for, as a
    stage and the share of it that is done. `kernels` are a CPU's; None: torch's operations alone."""

    spec: ModelSpec
    target: Target
    sizes: Sizes
    processors: Mapping[str, Processor]
    maintenance: Maintenance
    draft: Draft | None = None
    adapters: AdapterLimits | None = None
    rank: Rank | None = None
    paced: bool = False
    progress: Callable[[str, float], None] = silent
    kernels: Kernels | None = None

    def shape(self, page_size: int, chunks: int) -> Shape:
        """The shape of a runner whose steps have up to so many `chunks`."""
        spec, (rows, tokens, context) = self.spec, self.sizes
        pages, hidden = -(-context // page_size), HiddenShape(spec.hidden, self.target.dtype)
        drafts = 0 if self.draft is None else self.draft.most
        trees = self.draft is not None and self.draft.tree is not None
        vocab = spec.vocab_size
        return Shape(rows, tokens, chunks, pages, page_size, vocab, hidden, drafts, trees, self.adapters)
