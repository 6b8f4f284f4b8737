"""What the steps of a runner can hold."""

from __future__ import annotations

from typing import NamedTuple

import torch

from core.adapters import HEAD, AdapterLimits
from gpu.state.entry import Limits
from gpu.step.buffers import HiddenShape
from gpu.step.rings import Entries
from gpu.step.shapes import most_samples

ENTRIES = 4
"""Entries of each ring: the deepest overlap is 2, and a step more is written while one is read."""

PAGE_WRITES = 8192
"""Page writes in one entry, 64 KiB: a full step of prompts writes 128, so this is 64 cached prefixes of as
many."""


class Shape(NamedTuple):
    """What the steps of a runner can hold. `pages` is the longest row of the page table, `drafts` the most
    that one row has, which may be `trees`."""

    rows: int
    tokens: int
    chunks: int
    pages: int
    page_size: int
    vocab: int
    hidden: HiddenShape
    drafts: int = 0
    trees: bool = False
    adapters: AdapterLimits | None = None

    @property
    def samples(self) -> int:
        """Tokens that a step may sample."""
        return most_samples(self.rows, self.tokens, self.drafts)

    @property
    def places(self) -> int:
        """Places for adapters on the device."""
        return 0 if self.adapters is None else self.adapters.places

    @property
    def adapts_head(self) -> bool:
        """Whether adapters may change the logits themselves."""
        return self.adapters is not None and HEAD in self.adapters.targets

    def entries(self, device: torch.device) -> Entries:
        """Memory for the plans of such steps, which all ranks read."""
        rows, tokens, drafts = self.rows, self.tokens, self.drafts
        limits = Limits(rows, self.chunks, tokens, PAGE_WRITES, self.pages, self.samples, drafts, self.trees)
        return Entries(limits, ENTRIES, device)
