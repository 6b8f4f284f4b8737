"""Products of many rows and weights of 8 bits, against the twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import error
from gpu.kernels.gemm.scaled import ScaledGemmConfig, scaled_gemm, scaled_gemm_config
from gpu.ops.plain import product
from gpu.quant.scaled import INT8, quantise, quantise_blocks, quantise_groups

LOW, HIGH = ScaledGemmConfig(16, 64, 4, 3), ScaledGemmConfig(32, 128, 4, 3)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("rows", "config"), [(1, LOW), (13, LOW), (40, LOW), (5, HIGH), (70, HIGH)], ids=str)
def test_as_the_twin(
    rows: int,
    config: ScaledGemmConfig,
    biased: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    x = torch.randn(rows, 256, device=device).to(dtype)
    made = torch.randn(384, 256, device=device)
    made[128:256, :128] *= 8.0  # blocks that differ
    weight, scale = quantise_blocks(made)
    bias = torch.randn(384, device=device).to(dtype) if biased else None
    found = scaled_gemm(*quantise_groups(x), weight, scale, bias, dtype, config)
    assert (found.dtype, found.shape) == (dtype, (rows, 384))
    assert error(found, product(x, weight, scale, bias)) < tolerance


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "config"),
    [
        (1, 64, 16, LOW),
        (13, 80, 272, LOW),
        (40, 208, 384, LOW),
        (5, 16, 144, HIGH),
        (70, 400, 1040, HIGH),
        (13, 80, 272, LOW._replace(tma=False)),
        (70, 384, 384, HIGH._replace(tma=False)),
    ],
    ids=str,
)
def test_integers(
    rows: int,
    outputs: int,
    inputs: int,
    config: ScaledGemmConfig,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Scaled by rows, sides that tiles do not divide: exact sums, behind the last input nothing."""
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight, scale = quantise(torch.randn(outputs, inputs, device=device), INT8)
    bias = torch.randn(outputs, device=device).to(dtype)
    numbers, by_row = quantise(x, INT8)
    ones = torch.ones_like(by_row), torch.ones_like(scale)
    found = scaled_gemm(numbers, ones[0], weight, ones[1], None, torch.float32, config)
    assert torch.equal(found.double(), numbers.double() @ weight.double().t())
    found = scaled_gemm(numbers, by_row, weight, scale, bias, dtype, config)
    assert (found.dtype, found.shape) == (dtype, (rows, outputs))
    assert error(found, product(x.double(), weight, scale, bias.double())) < tolerance


@pytest.mark.parametrize("tiles", [1, 15, 16, 17, 33])
def test_every_tile_has_one_program(tiles: int, device: torch.device) -> None:
    """Programs of 16 tiles of rows side by side: whatever is left over."""
    x = torch.randn(tiles * 16, 128, device=device)
    weight, scale = quantise_blocks(torch.randn(256, 128, device=device))
    found = scaled_gemm(*quantise_groups(x), weight, scale, None, torch.float32, LOW)
    assert error(found, product(x, weight, scale)) < 1e-3


def test_no_second_wave_for_a_few_tiles() -> None:
    found = [scaled_gemm_config(512, outputs).block_m for outputs in (4096, 6144, 24_576)]
    assert found == [128, 64, 128], "128, 192 and 768 tiles of 128 rows for 132 multiprocessors"
