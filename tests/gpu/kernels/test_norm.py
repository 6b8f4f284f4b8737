"""RMSNorm kernels against their twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import error, scalar
from gpu.kernels.norm import embed_beside, rms_norm


@pytest.mark.parametrize("width", [64, 96, 576])
def test_norm(width: int, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(3, width, device=device).to(dtype)
    weight = torch.rand(width, device=device).to(dtype)
    assert error(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)) < tolerance


@pytest.mark.parametrize("first", [True, False])
def test_what_is_normed_is_kept_between_other_columns(
    first: bool, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    x, residual = (torch.randn(5, 96, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(96, device=device).to(dtype)
    expected = x.clone() if first else residual + x
    kept = torch.full((7, 3 * 96), -1.0, device=device, dtype=dtype)
    found = rms_norm(
        x,
        weight,
        1e-5,
        residual=None if first else residual,
        keep=kept[:5, 96:192],
        num_rows=scalar(4, device),
    )
    assert error(found[:4], reference.rms_norm(expected[:4], weight, 1e-5)) < tolerance
    assert torch.equal(kept[:4, 96:192], expected[:4])
    kept[:4, 96:192] = -1.0
    assert bool((kept == -1.0).all())


def test_add_and_norm_leaves_padded_rows_alone(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    x, residual = (torch.randn(5, 96, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(96, device=device).to(dtype)
    x[3:] = float("nan")
    expected = residual[:3] + x[:3]
    before = residual.clone()
    found = rms_norm(x, weight, 1e-5, residual=residual, num_rows=scalar(3, device))
    assert error(found[:3], reference.rms_norm(expected, weight, 1e-5)) < tolerance
    assert torch.equal(residual[:3], expected)
    assert torch.equal(residual[3:], before[3:])


@pytest.mark.parametrize("normed", [False, True])
def test_an_embedding_beside_a_hidden_state(
    normed: bool, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    table, hidden = (torch.randn(rows, 96, device=device).to(dtype) for rows in (20, 5))
    weights = tuple(torch.rand(96, device=device).to(dtype) for _ in range(2))
    ids = torch.tensor([7, 19, 0, 3, 3], dtype=torch.int32, device=device)
    norms = (weights[0], weights[1]) if normed else None
    found = embed_beside(table, ids, hidden, norms, 1e-5, num_rows=scalar(4, device))
    halves = [table[ids], hidden]
    if normed:
        halves = [reference.rms_norm(x, w, 1e-5) for x, w in zip(halves, weights, strict=True)]
    assert error(found[:4], torch.cat(halves, dim=-1)[:4]) < tolerance
