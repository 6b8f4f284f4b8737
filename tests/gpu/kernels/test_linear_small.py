"""Products of a few rows against torch's, and where they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import error, linear
from gpu.kernels.gemm.gemv import GemvConfig, gemv, gemv_config
from gpu.kernels.norm import rms_norm

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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs", "cut"), SHAPES)
def test_norm_in_front_and_residual_behind(
    rows: int,
    outputs: int,
    inputs: int,
    cut: GemvConfig,
    gated: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """The rows have a mean square of about 900, and the norm's weights are float32 whatever the rows are."""
    x, weight, bias = linear(rows, outputs, inputs, device, dtype)
    x, norm, eps = x * 30, torch.rand(inputs, device=device) + 0.5, 1e-3
    exact = x.double()
    normed = exact * torch.rsqrt(exact.square().mean(1, keepdim=True) + eps) * norm
    want = F.linear(normed, weight.double(), bias.double())
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = F.silu(gate) * up
    assert error(gemv(x, weight, bias, cut, gated=gated, norm=(norm, eps)), want) < tolerance
    residual = torch.randn_like(want).to(dtype)
    want = want + residual
    made = gemv(x, weight, bias, cut, gated=gated, norm=(norm, eps), residual=residual)
    assert made is residual
    assert error(residual, want) < tolerance


@pytest.mark.parametrize("outputs", [4, 33])
def test_normed_rows_are_those_of_the_norms_kernel(outputs: int, device: torch.device) -> None:
    """Each program stores a part of the rows: with 4 outputs one program stores all 96 inputs, with 33
    outputs nine programs store up to 16 each."""
    x, weight, _ = (each.bfloat16() for each in linear(2, outputs, 96, device, torch.float32))
    norm, normed = torch.rand(96, device=device) + 0.5, torch.full_like(x, float("nan"))
    gemv(x, weight, None, GemvConfig(4, 4), norm=(norm, 1e-5), normed=normed)
    want = rms_norm(x, norm, 1e-5)
    assert (normed.float() / want.float() - 1).abs().max() < 0.01  # a bit, where sums are in another order


def test_the_sum_is_that_of_the_norms_kernel(device: torch.device) -> None:
    """The residual has the same bits whether `gemv` or the norm's kernel adds to it."""
    x, weight, bias = (each.bfloat16() for each in linear(2, 40, 256, device, torch.float32))
    residual = torch.randn(2, 40, device=device).bfloat16()
    other = residual.clone()
    gemv(x, weight, bias, GemvConfig(8, 4), residual=residual)
    rms_norm(gemv(x, weight, bias, GemvConfig(8, 4)), bias, 1e-6, residual=other)
    assert torch.equal(residual, other)


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
