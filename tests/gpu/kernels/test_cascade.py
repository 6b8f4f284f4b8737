"""Common pages for all rows at once, the rest row by row, merged: attention over everything."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import Heads, error, pages, scalar
from gpu.kernels.attention.cascade import PrefixConfig, prefix_attention
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.merge_state import merge_state

LENGTHS = [70, 49, 130, 65, 50]


@pytest.mark.parametrize("common", [0, 16, 48])
@pytest.mark.parametrize("cap", [0.0, 20.0])
def test_cascade(common: int, cap: float, device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    heads, live, scale = Heads(6, 2, 24), 4, 0.2
    kept = pages(LENGTHS, 16, heads, dtype, device)
    kept.table[kept.slots, : common // 16] = kept.table[kept.slots[0], : common // 16].clone()
    q = torch.randn(len(LENGTHS), heads.q, heads.dim, device=device).to(dtype)
    layer = kept.layer(16, scale, cap)
    cache, count, shared = (kept.k, kept.v), scalar(live, device), scalar(common, device)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=3)
    plan = plan_decode(kept.slots, kept.lengths[kept.slots], config, num_rows=count, skip=shared)
    space = decode_workspace(len(LENGTHS), heads.q, heads.kv, heads.dim, config, device)
    lse = torch.zeros(len(LENGTHS), heads.q, device=device)
    out = paged_decode(q, layer, plan, space, config, lse=lse)
    use = PrefixConfig(queries=16, tile=16, parts=2)
    prefix = prefix_attention(q, layer, kept.slots, shared, use, num_rows=count)
    merge_state(out.view_as(q), lse, prefix.out, prefix.lse, num_rows=count)
    table = kept.table[kept.slots]
    expected, sums = reference.decode_attention(q, cache, table, LENGTHS[:live], 16, scale, cap=cap)
    assert error(out.view_as(q)[:live], expected[:live]) < tolerance
    assert error(lse[:live], sums[:live]) < tolerance
