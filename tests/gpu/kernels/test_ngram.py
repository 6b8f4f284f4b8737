"""Prompt lookup by the kernel: drafts and texts are bit for bit those of a CPU."""

from __future__ import annotations

import pytest
import torch

from gpu.draft.ngram import NgramDrafter
from gpu.kernels.draft import look_up
from gpu.state.tables import SlotTables
from tests.rigs.ngram import Texts
from tests.rigs.runner import CPU

ROWS, SAMPLES = 6, 48


@pytest.mark.parametrize(
    ("context", "most", "longest", "steps"), [(16, 3, 4, 40), (64, 1, 2, 40), (64, 7, 4, 60), (4096, 4, 3, 6)]
)
def test_the_kernel_proposes_what_a_cpu_does(
    context: int, most: int, longest: int, steps: int, device: torch.device
) -> None:
    texts = Texts(most, ROWS, most, context)
    tables = SlotTables(ROWS, 1, device, most)
    cpu = NgramDrafter(texts.tables, context, most, longest)
    kernel = NgramDrafter(tables, context, most, longest, look_up=look_up)
    found = 0
    for _ in range(steps):
        step = texts.next()
        for ours, theirs in ((tables.words, texts.tables.words), (tables.drafts, texts.tables.drafts)):
            ours.copy_(theirs)
        for drafter, where in ((cpu, CPU), (kernel, device)):
            drafter.prepare(step.plan)
            drafter.propose(step.outcome(SAMPLES, where), ROWS)  # padded: few steps have all rows
        assert torch.equal(tables.drafts.cpu(), texts.tables.drafts)
        assert torch.equal(kernel.history.words.cpu(), cpu.history.words)
        found += sum(int(tables.drafts[slot, 0]) > 0 for slot, _ in texts.rows)
    assert found > steps / 2 and texts.taken
