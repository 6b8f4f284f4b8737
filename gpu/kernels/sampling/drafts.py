"""`gpu.draft.kernels.DraftKernels` for a GPU."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, padding, pow2
from gpu.kernels.sampling.sample import BLOCK, RUN, Columns, Runs, inverse_temperature, sample_runs
from gpu.kernels.sampling.sample import perturb as perturb
from gpu.sample.rows import DraftSamples
from gpu.state.draft_rows import DraftRows
from gpu.state.tables import row_of
from gpu.state.view import StepView

_LAST_TOKEN: tl.constexpr = tl.constexpr(row_of("last_token"))
_LENGTH: tl.constexpr = tl.constexpr(row_of("length"))
_LIMIT: tl.constexpr = tl.constexpr(row_of("limit"))
_MAX_DRAFTS: tl.constexpr = tl.constexpr(row_of("max_drafts"))

_FEW = 16
"""Up to so many rows a program draws from one block of logits: runs would leave most of the device idle."""


@jit_loose("tokens", "most", "samples", "count", "chunks")
def _follow(
    ids: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    num_decode: tl.tensor,
    chunk_firsts: tl.tensor,
    behind: tl.tensor,
    sample_rows: tl.tensor,
    sample_slots: tl.tensor,
    sample_positions: tl.tensor,
    sampling: tl.tensor,
    before: tl.tensor,
    live: tl.tensor,
    chosen: tl.tensor,
    columns: tl.tensor,
    table: tl.tensor,
    skipped: tl.tensor,
    taken: tl.tensor,
    out_ids: tl.tensor,
    out_positions: tl.tensor,
    out_mapping: tl.tensor,
    out_lengths: tl.tensor,
    last: tl.tensor,
    column: int,
    width: int,
    tokens: int,
    most: int,
    samples: int,
    count: int,
    chunks: int,
    SHIFTED: tl.constexpr,
    MIXED: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    own = tl.load(sampling)
    decode = tl.load(num_decode) - tl.load(before + own)
    for first in range(0, count, SPAN):
        i = first + tl.arange(0, SPAN)
        inside = i < count
        slot = tl.load(sample_slots + i, mask=inside, other=0)
        position = tl.load(sample_positions + i, mask=inside, other=0)
        length = tl.load(columns + _LENGTH * column + slot, mask=inside, other=0)
        at = tl.load(sample_rows + i, mask=inside, other=0) + length - position
        tl.store(last + i, tl.minimum(tl.maximum(at, 0), tokens - 1), mask=inside)
        mine = inside & (i < own)
        missed = tl.load(skipped + slot, mask=mine, other=0) + position - 1
        missed = tl.maximum(missed - tl.load(taken + slot, mask=mine, other=0), 0)
        tl.store(skipped + slot, tl.where(i < decode, missed, 0), mask=mine)
        tl.store(taken + slot, length, mask=mine)
    tl.debug_barrier()  # the rows' gaps are read token by token
    for first in range(0, tokens, SPAN):
        i = first + tl.arange(0, SPAN)
        inside, decoding = i < tokens, i < most
        slot = tl.load(slots + i, mask=decoding, other=0)
        gap = tl.load(skipped + slot, mask=decoding, other=0)
        position = tl.load(positions + i, mask=inside, other=0) - gap
        cell = tl.load(mapping + i, mask=inside, other=0)
        moved = (gap > 0) & (cell > 0)
        page = tl.load(table + slot.to(tl.int64) * width + position // PAGE, mask=moved, other=0)
        tl.store(out_positions + i, position, mask=inside)
        tl.store(out_mapping + i, tl.where(moved, page * PAGE + position % PAGE, cell), mask=inside)
        tl.store(out_lengths + i, tl.load(lengths + i, mask=decoding, other=0) - gap, mask=decoding)
        if SHIFTED:
            successor = tl.load(ids + i + 1, mask=i + 1 < tokens, other=0)
            tl.store(out_ids + i, successor, mask=inside)
    if SHIFTED:
        tl.debug_barrier()  # what was chosen goes over those of a row's last token
        true = tl.minimum(tl.load(live), samples)
        for first in range(0, samples, SPAN):
            i = first + tl.arange(0, SPAN)
            mine = i < true
            at = tl.load(sample_rows + i, mask=mine, other=0)
            token = tl.load(chosen + i, mask=mine, other=0)
            tl.store(out_ids + at, tl.maximum(token, 0).to(tl.int32), mask=mine)
        if MIXED:
            for first in range(0, chunks, SPAN):
                i = first + tl.arange(0, SPAN)
                token = tl.load(behind + i, mask=i < chunks, other=-1)
                at = tl.load(chunk_firsts + i + 1, mask=i < chunks, other=0) - 1
                tl.store(out_ids + at, token, mask=token >= 0)


def follow(
    view: StepView,
    samples: tuple[Tensor, Tensor, Tensor, DraftSamples],
    live: Tensor,
    chosen: Tensor,
    rows: DraftRows,
    behind: Tensor | None,
    *,
    pdl: bool = False,
) -> tuple[StepView, Tensor]:
    """See `DraftKernels.follow`. One program, which needs no order between programs."""
    tables, (at, slots, positions, drafts) = rows.tables, samples
    out = view._replace(
        ids=torch.empty_like(view.ids) if rows.shifted else view.ids,
        positions=torch.empty_like(view.positions),
        kv_slot_mapping=torch.empty_like(view.kv_slot_mapping),
        decode_lengths=torch.empty_like(view.decode_lengths),
    )
    last = torch.empty_like(rows.ends)
    span = 1024 if view.tokens > 256 else 256
    _follow[(1,)](
        view.ids, view.positions, view.kv_slot_mapping, view.decode_slots, view.decode_lengths,
        view.num_decode, view.chunk_firsts, behind, at, slots, positions, *drafts[:2], live, chosen,
        tables.words, tables.page_table, *rows.gaps, out.ids, out.positions, out.kv_slot_mapping,
        out.decode_lengths, last, tables.words.stride(0), tables.page_table.stride(0), view.tokens,
        view.max_decode, len(at), len(last), view.max_chunks, SHIFTED=rows.shifted,
        MIXED=behind is not None and len(behind) > 0, PAGE=rows.page_size, SPAN=span,
        **launch_options(pdl, span // 32),
    )  # fmt: skip
    return out, last


@jit
def _keep(
    first: tl.tensor,
    second: tl.tensor | None,
    at: tl.tensor | None,
    out_first: tl.tensor,
    out_second: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    begin(PDL)
    origin = row
    if at is not None:
        origin = tl.load(at + row).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(first + origin * WIDTH + i, mask=i < WIDTH)
    tl.store(out_first + row * WIDTH + i, x, mask=i < WIDTH)
    if second is not None:
        x = tl.load(second + origin * WIDTH + i, mask=i < WIDTH)
    tl.store(out_second + row * WIDTH + i, x, mask=i < WIDTH)


def keep(
    states: tuple[Tensor, Tensor], at: Tensor | None, out: tuple[Tensor, Tensor], *, pdl: bool = False
) -> None:
    """See `DraftKernels.keep`. All are contiguous."""
    first, second = states
    rows, width = len(first) if at is None else len(at), first.shape[1]
    block = pow2(width)
    _keep[(rows,)](
        first, None if second is first else second, at, *out, WIDTH=width, BLOCK=block,
        **launch_options(pdl, min(max(block // 512, 1), 8)),
    )  # fmt: skip


@jit
def _forward(
    table: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    end: tl.tensor,
    width: int,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where a token at `position` stands and is stored: behind the row's last page (`end`) in the dump."""
    held = tl.minimum(position, tl.maximum(end, 1) - 1)
    page = tl.load(table + slot.to(tl.int64) * width + held // PAGE)
    return held, tl.where(position < end, page * PAGE + held % PAGE, 0)


@jit_loose("first", "count")
def _start(
    sample_slots: tl.tensor,
    sample_positions: tl.tensor,
    sampling: tl.tensor,
    before: tl.tensor,
    num_decode: tl.tensor,
    columns: tl.tensor,
    table: tl.tensor,
    drafts: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    slots: tl.tensor,
    lengths: tl.tensor,
    skipped: tl.tensor,
    ends: tl.tensor,
    draw_slots: tl.tensor,
    draws: tl.tensor,
    column: int,
    width: int,
    first: int,
    count: int,
    DRAFTS: tl.constexpr,
    MOST: tl.constexpr,
    REACH: tl.constexpr,
    TOKENS: tl.constexpr,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    i = tl.arange(0, SPAN)
    own, inside = tl.load(sampling), i < count
    live = inside & (first + i < own)
    slot = tl.load(sample_slots + first + i, mask=live, other=0)
    length = tl.load(columns + _LENGTH * column + slot, mask=live, other=0)
    token = tl.load(columns + _LAST_TOKEN * column + slot, mask=live, other=0)
    limit = tl.load(columns + _LIMIT * column + slot, mask=live, other=0)
    query = tl.minimum(tl.load(columns + _MAX_DRAFTS * column + slot, mask=live, other=0), DRAFTS)
    # A decode row has pages for its whole query, any other for its tokens.
    decode = tl.load(num_decode) - tl.load(before + own)
    held = tl.load(sample_positions + first + i, mask=live, other=0)
    held += tl.where(first + i < decode, query, 0)
    end = tl.where(live & (slot > 0), tl.minimum(limit, (held + PAGE - 1) // PAGE * PAGE), 0)
    room = tl.minimum(tl.maximum(end - length + REACH, 0), MOST)
    tl.store(drafts + slot * (DRAFTS + 1), room, mask=live & (slot > 0))
    gap = tl.load(skipped + slot, mask=live, other=0)
    tl.store(ends + i, end, mask=inside)
    for j in range(TOKENS):
        at = i * TOKENS + j
        position, cell = _forward(table, slot, length - gap + j, end, width, PAGE)
        seen = position + 1
        if not CAUSAL:
            seen = tl.maximum(tl.minimum(length + TOKENS, end) - gap, 1)
        tl.store(ids + at, tl.where(slot > 0, tl.where(j > 0, MASK, token), 0), mask=inside)
        tl.store(positions + at, position, mask=inside)
        tl.store(mapping + at, cell, mask=inside)
        tl.store(slots + at, slot, mask=inside)
        tl.store(lengths + at, seen, mask=inside)
        if TOKENS == 1:
            tl.store(draws + i, length + 1, mask=inside)
        else:
            tl.store(draw_slots + at - i - 1, slot, mask=inside & (j > 0))
            tl.store(draws + at - i - 1, length + j, mask=inside & (j > 0))
    rows = tl.minimum(tl.maximum(own - first, 0), count)
    i = tl.arange(0, 4)
    drawn = rows * (TOKENS if TOKENS == 1 else TOKENS - 1)
    tl.store(counts + i, tl.where(i == 2, 0, tl.where(i == 3, drawn, rows * TOKENS)))


def start(
    view: StepView,
    samples: tuple[Tensor, Tensor, Tensor, DraftSamples],
    rows: DraftRows,
    first: int = 0,
    *,
    pdl: bool = False,
) -> None:
    """See `DraftKernels.start`. One program."""
    own, tables, block, (_, slots, positions, drafts) = rows.view, rows.tables, rows.block, samples
    span = pow2(tables.slots - 1)  # of the tables, not of the step: one kernel for all sizes
    _start[(1,)](
        slots, positions, *drafts[:2], view.num_decode, tables.words, tables.page_table, tables.drafts,
        own.counts, own.ids, own.positions, own.kv_slot_mapping, own.decode_slots, own.decode_lengths,
        rows.gaps.skipped, rows.ends, rows.slots, rows.positions, tables.words.stride(0),
        tables.page_table.stride(0), first, len(rows.ends), DRAFTS=tables.most_drafts, MOST=rows.most,
        REACH=rows.reach, TOKENS=block.tokens, MASK=block.mask, CAUSAL=block.causal, PAGE=rows.page_size,
        SPAN=span, **launch_options(pdl, min(max(span // 32, 1), 8)),
    )  # fmt: skip


@jit_loose("made", "count")
def _take(
    runs: Runs,
    logits: tl.tensor,
    names: tl.tensor | None,
    temperature: tl.tensor,
    columns: tl.tensor,
    table: tl.tensor,
    drafts: tl.tensor,
    survival: tl.tensor,
    num_draws: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    lengths: tl.tensor,
    skipped: tl.tensor,
    ends: tl.tensor,
    draw_slots: tl.tensor,
    draws: tl.tensor,
    stride: int,
    column: int,
    width: int,
    made: int,
    count: int,
    DRAFTS: tl.constexpr,
    DRAWS: tl.constexpr,
    CHAIN: tl.constexpr,
    SHIFTED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    begin(PDL)
    if padding(row * DRAWS, num_draws):
        return
    slot, inside = tl.load(draw_slots + row * DRAWS), r < count
    inverse = inverse_temperature(tl.load(temperature + slot))
    known = tl.full([], 1.0, tl.float32)
    if made > 0:
        known = tl.load(survival + slot * DRAFTS + made - 1)
    for j in range(DRAWS):
        line = row * DRAWS + j
        at = line * count + r
        score = tl.load(runs.score + at, mask=inside, other=float("-inf"))
        found = tl.load(runs.token + at, mask=inside, other=2147483647)
        peaks = tl.load(runs.high + at, mask=inside, other=float("-inf"))
        mass = tl.load(runs.mass + at, mask=inside, other=0.0)
        high = tl.max(peaks, 0)
        finite = (high > float("-inf")) & (high < float("inf"))
        level = tl.where(finite, high, 0.0)
        best = tl.min(tl.where(score == tl.max(score, 0), found, 2147483647), 0)
        best = tl.where(finite, best, 0)
        # Behind a row without a token stands token 0, which nobody expects to be accepted.
        total = tl.sum(mass * tl.exp((tl.minimum(peaks, level) - level) * inverse), 0)
        share = tl.exp((tl.load(logits + line.to(tl.int64) * stride + best) - level) * inverse) / total
        known *= tl.where(finite, share, 0.0)
        token = best
        if names is not None:
            token = tl.load(names + best).to(tl.int32)
        token = tl.where(finite, token, 0)
        tl.store(survival + slot * DRAFTS + made + j, known)
        tl.store(drafts + slot * (DRAFTS + 1) + 1 + made + j, token)
        if CHAIN:
            draw = tl.load(columns + _LENGTH * column + slot) + made + 1
            behind = draw - SHIFTED - tl.load(skipped + slot)
            position, cell = _forward(table, slot, behind, tl.load(ends + row), width, PAGE)
            tl.store(ids + row, token)
            tl.store(positions + row, position)
            tl.store(mapping + row, cell)
            tl.store(lengths + row, position + 1)
            tl.store(draws + row, draw + 1)


def draw(logits: Tensor, token_ids: Tensor | None, rows: DraftRows, made: int, *, pdl: bool = False) -> None:
    """See `DraftKernels.draw`: the first kernel of `choose`, and one that takes what it found."""
    vocab, tables, view, live = logits.shape[1], rows.tables, rows.view, rows.view.counts[3:4]
    run = 1 if len(logits) <= _FEW else RUN
    shape = len(logits), cdiv(vocab, BLOCK * run)
    runs = Runs.empty(shape, logits.device)
    sample_runs[shape](
        logits, rows.slots, rows.positions, Columns.of(tables), live, runs, token_ids, logits.stride(0),
        vocab, shape[1], WEIGHED="all", BLOCK=BLOCK, RUN=run, **launch_options(pdl, 4),
    )  # fmt: skip
    _take[(len(rows.ends),)](
        runs, logits, token_ids, tables.temperature, tables.words, tables.page_table, tables.drafts,
        tables.survival, live, view.ids, view.positions, view.kv_slot_mapping, view.decode_lengths,
        rows.gaps.skipped, rows.ends, rows.slots, rows.positions, logits.stride(0), tables.words.stride(0),
        tables.page_table.stride(0), made, shape[1], DRAFTS=tables.most_drafts, DRAWS=rows.block.draws,
        CHAIN=rows.block.tokens == 1, SHIFTED=int(rows.shifted), PAGE=rows.page_size, BLOCK=pow2(shape[1]),
        **launch_options(pdl, 1),
    )  # fmt: skip
