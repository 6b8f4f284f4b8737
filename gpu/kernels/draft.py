"""Prompt lookup: a step's tokens into the texts of its rows, and what followed their newest ones before."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, pow2
from gpu.sample.rows import DraftSamples
from gpu.state.history import AVERAGE, LEAST, RETRY, UNIT, WAITED, WEIGHT, History
from gpu.state.tables import SlotTables, row_of

_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))
_LIMIT: tl.constexpr = tl.constexpr(row_of("limit"))
_MAX_DRAFTS: tl.constexpr = tl.constexpr(row_of("max_drafts"))
_AVERAGE: tl.constexpr = tl.constexpr(AVERAGE)
_WAITED: tl.constexpr = tl.constexpr(WAITED)
_UNIT: tl.constexpr = tl.constexpr(UNIT)
_WEIGHT: tl.constexpr = tl.constexpr(WEIGHT)
_LEAST: tl.constexpr = tl.constexpr(LEAST)
_RETRY: tl.constexpr = tl.constexpr(RETRY)

_BLOCK = 2048
"""Cells that a program compares at a time, at most."""


@jit
def _pays(state: tl.tensor, accepted: tl.tensor, given: tl.tensor) -> tl.tensor:
    """Take what became of the step's drafts into the row's average. Whether it is to have drafts again."""
    average, waited = tl.load(state + _AVERAGE), tl.load(state + _WAITED)
    share = _UNIT // _WEIGHT * accepted // tl.maximum(given, 1)
    average = tl.where(given > 0, average - average // _WEIGHT + share, average)
    waited = tl.where(given > 0, 0, waited + 1)
    tl.store(state + _AVERAGE, average)
    tl.store(state + _WAITED, waited)
    return (average >= _LEAST) | (waited >= _RETRY)


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
    if last < first:
        tl.store(out, 0)
        return
    ahead = tl.load(before + row)
    given = tl.load(before + row + 1) - ahead
    ring = words + slot.to(tl.int64) * stride
    j = tl.arange(0, LANES)
    mine = first + j <= last
    token = tl.load(chosen + tl.where(j > 0, rows + ahead + j - 1, row), mask=mine, other=0)
    tl.store(ring + ((first + j) & (WIDTH - 1)), tl.maximum(token, 0).to(tl.int32), mask=mine)
    wanted = tl.load(columns + _LIMIT * column + slot) - last - 1
    wanted = tl.minimum(tl.minimum(wanted, tl.load(columns + _MAX_DRAFTS * column + slot)), MOST)
    wanted = tl.where(_pays(ring + WIDTH, last - first, given), wanted, 0)
    tl.debug_barrier()
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
    rows. That is 4 us at 4.3 TB/s if none of it is in the L2 cache; the shifted loads of the longer suffixes
    hit the L1 cache and take as long again. By reasoning, not measured.
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
