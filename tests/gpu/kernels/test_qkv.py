"""Head norms, rope and the store into pages, in one kernel, against their twins."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.kernels.inputs import Heads, error, rope, scalar
from gpu.kernels import reference
from gpu.kernels.qkv import norm_rope_store


@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(9, 3, 24)], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_queries_and_pages(
    heads: Heads,
    normed: bool,
    in_place: bool,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    rows, live = 5, 4
    rotary = heads.dim if heads.dim == 32 else 16  # the other family turns only a part of a head
    qkv = torch.randn(rows, (heads.q + 2 * heads.kv) * heads.dim, device=device).to(dtype)
    turn = rope(rows, rotary, dtype, device)
    weights = torch.rand(2, heads.dim, device=device).to(dtype)
    norms = (weights[0], weights[1], 1e-6) if normed else None
    cache = torch.zeros(64, 2, heads.kv, heads.dim, device=device, dtype=dtype)
    where = torch.tensor([20, 3, 63, 0, 40], device=device)
    q, k, v = reference.norm_rope(qkv, heads.kv, heads.dim, turn, norms)
    target = None if in_place else torch.zeros(rows, heads.q * heads.dim, device=device, dtype=dtype)
    found = norm_rope_store(
        qkv, (cache[:, 0], cache[:, 1]), where, turn, norms, q_out=target, num_rows=scalar(live, device)
    )
    assert error(found[:live], q[:live]) < tolerance
    assert error(cache[where[:live], 0], k[:live]) < tolerance
    assert torch.equal(cache[where[:live], 1], v[:live])
    touched = torch.zeros(64, dtype=torch.bool)
    touched[where[:live].cpu()] = True
    assert not cache.cpu()[~touched].any()


def test_float8_pages_take_what_is_left_after_their_scales(device: torch.device, dtype: torch.dtype) -> None:
    """Divided by the scales, rounded to the nearest e4m3, and saturated: never infinite, never NaN."""
    heads, rows, scales = Heads(4, 2, 32), 5, (0.25, 2.0)
    qkv = torch.randn(rows, (heads.q + 2 * heads.kv) * heads.dim, device=device).to(dtype)
    qkv[0] *= 1000.0
    turn = rope(rows, heads.dim, dtype, device)
    _, *kept = reference.norm_rope(qkv, heads.kv, heads.dim, turn, None)
    cache = torch.zeros(64, 2, heads.kv, heads.dim, device=device, dtype=torch.float8_e4m3fn)
    where = torch.tensor([20, 3, 63, 0, 40], device=device)
    norm_rope_store(qkv, (cache[:, 0], cache[:, 1]), where, turn, scales=scales)
    for side, (whole, scale) in enumerate(zip(kept, scales, strict=True)):
        found = cache[where, side].float()
        exact = (whole.float() / scale).clamp(-448.0, 448.0)
        assert found[0].abs().max() == 448.0
        # Half a step of three bits behind the point; the least step is 2^-9.
        assert bool(((found - exact).abs() <= exact.abs() / 15 + 2.0**-10).all())
        assert F.cosine_similarity(found[1:].flatten(), exact[1:].flatten(), 0) > 0.998
    assert not cache.float()[[1, 2]].any()
