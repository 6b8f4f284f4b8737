"""RMSNorm kernels against their twin."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import error, scalar
from gpu.kernels.norm import add_normed, embed_beside, mean_squares, norm_wide, rms_norm


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


def test_what_is_normed_is_added_to_the_residual(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    x, residual = (torch.randn(5, 96, device=device).to(dtype) for _ in range(2))
    weight, given, before = torch.rand(96, device=device).to(dtype), x.clone(), residual.clone()
    add_normed(x, residual, weight, 1e-5, num_rows=scalar(3, device))
    assert error(residual[:3], before[:3] + reference.rms_norm(x[:3], weight, 1e-5)) < tolerance
    assert torch.equal(residual[3:], before[3:]) and torch.equal(x, given)


def test_a_weight_may_be_wider_than_the_rows(device: torch.device) -> None:
    """16-bit rows are multiplied by float32 weights before they are rounded: on average by no less."""
    x, residual = (torch.randn(64, 96, device=device).half() for _ in range(2))
    weight = torch.full((96,), 1.0004, device=device)  # 1 in float16
    expected = reference.rms_norm(x.float(), weight, 1e-6)
    found, before = rms_norm(x, weight, 1e-6), residual.clone()
    add_normed(x, residual, weight, 1e-6)
    assert float((found.float() / expected - 1).mean().abs()) < 1e-4
    assert torch.equal(residual, before + found)


@pytest.mark.parametrize(("q", "k"), [(96, 32), (40, 40)])
def test_queries_and_keys_are_normed_over_all_heads(
    q: int, k: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Between other columns, by their own means and by given ones."""
    whole = torch.randn(5, q + 2 * k + 8, device=device).to(dtype)
    before, qkv = whole.clone(), whole[:, : q + 2 * k]
    weights = tuple(torch.rand(size, device=device).to(dtype) for size in (q, k))
    parts = before[:, :q], before[:, q : q + k]
    means = torch.stack([part.float().square().mean(-1) for part in parts], -1)
    norms, live = (weights[0], weights[1], 1e-5), scalar(4, device)
    assert error(mean_squares(qkv, (q, k), num_rows=live)[:4], means[:4]) < tolerance
    for given, by in ((None, 1.0), (4 * means, 2.0)):
        whole.copy_(before)
        norm_wide(qkv, norms, given, num_rows=live)
        want = [reference.rms_norm(part, w, 1e-5)[:4] / by for part, w in zip(parts, weights, strict=True)]
        assert error(whole[:4, : q + k], torch.cat(want, -1)) < tolerance
        assert torch.equal(whole[:, q + k :], before[:, q + k :]) and torch.equal(whole[4:], before[4:])


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
