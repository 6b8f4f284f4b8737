"""Times of the kernels at the start and end of a step: ring entry, penalties, masks, accepted tokens.

Ring entries, results and masks are in pinned host memory, as in serving, so these kernels are limited by
PCIe, while the peak in the table is that of device memory. Host and device bytes count the same; single
numbers count with their size, although memory moves 32 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.kernels.checks import DEVICE
from bench.kernels.inputs import scalar
from bench.kernels.timing import Row, microseconds
from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from core.types import Ints
from gpu.cuda import MAX_CHUNKS
from gpu.kernels.sampling.adjust import mask_rows
from gpu.kernels.sampling.penalty import penalise, start_counts
from gpu.kernels.step import accept, begin_step
from gpu.sample.kernels import MaskRows
from gpu.sample.penalties import Counts
from gpu.sample.rows import Rows
from gpu.state.entry import CHUNK, MARK, NEW, SAMPLE, TOKEN, WRITE, Limits
from gpu.state.tables import SlotTables
from gpu.state.view import StepView
from gpu.step.buffers import HiddenShape, StepBuffers
from gpu.step.rings import Entries, Rings
from gpu.step.shape import ENTRIES, PAGE_WRITES
from gpu.step.steps import Forward

COPIES = 4
"""Input sets: with them, logits and counts of 32 rows exceed the L2 cache; those of fewer rows are in L2 in a
real step too, because the LM head has just written them."""

VOCAB = 151_936
ROWS = (1, 32, 256, 512)
SLOTS, TOKENS = 512, 2048
PAGE, PAGES = 16, 2560
"""Page size, and pages of a slot: 40,960 tokens, the context length of both models."""

LIMITS = Limits(SLOTS, MAX_CHUNKS, TOKENS, PAGE_WRITES, PAGES, samples=SLOTS)

KNOWN = 1024
"""Length of a decode row, and the number of tokens its penalties have counted."""

STEPS = ((1, 0, 0), (32, 0, 0), (256, 0, 0), (512, 0, 0), (0, 1, 2048), (0, 32, 64), (256, 7, 256))
"""Decode rows, prefill chunks, and tokens of each chunk."""

STARTS = ((1, 2048), (1, 8192), (32, 64), (32, 256))
"""New slots with penalties, and prompt tokens of each."""


def _ints(*args: int) -> Ints:
    return np.arange(*args, dtype=np.int32)


def _rings() -> Rings:
    return Rings(Entries(LIMITS, ENTRIES, DEVICE), DEVICE)


def _plan(rows: int, chunks: int, tokens: int) -> StepPlan:
    """A plan: every 16th decode row gets a new page, and each chunk is the whole prompt of a new slot."""
    fresh = range(rows + 1, rows + 1 + chunks)
    first, pages = _ints(1, rows + 1, PAGE), -(-tokens // PAGE)
    slots = np.concatenate([first, np.repeat(np.array(fresh, np.int32), pages)])
    places = np.concatenate([np.full(len(first), KNOWN // PAGE, np.int32), np.tile(_ints(pages), chunks)])
    return StepPlan(
        0,
        _ints(1, rows + 1),
        tuple(Chunk(slot, 0, _ints(tokens), True) for slot in fresh),
        tuple(NewSlot(slot, SamplingParams(), _ints(tokens), _ints(0), 0) for slot in fresh),
        PageWrites(slots, places, _ints(1, len(slots) + 1)),
    )


def _words(plan: StepPlan, view: StepView, room: int) -> int:
    """Words that `begin_step` moves: the ring entry without its header, the table cells it reads or writes,
    and the view and the samples, including padding."""
    rows, chunks, news = len(plan.decode_slots), len(plan.chunks), len(plan.new_slots)
    entries = (
        (rows, 1 + 3),  # length, last token, page
        (chunks, CHUNK + 1),
        (sum(chunk.samples for chunk in plan.chunks), SAMPLE),
        (news, NEW + NEW),
        (len(plan.page_writes.slots), WRITE + 1),
        (plan.num_tokens - rows, TOKEN + 1),
    )
    written = 3 * view.tokens + 2 * view.max_decode + 3 * view.max_chunks + 3 * room
    return sum(count * words for count, words in entries) + written


def _begin_steps() -> Iterator[Row]:
    for rows, chunks, tokens in STEPS:
        plan, calls = _plan(rows, chunks, tokens), []
        for _ in range(COPIES):
            tables, rings = SlotTables(SLOTS, PAGES, DEVICE), _rings()
            tables.length.fill_(KNOWN)
            for _ in range(ENTRIES):  # each call reads the next entry
                rings.write(plan)
            buffers = StepBuffers(tables, LIMITS, HiddenShape(1, torch.float32))
            most = min(plan.num_tokens, SLOTS)
            key = Forward(plan.num_tokens, most, MAX_CHUNKS if chunks else 0, most)
            view, samples = buffers.view(key), buffers.samples.first(most)
            args = rings.entries, tables, view, samples
            calls.append(partial(begin_step, *args, page_size=PAGE))
        case = f"{rows} rows" + f", {chunks} x {tokens} tokens" * (chunks > 0)
        yield Row("begin_step", case, microseconds(calls), 4 * _words(plan, view, len(samples.rows)))


def _accepts() -> Iterator[Row]:
    turned = torch.ones(1, dtype=torch.int64, device=DEVICE)
    for rows in ROWS:
        sets = [torch.arange(rows, device=DEVICE) for _ in range(COPIES)]
        tables, slots = SlotTables(SLOTS, 1, DEVICE), torch.arange(rows, dtype=torch.int32, device=DEVICE)
        own = Rows(slots, slots, scalar(rows, DEVICE), tables)
        calls = [partial(accept, tokens, own, turned, _rings().answers) for tokens in sets]
        yield Row("accept", f"{rows} rows", microseconds(calls), rows * (8 + 5 * 4))


def _start_counts() -> Iterator[Row]:
    """Bytes: every count row is cleared; for each prompt token a mark is read and a flag is set."""
    params = SamplingParams(repetition_penalty=1.1)
    for slots, tokens in STARTS:
        calls = []
        for _ in range(COPIES):
            rings, draw = _rings(), np.random.default_rng(7)
            prompts = draw.integers(0, VOCAB, (slots, tokens), np.int32)
            new = [NewSlot(i + 1, params, each, _ints(0), 0) for i, each in enumerate(prompts)]
            marks = rings.write(StepPlan(0, _ints(0), new_slots=tuple(new))).marks
            args = rings.entries, Counts(slots, VOCAB, DEVICE)
            calls.append(partial(start_counts, *args, new_slots=slots, marks=marks))
        moved = slots * VOCAB * (4 + 1) + marks * (MARK * 4 + 1)
        yield Row("start_counts", f"{slots} x {tokens} tokens", microseconds(calls), moved)


def _counts(rows: int) -> Counts:
    counts = Counts(rows, VOCAB, DEVICE)
    generated, seen = counts.tables
    seen.scatter_(1, torch.randint(VOCAB, (rows, KNOWN), device=DEVICE), True)
    generated.copy_(seen)
    return counts


def _penalties(rows: int, logits: list[Tensor]) -> Iterator[Row]:
    """Bytes: all flags of a row; for tokens that occurred, the count, and the logit read and written. "none":
    no row has penalties."""
    tables, live = SlotTables(SLOTS, 1, DEVICE), scalar(rows, DEVICE)
    for penalty, value in ((tables.repetition, 1.1), (tables.frequency, 0.5), (tables.presence, 0.5)):
        penalty.fill_(value)
    slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
    every = Rows(slots, slots, live, tables)
    pool = [_counts(rows) for _ in logits]
    known = int(pool[0].tables[1].sum())
    sets = list(zip(logits, pool, strict=True))
    calls = [partial(penalise, x, every, counts) for x, counts in sets]
    yield Row("penalise", f"{rows} x {VOCAB}, none", microseconds(calls), rows * (4 + 4))
    tables.count_row[1 : rows + 1] = slots - 1
    yield Row("penalise", f"{rows} x {VOCAB}", microseconds(calls), rows * VOCAB + known * (4 + 2 * 4))
    tokens, answers = torch.randint(VOCAB, (rows,), device=DEVICE), _rings().answers
    turned = torch.ones(1, dtype=torch.int64, device=DEVICE)
    us = microseconds([partial(accept, tokens, every, turned, answers, counts) for counts in pool])
    # What it moves without counts; a slot's row, the count both ways, and a flag.
    yield Row("accept", f"{rows} rows, counted", us, rows * (8 + 5 * 4 + 4 + 2 * 4 + 1))


def _masks(rows: int, logits: list[Tensor]) -> Iterator[Row]:
    """Each mask allows one token; all other logits are read and written. Also with masks in device memory, to
    see the cost of PCIe, and without a grammar on any row."""
    live, words = scalar(rows, DEVICE), -(-VOCAB // 32)
    which, bits = torch.arange(rows, dtype=torch.int32), torch.zeros(rows, words, dtype=torch.int32)
    bits[:, 0] = 1
    moved = rows * (4 + 4 * words + 2 * 4 * (VOCAB - 1))
    for name, one, masks, cost in (
        ("", which.pin_memory(), bits.pin_memory(), moved),
        (", on device", which.to(DEVICE), bits.to(DEVICE), moved),
        (", none", torch.full_like(which, -1).pin_memory(), bits.pin_memory(), rows * 4),
    ):
        calls = [partial(mask_rows, x, MaskRows(one, masks), live) for x in logits]
        yield Row("mask_rows", f"{rows} x {VOCAB}{name}", microseconds(calls), cost)


def ends() -> Iterator[Row]:
    """Ring entry, accepted tokens, counts of new slots, penalties and masks."""
    yield from _begin_steps()
    yield from _accepts()
    yield from _start_counts()
    for rows in ROWS:
        logits = [torch.randn(rows, VOCAB, device=DEVICE) for _ in range(COPIES)]
        yield from _penalties(rows, logits)
        yield from _masks(rows, logits)
