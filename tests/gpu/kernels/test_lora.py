"""The products of adapters against their twins: mixed ranks, places, rows without any, padding."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bench.kernels.inputs import error, scalar
from bench.kernels.lora_inputs import blank_rows, lora_matrix, lora_rows, slots_view
from gpu.adapters import kernels as twin
from gpu.kernels.lora.dense import LoraConfig, embed, expand, expand_silu, lora_config, shrink
from gpu.kernels.lora_rows import lay_out
from gpu.kernels.silu_mul import silu_mul
from gpu.lora import LoraMatrix, LoraRows

FEW = LoraConfig(16, 32, 4, 16, 32)
MANY = LoraConfig(32, 64, 1, 16, 64)


class Case(NamedTuple):
    """places of the rows, ranks of the places, output sizes, inputs, and the cut."""

    used: list[int]
    ranks: list[int]
    parts: tuple[int, ...]
    inputs: int
    cut: LoraConfig


CASES = {
    "one": Case([0], [16], (48,), 128, FEW),
    # several ranks, and outputs and inputs that no block divides
    "mixed": Case([2, -1, 0, 2, 1, -1, 2], [16, 4, 9], (64, 24, 24), 80, FEW),
    "none": Case([-1, -1], [5, 8], (40,), 136, FEW._replace(parts=2)),
    # more rows than a tile, and a place whose adapter leaves the matrix as it is
    "tiles": Case([0, 1, 2] * 13 + [1] * 30, [32, 8, 0], (48, 48), 96, MANY),
}
PADDING = 3


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def made(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[LoraMatrix, LoraRows, torch.Tensor]:
    """Matrix and list of a case, and rows that hold no number where they are padding."""
    lora = lora_matrix(case.ranks, case.inputs, case.parts, dtype, device)
    rows = lora_rows(case.used, len(case.ranks), device, PADDING)
    x = torch.randn(len(rows.places), case.inputs, device=device).to(dtype)
    x[-PADDING:] = float("nan")
    return lora, rows, x


def test_linear(case: Case, dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    lora, rows, x = made(case, dtype, device)
    y = torch.randn(len(x), sum(case.parts), device=device).to(dtype)
    h, expected, h_twin = shrink(x, lora, rows, config=case.cut), y.clone(), twin.shrink(x, lora, rows)
    twin.expand(h_twin, lora, rows, expected)
    changed = [row for row, place in enumerate(case.used) if place >= 0 and case.ranks[place]]
    assert error(h.sum(0)[changed], h_twin[changed]) < tolerance
    found = y.clone()
    expand(h, lora, rows, found, config=case.cut)
    assert error(found, expected) < tolerance
    left = [row for row in range(len(x)) if row not in changed]
    assert torch.equal(found[left], y[left])


def test_gate_and_up(dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    lora, rows, x = made(CASES["tiles"], dtype, device)
    both = torch.randn(len(x), 96, device=device).to(dtype)
    count = scalar(len(x) - PADDING, device)
    out = expand_silu(shrink(x, lora, rows), lora, rows, both, num_rows=count, config=MANY)
    expected = both.clone()
    twin.expand(twin.shrink(x, lora, rows), lora, rows, expected)
    assert error(out[:-PADDING], silu_mul(expected)[:-PADDING]) < tolerance


def test_embedding(dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    lora = lora_matrix([4, 16], 50, (72,), dtype, device)
    rows = lora_rows([1, -1, 0, 1], 2, device, PADDING)
    ids = torch.tensor([3, 49, 0, 49, 0, 0, 0], dtype=torch.int32, device=device)
    y = torch.randn(7, 72, device=device).to(dtype)
    expected = y.clone()
    twin.embed(ids, lora, rows, expected)
    embed(ids, lora, rows, y, config=FEW)
    assert error(y, expected) < tolerance


def test_logits(dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    """The head has another dtype than its rows."""
    lora, rows, x = made(CASES["mixed"], dtype, device)
    y = torch.randn(len(x), 112, device=device)
    expected = y.clone()
    twin.expand(twin.shrink(x, lora, rows), lora, rows, expected)
    expand(shrink(x, lora, rows), lora, rows, y)
    assert error(y, expected) < tolerance


def test_16_bits(device: torch.device) -> None:
    """Wherever the kernels run: the interpreter computes products of float16 rightly."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    lora, rows, x = made(CASES["mixed"], kind, device)
    y = torch.randn(len(x), 112, device=device).to(kind)
    expected = y.clone()
    twin.expand(twin.shrink(x, lora, rows), lora, rows, expected)
    expand(shrink(x, lora, rows), lora, rows, y)
    assert error(y, expected) < 1e-2


@pytest.mark.parametrize(
    ("decode", "chunks", "tokens", "room", "places"),
    [
        ([1], [], 1, 0, 1),
        ([3, 1, 2, 5], [], 6, 0, 3),
        ([], [(2, 5)], 8, 1, 2),
        ([4, 5], [(1, 40), (3, 1), (0, 20), (2, 9)], 80, 7, 300),  # in spans
        ([], [], 4, 3, 2),
    ],
    ids=["row", "rows", "chunk", "mixed", "empty"],
)
def test_work_lists(
    decode: list[int],
    chunks: list[tuple[int, int]],
    tokens: int,
    room: int,
    places: int,
    device: torch.device,
) -> None:
    view = slots_view(decode, chunks, tokens, room, device)
    sampled = torch.tensor([*decode, *[0] * (tokens - len(decode))], dtype=torch.int32, device=device)
    view.counts[3] = len(decode)
    column = torch.tensor([-1, 0, places - 1, 0, -1, places - 1], dtype=torch.int32, device=device)
    found, expected = (
        [blank_rows(size, places, device) for size in (tokens + 2, len(sampled))] for _ in range(2)
    )
    lay_out(view, sampled, column, found[0], found[1])
    twin.lay_out(view, sampled, column, expected[0], expected[1])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.places, other.places)
        assert torch.equal(one.starts, other.starts)
        assert torch.equal(one.order, other.order)  # behind the rows with a place: the others


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 128, 256, 1000, 8192])
def test_cuts_fill_the_device(rows: int) -> None:
    lora = LoraMatrix(
        *(torch.empty(8, *size, device="meta") for size in ((48, 4096), (6144, 16))),
        torch.empty(8, device="meta"),
        (4096, 1024, 1024),
    )
    cut = lora_config(rows, lora)
    assert cut.parts & (cut.parts - 1) == 0 and cut.parts <= 32
    assert (cut.parts > 1) == (rows < 8192)
