"""Packed keys: when a step's keys are packed, and that what lies there is what their pages hold, then
zeros."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.inputs import Heads, chunks, pages
from gpu.kernels.attention.kv_packing import pack, plan_packing

TILE = 32


@pytest.mark.parametrize(
    ("live", "room", "pairs_per_key", "expected"),
    [
        (3, 288, 20, [0, 64, 224]),  # each at a multiple of a tile
        (3, 287, 20, [-1, -1, -1]),
        (2, 224, 20, [0, 64, -1]),
        (0, 288, 20, [-1, -1, -1]),
        (3, 288, 26, [0, 64, 224]),  # 40 * 20 + 30 * 115 + 64 * 32 pairs of 234 keys
        (3, 288, 27, [-1, -1, -1]),
    ],
)
def test_all_are_packed_where_there_is_room_and_it_pays(
    live: int, room: int, pairs_per_key: float, expected: list[int], device: torch.device
) -> None:
    sizes = [(0, 40), (100, 30), (0, 64)]
    kept = pages([sum(size) for size in sizes], 16, Heads(1, 1, 16), torch.float32, device)
    cut = chunks(sizes, kept, 3, device)
    found = plan_packing(cut.step(live), pairs_per_key, room, TILE)
    assert found.places.tolist() == [*expected, -1]
    assert found.left.tolist() == [live if expected[0] < 0 else 0]


@pytest.mark.parametrize(
    ("heads", "page_size"), [(Heads(1, 2, 16), 16), (Heads(1, 3, 24), 1), (Heads(1, 8, 128), 64)]
)
def test_packed_keys_are_those_of_the_pages(
    heads: Heads, page_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    sizes = [(0, 40), (100, 3), (17, 50)]
    kept = pages([sum(size) for size in sizes], page_size, heads, dtype, device)
    cut = chunks(sizes, kept, 2, device)
    packed = plan_packing(cut.step(3), 0, 320, TILE).places
    assert packed.tolist() == [0, 64, 192, -1]
    out = tuple(torch.full((320, heads.kv, heads.dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    pack((kept.k, kept.v), (out[0], out[1]), packed, cut.step(3), kept.table, page_size, TILE)
    for slot, first, keys in zip(kept.slots, packed.tolist(), (40, 103, 67), strict=False):
        at = torch.arange(keys, device=device)
        where = kept.table[slot, at // page_size].long() * page_size + at % page_size
        end = first + -(-keys // TILE) * TILE
        for side, whole in zip(out, (kept.k, kept.v), strict=True):
            assert torch.equal(side[first : first + keys], whole[where])
            assert (side[first + keys : end] == 0).all()
    assert all((side[288:] == 7.0).all() for side in out)  # nobody's


def test_packed_keys_of_float8_pages_are_scaled(device: torch.device, dtype: torch.dtype) -> None:
    kept = pages([50], 16, Heads(1, 2, 16), dtype, device)
    cut = chunks([(10, 40)], kept, 1, device)
    packed = plan_packing(cut.step(1), 0, 64, TILE).places
    cache = kept.k.nan_to_num(0.0).to(torch.float8_e4m3fn), kept.v.nan_to_num(0.0).to(torch.float8_e4m3fn)
    out = tuple(torch.full((64, 2, 16), 7.0, dtype=dtype, device=device) for _ in range(2))
    pack(cache, (out[0], out[1]), packed, cut.step(1), kept.table, 16, TILE, scales=(0.5, 3.0))
    at = torch.arange(50, device=device)
    where = kept.table[kept.slots[0], at // 16].long() * 16 + at % 16
    for side, whole, scale in zip(out, cache, (0.5, 3.0), strict=True):
        assert torch.equal(side[:50], (whole.float() * scale).to(dtype)[where])
        assert (side[50:] == 0).all()
