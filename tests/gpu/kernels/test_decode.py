"""Decode attention over pages against its twin, whatever the lengths and however the work is cut."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from bench.kernels import reference
from bench.kernels.inputs import Heads, error, pages, rope, scalar
from gpu.kernels.attention.decode import decode_workspace, paged_decode
from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.attention.decode_plan import plan_decode
from gpu.kernels.attention.pages import Pages
from gpu.kernels.attention.qk_norm_rope_store import norm_rope_store

WIDE = [5, 1, 130, 64, 2]


@pytest.mark.parametrize("newest", [0, 1])
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
    newest: int,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    kept = pages(lengths, page_size, heads, dtype, device)
    q = torch.randn(len(lengths), heads.q, heads.dim, device=device).to(dtype)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=programs, newest=newest)
    plan = plan_decode(
        kept.slots,
        kept.lengths[kept.slots],
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
        found = paged_decode(q, kept.layer(page_size, scale, cap), plan, space, config, lse=lse)
        assert error(found.view_as(q)[:live], expected[:live]) < tolerance
        assert error(lse[:live], sums[:live]) < tolerance
        assert not lse[live:].any()  # padded rows are left alone
        assert not space.counters.any()


def test_every_tile_has_one_program(device: torch.device) -> None:
    lengths = torch.tensor([64, 700, 128, 1, 65], device=device)
    slots = torch.tensor([3, 1, 5, 2, 4], device=device)
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=7, least=2)
    plan = plan_decode(slots, lengths, config, num_rows=scalar(4, device))
    found: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(5)}
    taken = []
    for program, run in enumerate(plan.runs.tolist()):
        place, count = run[6:]
        assert count <= 0 or run[:6] == plan.segments[place, :6].tolist()
        for _ in range(5):
            if count <= 0:
                break
            row, slot, first, last, start, end, lead, pieces = plan.segments[place].tolist()
            assert (slot, start, end) == (int(slots[row]), 0, int(lengths[row]))
            assert first < last
            assert lead <= place < lead + pieces
            found[row].append((first, last, place))
            taken.append((program, last - first))
            count -= last - first
            place += 1
        assert count <= 0
    assert max(sum(tiles for owner, tiles in taken if owner == program) for program in range(7)) == 5
    for row, tiles in ((0, 2), (1, 22), (2, 4), (3, 1), (4, 0)):  # 29 tiles, 7 programs
        pieces = found[row]
        assert [first for first, _, _ in pieces] == [0, *(last for _, last, _ in pieces)][: len(pieces)]
        assert sum(last - first for first, last, _ in pieces) == tiles
        assert len({place for _, _, place in pieces}) == len(pieces)


def test_a_row_gone_wrong_stays_alone(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """One program does three rows in one loop: the middle one is all NaN."""
    heads, lengths = Heads(4, 2, 16), [40, 70, 33]
    kept = pages(lengths, 16, heads, dtype, device)
    q = torch.randn(3, heads.q, heads.dim, device=device).to(dtype)
    q[1] = float("nan")
    config = DecodeConfig(tile=32, warps=4, stages=2, programs=1)
    plan = plan_decode(kept.slots, kept.lengths[kept.slots], config)
    space = decode_workspace(3, heads.q, heads.kv, heads.dim, config, device)
    cache, scale = (kept.k, kept.v), heads.dim**-0.5
    found = paged_decode(q, kept.layer(16, scale), plan, space, config).view_as(q)
    expected, _ = reference.decode_attention(q, cache, kept.table[kept.slots], lengths, 16, scale)
    assert found[1].isnan().all()
    assert error(found[::2], expected[::2]) < tolerance


@pytest.mark.parametrize("newest", [1, 3, 40])
@pytest.mark.parametrize("window", [0, 37])
def test_first_tiles_loaded_ahead_change_nothing(
    window: int, newest: int, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    """Rows have fewer keys than `newest`, or a last tile of newest keys alone, or a window."""
    heads, lengths = Heads(4, 2, 24), [1, 65, 200, 34]
    kept = pages(lengths, 16, heads, dtype, device)
    q = torch.randn(len(lengths), heads.q, heads.dim, device=device).to(dtype)
    found = []
    for each in (0, newest):
        config = DecodeConfig(tile=32, warps=4, stages=2, programs=5, newest=each)
        plan = plan_decode(kept.slots, kept.lengths[kept.slots], config, window=window)
        space = decode_workspace(len(lengths), heads.q, heads.kv, heads.dim, config, device)
        layer = kept.layer(16, heads.dim**-0.5)
        found.append(paged_decode(q, layer, plan, space, config, window=window))
    assert error(*found) < tolerance  # parts are added up in another order


@pytest.mark.gpu
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("lengths", [[1040], [300, 1, 2050, 64], [16, 17, 128, 129], [9000]], ids=str)
def test_a_dependent_launch_sees_what_the_one_before_stored(lengths: list[int], device: torch.device) -> None:
    """The newest token's K and V, and the queries, come from the kernel that this one starts beside."""
    heads, page, count, dtype = Heads(16, 2, 128), 16, 12, torch.bfloat16
    rows, scale = len(lengths), heads.dim**-0.5
    kept = pages(lengths, page, heads, dtype, device)
    last = kept.lengths[kept.slots] - 1
    where = kept.table[kept.slots, last // page].long() * page + last % page
    width = (heads.q + 2 * heads.kv) * heads.dim
    fused = [torch.randn(rows, width, device=device).to(dtype) for _ in range(count)]
    caches = [(torch.randn_like(kept.k), torch.randn_like(kept.v)) for _ in range(count)]
    turn = rope(rows, heads.dim, dtype, device)
    config = DecodeConfig(tile=64, warps=4, stages=2, programs=32, newest=1)
    plan = plan_decode(kept.slots, last + 1, config)
    space = decode_workspace(rows, heads.q, heads.kv, heads.dim, config, device)

    def layer(i: int, pdl: bool) -> tuple[Tensor, Tensor]:
        into = torch.empty(rows, heads.q * heads.dim, dtype=dtype, device=device)
        q = norm_rope_store(fused[i], caches[i], where, turn, q_out=into, pdl=pdl)
        own = Pages(*caches[i], kept.table, page, scale)
        return q, paged_decode(q, own, plan, space, config, pdl=pdl)

    layer(0, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer(i, True) for i in range(count)]
    for own in fused:
        own.normal_()
    runs = []
    for _ in range(3):
        for k, v in caches:
            k[where], v[where] = float("nan"), float("nan")
        graph.replay()
        runs.append([out.clone() for _, out in found])
        assert not space.counters.any()
    assert all(torch.equal(a, b) for later in runs[1:] for a, b in zip(runs[0], later, strict=True))
    for i, (q, out) in enumerate(found):
        expected, _ = reference.decode_attention(q, caches[i], kept.table[kept.slots], lengths, page, scale)
        assert error(out.view_as(q), expected) < 1e-2
        assert error(out, layer(i, False)[1]) < 1e-2


class Ragged(NamedTuple):
    """Rows as (keys, tokens): a row's last token sees all its keys, the one before it one less."""

    heads: Heads
    page: int
    rows: list[tuple[int, int]]
    queries: int
    programs: int
    least: int = 1
    tile: int = 32
    window: int = 0
    cap: float = 0.0
    skip: int = 0
    dead: int = 0


MANY = [(40, 3), (33, 1), (131, 8), (64, 5), (2, 2), (65, 2), (8, 8), (1, 1)]


@pytest.mark.parametrize(
    "case",
    [
        Ragged(Heads(8, 2, 32), 16, MANY, 8, 4),
        Ragged(Heads(8, 2, 32), 16, MANY, 8, 1),  # one program does all
        Ragged(Heads(8, 2, 32), 16, MANY, 8, 40),  # a tile each
        Ragged(Heads(8, 2, 32), 16, MANY, 8, 7, least=2),
        Ragged(Heads(2, 2, 32), 16, MANY, 8, 5),
        Ragged(Heads(14, 2, 32), 16, MANY, 8, 5),
        Ragged(Heads(8, 1, 32), 64, MANY, 8, 6),
        Ragged(Heads(8, 1, 32), 16, [(n, 1) for n, _ in MANY], 8, 4),  # no drafts at all
        Ragged(Heads(8, 1, 24), 1, MANY, 3, 6),  # rows of several tiles of queries
        Ragged(Heads(8, 1, 64), 16, [(90, 13), (33, 16), (300, 4)], 8, 5),
        Ragged(Heads(8, 1, 32), 16, [(33 + i, 8) for i in range(7)], 8, 9),  # first keys behind a tile's end
        Ragged(Heads(8, 2, 32), 16, MANY, 8, 6, window=9),
        Ragged(Heads(8, 2, 32), 16, [(67, 4), (97, 8), (230, 8)], 8, 7, window=1),
        Ragged(Heads(8, 2, 32), 16, [(67, 4), (97, 8), (230, 8)], 8, 7, window=32),  # begins between queries
        Ragged(Heads(4, 2, 32), 16, MANY, 8, 6, cap=1.5),
        Ragged(Heads(4, 2, 16), 16, [(40, 4), (70, 8), (33, 1), (41, 2)], 8, 3, skip=32),
        Ragged(Heads(8, 2, 32), 16, [(40, 3), (33, 1), (131, 8), (64, 5)], 8, 4, dead=5),
    ],
)
def test_a_row_reads_its_keys_once_for_all_its_tokens(
    case: Ragged, device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    heads, keys = case.heads, [count for count, _ in case.rows]
    kept = pages(keys, case.page, heads, dtype, device)
    row = [i for i, (_, tokens) in enumerate(case.rows) for _ in range(tokens)]
    lengths = [count - tokens + 1 + j for count, tokens in case.rows for j in range(tokens)]
    live, slots = len(row) - case.dead, kept.slots[row]
    q = torch.randn(len(row), heads.q, heads.dim, device=device).to(dtype)
    config = DecodeConfig(case.tile, 4, 2, case.programs, case.least, queries=case.queries)
    plan = plan_decode(
        slots, torch.tensor(lengths, device=device), config,
        longest=max(tokens for _, tokens in case.rows), window=case.window,
        num_rows=scalar(live, device), skip=scalar(case.skip, device) if case.skip else None,
    )  # fmt: skip
    space = decode_workspace(len(row), heads.q, heads.kv, heads.dim, config, device)
    for part in space.parts:
        part.fill_(float("nan"))
    lse, scale = torch.zeros(len(row), heads.q, device=device), heads.dim**-0.5
    expected, sums = reference.decode_attention(
        q, (kept.k, kept.v), kept.table[slots], lengths[:live], case.page, scale,
        cap=case.cap, window=case.window, skip=case.skip,
    )  # fmt: skip
    layer = kept.layer(case.page, scale, case.cap)
    for _ in range(2):  # a second layer finds the counters as the first did
        found = paged_decode(q, layer, plan, space, config, window=case.window, lse=lse).view_as(q)
        for i in range(live):
            assert error(found[i], expected[i]) < tolerance
        assert error(lse[:live], sums[:live]) < tolerance
        assert not lse[live:].any()  # padded rows are left alone
        assert not space.counters.any()


def test_one_token_gone_wrong_stays_alone_in_its_row(
    device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    heads, rows = Heads(4, 2, 16), [(40, 3), (70, 4), (33, 1)]
    kept = pages([count for count, _ in rows], 16, heads, dtype, device)
    row, lengths = [0] * 3 + [1] * 4 + [2], [38, 39, 40, 67, 68, 69, 70, 33]
    q = torch.randn(8, heads.q, heads.dim, device=device).to(dtype)
    q[4] = float("nan")
    config = DecodeConfig(32, 4, 2, 3, queries=4)
    plan = plan_decode(kept.slots[row], torch.tensor(lengths, device=device), config, longest=4)
    space = decode_workspace(8, heads.q, heads.kv, heads.dim, config, device)
    cache, scale = (kept.k, kept.v), heads.dim**-0.5
    found = paged_decode(q, kept.layer(16, scale), plan, space, config).view_as(q)
    expected, _ = reference.decode_attention(q, cache, kept.table[kept.slots[row]], lengths, 16, scale)
    assert found[4].isnan().all()
    assert error(found[[0, 1, 2, 3, 5, 6, 7]], expected[[0, 1, 2, 3, 5, 6, 7]]) < tolerance
