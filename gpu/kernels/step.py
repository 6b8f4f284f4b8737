"""The first and the last kernel of a step: a plan into the tables and the view, tokens into the tables and
out to the host.

One program each. A step has at most a few thousand words, and one program needs no order between
programs: what new slots and page writes change is read a barrier later by the rows of the same step.

Decode rows have a token each where the tables have no room for drafts (DRAFTS 0), and else up to DRAFTS more:
in steps of graphs for several tokens of a row (VERIFIES). Other steps take the shorter way of servers without
drafts, so that a server whose drafts do not pay loses nothing.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, jit_loose, options, pow2
from gpu.kernels.lora_rows import lay_out
from gpu.kernels.paths import drafts_beside
from gpu.sample.penalties import Counts
from gpu.sample.rows import COUNT_BITS, DraftSamples, Rows
from gpu.state.entry import CHUNK, NEW, SAMPLE, TOKEN, WRITE, EntryRing
from gpu.state.tables import LEVEL_BITS, LEVELS, ONE, WIDE, SlotTables, row_of
from gpu.state.view import StepView

_CHUNK: tl.constexpr = tl.constexpr(CHUNK)
_SAMPLE: tl.constexpr = tl.constexpr(SAMPLE)
_NEW: tl.constexpr = tl.constexpr(NEW)
_WRITE: tl.constexpr = tl.constexpr(WRITE)
_TOKEN: tl.constexpr = tl.constexpr(TOKEN)
_WIDE: tl.constexpr = tl.constexpr(WIDE)
_ONE: tl.constexpr = tl.constexpr(ONE)
_LEVEL_BITS: tl.constexpr = tl.constexpr(LEVEL_BITS)
_LEVELS: tl.constexpr = tl.constexpr(LEVELS)
_COUNT_BITS: tl.constexpr = tl.constexpr(COUNT_BITS)
_LAST_TOKEN: tl.constexpr = tl.constexpr(row_of("last_token"))
_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))
_MAX_DRAFTS: tl.constexpr = tl.constexpr(row_of("max_drafts"))
_LIMIT: tl.constexpr = tl.constexpr(row_of("limit"))
_COUNT_ROW: tl.constexpr = tl.constexpr(row_of("count_row"))


@jit
def _take_new(
    records: tl.tensor, count: tl.tensor, columns: tl.tensor, stride: int, SPAN: tl.constexpr
) -> None:
    """A word at a time from each record to its column: rows 2 c and 2 c + 1 hold a column of two words, slot
    by slot, and the rows behind them one word each."""
    for first in range(0, count, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < count
        at = records + i * _NEW
        slot = tl.load(at, mask=live, other=0)
        for word in tl.static_range(_NEW - 1):
            value = tl.load(at + 1 + word, mask=live, other=0)
            if word < _WIDE:
                tl.store(columns + (word - word % 2) * stride + slot * 2 + word % 2, value, mask=live)
            else:
                tl.store(columns + word * stride + slot, value, mask=live)


@jit
def _wanted(
    columns: tl.tensor,
    drafts: tl.tensor,
    slot: tl.tensor,
    live: tl.tensor,
    longest: tl.tensor,
    stride: int,
    DRAFTS: tl.constexpr,
) -> tl.tensor:
    """Drafts that each row may have verified by its own limits."""
    before = tl.load(columns + _LENGTH * stride + slot, mask=live, other=0)
    limit = tl.load(columns + _LIMIT * stride + slot, mask=live, other=0)
    most = tl.load(columns + _MAX_DRAFTS * stride + slot, mask=live, other=0)
    ready = tl.minimum(tl.load(drafts + slot * (DRAFTS + 1), mask=live, other=0), most)
    wanted = tl.maximum(tl.minimum(tl.minimum(ready, limit - before - 1), longest - 1), 0)
    return tl.where(live, wanted, 0)


@jit
def _within(
    survival: tl.tensor, slot: tl.tensor, wanted: tl.tensor, places: tl.tensor, DRAFTS: tl.constexpr
) -> tl.tensor:
    """How many of its `wanted` drafts each row has in the first `places` places: those of the highest level
    come first, and within a level a row's earlier drafts."""
    level, count = tl.zeros_like(wanted), tl.zeros_like(wanted)
    for j in tl.static_range(DRAFTS):
        mine = j < wanted
        bits = tl.load(survival + slot * DRAFTS + j, mask=mine, other=0.0).to(tl.int32, bitcast=True)
        below = tl.minimum((_ONE - tl.maximum(bits, 0)) >> _LEVEL_BITS, _LEVELS - 1)
        level = tl.maximum(level, below)
        count += (mine & (level * DRAFTS + j < places)).to(tl.int32)
    return count


@jit
def _divide(
    entry: tl.tensor,
    columns: tl.tensor,
    drafts: tl.tensor,
    survival: tl.tensor,
    stride: int,
    DRAFTS: tl.constexpr,
    AT_DECODE: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """How many places have all their drafts verified, by bisection; and how many drafts are left for the next
    place, which rows take in their order."""
    rows, longest, budget = tl.load(entry + 1), tl.load(entry + 8), tl.load(entry + 9)
    places, taken = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    more = tl.full([], PLACES, tl.int32)  # mostly all fit, which the first look tells
    while more > 0:
        count = tl.full([], 0, tl.int32)
        for first in range(0, rows, SPAN):
            i = first + tl.arange(0, SPAN)
            slot = tl.load(entry + AT_DECODE + i, mask=i < rows, other=0)
            wanted = _wanted(columns, drafts, slot, i < rows, longest, stride, DRAFTS)
            count += tl.sum(_within(survival, slot, wanted, places + more, DRAFTS))
        fits = count <= budget
        taken = tl.where(fits, count, taken)
        places = tl.where(fits, places + more, places)
        more = tl.where(places < PLACES, more // 2, 0)
    return places, budget - taken


@jit
def _take_rows(
    entry: tl.tensor,
    columns: tl.tensor,
    drafts: tl.tensor,
    survival: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    decode_slots: tl.tensor,
    sample_rows: tl.tensor,
    sample_slots: tl.tensor,
    sample_positions: tl.tensor,
    drafts_before: tl.tensor,
    trees: tl.tensor | None,
    ancestors: tl.tensor | None,
    stride: int,
    DRAFTS: tl.constexpr,
    AT_DECODE: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Lay out the queries of rows that may have drafts, as `gpu.step.begin` divides them, and their samples.
    Returns how many tokens they have together."""
    places, left = _divide(entry, columns, drafts, survival, stride, DRAFTS, AT_DECODE, PLACES, SPAN)
    rows, longest = tl.load(entry + 1), tl.load(entry + 8)
    sampling = rows + tl.load(entry + 3)
    tokens = tl.full([], 0, tl.int32)
    for first in range(0, rows, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < rows
        slot = tl.load(entry + AT_DECODE + i, mask=live, other=0)
        before = tl.load(columns + _LENGTH * stride + slot, mask=live, other=0)
        wanted = _wanted(columns, drafts, slot, live, longest, stride, DRAFTS)
        given = _within(survival, slot, wanted, places, DRAFTS)
        next_place = _within(survival, slot, wanted, places + 1, DRAFTS) - given
        given += tl.where(tl.cumsum(next_place) <= left, next_place, 0)
        query = tl.where(live, 1 + given, 0)
        at = tokens + tl.cumsum(query) - query
        tl.store(drafts_before + i, at - i, mask=live)
        for j in tl.static_range(DRAFTS + 1):
            mine = j < query
            if j == 0:
                sample = i
                token = tl.load(columns + _LAST_TOKEN * stride + slot, mask=mine, other=0)
            else:
                sample = sampling + at - i + j - 1
                token = tl.load(drafts + slot * (DRAFTS + 1) + j, mask=mine, other=0)
            tl.store(ids + at + j, token, mask=mine)
            tl.store(positions + at + j, before + j, mask=mine)
            tl.store(decode_slots + at + j, slot, mask=mine)
            tl.store(sample_rows + sample, at + j, mask=mine)
            tl.store(sample_slots + sample, slot, mask=mine)
            behind = before + j + 1
            if trees is not None:
                seen = tl.full([SPAN], -1, tl.int32)
                if j > 0:
                    seen = tl.load(trees + slot * DRAFTS + j - 1, mask=mine, other=-1)
                tl.store(ancestors + at + j, seen, mask=mine)
                behind -= drafts_beside(seen)
            tl.store(sample_positions + sample, behind, mask=mine)
        left -= tl.sum(next_place)
        tokens += tl.sum(query)
    return tokens


@jit
def _count_drafts(
    entry: tl.tensor,
    sampling_rows: tl.tensor,
    drafts_before: tl.tensor,
    proposes: tl.tensor,
    rows: tl.tensor,
    samples: tl.tensor,
    queries: tl.tensor,
    VERIFIES: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Say how many rows sample, whether drafts are proposed behind them, and that all drafts are before the
    samples of prompts; rows with drafts know theirs."""
    tl.store(sampling_rows, rows + samples)
    tl.store(proposes, tl.load(entry + 10))
    first = tl.zeros([], tl.int32)
    if VERIFIES:
        first = rows
    for start in range(first, rows + samples + 1, SPAN):
        i = start + tl.arange(0, SPAN)
        tl.store(drafts_before + i, queries - rows, mask=i <= rows + samples)
    if VERIFIES:  # what the rows wrote is read by others now
        tl.debug_barrier()


@jit_loose("n", "d", "c", "s")
def _begin(
    ring: tl.tensor,
    cursor: tl.tensor,
    columns: tl.tensor,
    table: tl.tensor,
    drafts: tl.tensor,
    survival: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    kv_slot_mapping: tl.tensor,
    decode_slots: tl.tensor,
    decode_lengths: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    common: tl.tensor,
    sample_rows: tl.tensor,
    sample_slots: tl.tensor,
    sample_positions: tl.tensor,
    sampling_rows: tl.tensor,
    drafts_before: tl.tensor,
    proposes: tl.tensor,
    trees: tl.tensor | None,
    ancestors: tl.tensor | None,
    stride: int,
    width: int,
    n: int,
    d: int,
    c: int,
    s: int,
    DRAFTS: tl.constexpr,
    VERIFIES: tl.constexpr,
    MIXED: tl.constexpr,
    PAGE: tl.constexpr,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
    AT_DECODE: tl.constexpr,
    AT_CHUNKS: tl.constexpr,
    AT_SAMPLES: tl.constexpr,
    AT_NEW: tl.constexpr,
    AT_WRITES: tl.constexpr,
    AT_TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    turn = tl.load(cursor)
    entry = ring + (turn % ENTRIES) * WORDS
    known, rows, chunks = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    samples, news, writes = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    tl.store(common, tl.load(entry + 6))
    last_token, length = columns + _LAST_TOKEN * stride, columns + _LENGTH * stride
    _take_new(entry + AT_NEW, news, columns, stride, SPAN)
    for first in range(0, writes, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < writes
        cell = tl.load(entry + AT_WRITES + i * _WRITE, mask=live, other=0)
        page = tl.load(entry + AT_WRITES + i * _WRITE + 1, mask=live, other=0)
        tl.store(table + cell, page, mask=live)
    tl.debug_barrier()
    queries = rows
    if VERIFIES:
        queries = _take_rows(
            entry, columns, drafts, survival, ids, positions, decode_slots, sample_rows, sample_slots,
            sample_positions, drafts_before, trees, ancestors, stride, DRAFTS, AT_DECODE, PLACES, SPAN,
        )  # fmt: skip
    if DRAFTS:
        _count_drafts(entry, sampling_rows, drafts_before, proposes, rows, samples, queries, VERIFIES, SPAN)
    tokens = queries + known
    tl.store(counts, tokens)
    tl.store(counts + 1, queries)
    tl.store(counts + 2, chunks)
    tl.store(counts + 3, queries + samples)
    # Padding of either kind: slot 0, position 0, length 1, place 0.
    for first in range(0, d, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < queries
        if VERIFIES:
            slot = tl.load(decode_slots + i, mask=live, other=0)
            position = tl.load(positions + i, mask=live, other=0)
            token = tl.load(ids + i, mask=live, other=0)
        else:
            slot = tl.load(entry + AT_DECODE + i, mask=live, other=0)
            position = tl.load(length + slot, mask=live, other=0)
            token = tl.load(last_token + slot, mask=live, other=0)
            tl.store(sample_rows + i, i, mask=live)
            tl.store(sample_slots + i, slot, mask=live)
            tl.store(sample_positions + i, position + 1, mask=live)
        stored = live
        if DRAFTS:  # the token of a row at its limit is computed for nobody, and stored in the dump
            stored = live & (position < tl.load(columns + _LIMIT * stride + slot, mask=live, other=0))
            position -= (live & (stored == 0)).to(tl.int32)
        page = tl.load(table + slot * width + position // PAGE, mask=stored, other=0)
        tl.store(ids + i, token, mask=i < d)
        tl.store(kv_slot_mapping + i, page * PAGE + tl.where(stored, position % PAGE, 0), mask=i < d)
        tl.store(decode_slots + i, slot, mask=i < d)
        tl.store(decode_lengths + i, position + 1, mask=i < d)
        if trees is not None:
            seen = tl.full([SPAN], -1, tl.int32)
            if VERIFIES:  # or there are no drafts, and what is there is of an earlier step
                seen = tl.load(ancestors + i, mask=live, other=-1)
            position -= drafts_beside(seen)
            tl.store(ancestors + i, seen, mask=i < d)
        tl.store(positions + i, position, mask=i < d)
    if MIXED:
        for first in range(0, c, SPAN):
            i = first + tl.arange(0, SPAN)
            live = i < chunks
            at = entry + AT_CHUNKS + i * _CHUNK
            slot = tl.load(at, mask=live, other=0)
            start = tl.load(at + 1, mask=live, other=0)
            index = tl.load(at + 2, mask=live, other=0)
            tl.store(chunk_slots + i, slot, mask=i < c)
            tl.store(chunk_starts + i, start, mask=i < c)
            tl.store(chunk_firsts + i, tl.where(live, queries + index, tokens), mask=i < c)
        tl.store(chunk_firsts + c, tokens)
        # Behind the decode rows' stores: tokens up to d were written above as if they were padding.
        tl.debug_barrier()
        for first in range(0, n, SPAN):
            i = first + tl.arange(0, SPAN)
            live = (i >= queries) & (i < tokens)
            at = entry + AT_TOKENS + (i - queries) * _TOKEN
            token = tl.load(at, mask=live, other=0)
            owner = tl.load(at + 1, mask=live, other=0)
            record = entry + AT_CHUNKS + owner * _CHUNK
            slot = tl.load(record, mask=live, other=0)
            start = tl.load(record + 1, mask=live, other=0)
            index = tl.load(record + 2, mask=live, other=0)
            position = tl.where(live, start + i - queries - index, 0)
            page = tl.load(table + slot * width + position // PAGE, mask=live, other=0)
            mine = (i >= queries) & (i < n)
            tl.store(ids + i, token, mask=mine)
            tl.store(positions + i, position, mask=mine)
            tl.store(kv_slot_mapping + i, page * PAGE + position % PAGE, mask=mine)
    for first in range(0, s, SPAN):
        i = first + tl.arange(0, SPAN)
        live = (i >= rows) & (i < rows + samples)
        at = entry + AT_SAMPLES + (i - rows) * _SAMPLE
        index = tl.load(at, mask=live, other=0)
        slot = tl.load(at + 1, mask=live, other=0)
        position = tl.load(at + 2, mask=live, other=0)
        mine = (i >= rows) & (i < s)
        if VERIFIES:
            mine &= live | (i >= queries + samples)
        tl.store(sample_rows + i, tl.where(live, queries + index, 0), mask=mine)
        tl.store(sample_slots + i, slot, mask=mine)
        tl.store(sample_positions + i, position, mask=mine)
    tl.store(cursor, turn + 1)


def begin_step(
    ring: EntryRing,
    tables: SlotTables,
    view: StepView,
    samples: tuple[Tensor, Tensor, Tensor, DraftSamples],
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """See `gpu.step.begin.BeginStep`; `samples` are those of `gpu.step.buffers.Samples`."""
    words, cursor, at = ring
    rows, slots, positions, drafts = samples
    span = 1024 if view.tokens > 256 else 256
    _begin[(1,)](
        words,
        cursor,
        tables.words,
        tables.page_table,
        tables.drafts,
        tables.survival,
        view.counts,
        view.ids,
        view.positions,
        view.kv_slot_mapping,
        view.decode_slots,
        view.decode_lengths,
        view.chunk_slots,
        view.chunk_starts,
        view.chunk_firsts,
        view.common,
        rows,
        slots,
        positions,
        *drafts,
        tables.ancestors,
        view.ancestors,
        tables.words.stride(0),
        tables.page_table.stride(0),
        view.tokens,
        view.max_decode,
        view.max_chunks,
        len(rows),
        DRAFTS=tables.most_drafts,
        VERIFIES=tables.most_drafts > 0 and view.query > 1,
        MIXED=view.max_chunks > 0,
        PAGE=page_size,
        ENTRIES=len(words),
        WORDS=at.words,
        AT_DECODE=at.decode,
        AT_CHUNKS=at.chunks,
        AT_SAMPLES=at.samples,
        AT_NEW=at.new,
        AT_WRITES=at.writes,
        AT_TOKENS=at.tokens,
        PLACES=pow2(LEVELS * tables.most_drafts),
        SPAN=span,
        PDL=pdl,
        **options(span // 32, pdl=pdl),
    )
    if view.adapters is not None:
        lay_out(view, slots, tables.place, *view.adapters, pdl=pdl)


@jit_loose("room")
def _accept(
    tokens: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    samples: tl.tensor,
    rows: tl.tensor,
    before: tl.tensor,
    drafts: tl.tensor,
    trees: tl.tensor | None,
    moved: tl.tensor | None,
    columns: tl.tensor,
    generated: tl.tensor | None,
    seen: tl.tensor | None,
    cursor: tl.tensor,
    out: tl.tensor,
    column: int,
    vocab: int,
    stride: int,
    room: int,
    DRAFTS: tl.constexpr,
    AT_COUNTS: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    entry = out + ((tl.load(cursor) - 1) % ENTRIES) * stride
    i = tl.arange(0, SPAN)
    if DRAFTS:
        sampling = tl.load(rows)
        live = i < sampling
        ahead = tl.load(before + i, mask=live, other=0)
        given = tl.load(before + i + 1, mask=live, other=0) - ahead
    else:
        live = i < tl.minimum(tl.load(samples), room)
    slot = tl.load(slots + i, mask=live, other=0)
    position = tl.load(positions + i, mask=live, other=0)
    token = tl.load(tokens + i, mask=live, other=0).to(tl.int32)
    made, mine, at = token, live, i
    if DRAFTS:
        # A draft is taken while it is what was sampled before it; nothing is of a row at its limit.
        live &= position <= tl.load(columns + _LIMIT * column + slot, mask=live, other=0)
        count = live.to(tl.int32)
        if trees is not None:
            node, path = tl.zeros([SPAN], tl.int32), tl.full([SPAN], -1, tl.int32)
            which = tl.zeros([SPAN], tl.int32)
        for j in tl.static_range(1, DRAFTS + 1):
            more = (count == j) & (j <= given)
            if trees is not None:  # a child of the last one taken sees what that one sees, and itself
                more = live & (j <= given)
                own = tl.load(trees + slot * DRAFTS + j - 1, mask=more, other=0)
                more &= own == ((path << (j - node)) | 1)
            more &= token == tl.load(drafts + slot * (DRAFTS + 1) + j, mask=more, other=-1)
            after = tl.load(tokens + sampling + ahead + j - 1, mask=more, other=0).to(tl.int32)
            token = tl.where(more, after, token)
            if trees is not None:
                # Where it would be in a chain; what lies there has been looked at.
                tl.store(tokens + sampling + ahead + count - 1, after.to(tl.int64), mask=more)
                tl.store(moved + i + ahead + count, j - count, mask=more)
                node, path = tl.where(more, j, node), tl.where(more, own, path)
                which = tl.where(more, which | (1 << (j - 1)), which)
            count += more.to(tl.int32)
        if trees is not None:
            tl.store(entry + AT_COUNTS + ROWS + i, which, mask=i < sampling)
            for j in tl.static_range(DRAFTS + 1):
                rest = (i < sampling) & (j <= given) & ((j >= count) | (j == 0))
                tl.store(moved + i + ahead + j, tl.zeros([SPAN], tl.int32), mask=rest)
            tl.debug_barrier()
        tl.store(entry + AT_COUNTS + i, count | given << _COUNT_BITS, mask=i < sampling)
        at, position = tl.cumsum(count) - count, position + count - 1
    if generated is not None:
        counted = tl.load(columns + _COUNT_ROW * column + slot, mask=live, other=-1).to(tl.int64)
    for j in tl.static_range(DRAFTS + 1):
        if DRAFTS:
            mine = j < count
        if j > 0:
            made = tl.load(tokens + sampling + ahead + j - 1, mask=mine, other=0).to(tl.int32)
        tl.store(entry + at + j, made, mask=mine)
        if generated is not None:
            known = mine & (counted >= 0) & (made >= 0)
            # Added: a row may have taken a token twice.
            tl.atomic_add(generated + counted * vocab + made, tl.full([SPAN], 1, tl.int32), mask=known)
            tl.store(seen + counted * vocab + made, tl.full([SPAN], 1, tl.int1), mask=known)
    tl.store(columns + _LENGTH * column + slot, position, mask=live)
    # The next step embeds the cell, so it must name a row of the table.
    tl.store(columns + _LAST_TOKEN * column + slot, tl.maximum(token, 0), mask=live)


def accept(
    tokens: Tensor,
    rows: Rows,
    cursor: Tensor,
    out: Tensor,
    counts: Counts | None = None,
    *,
    pdl: bool = False,
) -> None:
    """See `gpu.sample.kernels.SamplingKernels.accept`. `out` is memory that host and device share; `cursor`
    has been turned by `begin_step`."""
    tables, most = rows.tables, rows.tables.slots - 1
    generated, seen = (None, None) if counts is None else counts.tables
    span = pow2(most)  # of the ring, not of the step: one kernel for all sizes
    _accept[(1,)](
        tokens, rows.slots, rows.positions, rows.live, *(rows.drafts or (None, None))[:2], tables.drafts,
        tables.ancestors, None if rows.paths is None else rows.paths.moved, tables.words, generated, seen,
        cursor, out, tables.words.stride(0), 0 if generated is None else generated.shape[1], out.stride(0),
        len(tokens), DRAFTS=tables.most_drafts, ROWS=most, ENTRIES=len(out), SPAN=span, PDL=pdl,
        AT_COUNTS=out.shape[1] - most * (2 if rows.paths else 1),
        **options(min(max(span // 32, 1), 8), pdl=pdl),
    )  # fmt: skip
