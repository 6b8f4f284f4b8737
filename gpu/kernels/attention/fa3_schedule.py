"""The schedule that FlashInfer's FA3 prefill reads, written on the device.

Its kernel is as many programs as the device has multiprocessors; each walks its own run of a work list
that lies in device memory: a tile of queries of one query head. FlashInfer makes that list on the host
(`PrefillSM90Plan`), which a captured step cannot wait for. Here it is
`gpu.kernels.attention.prefill_plan.plan_prefill` with the tile that FA3 uses and heads unpacked, dealt out to
and fro: the program with the heaviest tile of a round gets the lightest of the next.

    rank      0 1 2 3 | 4 5 6 7 | 8 9      tiles by keys, most first, every head in turn
    program   0 1 2 3 | 3 2 1 0 | 0 1

Where a step may pack its keys (`gpu.kernels.attention.kv_packing`) there are two lists, and one of them is
empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.prefill_plan import FIELDS, Chunks, PrefillConfig, plan_prefill
from gpu.kernels.jit import begin, cdiv, jit_loose, launch_options, pow2

ARRAYS = 7
"""Arrays of the list: tile, first row, first page-table entry or packed key, queries, keys, head, chunk."""


class Fa3Schedule(NamedTuple):
    """`numbers` int32 holds the arrays, then where each program's run begins; `offsets` says in bytes where,
    in the order of FlashInfer's `PrefillPlanSM90Info`."""

    numbers: Tensor
    offsets: tuple[int, ...]


def fa3_tile(head_dim: int) -> int:
    """Queries per tile of FA3 (`getCTATileSize`)."""
    return 192 if head_dim == 64 else 128


@jit_loose("blocks", "heads", "programs", "width", "room")
def _schedule(
    items: tl.tensor,
    packed: tl.tensor,
    numbers: tl.tensor,
    blocks: int,
    heads: int,
    programs: int,
    width: int,
    room: int,
    OF_PACKED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    b = tl.arange(0, BLOCKS)
    begin(PDL)
    found = tl.load(items + b * FIELDS + 3, mask=b < blocks, other=0) > 0
    if packed is not None:
        found = found & ((tl.load(packed) >= 0) == OF_PACKED)  # one is as the others
    total = tl.sum(found.to(tl.int32), 0) * heads
    rounds = total // programs
    rest = total - rounds * programs
    rank = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    known = rank < total
    turn = rank // programs
    lane = rank - turn * programs
    lane = tl.where(turn % 2 == 0, lane, programs - 1 - lane)
    back = rounds % 2
    at = (
        lane * rounds
        + tl.where(back == 0, tl.minimum(lane, rest), tl.maximum(lane - programs + rest, 0))
        + turn
    )
    item = items + rank // heads * FIELDS
    slot = tl.load(item, mask=known, other=0)
    start = tl.load(item + 2, mask=known, other=0)
    tokens = tl.load(item + 3, mask=known, other=0)
    keys_at = slot * width
    if OF_PACKED:
        keys_at = tl.load(packed + tl.load(item + 5, mask=known, other=0), mask=known, other=0)
    tl.store(numbers + at, tl.load(item + 4, mask=known, other=0) // TILE, mask=known)
    tl.store(numbers + room + at, tl.load(item + 1, mask=known, other=0), mask=known)
    tl.store(numbers + 2 * room + at, keys_at, mask=known)
    tl.store(numbers + 3 * room + at, tokens, mask=known)
    tl.store(numbers + 4 * room + at, start + tokens, mask=known)
    tl.store(numbers + 5 * room + at, rank % heads, mask=known)
    tl.store(numbers + 6 * room + at, slot, mask=known)
    if tl.program_id(0) == 0:
        j = tl.arange(0, LANES)
        more = tl.where(back == 0, tl.minimum(j, rest), tl.maximum(j - programs + rest, 0))
        tl.store(numbers + 7 * room + j, j * rounds + more, mask=j <= programs)


def fa3_tiles(chunks: Chunks, tokens: int, head_dim: int, *, pdl: bool = False) -> Tensor:
    """A step's tiles of queries, those with the most keys first: as `plan_prefill`. The graph has `tokens`
    rows."""
    tile = fa3_tile(head_dim)
    return plan_prefill(chunks, tokens, 1, PrefillConfig(tile, tile, 4, 2), pdl=pdl)


def schedule_fa3(
    tiles: Tensor,
    heads: int,
    head_dim: int,
    table_width: int,
    programs: int,
    packed: Tensor | None = None,
    of_packed: bool = False,
    *,
    pdl: bool = False,
) -> Fa3Schedule:
    """Write a step's schedule.

    tiles        of `fa3_tiles`
    heads        query heads
    table_width  entries between two slots' rows of the page table
    programs     multiprocessors of the device: the grid of FA3
    packed       of `plan_packing`, None where nothing is packed; the schedule is that of the tiles of
                 packed chunks (`of_packed`), or of those that stay in their pages
    """
    blocks = len(tiles)
    room = cdiv(blocks * heads, 4) * 4  # arrays begin at 16 bytes
    numbers = torch.empty(ARRAYS * room + programs + 1, dtype=torch.int32, device=tiles.device)
    span = 256
    _schedule[(cdiv(blocks * heads, span),)](
        tiles,
        packed,
        numbers,
        blocks,
        heads,
        programs,
        table_width,
        room,
        OF_PACKED=of_packed,
        TILE=fa3_tile(head_dim),
        BLOCKS=pow2(blocks),
        SPAN=span,
        LANES=pow2(programs + 1),
        **launch_options(pdl, 4),
    )
    tile, row, keys_at, queries, keys, head, chunk, runs = (4 * room * i for i in range(ARRAYS + 1))
    return Fa3Schedule(numbers, (tile, row, keys_at, queries, keys, head, runs, chunk, 0))
