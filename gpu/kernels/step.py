"""The first and the last kernel of a step: a plan into the tables and the view, tokens out to the host.

One program each. A step has at most a few thousand words, and one program needs no order between
programs: what new slots and page writes change is read a barrier later by the rows of the same step.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, jit_loose, options, pow2
from gpu.state.entry import CHUNK, NEW, SAMPLE, TOKEN, WRITE, EntryRing
from gpu.state.tables import WIDE, SlotTables, row_of
from gpu.state.view import StepView

_CHUNK: tl.constexpr = tl.constexpr(CHUNK)
_SAMPLE: tl.constexpr = tl.constexpr(SAMPLE)
_NEW: tl.constexpr = tl.constexpr(NEW)
_WRITE: tl.constexpr = tl.constexpr(WRITE)
_TOKEN: tl.constexpr = tl.constexpr(TOKEN)
_WIDE: tl.constexpr = tl.constexpr(WIDE)
_LAST_TOKEN: tl.constexpr = tl.constexpr(row_of("last_token"))
_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))


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


@jit_loose("n", "d", "c", "s")
def _begin(
    ring: tl.tensor,
    cursor: tl.tensor,
    columns: tl.tensor,
    table: tl.tensor,
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
    stride: int,
    width: int,
    n: int,
    d: int,
    c: int,
    s: int,
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
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    turn = tl.load(cursor)
    entry = ring + (turn % ENTRIES) * WORDS
    tokens, rows, chunks = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    samples, news, writes = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    tl.store(counts, tokens)
    tl.store(counts + 1, rows)
    tl.store(counts + 2, chunks)
    tl.store(counts + 3, samples)
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
    # Padding of either kind: slot 0, position 0, length 1, place 0.
    for first in range(0, d, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < rows
        slot = tl.load(entry + AT_DECODE + i, mask=live, other=0)
        before = tl.load(length + slot, mask=live, other=0)
        tl.store(length + slot, before + 1, mask=live)
        token = tl.load(last_token + slot, mask=live, other=0)
        page = tl.load(table + slot * width + before // PAGE, mask=live, other=0)
        tl.store(ids + i, token, mask=i < d)
        tl.store(positions + i, before, mask=i < d)
        tl.store(kv_slot_mapping + i, page * PAGE + tl.where(live, before % PAGE, 0), mask=i < d)
        tl.store(decode_slots + i, slot, mask=i < d)
        tl.store(decode_lengths + i, before + 1, mask=i < d)
    if MIXED:
        for first in range(0, c, SPAN):
            i = first + tl.arange(0, SPAN)
            live = i < chunks
            at = entry + AT_CHUNKS + i * _CHUNK
            slot = tl.load(at, mask=live, other=0)
            start = tl.load(at + 1, mask=live, other=0)
            row = tl.load(at + 2, mask=live, other=0)
            stop = tl.load(at + 2 + _CHUNK, mask=i + 1 < chunks, other=0)
            stop = tl.where(i + 1 < chunks, stop, tokens)
            tl.store(length + slot, start + stop - row, mask=live)
            tl.store(chunk_slots + i, slot, mask=i < c)
            tl.store(chunk_starts + i, start, mask=i < c)
            tl.store(chunk_firsts + i, tl.where(live, row, tokens), mask=i < c)
        tl.store(chunk_firsts + c, tokens)
        # Behind the decode rows' stores: rows up to d were written above as if they were padding.
        tl.debug_barrier()
        for first in range(0, n, SPAN):
            i = first + tl.arange(0, SPAN)
            live = (i >= rows) & (i < tokens)
            at = entry + AT_TOKENS + (i - rows) * _TOKEN
            token = tl.load(at, mask=live, other=0)
            owner = tl.load(at + 1, mask=live, other=0)
            record = entry + AT_CHUNKS + owner * _CHUNK
            slot = tl.load(record, mask=live, other=0)
            start = tl.load(record + 1, mask=live, other=0)
            row = tl.load(record + 2, mask=live, other=0)
            position = tl.where(live, start + i - row, 0)
            page = tl.load(table + slot * width + position // PAGE, mask=live, other=0)
            mine = (i >= rows) & (i < n)
            tl.store(ids + i, token, mask=mine)
            tl.store(positions + i, position, mask=mine)
            tl.store(kv_slot_mapping + i, page * PAGE + position % PAGE, mask=mine)
    tl.debug_barrier()
    for first in range(0, s, SPAN):
        i = first + tl.arange(0, SPAN)
        live = i < samples
        at = entry + AT_SAMPLES + i * _SAMPLE
        row = tl.load(at, mask=live, other=0)
        slot = tl.load(at + 1, mask=live, other=0)
        position = tl.load(length + slot, mask=live, other=0)
        tl.store(sample_rows + i, row, mask=i < s)
        tl.store(sample_slots + i, slot, mask=i < s)
        tl.store(sample_positions + i, position, mask=i < s)
    tl.store(cursor, turn + 1)


def begin_step(
    ring: EntryRing,
    tables: SlotTables,
    view: StepView,
    samples: tuple[Tensor, Tensor, Tensor],
    *,
    page_size: int,
    pdl: bool = False,
) -> None:
    """Take the next entry: write the tables, gather the view, turn the ring. `samples` are rows, slots and
    positions int32 [s] of the tokens to choose; s at most the view's tokens."""
    words, cursor, at = ring
    rows, slots, positions = samples
    span = 1024 if view.tokens > 256 else 256
    _begin[(1,)](
        words,
        cursor,
        tables.words,
        tables.page_table,
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
        tables.words.stride(0),
        tables.page_table.stride(0),
        view.tokens,
        view.max_decode,
        view.max_chunks,
        len(rows),
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
        SPAN=span,
        PDL=pdl,
        **options(span // 32, pdl=pdl),
    )


@jit_loose("room")
def _emit(
    tokens: tl.tensor,
    cursor: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    stride: int,
    room: int,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    entry = out + ((tl.load(cursor) - 1) % ENTRIES) * stride
    i = tl.arange(0, SPAN)
    live = i < tl.minimum(tl.load(count), room)
    tl.store(entry + i, tl.load(tokens + i, mask=live, other=0).to(tl.int32), mask=live)


def emit(tokens: Tensor, cursor: Tensor, count: Tensor, out: Tensor, *, pdl: bool = False) -> None:
    """Write `tokens` int64 [s], of which `count` int32 [1] are true, to the current entry of `out` int32
    [entries, rows], memory that host and device share. `cursor` has been turned by `begin_step`."""
    span = pow2(out.shape[1])  # of the ring, not of the step: one kernel for all sizes
    _emit[(1,)](
        tokens, cursor, count, out, out.stride(0), len(tokens), ENTRIES=len(out), SPAN=span, PDL=pdl,
        **options(min(max(span // 32, 1), 8), pdl=pdl),
    )  # fmt: skip
