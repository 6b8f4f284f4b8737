"""Rows as numbers of 8 bits and their scales, against the twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import error, scalar
from gpu.kernels.gemm.quant import quantise_rows
from gpu.ops.plain import product
from gpu.ops.scaled import cublas_fp8_gemm
from gpu.quant.scaled import EIGHT_BITS, INT8, TOP, quantise, restore


def exact(rows: int, width: int) -> torch.Tensor:
    """Rows that e4m3 has exactly, one of whose numbers is the largest: the interpreter rounds others
    wrongly where the exponent must grow."""
    x = torch.randn(rows, width).to(torch.float8_e4m3fn).float()
    x[:, 3] = -TOP
    return x


@pytest.mark.parametrize("per", [1, 2])
def test_rows_with_their_scales(per: int, device: torch.device, dtype: torch.dtype) -> None:
    rows, live, width = 6, 4, 48
    x = exact(rows, width)
    power = 2.0 ** torch.arange(-3, 3)[:, None]
    given = (x * power).to(device, dtype)
    given[live:] = float("nan")  # padded rows may hold anything
    numbers, scales = quantise_rows(given, per=per, num_rows=scalar(live // per, device))
    assert numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(numbers[:live].float().cpu(), x[:live])
    torch.testing.assert_close(scales[:live].cpu(), power[:live, 0])
    found = quantise(given[:live])
    assert torch.equal(found[0].float(), numbers[:live].float())
    torch.testing.assert_close(found[1], scales[:live])


@pytest.mark.parametrize("per", [1, 2])
def test_rows_as_integers(per: int, device: torch.device, dtype: torch.dtype) -> None:
    """Ties go to the even number, and a row that is not finite says so in its scale."""
    rows, live, width = 8, 6, 48
    given = torch.randn(rows, width).to(dtype).float()
    ties = torch.tensor([127.0, 0.5, 1.5, -2.5, 126.5, -0.49, -126.5])
    given[0] = 0.0
    given[0, : len(ties)] = ties * 0.25
    given[1, 5], given[2, 7] = float("nan"), float("-inf")
    given[live:] = float("nan")  # padded rows may hold anything
    x = given.to(device, dtype)
    numbers, scales = quantise_rows(x, INT8, per=per, num_rows=scalar(live // per, device))
    assert numbers.dtype == INT8 and float(scales[0]) == 0.25
    assert numbers[0, : len(ties)].tolist() == [127, 0, 2, -2, 126, 0, -126]
    assert not numbers[0, len(ties) :].any()
    assert not scales[1:3].isfinite().any()
    theirs, expected = quantise(x[3:live], INT8)
    torch.testing.assert_close(scales[3:live], expected)
    assert int((numbers[3:live].int() - theirs.int()).abs().max()) <= (device.type == "cuda")
    assert not quantise(x[1:3], INT8)[1].isfinite().any()


def test_groups_with_their_scales(device: torch.device, dtype: torch.dtype) -> None:
    x = exact(12, 16).view(3, 64)  # the largest number in each group of 16
    power = 2.0 ** torch.arange(-6, 6).view(3, 4)
    given = (x.view(3, 4, 16) * power[..., None]).view(3, 64).to(device, dtype)
    given[2:] = float("nan")
    numbers, scales = quantise_rows(given, group=16, num_rows=scalar(2, device))
    assert torch.equal(numbers[:2].float().cpu(), x[:2])
    torch.testing.assert_close(scales[:2].cpu(), power[:2])


@pytest.mark.parametrize("biased", [True, False])
def test_products_of_rows(biased: bool, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = exact(5, 64).to(device, dtype), exact(32, 64).to(device).to(torch.float8_e4m3fn)
    scale = torch.rand(32, device=device) + 0.5
    bias = torch.randn(32, device=device).to(dtype) if biased else None
    found = cublas_fp8_gemm(*quantise_rows(x), weight, scale, bias, dtype)
    assert found.dtype == dtype
    assert error(found, product(x, weight, scale, bias)) < tolerance


@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_zeros_and_extremes(kind: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    x = torch.zeros(3, 40, device=device, dtype=dtype)
    x[1, 5], x[2, 7] = 3e38, 1e-30
    numbers, scales = quantise_rows(x, kind)
    found = restore(numbers, scales)
    assert bool(found.isfinite().all()) and not found[0].any()
    torch.testing.assert_close(found[1, 5], x[1, 5].float(), rtol=1e-2, atol=0)
    assert torch.equal(restore(*quantise(x, kind))[0], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EIGHT_BITS, ids=str)
def test_rounds_as_the_twin(kind: torch.dtype, device: torch.device) -> None:
    x = torch.randn(64, 2048, device=device, dtype=torch.bfloat16)
    numbers, scales = quantise_rows(x, kind)
    theirs, expected = quantise(x, kind)
    torch.testing.assert_close(scales, expected)
    # The division's last bit decides ties alone.
    assert (numbers.float() != theirs.float()).float().mean() < 1e-3
