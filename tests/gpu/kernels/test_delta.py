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


def view(
    device: torch.device,
    rows: list[tuple[int, int, int]],
    chunks: list[tuple[int, int, int]],
    padded: int = 0,
) -> StepView:
    """A step with decode rows and chunks (slot, start, tokens). With `padded` it also has so many padding
    tokens, a padding row and a padding chunk."""
    more = 1 if padded else 0
    owners = [slot for slot, _, tokens in rows for _ in range(tokens)]
    positions = [start + at for _, start, tokens in rows for at in range(tokens)]
    firsts = [len(owners)]
    for _, _, tokens in chunks:
        firsts.append(firsts[-1] + tokens)
    total, decode = firsts[-1] + padded, len(owners) + more

    def ints(values: list[int], length: int) -> torch.Tensor:
        return torch.tensor(values + [0] * (length - len(values)), dtype=torch.int32, device=device)

    return StepView(
        total, decode, len(chunks) + more, ints([firsts[-1], len(owners), len(chunks), 0], 4),
        ints([], total), ints(positions, total), ints([1] * firsts[-1], total), ints([], 1)[None],
        ints(owners, decode), ints([position + 1 for position in positions], decode),
        ints([slot for slot, _, _ in chunks], len(chunks) + more),
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
    step = view(device, [(slot, 70, 1) for slot in range(1, 1 + rows)], chunks, padded)
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


@pytest.mark.parametrize("linear", [SMALL, msgspec.structs.replace(SMALL, kernel=2, value_dim=40)])
def test_drafts(linear: LinearSpec, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """Outputs, states and saves equal those of the accepted tokens alone, whether all, some or no drafts are
    accepted, with steps without drafts between and a chunk beside. A rejected draft may have passed the place
    of a save. A row at its length limit does not change its states."""
    lengths, limited, most = {1: 9, 2: 6, 3: 7}, 4, 3
    plain, pool, twin = (
        StatePool(linear, SLOTS, CHECKPOINTS, dtype, device, drafts) for drafts in (0, most, most)
    )
    for each in (plain, pool, twin):
        each.saves[1, 0] = torch.tensor([5, SLOTS + 1])
        each.saves[2, 1] = torch.tensor([4, SLOTS + 2])
        each.saves[3, 0] = torch.tensor([2, SLOTS + 3])
        each.memory[:, limited] = 1.0
    text = {slot: inputs(length, linear, device, dtype) for slot, length in lengths.items()}
    weight, want = text[1].conv, {}
    for slot, whole in text.items():
        alone = view(device, [], [(slot, 0, lengths[slot])])
        want[slot] = delta.gated_delta(plain, 1, alone, whole._replace(conv=weight))
    done = dict.fromkeys(lengths, 0)
    # Of each row: tokens of its query, and how many are right. The first step has chunks in their place.
    for step in (
        {3: (2, 2), 2: (1, 1), 1: (1, 1)},
        {1: (4, 1), 2: (4, 4), 3: (2, 2)},
        {2: (1, 1), 1: (4, 3), 3: (1, 1)},
        {1: (2, 2), 3: (4, 1)},
        {1: (1, 1), 3: (1, 1)},
        {1: (1, 1)},
    ):
        own, idle = [(slot, done[slot], query) for slot, (query, _) in step.items()], (limited, 8, 1)
        if begins := not any(done.values()):
            made = view(device, [idle], own, padded=2)
        else:
            made = view(device, [*own, idle], [(5, 0, 3)], padded=2)
        given = inputs(made.tokens, linear, device, dtype)._replace(conv=weight)
        made.kv_slot_mapping[int(made.counts[1]) - 1] = 0
        at, true, right_at = int(begins), [], []
        for slot, (query, right) in step.items():
            part = slice(done[slot], done[slot] + right)
            for into, source in zip(given[:3], text[slot][:3], strict=True):
                into[at : at + right] = source[part]
            true.append(want[slot][part])
            right_at += range(at, at + right)
            at, done[slot] = at + query, done[slot] + right
        found, theirs = gated_delta(pool, 1, made, given), delta.gated_delta(twin, 1, made, given)
        live = (made.kv_slot_mapping > 0).nonzero()[:, 0]
        assert error(found[live], theirs[live]) < tolerance
        assert error(found[right_at], torch.cat(true)) < tolerance
    assert done == lengths
    for name in ("conv", "memory"):
        own, theirs, truth = (getattr(each, name)[1] for each in (pool, twin, plain))
        for entry in (1, 2, 3, SLOTS + 1, SLOTS + 2, SLOTS + 3, limited):
            assert error(own[entry], truth[entry]) < tolerance, (name, entry)
            assert error(theirs[entry], truth[entry]) < tolerance, (name, entry)


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_cpu_in_16_bits(drafts: int) -> None:
    """On a CPU the plain-torch version runs: it keeps states in float32 and returns 16-bit outputs."""
    cpu, found = torch.device("cpu"), []
    step = view(cpu, [(1, 70, 1 + drafts), (2, 70, 1)], [(3, 0, 5)])
    given = inputs(step.tokens, SMALL, cpu, torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        pool = StatePool(SMALL, SLOTS, CHECKPOINTS, dtype, cpu, drafts)
        same = given._replace(qkv=given.qkv.to(dtype), conv=given.conv.to(dtype))
        found.append(delta.gated_delta(pool, 0, step, same))
        assert found[-1].dtype == dtype
    assert error(*found) < 2e-2
