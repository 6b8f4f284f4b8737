"""SiLU and multiply against its twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import error, scalar
from gpu.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("width", [40, 1100])
def test_silu_mul(width: int, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    both = torch.randn(4, 2 * width, device=device).to(dtype)
    found = silu_mul(both, num_rows=scalar(3, device))
    assert error(found[:3], reference.silu_mul(both)[:3]) < tolerance
