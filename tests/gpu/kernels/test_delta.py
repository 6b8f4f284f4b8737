"""The gated delta rule against its twin: rows, chunks, states within a chunk, padding."""

from __future__ import annotations

import msgspec
import pytest
import torch

from bench.kernels.inputs import error
from core.models import LinearSpec
from core.plan import MOST_SAVES
from gpu.kernels.delta import gated_delta
from gpu.kv.states import StatePool
from gpu.ops import delta
from gpu.state.recurrent import DeltaInputs
from gpu.state.view import StepView

SMALL = LinearSpec(
    layers=frozenset({0, 2}), key_heads=2, value_heads=4, key_dim=12, value_dim=8, kernel=4, mixed=True
)
REAL = msgspec.structs.replace(SMALL, key_heads=1, value_heads=2, key_dim=128, value_dim=128)
SLOTS, CHECKPOINTS = 6, 4


def view(device: torch.device, rows: int, chunks: list[tuple[int, int, int]], padded: int = 0) -> StepView:
    """A step with decode rows of slots 1 ... `rows` at position 70, and chunks (slot, start, tokens). With
    `padded` it also has so many padding tokens, a padding row and a padding chunk."""
    more = 1 if padded else 0
    firsts = [rows]
    for _, _, tokens in chunks:
        firsts.append(firsts[-1] + tokens)
    total = firsts[-1] + padded

    def ints(values: list[int], length: int) -> torch.Tensor:
        return torch.tensor(values + [0] * (length - len(values)), dtype=torch.int32, device=device)

    return StepView(
        total, rows + more, len(chunks) + more, ints([firsts[-1], rows, len(chunks), 0], 4), ints([], total),
        ints([70] * rows, total), ints([], total), ints([], 1)[None],
        ints([*range(1, 1 + rows)], rows + more),
        ints([71] * rows, rows + more), ints([slot for slot, _, _ in chunks], len(chunks) + more),
        ints([start for _, start, _ in chunks], len(chunks) + more), ints(firsts, len(chunks) + 1 + more),
        ints([], 1),
    )  # fmt: skip


def inputs(tokens: int, linear: LinearSpec, device: torch.device, dtype: torch.dtype) -> DeltaInputs:
    """Rows of the projection have what belongs to the output's gate behind them."""
    wide = torch.randn(tokens, linear.channels + linear.value_size, device=device).to(dtype)
    heads = tokens, linear.value_heads
    decay, beta = -torch.rand(heads, device=device), torch.rand(heads, device=device)
    weight = torch.randn(linear.channels, linear.kernel, device=device).to(dtype)
    return DeltaInputs(wide[:, : linear.channels], decay, beta, weight, linear)


def pools(linear: LinearSpec, dtype: torch.dtype, device: torch.device) -> list[StatePool]:
    """Two equal pools. Slot 3 is saved within its chunk and at its end, slot 2 after its token."""
    made = [StatePool(linear, SLOTS, CHECKPOINTS, dtype, device) for _ in range(2)]
    for name in ("conv", "memory"):
        first, second = (getattr(pool, name) for pool in made)
        second.copy_(first.normal_())
    for pool in made:
        found = torch.zeros(SLOTS, MOST_SAVES, 2, dtype=torch.int32, device=device)
        found[3, :3] = torch.tensor([[41, SLOTS + 1], [42, SLOTS + 2], [45, SLOTS + 4]])
        found[2, 1] = torch.tensor([71, SLOTS + 3])
        found[1, 0] = torch.tensor([70, SLOTS + 3])  # passed
        pool.saves.copy_(found)
    return made


@pytest.mark.parametrize(
    ("linear", "rows", "chunks", "padded"),
    [
        (SMALL, 2, [(3, 40, 5), (4, 0, 1), (5, 7, 70)], 3),
        (SMALL, 3, [], 2),
        (msgspec.structs.replace(SMALL, kernel=2, value_dim=40), 0, [(3, 40, 5)], 0),
        (REAL, 1, [(3, 40, 3)], 0),
    ],
)
def test_states_and_outputs(
    linear: LinearSpec,
    rows: int,
    chunks: list[tuple[int, int, int]],
    padded: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    step = view(device, rows, chunks, padded)
    given = inputs(step.tokens, linear, device, dtype)
    pool, twin = pools(linear, dtype, device)
    true = step.tokens - padded
    want = delta.gated_delta(twin, 1, step, given)[:true]
    found = gated_delta(pool, 1, step, given)[:true]
    assert error(found, want) < tolerance
    for name in ("conv", "memory"):
        own, theirs = getattr(pool, name), getattr(twin, name)
        assert torch.equal(own[0], theirs[0]), "another layer's"
        assert error(own[1], theirs[1]) < tolerance
        untouched = [each for each in range(SLOTS + 1) if each > 5 or each == 0]
        assert torch.equal(own[1, untouched], theirs[1, untouched])
