"""Head norms, rope and the store into pages, in one kernel, against their twins."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import Heads, error, rope, scalar
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store


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


def coarse(*shape: int) -> torch.Tensor:
    """Random e4m3 numbers, as float32."""
    return torch.randn(shape).to(torch.float8_e4m3fn).float()


def test_float8_pages_take_what_is_left_after_their_scales(device: torch.device, dtype: torch.dtype) -> None:
    """Numbers that e4m3 has behind the scales arrive exactly (the interpreter rounds others wrongly),
    and larger ones as its largest: never as infinity or NaN."""
    heads, rows, live, scales = Heads(4, 2, 32), 5, 4, (0.25, 2.0)
    qkv = coarse(rows, heads.q + 2 * heads.kv, heads.dim)
    qkv[0, 4:, :2] = torch.tensor([5000.0, -5000.0])
    x = qkv.clone()
    x[:, 4:6] *= scales[0]
    x[:, 6:] *= scales[1]
    turn = torch.ones(rows, 1, heads.dim), torch.zeros(rows, 1, heads.dim)
    cache = torch.zeros(64, 2, heads.kv, heads.dim, device=device).to(torch.float8_e4m3fn)
    where = torch.tensor([20, 3, 63, 0, 40], device=device)
    norm_rope_store(
        x.flatten(1).to(device, dtype),
        (cache[:, 0], cache[:, 1]),
        where,
        (turn[0].to(device, dtype), turn[1].to(device, dtype)),
        scales=scales,
        num_rows=scalar(live, device),
    )
    found = cache.float().cpu()[where[:live].cpu()].flatten(1, 2)
    assert torch.equal(found, qkv[:live, 4:].clamp(-448.0, 448.0))
    assert not cache[40].float().any()


@pytest.mark.gpu
def test_float8_pages_round_to_the_nearest(device: torch.device) -> None:
    heads, rows = Heads(4, 2, 32), 64
    qkv = torch.randn(rows, (heads.q + 2 * heads.kv) * heads.dim, device=device)
    turn = rope(rows, heads.dim, torch.float32, device)
    _, k, v = reference.norm_rope(qkv, heads.kv, heads.dim, turn, None)
    cache = torch.zeros(64, 2, heads.kv, heads.dim, device=device).to(torch.float8_e4m3fn)
    norm_rope_store(qkv, (cache[:, 0], cache[:, 1]), torch.arange(64, device=device), turn)
    assert (
        error(cache[:, 0].float(), k.to(torch.float8_e4m3fn).float()) < 1e-3
    )  # rope's last bit decides ties
    assert torch.equal(cache[:, 1].float(), v.to(torch.float8_e4m3fn).float())
