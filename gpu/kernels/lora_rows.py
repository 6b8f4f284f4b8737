"""The work lists of a step with adapters: which rows use which place, sorted by place.

One launch a step, a program a list. Each list is sorted by counting, without atomics, so that the same rows
give the same list; every kernel of every layer then finds its tile of rows in the list by itself, with a sum
over the places (`take_tile`).
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, jit_loose, launch_options, pow2
from gpu.lora import LoraRows
from gpu.state.view import StepView

SPAN_PLACES = 8192
"""Rows of a span times places: what a program compares at a time."""


@jit
def _slots(
    decode_slots: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_firsts: tl.tensor,
    row: tl.tensor,
    queries: tl.tensor,
    chunks: tl.tensor,
    tokens: tl.tensor,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """Slots of the tokens `row`: of decode rows first, then those of chunks; 0 behind all `tokens`."""
    slot = tl.load(decode_slots + row, mask=row < queries, other=0)
    if STEPS > 0:
        of_chunk = (row >= queries) & (row < tokens)
        chunk = tl.zeros(row.shape, tl.int32)  # the last that begins at `row` or before, by bisection
        for step in tl.static_range(STEPS):
            later = chunk + (1 << (STEPS - 1 - step))
            first = tl.load(chunk_firsts + later, mask=of_chunk & (later < chunks), other=2**31 - 1)
            chunk = tl.where(first <= row, later, chunk)
        slot = tl.where(of_chunk, tl.load(chunk_slots + chunk, mask=of_chunk, other=0), slot)
    return slot


@jit
def _sort(
    column: tl.tensor,
    slots: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_firsts: tl.tensor,
    queries: tl.tensor,
    chunks: tl.tensor,
    true: tl.tensor,
    rows: LoraRows,
    n: int,
    PLACES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Fill `rows`, `n` of them, of which the first `true` have slots. Rows without a place count as those of
    place PLACES: they come last in the order."""
    p = tl.arange(0, BLOCK_P)[None, :]
    counts = tl.zeros([BLOCK_P], tl.int32)
    for first in range(0, n, SPAN):
        row = first + tl.arange(0, SPAN)
        slot = _slots(slots, chunk_slots, chunk_firsts, row, queries, chunks, true, STEPS)
        place = tl.load(column + slot, mask=row < true, other=-1)
        tl.store(rows.places + row, place, mask=row < n)
        own = tl.where(place < 0, PLACES, place)[:, None] == p
        counts += tl.sum((own & (row < n)[:, None]).to(tl.int32), 0)
    tl.debug_barrier()
    begins = tl.cumsum(counts, 0) - counts
    tl.store(rows.starts + tl.arange(0, BLOCK_P), begins, mask=tl.arange(0, BLOCK_P) <= PLACES)
    for first in range(0, n, SPAN):
        row = first + tl.arange(0, SPAN)
        place = tl.load(rows.places + row, mask=row < n, other=-1)
        own = (tl.where(place < 0, PLACES, place)[:, None] == p) & (row < n)[:, None]
        ones = own.to(tl.int32)
        before = begins[None, :] + tl.cumsum(ones, 0) - ones
        tl.store(rows.order + tl.sum(tl.where(own, before, 0), 1), row, mask=row < n)
        begins += tl.sum(ones, 0)


@jit_loose("n", "s")
def _lay_out(
    column: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_firsts: tl.tensor,
    sample_slots: tl.tensor,
    tokens: LoraRows,
    samples: LoraRows,
    n: int,
    s: int,
    PLACES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPAN: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    if tl.program_id(0) == 0:
        true, queries, chunks = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
        _sort(
            column, decode_slots, chunk_slots, chunk_firsts, queries, chunks, true, tokens, n,
            PLACES, BLOCK_P, SPAN, STEPS,
        )  # fmt: skip
    else:
        true = tl.load(counts + 3)
        _sort(
            column, sample_slots, chunk_slots, chunk_firsts, true, 0, true, samples, s,
            PLACES, BLOCK_P, SPAN, 0,
        )  # fmt: skip


def lay_out(
    view: StepView, sampled: Tensor, place: Tensor, tokens: LoraRows, samples: LoraRows, *, pdl: bool = False
) -> None:
    """See `gpu.adapters.kernels.lay_out`. Rows without a place, padded ones too, stand in `order`
    behind the others."""
    places = len(tokens.starts) - 1
    block = max(pow2(places + 1), 2)
    span = max(SPAN_PLACES // block, 16)
    _lay_out[(2,)](
        place,
        view.counts,
        view.decode_slots,
        view.chunk_slots,
        view.chunk_firsts,
        sampled,
        tokens,
        samples,
        len(tokens.places),
        len(samples.places),
        PLACES=places,
        BLOCK_P=block,
        SPAN=min(span, max(pow2(max(len(tokens.places), len(samples.places))), 16)),
        STEPS=pow2(view.max_chunks + 1).bit_length() - 1 if view.max_chunks else 0,
        **launch_options(pdl, 4),
    )


def max_tiles(rows: int, places: int, block_m: int) -> int:
    """The most tiles of `block_m` rows that any `rows` rows of `places` places can need."""
    return min(rows, (rows + min(rows, places) * (block_m - 1)) // block_m)


@jit
def take_tile(
    starts: tl.tensor,
    rest: tl.tensor,
    tile: tl.tensor,
    PLACES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Place, first index in the order and number of rows of tile `tile` where each place's rows are cut into
    tiles of BLOCK_M; of tiles behind the last, no rows. Unless `rest` is None, rows without a place, up to
    index `rest` of the order, follow as those of place PLACES. BLOCK_P is more than PLACES."""
    p = tl.arange(0, BLOCK_P)
    begins = tl.load(starts + p, mask=p <= PLACES, other=0)
    ends = tl.load(starts + p + 1, mask=p < PLACES, other=0)
    ends = tl.where(p < PLACES, ends, begins)
    if rest is not None:
        ends = tl.where(p == PLACES, rest, ends)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    place = tl.sum((last <= tile).to(tl.int32), 0)
    mine = p == place
    first = tl.sum(tl.where(mine, begins + (tile - last + tiles) * BLOCK_M, 0), 0)
    count = tl.minimum(tl.sum(tl.where(mine, ends, 0), 0) - first, BLOCK_M)
    return place, first, count
