"""Prompt lookup: a step's tokens into the texts of its rows, and what followed their newest ones before."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, pow2
from gpu.sample.rows import DraftSamples
from gpu.state.history import EXPECTED, LEAST, RETRY, UNIT, WAITED, WEIGHT, History
from gpu.state.tables import SlotTables, row_of

_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))
_LIMIT: tl.constexpr = tl.constexpr(row_of("limit"))
_MAX_DRAFTS: tl.constexpr = tl.constexpr(row_of("max_drafts"))
_EXPECTED: tl.constexpr = tl.constexpr(EXPECTED)
_WAITED: tl.constexpr = tl.constexpr(WAITED)
_UNIT: tl.constexpr = tl.constexpr(UNIT)
_WEIGHT: tl.constexpr = tl.constexpr(WEIGHT)
_LEAST: tl.constexpr = tl.constexpr(LEAST)
_RETRY: tl.constexpr = tl.constexpr(RETRY)

_BLOCK = 2048
"""Cells that a program compares at a time, at most."""


@jit
def _wanted(state: tl.tensor, accepted: tl.tensor, given: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Count what became of a step's drafts. Returns how many the row is to have next. Has a barrier."""
    expected, waited = tl.load(state + _EXPECTED), tl.load(state + _WAITED)
    worth = tl.where(accepted < given, accepted, tl.minimum(2 * given, MOST))
    after = expected + worth * (_UNIT // _WEIGHT) - expected // _WEIGHT
    expected = tl.where(given > 0, after, expected)
    waited = tl.where(given > 0, 0, waited + 1)
    tl.debug_barrier()  # one warp stores what all have loaded
    tl.store(state + _EXPECTED, expected)
    tl.store(state + _WAITED, waited)
    return tl.where(expected >= _LEAST, (expected + _UNIT - 1) // _UNIT, (waited >= _RETRY).to(tl.int32))


@jit
def _last_match(
    ring: tl.tensor,
    last: tl.tensor,
    known: tl.tensor,
    WIDTH: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How far before position `last` the best match of the tokens up to there ends, WIDTH where there is
    none. The ring has `known` tokens. The length of a match counts first, then its distance."""
    best = tl.zeros([BLOCK], tl.int32)
    for first in range(1, known, BLOCK):
        distance = first + tl.arange(0, BLOCK)
        matched = tl.zeros([BLOCK], tl.int32)
        alive = distance < known
        for back in tl.static_range(LONGEST):
            there = distance + back < known
            before = tl.load(ring + ((last - back - distance) & (WIDTH - 1)), mask=there, other=0)
            alive &= there & (before == tl.load(ring + ((last - back) & (WIDTH - 1))))
            matched += alive.to(tl.int32)
        score = tl.where(matched >= SHORTEST, matched * WIDTH + WIDTH - distance, 0)
        best = tl.maximum(best, score)
    return WIDTH - tl.max(best) % WIDTH


@jit
def _look_up(
    words: tl.tensor,
    columns: tl.tensor,
    drafts: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    sampling: tl.tensor,
    before: tl.tensor,
    chosen: tl.tensor,
    stride: int,
    column: int,
    DRAFTS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    row, rows = tl.program_id(0), tl.load(sampling)
    if row >= rows:
        return
    slot, first = tl.load(slots + row), tl.load(positions + row)
    last = tl.load(columns + _LENGTH * column + slot)
    out = drafts + slot * (DRAFTS + 1)
    ahead = tl.load(before + row)
    given = tl.load(before + row + 1) - ahead
    ring = words + slot.to(tl.int64) * stride
    j = tl.arange(0, LANES)
    mine = first + j <= last
    token = tl.load(chosen + tl.where(j > 0, rows + ahead + j - 1, row), mask=mine, other=0)
    tl.store(ring + ((first + j) & (WIDTH - 1)), tl.maximum(token, 0).to(tl.int32), mask=mine)
    room = tl.load(columns + _LIMIT * column + slot) - last - 1
    room = tl.minimum(tl.minimum(room, tl.load(columns + _MAX_DRAFTS * column + slot)), MOST)
    wanted = tl.minimum(room, _wanted(ring + WIDTH, last - first, given, MOST))
    # Behind a barrier: the search reads the tokens just stored.
    known = tl.where(wanted > 0, tl.minimum(last + 1, WIDTH), 0)
    period = _last_match(ring, last, known, WIDTH, LONGEST, SHORTEST, BLOCK)
    count = tl.where(period < WIDTH, wanted, 0)
    copied = tl.load(ring + ((last - period + 1 + j % period) & (WIDTH - 1)), mask=j < count, other=0)
    tl.store(out + 1 + j, copied, mask=j < count)
    tl.store(out, tl.maximum(count, 0))


def look_up(
    history: History,
    tables: SlotTables,
    samples: tuple[Tensor, Tensor, Tensor, DraftSamples],
    chosen: Tensor,
    rows: int,
    *,
    pdl: bool = False,
) -> None:
    """See `gpu.draft.ngram.LookUp`; `samples` are those of `gpu.step.buffers.Samples`.

    A program per row reads the row's ring once, four bytes a token: 32 KiB of 8,192 tokens, 17 MB of 512 such
    rows. That is 4 us at 4.3 TB/s if none of it is in the L2 cache; the loads of `history.longest` tokens for
    each hit the L1 cache, and eight take as long again or twice that. By reasoning, not measured.
    """
    _, slots, positions, drafts = samples
    width = history.width
    block = min(width, _BLOCK)
    _look_up[(rows,)](
        history.words,
        tables.words,
        tables.drafts,
        slots,
        positions,
        *drafts,
        chosen,
        history.words.stride(0),
        tables.words.stride(0),
        DRAFTS=tables.most_drafts,
        MOST=history.most,
        WIDTH=width,
        LONGEST=history.longest,
        SHORTEST=history.shortest,
        BLOCK=block,
        LANES=pow2(tables.most_drafts + 1),
        **launch_options(pdl, max(block // 256, 1)),
    )
