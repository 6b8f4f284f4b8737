"""Prompt lookup: a step's tokens into the texts of its rows, and what followed their newest ones before,
there or in other answers.

These are two kernels: nobody may read another slot's answer while it is written, when the owner and the
tokens of a block may be of two requests.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, launch_options, pow2
from gpu.sample.rows import DraftSamples
from gpu.state.history import (
    CELLS,
    EXPECTED,
    FRESH,
    LEAST,
    NAMESPACE,
    NO_TOKEN,
    RETRY,
    SERVED,
    SOURCE,
    UNIT,
    WAITED,
    WEIGHT,
    History,
)
from gpu.state.served import BLOCK, FACTORS, SIZES, TAIL
from gpu.state.tables import SlotTables, row_of

_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))
_LIMIT: tl.constexpr = tl.constexpr(row_of("limit"))
_MAX_DRAFTS: tl.constexpr = tl.constexpr(row_of("max_drafts"))
_CELLS: tl.constexpr = tl.constexpr(CELLS)
_EXPECTED: tl.constexpr = tl.constexpr(EXPECTED)
_FRESH: tl.constexpr = tl.constexpr(FRESH)
_NAMESPACE: tl.constexpr = tl.constexpr(NAMESPACE)
_NO_TOKEN: tl.constexpr = tl.constexpr(NO_TOKEN)
_SERVED: tl.constexpr = tl.constexpr(SERVED)
_SOURCE: tl.constexpr = tl.constexpr(SOURCE)
_WAITED: tl.constexpr = tl.constexpr(WAITED)
_UNIT: tl.constexpr = tl.constexpr(UNIT)
_WEIGHT: tl.constexpr = tl.constexpr(WEIGHT)
_LEAST: tl.constexpr = tl.constexpr(LEAST)
_RETRY: tl.constexpr = tl.constexpr(RETRY)
_OWNED: tl.constexpr = tl.constexpr(BLOCK)
_TAIL: tl.constexpr = tl.constexpr(TAIL)
_MORE: tl.constexpr = tl.constexpr(SIZES[0])
_FEWER: tl.constexpr = tl.constexpr(SIZES[1])
_FACTOR: tl.constexpr = tl.constexpr(FACTORS[0])
_LAST_FACTOR: tl.constexpr = tl.constexpr(FACTORS[1])

_BLOCK = 2048
"""Cells that a program compares at a time, at most."""


@jit
def _wanted(state: tl.tensor, accepted: tl.tensor, given: tl.tensor, MOST: tl.constexpr) -> tl.tensor:
    """Count what became of a step's drafts from one source. Returns how many the row is to have next. Has a
    barrier."""
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
def _namespace(state: tl.tensor) -> tl.tensor:
    """The namespace of a slot, int64, and its halves uint32."""
    low, high = tl.load(state + _NAMESPACE), tl.load(state + _NAMESPACE + 1)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    whole = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return whole.to(tl.int64, bitcast=True), low, high


@jit
def _bucket(
    ring: tl.tensor,
    end: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    SIZE: tl.constexpr,
    RING: tl.constexpr,
    BUCKETS: tl.constexpr,
) -> tl.tensor:
    """The bucket of the SIZE tokens up to cell `end` of a ring, in the namespace of these halves."""
    found = end.to(tl.uint32) * 0 + low
    for back in tl.static_range(SIZE):
        # Cells that others own are read too where an answer begins: no reader believes such a place.
        token = tl.load(ring + (end - back) % RING)
        found = (found ^ token.to(tl.uint32, bitcast=True)) * tl.full([], _FACTOR, tl.uint32)
    found ^= found >> 15
    found = (found ^ high) * tl.full([], _LAST_FACTOR, tl.uint32)
    found ^= found >> 15
    return (found & (BUCKETS - 1)).to(tl.int32)


@jit
def _serve(
    words: tl.tensor,
    columns: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    sampling: tl.tensor,
    before: tl.tensor,
    chosen: tl.tensor,
    tokens: tl.tensor,
    owners: tl.tensor,
    places: tl.tensor,
    stride: int,
    column: int,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BUCKETS: tl.constexpr,
    ENDS: tl.constexpr,
    CELLS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    row, rows = tl.program_id(0), tl.load(sampling)
    if row >= rows:
        return
    slot, first = tl.load(slots + row), tl.load(positions + row)
    ring = words + slot.to(tl.int64) * stride
    state = ring + WIDTH
    namespace, low, high = _namespace(state)
    count = tl.load(columns + _LENGTH * column + slot) - first + 1
    if (namespace == 0) | (count <= 0):
        return
    ahead = tl.load(before + row)
    at, fresh = tl.load(state + _CELLS), tl.load(state + _FRESH)
    at = tl.where(fresh > 0, (at + _OWNED - 1) // _OWNED * _OWNED, at)
    tail = tl.where(fresh > 0, tl.minimum(first, _TAIL), 0)
    stop = at + tail + count
    j = tl.arange(0, CELLS)
    known = tl.load(ring + ((first - tail + j) & (WIDTH - 1)), mask=j < tail, other=_NO_TOKEN)
    i = j - tail
    mine = (i >= 0) & (i < count)
    made = tl.load(chosen + tl.where(i > 0, rows + ahead + i - 1, row), mask=mine, other=0)
    token = tl.where(mine, tl.maximum(made, 0).to(tl.int32), known)
    cell = (at + j) % RING
    live = at + j < (stop + _OWNED - 1) // _OWNED * _OWNED
    answers = tokens + slot.to(tl.int64) * RING
    tl.store(answers + cell, token, mask=live)
    tl.store(owners + slot.to(tl.int64) * (RING // _OWNED) + cell // _OWNED, namespace, mask=live)
    tl.debug_barrier()  # loads of what other threads stored, and stores of what all have loaded
    tl.store(state + _CELLS, stop % RING)
    tl.store(state + _FRESH, 0)
    e = tl.arange(0, ENDS)
    end, mine = stop - count - 1 + e + RING, e < count
    place = slot * RING + end % RING
    more = _bucket(answers, end, low, high, _MORE, RING, BUCKETS)
    tl.store(places + more, place, mask=mine)
    fewer = _bucket(answers, end, low, high, _FEWER, RING, BUCKETS)
    tl.store(places + BUCKETS + fewer, place, mask=mine)


@jit
def _find(
    ring: tl.tensor,
    last: tl.tensor,
    tokens: tl.tensor,
    owners: tl.tensor,
    places: tl.tensor,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BUCKETS: tl.constexpr,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    SEEN: tl.constexpr,
) -> tl.tensor:
    """The place of the SIZE newest tokens, as a cell of the flat `tokens`, and how many may be drafted from
    behind it: 0 or less where there is none."""
    namespace, low, high = _namespace(ring + WIDTH)
    known = (namespace != 0) & (last + 1 >= SIZE)
    place = tl.load(places + _bucket(ring, last + WIDTH, low, high, SIZE, WIDTH, BUCKETS))
    j = tl.arange(0, SEEN)
    cells = place // RING * RING + (place % RING + RING + 1 - SIZE + j) % RING
    there = tl.load(tokens + cells)
    newest = tl.load(ring + (last + WIDTH + 1 - SIZE + j) % WIDTH, mask=j < SIZE, other=0)
    good = tl.where(j < SIZE, there == newest, (there >= 0) & (j < SIZE + MOST))
    good &= (tl.load(owners + cells // _OWNED) == namespace) & known
    return place, tl.min(tl.where(good, SEEN, j)) - SIZE


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
    none; and its length. The ring has `known` tokens. The length counts first, then the distance."""
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
    top = tl.max(best)
    return WIDTH - top % WIDTH, top // WIDTH


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
    proposes: tl.tensor,
    tokens: tl.tensor | None,
    owners: tl.tensor | None,
    places: tl.tensor | None,
    stride: int,
    column: int,
    DRAFTS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BUCKETS: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    SEEN: tl.constexpr,
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
    state = ring + WIDTH
    source = tl.load(state + _SOURCE)
    wanted = tl.minimum(room, _wanted(state, last - first, tl.where(source > 0, 0, given), MOST))
    others = wanted * 0
    if tokens is not None:
        theirs = tl.where(source > 0, given, 0)
        others = tl.minimum(room, _wanted(state + _SERVED, last - first, theirs, MOST))
    if tl.load(proposes) == 0:  # a text is stored behind every step, but not always searched
        if tokens is not None:
            tl.store(state + _SOURCE, 0)
        tl.store(out, 0)
        return
    # Behind a barrier: the search reads the tokens just stored.
    known = tl.where(tl.maximum(wanted, others) > 0, tl.minimum(last + 1, WIDTH), 0)
    period, size = _last_match(ring, last, known, WIDTH, LONGEST, SHORTEST, BLOCK)
    count = tl.where(period < WIDTH, wanted, 0)
    copied = tl.load(ring + ((last - period + 1 + j % period) & (WIDTH - 1)), mask=j < count, other=0)
    if tokens is not None:
        # Neither waits for the other: their loads overlap.
        place, length = _find(ring, last, tokens, owners, places, WIDTH, RING, BUCKETS, _MORE, MOST, SEEN)
        fewer, behind = _find(
            ring, last, tokens, owners, places + BUCKETS, WIDTH, RING, BUCKETS, _FEWER, MOST, SEEN
        )
        found = tl.where(length > 0, _MORE, _FEWER)
        place, length = tl.where(length > 0, place, fewer), tl.where(length > 0, length, behind)
        taken = (others > 0) & (length > 0) & (found > size)
        count = tl.where(taken, tl.minimum(others, length), count)
        cells = place // RING * RING + (place % RING + 1 + j) % RING
        copied = tl.where(taken, tl.load(tokens + cells, mask=j < count, other=0), copied)
        tl.store(state + _SOURCE, tl.where(taken, _SERVED, 0))
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
    width, most, served = history.width, history.most, history.served
    steps = slots, positions, drafts.rows, drafts.before, chosen
    strides = history.words.stride(0), tables.words.stride(0)
    sizes = {"WIDTH": width, "RING": 1, "BUCKETS": 1}
    if served is not None:
        sizes = {"WIDTH": width, "RING": served.width, "BUCKETS": served.places.shape[1]}
        ends = tables.most_drafts + 1
        cells = pow2(TAIL + ends + BLOCK - 1)
        _serve[(rows,)](
            history.words, tables.words, *steps, *served, *strides,
            **sizes, ENDS=pow2(ends), CELLS=cells, **launch_options(pdl, 1),
        )  # fmt: skip
    block = min(width, _BLOCK)
    _look_up[(rows,)](
        history.words, tables.words, tables.drafts, *steps, drafts.proposes, *(served or (None,) * 3),
        *strides,
        DRAFTS=tables.most_drafts,
        MOST=most,
        **sizes,
        LONGEST=history.longest,
        SHORTEST=history.shortest,
        BLOCK=block,
        LANES=pow2(tables.most_drafts + 1),
        SEEN=pow2(TAIL + most),
        **launch_options(pdl, max(block // 256, 1)),
    )  # fmt: skip
