"""Products of weights scaled by blocks, against the twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import error
from gpu.kernels.gemm.scaled import ScaledGemmConfig, scaled_gemm, scaled_gemm_config
from gpu.ops.plain import product
from gpu.quant import quantise_blocks, quantise_groups

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
