"""Views of plans on a CPU, without a runner."""

from __future__ import annotations

import torch

from core.plan import StepPlan
from gpu.state.entry import Limits
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.begin import begin_step
from gpu.step.buffers import HiddenShape, Samples, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.steps import ExactSizes

CPU = torch.device("cpu")


class Views:
    """Tables of `rows` slots, and the view of one plan at a time."""

    def __init__(self, rows: int, pages: int, page_size: int, tokens: int) -> None:
        self.tables = SlotTables(rows, pages, CPU)
        limits = Limits(rows, rows, tokens, rows * pages, pages, samples=rows)
        self.buffers = StepBuffers(self.tables, limits, HiddenShape(1, torch.float32))
        self.rings = Rings(Entries(limits, 2, CPU), CPU)
        self.page_size = page_size
        self.samples = self.buffers.samples

    def take(self, plan: StepPlan) -> StepView:
        """Apply a plan and set `samples`. Sets the lengths of all rows too, because nothing samples here."""
        rings, key = self.rings, ExactSizes().forward(plan)
        rings.write(plan)
        view, self.samples = self.buffers.view(key), self.buffers.samples.first(key.samples)
        begin_step(rings.entries, self.tables, view, self.samples, page_size=self.page_size)
        self.tables.length[view.decode_slots.long()] = view.decode_lengths
        for chunk in plan.chunks:
            self.tables.length[chunk.slot] = chunk.start + len(chunk.tokens)
        return view

    def write_tokens(self, samples: Samples, tokens: torch.Tensor) -> None:
        """Store `tokens` [s] as the last tokens of the slots that sample."""
        self.tables.last_token[samples.slots.long()] = tokens.int()
