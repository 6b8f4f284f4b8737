"""Decode attention over pages against its twin, whatever the lengths and however the work is cut."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import Heads, error, pages, scalar
from gpu.kernels import reference
from gpu.kernels.decode import DecodeConfig, decode_workspace, paged_decode, plan_decode

WIDE = [5, 1, 130, 64, 2]


@pytest.mark.parametrize(
    ("heads", "page_size", "lengths", "live", "programs", "window", "cap", "skip"),
    [
        (Heads(8, 2, 32), 16, WIDE, 5, 4, 0, 0.0, 0),
        (Heads(8, 2, 32), 16, WIDE, 3, 1, 0, 0.0, 0),  # one program does all
        (Heads(3, 1, 64), 1, [33, 7], 2, 3, 16, 0.0, 0),
        (Heads(4, 2, 24), 64, [200, 64, 65, 3], 3, 5, 0, 30.0, 0),
        (Heads(4, 1, 16), 16, [300], 1, 16, 0, 0.0, 0),  # more programs than tiles
        (Heads(4, 2, 16), 16, [40, 70, 33], 3, 3, 0, 0.0, 32),  # the first two pages elsewhere
        (Heads(4, 2, 16), 16, [90, 20], 2, 3, 40, 0.0, 0),
    ],
)
def test_paged_decode(
    heads: Heads,
    page_size: int,
    lengths: list[int],
    live: int,
    programs: int,
    window: int,
    cap: float,
    skip: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    kept = pages(lengths, page_size, heads, dtype, device)
    q = torch.randn(len(lengths), heads.q, heads.dim, device=device).to(dtype)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=programs)
    plan = plan_decode(
        kept.slots,
        kept.lengths,
        config,
        window=window,
        num_rows=scalar(live, device),
        skip=scalar(skip, device) if skip else None,
    )
    space = decode_workspace(len(lengths), heads.q, heads.kv, heads.dim, config, device)
    lse = torch.zeros(len(lengths), heads.q, device=device)
    scale = heads.dim**-0.5
    expected, sums = reference.decode_attention(
        q,
        (kept.k, kept.v),
        kept.table[kept.slots],
        lengths[:live],
        page_size,
        scale,
        cap=cap,
        window=window,
        skip=skip,
    )
    for _ in range(2):  # a second layer finds the counters as the first did
        found = paged_decode(
            q,
            (kept.k, kept.v),
            kept.table,
            kept.slots,
            plan,
            space,
            config,
            page_size=page_size,
            scale=scale,
            cap=cap,
            lse=lse,
        )
        assert error(found.view_as(q)[:live], expected[:live]) < tolerance
        assert error(lse[:live], sums[:live]) < tolerance
        assert not lse[live:].any()  # padded rows are left alone
        assert not space.counters.any()


def test_every_tile_has_one_program(device: torch.device) -> None:
    lengths = torch.tensor([0, 700, 1, 64, 65, 128], device=device)
    slots = torch.tensor([3, 1, 5, 2, 4], device=device)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=7, least=2)
    plan = plan_decode(slots, lengths, config, num_rows=scalar(4, device))
    tiles = [2, 22, 4, 1, 0]
    firsts = [sum(tiles[:i]) for i in range(6)]
    assert plan.firsts.tolist() == firsts
    share = int(plan.share)
    assert share == 5  # 29 tiles, 7 programs
    assert plan.ends.tolist() == [64, 700, 128, 1, 0]
    for program, row in enumerate(plan.owners.tolist()):
        if program * share < firsts[-1]:
            assert firsts[row] <= program * share < firsts[row + 1]
