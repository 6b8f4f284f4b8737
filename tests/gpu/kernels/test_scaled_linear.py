"""Products of weights of 8 bits, whoever multiplies: against the twin, and by whom."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.inputs import error, scalar
from gpu.kernels.gemm.skinny import split_k_counters
from gpu.ops import scaled
from gpu.ops.base import Matrix
from gpu.ops.plain import product
from gpu.ops.scaled import scaled_linear
from gpu.quant.scaled import INT8, quantise, quantise_blocks

OUTPUTS, INPUTS = 1024, 1024

KINDS = {"rows": quantise, "blocks": quantise_blocks, "int8": partial(quantise, dtype=INT8)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply these small sizes as large ones are."""
    monkeypatch.setattr("gpu.kernels.gemm.skinny.LEAST_WEIGHTS", 1)
    monkeypatch.setattr("gpu.kernels.gemm.skinny.FILLED", 4)


@pytest.fixture
def who(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what multiplied."""
    found: list[str] = []

    def listen(name: str) -> None:
        run = getattr(scaled, name)

        def told(*args: Any, **kwargs: Any) -> Tensor:
            found.append(name)
            result: Tensor = run(*args, **kwargs)
            return result

        monkeypatch.setattr(scaled, name, told)

    for name in ("skinny_gemm", "scaled_gemm", "cublas_fp8_gemm"):
        listen(name)
    return found


@pytest.mark.usefixtures("small", "rounding")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind", "expected"),
    [
        (3, "rows", "skinny_gemm"),
        (3, "blocks", "skinny_gemm"),
        (100, "rows", "skinny_gemm"),
        (66, "blocks", "scaled_gemm"),
        (130, "rows", "cublas_fp8_gemm"),
        (3, "int8", "skinny_gemm"),
        (100, "int8", "skinny_gemm"),
        (130, "int8", "scaled_gemm"),
    ],
)
def test_as_the_twin(
    rows: int,
    kind: str,
    expected: str,
    gated: bool,
    who: list[str],
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    made = torch.randn(OUTPUTS, INPUTS, device=device) * INPUTS**-0.5
    weight, scale = KINDS[kind](made)
    bias = torch.randn(OUTPUTS, device=device).to(dtype)
    x = torch.randn(rows, INPUTS, device=device).to(dtype)
    live = scalar(rows - 1, device)
    if kind != "blocks" and rows == 100 and not gated:
        # Split in two at these sizes, as of a large model's `o`: one that is not split is the library's.
        weight, scale, bias = weight[:128], scale[:128], bias[:128]
    by = Matrix(weight, bias, scale)
    found = scaled_linear(x, by, split_k_counters(device), gated=gated, num_rows=live)
    want = product(x.double(), weight, scale, bias.double())
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = F.silu(gate) * up
    assert found.dtype == dtype
    assert error(found[: rows - 1], want[: rows - 1]) < tolerance
    assert who == [expected]


@pytest.mark.usefixtures("small", "rounding")
def test_a_device_without_room_has_the_others(
    who: list[str], device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """No counters: where `skinny_gemm` cannot hold its tiles."""
    x = torch.randn(5, INPUTS, device=device).to(dtype)
    made = torch.randn(OUTPUTS, INPUTS, device=device) * INPUTS**-0.5
    for quantised in (how(made) for how in KINDS.values()):
        found = scaled_linear(x, Matrix(quantised[0], scale=quantised[1]), None)
        assert error(found, product(x.double(), *quantised)) < tolerance
    assert who == ["cublas_fp8_gemm", "scaled_gemm", "scaled_gemm"]
