"""How a step's decode work is divided: see `gpu.kernels.attention.decode`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.decode_config import DecodeConfig
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, pow2, store_record, true_rows
from gpu.kernels.paths import drafts_beside

FIELDS: tl.constexpr = tl.constexpr(8)
"""int32 per segment: one sector."""


class DecodePlan(NamedTuple):
    """A step's division of work, for `rows` rows and `programs` programs per KV head.

    runs      int32 [programs, 8]  the first six fields of each program's first segment, its place, and
              how many tiles the program takes; where that is 0 the rest is arbitrary
    segments  int32 [programs + rows, 8]  row, slot, its first tile of the row's, the tile behind its last,
              first key position that the row attends to, its length, the row's first segment, and how
              many it has; arbitrary where there is no segment
    rows      int32 [rows, 2]  the place of a row's first partial result, and how many it has: 0 without keys.
              Arbitrary where several tokens share a pass

    Where several tokens share a pass, `rows` are tokens, and a segment is of up to `queries` of a row: its
    row is the first one's index times `queries` plus how many follow it, and in place of the row's first
    segment stands the place of that one's results in `Workspace.parts`.
    """

    runs: Tensor
    segments: Tensor
    rows: Tensor


@jit
def _pick(own: tl.tensor, values: tl.tensor) -> tl.tensor:
    """The `values` [n] that `own` [m, n] marks, at most one in each row: [m], 0 where there is none."""
    return tl.sum(tl.where(own, values[None, :], 0), 1)


@jit_loose("rows", "programs", "longest")
def _plan(
    slots: tl.tensor,
    lengths: tl.tensor,
    num_rows: tl.tensor,
    skip: tl.tensor,
    ancestors: tl.tensor | None,
    plan: DecodePlan,
    rows: int,
    programs: int,
    longest: tl.tensor,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    r = tl.arange(0, BLOCK)
    p = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    begin(PDL)
    n = true_rows(num_rows, rows)
    live = r < n
    slot = tl.load(slots + r, mask=live, other=0).to(tl.int32)
    end = tl.load(lengths + r, mask=live, other=0).to(tl.int32)
    start = tl.zeros([BLOCK], tl.int32)
    if skip is not None:
        start += tl.load(skip).to(tl.int32)
    if WINDOW > 0:
        oldest = end - WINDOW
        if ancestors is not None:  # a tree's tokens stand up to 31 positions before their keys
            if QUERIES > 1:
                oldest -= 31
            else:
                oldest -= drafts_beside(tl.load(ancestors + r, mask=live, other=-1))
        start = tl.maximum(start, oldest)
    if QUERIES > 1:
        # The first of every QUERIES tokens of a row stands for all: it begins where its own keys do and ends
        # where the last one's do. The others have no keys.
        before = tl.zeros([BLOCK], tl.int32)
        behind = tl.zeros([BLOCK], tl.int32)
        for i in range(1, longest):
            before += (tl.load(slots + r - i, mask=live & (r >= i), other=-1) == slot).to(tl.int32)
            behind += (tl.load(slots + r + i, mask=r + i < n, other=-1) == slot).to(tl.int32)
        queries = tl.where(live & (before % QUERIES == 0), tl.minimum(behind + 1, QUERIES), 0)
        end = tl.where(queries > 0, end + queries - 1, 0)
    start = tl.minimum(start, end)
    tiles = tl.where(start < end, (end + TILE - 1) // TILE - start // TILE, 0)
    upto = tl.cumsum(tiles, 0)
    first = upto - tiles
    total = tl.sum(tiles, 0)
    each = tl.maximum((total + programs - 1) // programs, LEAST)
    # Rows without keys have no segments and no rank.
    busy = tiles > 0
    rank = tl.cumsum(busy.to(tl.int32), 0) - 1
    head = rank + first // each
    tail = rank + (upto - 1) // each
    own = busy[None, :] & (head[None, :] <= p[:, None]) & (p[:, None] <= tail[None, :])
    known = tl.sum(own.to(tl.int32), 1) > 0
    c = p - _pick(own, rank)
    own_first = tl.maximum(c * each, _pick(own, first))
    own_last = tl.minimum((c + 1) * each, _pick(own, upto))
    shift = _pick(own, start // TILE - first)
    base, pieces = head, tl.where(busy, tail - head + 1, 0)
    if QUERIES > 1:
        base = first // each * QUERIES + r
        r = r * QUERIES + queries - 1
    else:
        store_record(plan.rows + r * 2, (head, pieces), (r < rows) & (tl.program_id(0) == 0))
    own_row, own_slot = _pick(own, r), _pick(own, slot)
    own_start, own_end = _pick(own, start), _pick(own, end)
    low, high = own_first + shift, own_last + shift
    at, count = plan.segments + p * FIELDS, _pick(own, pieces)
    store_record(at, (own_row, own_slot, low, high, own_start, own_end, _pick(own, base), count), known)
    # A program's run is written with its first segment; programs without work get a count of 0 below.
    leads = known & (own_first == c * each)
    at, count = plan.runs + c * FIELDS, tl.minimum(each, total - c * each)
    store_record(at, (own_row, own_slot, low, high, own_start, own_end, p, count), leads)
    idle = (p < programs) & (p * each >= total)
    tl.store(plan.runs + p * FIELDS + 7, tl.zeros([SPAN], tl.int32), mask=idle)


def plan_decode(
    slots: Tensor,
    lengths: Tensor,
    config: DecodeConfig,
    *,
    longest: int = 1,
    window: int = 0,
    num_rows: Tensor | None = None,
    skip: Tensor | None = None,
    ancestors: Tensor | None = None,
    pdl: bool = False,
) -> DecodePlan:
    """Divide a step's decode work.

    slots     integer [rows]  slot of each row
    lengths   integer [rows]  its tokens, this step's included
    longest   the most tokens of a row, where several share a pass: rows are then tokens
    window    positions a row sees, 0 for all
    num_rows  int32 [1] on the device; rows from there on have no work
    skip      integer [1] on the device: leading keys that are attended to elsewhere (cascade); less
              than every live row's length
    ancestors see `StepView.ancestors`
    """
    rows, device = len(slots), slots.device
    places = rows + config.programs
    plan = DecodePlan(
        torch.empty(config.programs, FIELDS.value, dtype=torch.int32, device=device),
        torch.empty(places, FIELDS.value, dtype=torch.int32, device=device),
        torch.empty(rows, 2, dtype=torch.int32, device=device),
    )
    block = max(pow2(rows), 64)  # one kernel for all small graphs: it is compiled anew for each size
    span = min(max(2048 // block, 1), 16)  # times rows: what a program holds in registers
    _plan[(cdiv(places, span),)](
        slots,
        lengths,
        num_rows,
        skip,
        ancestors,
        plan,
        rows,
        config.programs,
        longest if config.queries > 1 else None,
        WINDOW=window,
        TILE=config.tile,
        LEAST=config.least,
        QUERIES=config.queries,
        BLOCK=block,
        SPAN=span,
        **launch_options(pdl, 4),
    )
    return plan
