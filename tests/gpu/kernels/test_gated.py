"""SiLU, or GELU, and multiply against their twins."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import error, scalar
from gpu.kernels.silu_mul import gelu_mul, silu_mul


@pytest.mark.parametrize("width", [40, 1100])
def test_activate_and_multiply(
    width: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    both = (3 * torch.randn(4, 2 * width, device=device)).to(dtype)
    for made, expected in ((silu_mul, reference.silu_mul), (gelu_mul, reference.gelu_mul)):
        found = made(both, num_rows=scalar(3, device))
        assert error(found[:3], expected(both)[:3]) < tolerance
