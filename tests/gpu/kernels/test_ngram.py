"""Prompt lookup by the kernel: drafts and texts are bit for bit those of a CPU."""

from __future__ import annotations

import pytest
import torch

from gpu.draft.ngram import NgramDrafter
from gpu.kernels.ngram import look_up
from gpu.state.history import SERVED, SOURCE
from gpu.state.tables import SlotTables
from tests.rigs.ngram import Texts, lookup
from tests.rigs.runner import CPU

ROWS, SAMPLES = 6, 48


@pytest.mark.parametrize(
    ("context", "most", "longest", "steps"), [(16, 3, 4, 40), (64, 1, 2, 30), (64, 7, 4, 30), (4096, 4, 3, 6)]
)
def test_the_kernel_proposes_what_a_cpu_does(
    context: int, most: int, longest: int, steps: int, device: torch.device
) -> None:
    texts = Texts(most, ROWS, most, context)
    tables = SlotTables(ROWS, 1, device, most)
    cpu = NgramDrafter(texts.tables, context, most, lookup(longest))
    kernel = NgramDrafter(tables, context, most, lookup(longest), look_up)
    found = 0
    for at in range(steps):
        step, proposes = texts.next(), at % 9 < 8
        for ours, theirs in ((tables.words, texts.tables.words), (tables.drafts, texts.tables.drafts)):
            ours.copy_(theirs)
        for drafter, where in ((cpu, CPU), (kernel, device)):
            drafter.prepare(step.plan)
            drafter.propose(step.outcome(SAMPLES, where, proposes), ROWS)  # padded: few steps have all rows
        assert torch.equal(tables.drafts.cpu(), texts.tables.drafts)
        assert torch.equal(kernel.history.words.cpu(), cpu.history.words)
        found += sum(int(tables.drafts[slot, 0]) > 0 for slot, _ in texts.rows)
    assert found > steps / 2 and texts.taken


@pytest.mark.parametrize(
    ("capacity", "most", "steps"), [(1, 7, 30), (4000, 3, 30), (40_000, 4, 30), (40_000, 1, 20)]
)
def test_the_kernels_find_what_a_cpu_does_in_the_answers_of_others(
    capacity: int, most: int, steps: int, device: torch.device
) -> None:
    """Two rows of a step may write one place: the interpreter takes them in order, a device in any."""
    texts = Texts(most, ROWS, most, 32, namespaces=2, apart=False)
    tables = SlotTables(ROWS, 1, device, most)
    cpu = NgramDrafter(texts.tables, 32, most, lookup(2, capacity=capacity))
    kernel = NgramDrafter(tables, 32, most, lookup(2, capacity=capacity), look_up)
    assert cpu.history.served is not None and kernel.history.served is not None
    found = differing = 0
    for _ in range(steps):
        step = texts.next()
        for ours, theirs in ((tables.words, texts.tables.words), (tables.drafts, texts.tables.drafts)):
            ours.copy_(theirs)
        for drafter, where in ((cpu, CPU), (kernel, device)):
            drafter.prepare(step.plan)
            drafter.propose(step.outcome(SAMPLES, where), ROWS)
        for ours, theirs in zip(kernel.history.served[:2], cpu.history.served[:2], strict=True):
            assert torch.equal(ours.cpu(), theirs)
        if torch.equal(kernel.history.served.places.cpu(), cpu.history.served.places):
            assert torch.equal(tables.drafts.cpu(), texts.tables.drafts)
            assert torch.equal(kernel.history.words.cpu(), cpu.history.words)
        else:
            differing += 1
            kernel.history.served.places.copy_(cpu.history.served.places)
            kernel.history.words.copy_(cpu.history.words)
        sources = cpu.history.words[:, cpu.history.width + SOURCE]
        found += int((sources == SERVED).sum())
    assert differing == 0 or (device.type == "cuda" and differing < steps / 2)
    assert found > steps / 4 and texts.taken
