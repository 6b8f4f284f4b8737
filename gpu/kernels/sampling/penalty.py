"""Penalties over the counts of `gpu.sample.penalties.Counts`, inside a step: start, apply. The step's last
kernel counts (`gpu.kernels.step.accept`)."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, options, padding, pow2
from gpu.kernels.paths import drafts_beside
from gpu.sample.penalties import Counts
from gpu.sample.rows import Paths, Rows
from gpu.state.entry import MARK, NEW, EntryRing
from gpu.state.tables import row_of

BLOCK = 4096
"""Tokens of the vocabulary a program looks at: 20 KiB of counts."""

_MARK: tl.constexpr = tl.constexpr(MARK)
_NEW: tl.constexpr = tl.constexpr(NEW)
_COUNT_ROW: tl.constexpr = tl.constexpr(1 + row_of("count_row"))


@jit
def _clear(
    ring: tl.tensor,
    cursor: tl.tensor,
    generated: tl.tensor,
    seen: tl.tensor,
    vocab: int,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
    AT_NEW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    record = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = ring + (tl.load(cursor) % ENTRIES) * WORDS
    if record < tl.load(entry + 4):
        row = tl.load(entry + AT_NEW + record * _NEW + _COUNT_ROW)
        if row >= 0:
            at = row.to(tl.int64) * vocab + ids
            tl.store(generated + at, tl.zeros([BLOCK], tl.int32), mask=ids < vocab)
            tl.store(seen + at, tl.zeros([BLOCK], tl.int1), mask=ids < vocab)


@jit
def _mark(
    ring: tl.tensor,
    cursor: tl.tensor,
    generated: tl.tensor,
    seen: tl.tensor,
    vocab: int,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
    AT_MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = ring + (tl.load(cursor) % ENTRIES) * WORDS
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < tl.load(entry + 7)
    row = tl.load(entry + AT_MARKS + i * _MARK, mask=live, other=0)
    word = tl.load(entry + AT_MARKS + i * _MARK + 1, mask=live, other=0)
    # A generated token is stored as ~token.
    made = word < 0
    token = tl.where(made, -1 - word, word)
    at = row.to(tl.int64) * vocab + token
    tl.store(seen + at, tl.full([BLOCK], 1, tl.int1), mask=live)
    tl.atomic_add(generated + at, tl.full([BLOCK], 1, tl.int32), mask=live & made)


def start_counts(ring: EntryRing, counts: Counts, *, new_slots: int, marks: int) -> None:
    """Clear the count rows of an entry's new slots, then mark what they have of prompt and output.

    Launched between writing the entry and its step, which alone turns the ring. `new_slots` and `marks` are
    the entry's own counts, rounded up or not: they size the launch.
    """
    words, cursor, at = ring
    generated, seen = counts.tables
    vocab = generated.shape[1]
    block = min(BLOCK, pow2(vocab))
    _clear[(new_slots, cdiv(vocab, block))](
        words, cursor, generated, seen, vocab,
        ENTRIES=len(words), WORDS=at.words, AT_NEW=at.new, BLOCK=block, **options(4),
    )  # fmt: skip
    if marks:
        _mark[(cdiv(marks, 1024),)](
            words, cursor, generated, seen, vocab,
            ENTRIES=len(words), WORDS=at.words, AT_MARKS=at.marks, BLOCK=1024, **options(4),
        )  # fmt: skip


@jit
def _penalise(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    lengths: tl.tensor,
    drafts: tl.tensor,
    sampling: tl.tensor,
    trees: Paths | None,
    count_rows: tl.tensor,
    repetitions: tl.tensor,
    frequencies: tl.tensor,
    presences: tl.tensor,
    generated: tl.tensor,
    seen: tl.tensor,
    num_rows: tl.tensor,
    stride: int,
    vocab: int,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    counted = tl.load(count_rows + slot)
    if counted < 0:
        return
    at = counted.to(tl.int64) * vocab + ids
    inside = ids < vocab
    known = tl.load(seen + at, mask=inside, other=0).to(tl.int1) & inside
    if DRAFTS:  # those before this token are its row's, too
        again = tl.zeros([BLOCK], tl.int32)
        if row >= tl.load(sampling):
            before = tl.load(positions + row) - 1 - tl.load(lengths + slot)
            if trees is not None:
                path = tl.load(trees.ancestors + tl.load(trees.rows + row))
                before += drafts_beside(path)
            for j in tl.static_range(1, DRAFTS + 1):
                token = tl.load(drafts + slot * (DRAFTS + 1) + j)
                same = (ids == token) & (j <= before)
                if trees is not None:
                    same = same & (((path >> tl.maximum(before - j, 0)) & 1) > 0)
                again += same.to(tl.int32)
        known |= again > 0
    if tl.sum(known.to(tl.int32), 0) > 0:
        times = tl.load(generated + at, mask=known, other=0)
        if DRAFTS:
            times += again
        own = logits + row.to(tl.int64) * stride + ids
        x = tl.load(own, mask=known, other=0.0).to(tl.float32)
        repetition = tl.load(repetitions + slot)
        x = tl.where(x > 0, x / repetition, x * repetition)
        x -= tl.load(frequencies + slot) * times + tl.load(presences + slot) * (times > 0).to(tl.float32)
        tl.store(own, x.to(logits.dtype.element_ty), mask=known)


def penalise(logits: Tensor, rows: Rows, counts: Counts, *, pdl: bool = False) -> None:
    """Repetition, frequency and presence penalties of counted rows: `Counts.penalise`. `logits` float [rows,
    vocab], in place."""
    generated, seen = counts.tables
    vocab, tables = logits.shape[1], rows.tables
    block = min(BLOCK, pow2(vocab))
    _penalise[(len(logits), cdiv(vocab, block))](
        logits, rows.slots, rows.positions, tables.length, tables.drafts,
        None if rows.drafts is None else rows.drafts.rows, rows.paths, tables.count_row, tables.repetition,
        tables.frequency, tables.presence, generated, seen, rows.live, logits.stride(0), vocab,
        DRAFTS=tables.most_drafts, BLOCK=block, **launch_options(pdl, 4),
    )  # fmt: skip
