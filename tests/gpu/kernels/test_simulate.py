"""Simulated acceptance (`bench.spec.simulate`), by both sets of kernels: drafts are what was sampled, as far
as a request's seed says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.spec import kernels, simulate
from bench.spec.simulate import Force, seed_for
from gpu.sample.rows import DraftSamples, Rows
from gpu.state.tables import SlotTables

FORCES: dict[str, Force] = {"torch": simulate.force, "triton": kernels.force}
DRAFTS = 3


def step(seeds: list[int], given: list[int], positions: list[int], device: torch.device) -> Rows:
    """A step of rows in slots 1, 2, ... with `given` drafts each, all of them wrong."""
    tables = SlotTables(len(seeds), 4, device, DRAFTS)
    tables.seed[1 : len(seeds) + 1] = torch.tensor(seeds, device=device)
    tables.drafts[:, 1:] = -5
    tables.drafts[:, 0] = DRAFTS

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    samples = DraftSamples(ints([len(seeds)]), ints(np.cumsum([0, *given]).tolist()), ints([1]))
    live = len(seeds) + sum(given)
    padded = [0] * (live + 3 - len(seeds))
    slots = ints([*range(1, len(seeds) + 1), *padded])
    return Rows(slots, ints([*positions, *padded]), ints([live]), tables, samples)


def right(rows: Rows, tokens: torch.Tensor, given: list[int]) -> list[int]:
    """How many of each row's drafts are what was sampled, one behind the other."""
    assert rows.drafts is not None
    own, drafts, found = len(given), rows.tables.drafts.tolist(), []
    for row, count in enumerate(given):
        behind = own + int(rows.drafts.before[row])
        made = [int(tokens[row]), *tokens[behind : behind + count].tolist()]
        same = [a == b for a, b in zip(made[:count], drafts[1 + row][1:], strict=False)]
        found.append((*same, False).index(False))
    return found


@pytest.mark.parametrize("name", FORCES)
def test_drafts_are_right_as_far_as_the_seed_says(name: str, device: torch.device) -> None:
    if name == "torch" and device.type != "cpu":
        pytest.skip("a CPU's")
    change = seed_for(3.0, 1.0, 50)
    seeds = [seed_for(1.0), seed_for(3.0), seed_for(9.0), change, change, 7, seed_for(3.0), seed_for(3.0)]
    given, positions = [3, 3, 3, 3, 3, 3, 1, 0], [9, 9, 9, 49, 50, 9, 9, 9]
    rows = step(seeds, given, positions, device)
    tokens = torch.arange(100, 100 + len(rows.slots), device=device)
    FORCES[name](tokens, rows)
    assert right(rows, tokens, given) == [0, 2, 3, 2, 0, 0, 1, 0]
    assert rows.tables.drafts[6].tolist() == [DRAFTS, -5, -5, -5], "a seed of its own keeps its drafts"
    assert rows.tables.drafts[8].tolist() == [DRAFTS, -5, -5, -5], "none to verify"
    assert (rows.tables.drafts[:, 0] == DRAFTS).all()


@pytest.mark.parametrize("name", FORCES)
def test_a_fraction_is_right_in_the_mean(name: str, device: torch.device) -> None:
    if name == "torch" and device.type != "cpu":
        pytest.skip("a CPU's")
    count = 600
    given, positions = [DRAFTS] * count, np.random.default_rng(0).integers(0, 4096, count).tolist()
    rows = step([seed_for(2.25)] * count, given, positions, device)
    tokens = torch.arange(len(rows.slots), device=device) * 3
    FORCES[name](tokens, rows)
    found = right(rows, tokens, given)
    assert set(found) == {1, 2}
    assert np.mean(found) == pytest.approx(1.25, abs=0.06)
