"""A plan as words: the form in which the device reads it.

An entry is int32 words in pinned memory that the device can read:

    | head | decode slots | chunks | samples | new slots | page writes | tokens | marks |
      16     R              C × 3    C × 3     R × NEW     W × 2         T × 2    W × 2

Every section has a fixed place, so that the kernel that reads it needs no arithmetic but the counts in
the head. Where a chunk lies is counted from the first chunk's first token: how many tokens the decode rows
before it have is up to the device. R rows, C chunks, T tokens of chunks, W page writes and marks: tokens
that penalties know of a new slot. A plan with more page writes or marks than W has the rest done before its
step (`Surplus`): cached prefixes of many new requests can be long, and an entry for the worst case would be
megabytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.plan import NewSlot, StepPlan
from core.types import NO_TOKENS, Ints
from gpu.state.tables import COLUMNS, WORDS

HEAD: Final = 16
"""Words of the head: tokens of chunks, decode rows, chunks, chunks that sample, new slots, page writes,
common keys, marks, the longest query of a decode row, drafts of all decode rows, whether drafts are proposed
behind the step."""
CHUNK: Final = 3
"""Words of a chunk: slot, position and index of its first token."""
SAMPLE: Final = 3
"""Words of a chunk that samples: index of its last token, slot, position of the token to choose."""
NEW: Final = 1 + WORDS
"""Words of a new slot: slot, then what its columns begin with, in the order of `gpu.state.tables`."""
WRITE: Final = 2
"""Words of a page write: cell of the table (slot * width + index), page."""
TOKEN: Final = 2
"""Words of a chunk's token: id, index of its chunk."""

MARK: Final = 2
"""Words of a mark: count row, token of the prompt or, as ~token, of the output."""

CASCADE_ROWS: Final = 8
CASCADE_KEYS: Final = 256
"""From so many common keys on they are attended to once for all rows: with fewer, reading them per row costs
less than the extra kernel and merge would. By reasoning, not yet measured."""


_NUMPY: Final = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

NO_MARKS: Final[Ints] = np.zeros((0, MARK), np.int32)
NO_CELLS: Final[NDArray[np.int64]] = np.zeros(0, np.int64)


def shared_keys(plan: StepPlan) -> int:
    """Leading keys that are worth attending to once for all decode rows of `plan`."""
    return plan.common if len(plan.decode_slots) >= CASCADE_ROWS and plan.common >= CASCADE_KEYS else 0


class Limits(NamedTuple):
    """What an entry can hold: `writes` bounds page writes and marks each. `table_width` is the number of
    pages in a row of the page table. The answer holds `samples` tokens; where decode rows may have drafts, up
    to `drafts` each, also how many tokens are each row's; and where these may be `trees`, which drafts."""

    rows: int
    chunks: int
    tokens: int
    writes: int
    table_width: int
    samples: int
    drafts: int = 0
    trees: bool = False


class Layout(NamedTuple):
    """First word of each section, and the words of an entry."""

    decode: int
    chunks: int
    samples: int
    new: int
    writes: int
    tokens: int
    marks: int
    words: int


def layout(limits: Limits) -> Layout:
    """Where things lie. Sections start at multiples of 16 words, so that loads may be wide."""
    sizes = (
        HEAD,
        limits.rows,
        limits.chunks * CHUNK,
        limits.chunks * SAMPLE,
        limits.rows * NEW,
        limits.writes * WRITE,
        limits.tokens * TOKEN,
        limits.writes * MARK,
    )
    starts = np.cumsum([-(-size // 16) * 16 for size in sizes]).tolist()
    return Layout(*starts)


class EntryRing(NamedTuple):
    """Entries that wait for their steps.

    words   int32 [entries, layout.words], memory that host and device share
    cursor  int64 [1] on the device: entries taken so far; the next is this modulo the ring's length
    """

    words: Tensor
    cursor: Tensor
    at: Layout


class Surplus(NamedTuple):
    """What had no place in the entry: page writes, int64 cells of the flat table and int32 pages; and
    marks, int32 [n, 2]."""

    cells: NDArray[np.int64]
    pages: Ints
    marks: Ints


class Written(NamedTuple):
    """What a written entry has the host launch beside the step."""

    marks: int
    surplus: Surplus | None


class EntryWriter:
    """Owner: launch thread. Writes plans into entries."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._at = layout(limits)

    def write(self, plan: StepPlan, words: Ints) -> Written:
        """Fill `words` [layout.words]. What a former plan left behind the counts stays."""
        at, rows, room = self._at, len(plan.decode_slots), self._limits.writes
        words[at.decode : at.decode + rows] = plan.decode_slots
        tokens, samples = self._write_chunks(plan, words) if plan.chunks else (0, 0)
        cells, pages = self._write_pages(plan, words)
        marks = NO_MARKS
        if plan.new_slots:
            self._write_new(plan.new_slots, words)
            marks = _marks(plan.new_slots)
            section = words[at.marks : at.marks + min(len(marks), room) * MARK].reshape(-1, MARK)
            section[:] = marks[:room]
        words[:11] = (
            tokens,
            rows,
            len(plan.chunks),
            samples,
            len(plan.new_slots),
            min(len(plan.page_writes.slots), room),
            shared_keys(plan),
            min(len(marks), room),
            plan.query_length,
            plan.drafts,
            plan.proposes,
        )
        rest = Surplus(cells, pages, marks[room:])
        return Written(min(len(marks), room), rest if len(cells) or len(rest.marks) else None)

    def _write_pages(self, plan: StepPlan, words: Ints) -> tuple[NDArray[np.int64], Ints]:
        """Page writes, and those that have no place."""
        at, writes, room = self._at.writes, plan.page_writes, self._limits.writes
        if not len(writes.slots):
            return NO_CELLS, NO_TOKENS
        cells = writes.slots.astype(np.int64) * self._limits.table_width + writes.indices
        section = words[at : at + min(len(cells), room) * WRITE].reshape(-1, WRITE)
        section[:, 0] = cells[:room]
        section[:, 1] = writes.pages[:room]
        return cells[room:], writes.pages[room:]

    def _write_chunks(self, plan: StepPlan, words: Ints) -> tuple[int, int]:
        """Chunk records, their tokens, and who samples; returns how many tokens and samples there are."""
        at, count = self._at, len(plan.chunks)
        lengths = np.array([len(chunk.tokens) for chunk in plan.chunks])
        ends = np.cumsum(lengths)
        records = words[at.chunks : at.chunks + count * CHUNK].reshape(count, CHUNK)
        records[:, 0] = [chunk.slot for chunk in plan.chunks]
        records[:, 1] = [chunk.start for chunk in plan.chunks]
        records[:, 2] = ends - lengths
        total = int(lengths.sum())
        section = words[at.tokens : at.tokens + total * TOKEN].reshape(total, TOKEN)
        section[:, 0] = np.concatenate([chunk.tokens for chunk in plan.chunks])
        section[:, 1] = np.repeat(np.arange(count), lengths)
        sampling = np.flatnonzero([chunk.samples for chunk in plan.chunks])
        samples = words[at.samples : at.samples + len(sampling) * SAMPLE].reshape(-1, SAMPLE)
        samples[:, 0] = ends[sampling] - 1
        samples[:, 1] = records[sampling, 0]
        samples[:, 2] = records[sampling, 1] + lengths[sampling]
        return total, len(sampling)

    def _write_new(self, new_slots: tuple[NewSlot, ...], words: Ints) -> None:
        at, count = self._at.new, len(new_slots)
        records = words[at : at + count * NEW].reshape(count, NEW)
        records[:, 0] = [new.slot for new in new_slots]
        for column in COLUMNS:
            values = np.array([column.begin(new) for new in new_slots], _NUMPY[column.dtype])
            first = 1 + column.row
            records[:, first : first + column.width] = values.view(np.int32).reshape(count, column.width)


def _marks(new_slots: tuple[NewSlot, ...]) -> Ints:
    """Tokens that the new slots' penalties know, int32 [n, 2]. The prompt counts for repetition alone."""
    found = []
    for new in new_slots:
        if new.count_row < 0:
            continue
        for tokens, wanted in ((new.known, new.params.repetition_penalty != 1.0), (~new.output, True)):
            if wanted and len(tokens):
                rows = np.full(len(tokens), new.count_row, np.int32)
                found.append(np.stack([rows, tokens], axis=1))
    return np.concatenate(found) if found else NO_MARKS
