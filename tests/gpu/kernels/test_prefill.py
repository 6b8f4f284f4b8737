"""Attention of prompt chunks over pages against its twin, and the list of work it is given."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bench.kernels import reference
from bench.kernels.inputs import Heads, chunks, error, pages
from gpu.kernels.attention.fa3_schedule import Fa3Schedule, fa3_tiles, schedule_fa3
from gpu.kernels.attention.kv_packing import plan_packing
from gpu.kernels.attention.prefill import paged_prefill
from gpu.kernels.attention.prefill_merge import prefill_space
from gpu.kernels.attention.prefill_plan import PrefillConfig, plan_prefill

SMALL = PrefillConfig(queries=16, tile=16, warps=4, stages=2)


@pytest.mark.parametrize(("ahead", "programs", "least"), [(False, 0, 1), (True, 24, 1)])
@pytest.mark.parametrize(
    ("heads", "page_size", "sizes", "lead", "window", "cap"),
    [
        (Heads(8, 2, 32), 16, [(0, 40), (37, 21), (16, 1)], 3, 0, 0.0),
        (Heads(2, 2, 16), 16, [(0, 65)], 0, 0, 0.0),
        (Heads(3, 1, 24), 1, [(5, 13), (0, 9)], 1, 0, 30.0),  # no power of two anywhere
        (Heads(4, 2, 16), 64, [(70, 30), (0, 64)], 0, 0, 0.0),
        (Heads(4, 1, 16), 16, [(50, 30), (0, 44), (3, 7)], 2, 20, 0.0),
        (Heads(4, 1, 16), 16, [(90, 10)], 2, 3, 5.0),  # windows that begin and end within a tile
        (Heads(32, 1, 16), 16, [(10, 5)], 0, 0, 0.0),  # a token's heads are two blocks
        (Heads(2, 2, 16), 16, [(150, 15), (0, 3), (30, 40)], 1, 0, 0.0),  # of these one part or several
    ],
)
def test_paged_prefill(
    heads: Heads,
    page_size: int,
    sizes: list[tuple[int, int]],
    lead: int,
    window: int,
    cap: float,
    ahead: bool,
    programs: int,
    least: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Keys whole, and cut into parts."""
    config = SMALL._replace(ahead=ahead, programs=programs, least=least)
    kept = pages([start + tokens for start, tokens in sizes], page_size, heads, dtype, device)
    cut = chunks(sizes, kept, lead, device)
    rows = lead + sum(tokens for _, tokens in sizes) + 3
    q = torch.randn(rows, heads.q, heads.dim, device=device).to(dtype)
    q[-3:] = float("nan")
    plan = plan_prefill(cut.step(len(sizes)), rows, heads.q // heads.kv, config)
    scale = heads.dim**-0.5
    space = prefill_space(config, heads.kv, heads.dim, device)
    if space is not None:
        space.out.fill_(float("nan"))  # what another step left there
    layer, found = kept.layer(page_size, scale, cap), []
    for _ in range(2):
        out = torch.full((rows, heads.q * heads.dim), 7.0, dtype=dtype, device=device)
        paged_prefill(q, layer, plan, config, space, window=window, out=out)
        found.append(out)
    assert torch.equal(found[0], found[1])
    own = kept.table[kept.slots]
    expected = reference.prefill_attention(
        q, (kept.k, kept.v), own, cut.true, page_size, scale, cap=cap, window=window
    )
    live = slice(lead, rows - 3)
    assert error(out.view_as(q)[live], expected[live]) < tolerance
    assert (out[:lead] == 7.0).all() and (out[-3:] == 7.0).all()  # rows of no chunk are left alone


@pytest.mark.parametrize("group", [1, 3, 40])
@pytest.mark.parametrize("live", [0, 2, 5])
def test_every_query_is_in_one_block_and_most_keys_come_first(
    group: int, live: int, device: torch.device
) -> None:
    sizes = [(0, 40), (100, 33), (7, 1), (0, 64), (33, 16)]
    kept = pages([sum(size) for size in sizes], 16, Heads(1, 1, 16), torch.float32, device)
    cut = chunks(sizes, kept, 4, device)
    tokens = sum(count for _, count in sizes)
    plan = plan_prefill(cut.step(live), tokens, group, SMALL)
    found = plan.tolist()
    filled = [item for item in found if item[3]]
    assert found[: len(filled)] == filled  # programs behind the list find nothing
    expected = {
        (int(slot), first, start, count, at)
        for slot, (first, start, count) in zip(kept.slots[:live], cut.true, strict=False)
        for at in range(0, count * group, SMALL.queries)
    }
    assert sorted(tuple(item[:5]) for item in filled) == sorted(expected)
    keys = [
        start + min((at + SMALL.queries - 1) // group + 1, count) for _, _, start, count, at, *_ in filled
    ]
    assert keys == sorted(keys, reverse=True)


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("programs", [4, 8, 13, 40, 400])
def test_keys_are_cut_to_fill_the_programs(programs: int, least: int, device: torch.device) -> None:
    """Parts of a block stand side by side, and no other length would do with fewer tiles a part."""
    sizes = [(300, 17), (0, 40), (160, 5), (2, 1)]
    kept = pages([sum(size) for size in sizes], 16, Heads(1, 1, 16), torch.float32, device)
    cut = chunks(sizes, kept, 4, device)
    config = SMALL._replace(programs=programs, least=least)
    plan = plan_prefill(cut.step(len(sizes)), 63, 1, config)
    filled = [item for item in plan.tolist() if item[3]]
    blocks = {(i, at) for i, (_, count) in enumerate(sizes) for at in range(0, count, 16)}
    tiles, counts = [-(-sum(size) // 16) for size in sizes], [-(-count // 16) for _, count in sizes]
    each = next(
        (
            length
            for length in range(least, 21)
            if sum(n * -(-t // length) for n, t in zip(counts, tiles, strict=True)) <= programs
        ),
        max(tiles),
    )
    assert {(chunk, at) for *_, at, chunk, _, _ in filled} == blocks
    assert len(filled) == sum(n * -(-t // each) for n, t in zip(counts, tiles, strict=True))
    for i, (*_, at, chunk, part, parts) in enumerate(filled):
        assert parts == -(-tiles[chunk] // each)
        assert [item[4:7] for item in filled[i - part : i - part + parts]] == [
            [at, chunk, j] for j in range(parts)
        ]


Work = tuple[int, int, int, int, int, int, int]
"""A tile of FA3: number, first row, where its keys begin, queries, keys, head, slot."""


def listed(found: Fa3Schedule, programs: int) -> list[list[Work]]:
    """Tiles that each program is given."""
    tile, row, keys_at, queries, keys, head, run, chunk, same = found.offsets
    assert same == 0 and all(offset % 16 == 0 for offset in found.offsets)
    numbers = found.numbers.tolist()
    runs = numbers[run // 4 :]
    assert len(runs) == programs + 1 and runs[0] == 0
    order = [numbers[at // 4 : at // 4 + runs[-1]] for at in (tile, row, keys_at, queries, keys, head, chunk)]
    work = list(zip(*order, strict=True))
    return [work[a:b] for a, b in pairwise(runs)]


@pytest.mark.parametrize("programs", [3, 7, 100])
@pytest.mark.parametrize("room", [None, 0, 2048])
@pytest.mark.parametrize("live", [0, 2, 5])
def test_fa3_gets_every_tile_of_every_head_once(
    live: int, room: int | None, programs: int, device: torch.device
) -> None:
    sizes, heads, width = [(0, 400), (100, 330), (7, 1), (0, 64), (33, 160)], 3, 11
    kept = pages([sum(size) for size in sizes], 16, Heads(1, 1, 16), torch.float32, device)
    cut = chunks(sizes, kept, 4, device)
    tokens = sum(count for _, count in sizes)
    tiles = fa3_tiles(cut.step(live), tokens, 128)
    packed = None
    if room is not None:
        packed = plan_packing(cut.step(live), 0, room, 128).places
    places = [-1] * len(sizes) if packed is None else packed.tolist()
    assert (places[0] >= 0) == (room == 2048 and live > 0)
    expected = [
        (i, first, int(slot) * width if place < 0 else place, count, start + count, h, int(slot))
        for slot, place, (first, start, count) in zip(kept.slots[:live], places, cut.true, strict=False)
        for i in range(-(-count // 128))
        for h in range(heads)
    ]
    work: list[Work] = []
    for of_packed in [False] if packed is None else [False, True]:
        found = listed(schedule_fa3(tiles, heads, 128, width, programs, packed, of_packed), programs)
        work += [one for part in found for one in part]
        loads = [sum(min(k, k - n + 128 * (i + 1)) for i, _, _, n, k, _, _ in part) for part in found]
        assert max(loads) - min(loads) <= max((k for part in found for *_, k, _, _ in part), default=0)
    assert sorted(work) == sorted(expected)
