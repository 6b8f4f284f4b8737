"""Products of a few rows against torch's, and where they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import error, linear
from gpu.kernels.gemm.gemv import GemvConfig, gemv, gemv_config

# (rows, outputs, inputs, cut): outputs that the columns do not divide, inputs in one piece, in several and
# with a rest, rows that one program takes together and rows that two share
SHAPES = [
    (1, 10, 96, GemvConfig(2, 4)),
    (2, 14, 1024, GemvConfig(4, 4)),
    (3, 24, 2304, GemvConfig(1, 8)),
    (4, 6, 640, GemvConfig(2, 4)),
    (16, 6, 48, GemvConfig(2, 8)),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SHAPES)
def test_linear(
    rows: int,
    outputs: int,
    inputs: int,
    cut: GemvConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    found = gemv(x, weight, bias, cut)
    assert found.dtype == dtype
    assert error(found, F.linear(x.double(), weight.double(), bias.double())) < tolerance
    assert error(gemv(x, weight, None, cut), F.linear(x.double(), weight.double())) < tolerance


@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SHAPES)
def test_gated(
    rows: int,
    outputs: int,
    inputs: int,
    cut: GemvConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, dim=1)
    found = gemv(x, weight, bias, cut, gated=True)
    assert found.shape == (rows, outputs // 2)
    assert error(found, F.silu(gate) * up) < tolerance


def test_a_row_is_its_own(device: torch.device, dtype: torch.dtype) -> None:
    """Padded rows may hold anything; and a second run gives the same bits."""
    x, weight, bias = linear(3, 8, 512, device, dtype)
    cut = GemvConfig(2, 4)
    expected = gemv(x, weight, bias, cut)
    x[2] = float("nan")
    assert torch.equal(gemv(x, weight, bias, cut)[:2], expected[:2])


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "most"),
    [
        (5120, 2048, False, 2),
        (2048, 4096, False, 4),
        (24_576, 4096, True, 2),
        (4096, 12_288, False, 2),
        (128, 2048, False, 32),
        (576, 576, False, 4),
        (576, 1536, False, 8),
        (3072, 576, True, 2),
        (8192, 65_536, False, 0),  # more than registers hold
    ],
)
def test_rows_up_to_which(outputs: int, inputs: int, gated: bool, most: int) -> None:
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    taken = [n for n in (1, 2, 3, 4, 5, 8, 12, 16, 32, 40) if gemv_config(n, weight, gated)]
    assert max(taken, default=0) == most
    assert 12 not in taken  # neither few nor a multiple of the rows of a program
