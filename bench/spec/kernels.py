"""`bench.spec.simulate.Force` on a GPU."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from bench.spec import simulate
from gpu.kernels.jit import begin, cdiv, jit, launch_options
from gpu.sample.rows import Rows

_SPAN = 128
_MARK: tl.constexpr = tl.constexpr(simulate.MARK)


@jit
def _force(
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    before: tl.tensor,
    drafts: tl.tensor,
    seeds: tl.tensor,
    DRAFTS: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    own = tl.load(rows)
    i = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    live = i < own
    slot = tl.load(slots + i, mask=live, other=0)
    position = tl.load(positions + i, mask=live, other=0)
    ahead = tl.load(before + i, mask=live, other=0)
    given = tl.load(before + i + 1, mask=live, other=0) - ahead
    seed = tl.load(seeds + slot, mask=live, other=0)
    live &= (seed >> 48) == _MARK
    switch = (seed >> 16) & 0xFFFFFFFF
    level = tl.where(position.to(tl.int64) < switch, seed & 255, (seed >> 8) & 255).to(tl.int32)
    # The hash of `simulate._part`.
    word = slot.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    word = word ^ (position.to(tl.uint32) * tl.full([], 0x85EBCA6B, tl.uint32))
    word = (word ^ (word >> 15)) * tl.full([], 0x2C1B3C6D, tl.uint32)
    right = (level + (word >> 28).to(tl.int32)) >> 4
    for j in tl.static_range(DRAFTS):
        mine = live & (j < given)
        at = i if j == 0 else own + ahead + j - 1
        sampled = tl.load(tokens + at, mask=mine, other=0).to(tl.int32)
        tl.store(drafts + slot * (DRAFTS + 1) + 1 + j, tl.where(j < right, sampled, sampled ^ 1), mask=mine)


def force(tokens: Tensor, rows: Rows, *, pdl: bool = False) -> None:
    """See `bench.spec.simulate.Force`."""
    assert rows.drafts is not None
    tables = rows.tables
    count = min(len(rows.slots), tables.slots - 1)
    _force[(cdiv(count, _SPAN),)](
        tokens, rows.slots, rows.positions, rows.drafts.rows, rows.drafts.before, tables.drafts, tables.seed,
        DRAFTS=tables.most_drafts, SPAN=_SPAN, **launch_options(pdl, 4),
    )  # fmt: skip
