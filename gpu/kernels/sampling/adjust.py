"""Logits of single rows changed before the choice: grammar masks, logit_bias, stop ids before min_tokens.

Everything is added, nothing assigned: a NaN under a masked id stays visible, and infinity becomes NaN, so
that a broken row is found whatever it is asked for.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2
from gpu.sample.kernels import MaskRows
from gpu.sample.rows import Rows
from gpu.sample.token_tables import TokenTables

BLOCK = 4096
"""Tokens of a program."""

WORDS = 2048
"""Words of a mask looked at at a time."""


@jit
def _mask(
    logits: tl.tensor,
    which: tl.tensor,
    bits: tl.tensor,
    num_rows: tl.tensor,
    stride: int,
    words: int,
    vocab: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    if row < tl.load(num_rows):
        mine = tl.load(which + row)
        if mine >= 0:
            word = tl.load(bits + mine.to(tl.int64) * words + (ids >> 5), mask=(ids >> 5) < words, other=0)
            forbidden = ((word >> (ids & 31)) & 1) == 0
            inside = ids < vocab
            at = logits + row.to(tl.int64) * stride + ids
            x = tl.load(at, mask=inside & forbidden, other=0.0).to(tl.float32)
            # Added, not assigned: a NaN stays visible (see above).
            tl.store(at, (x + float("-inf")).to(logits.dtype.element_ty), mask=inside & forbidden)


def mask_rows(logits: Tensor, masks: MaskRows, live: Tensor, *, pdl: bool = False) -> None:
    """Make what constrained rows may not take impossible. `logits` float [rows, vocab], in place, of which
    `live` int32 [1] on the device are true."""
    rows, vocab = logits.shape
    block = min(BLOCK, pow2(vocab))
    _mask[(rows, cdiv(vocab, block))](
        logits, *masks, live, logits.stride(0), masks.bits.shape[1], vocab, BLOCK=block,
        **launch_options(pdl, 4),
    )  # fmt: skip


@jit
def _allowed(words: tl.tensor) -> tl.tensor:
    """Number of set bits of each of int32 `words`."""
    x = words - ((words >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@jit
def _adjust(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    num_bias: tl.tensor,
    num_stops: tl.tensor,
    stop_from: tl.tensor,
    bias_ids: tl.tensor,
    biases: tl.tensor,
    stop_ids: tl.tensor,
    which: tl.tensor,
    bits: tl.tensor,
    num_rows: tl.tensor,
    stride: int,
    words: int,
    BIASES: tl.constexpr,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    own = logits + row.to(tl.int64) * stride
    biased, held = tl.load(num_bias + slot), tl.load(num_stops + slot)
    if biased > 0:
        i = tl.arange(0, BIASES)
        ids = tl.load(bias_ids + slot * BIASES + i, mask=i < biased, other=0)
        x = tl.load(own + ids, mask=i < biased, other=0.0).to(tl.float32)
        x += tl.load(biases + slot * BIASES + i, mask=i < biased, other=0.0)
        tl.store(own + ids, x.to(logits.dtype.element_ty), mask=i < biased)
    if (held > 0) & (tl.load(positions + row) < tl.load(stop_from + slot)):
        tl.debug_barrier()  # a stop id may have a bias, which another thread has written
        i = tl.arange(0, STOPS)
        ids = tl.load(stop_ids + slot * STOPS + i, mask=i < held, other=0)
        mine = tl.load(which + row)
        others = tl.full([], 1, tl.int32)
        if mine >= 0:
            mask = bits + mine.to(tl.int64) * words
            word = tl.load(mask + (ids >> 5), mask=(i < held) & ((ids >> 5) < words), other=0)
            others = -tl.sum((word >> (ids & 31)) & 1, 0)
            for first in range(0, words, WORDS):
                at = first + tl.arange(0, WORDS)
                others += tl.sum(_allowed(tl.load(mask + at, mask=at < words, other=0)), 0)
        if others > 0:
            x = tl.load(own + ids, mask=i < held, other=0.0).to(tl.float32)
            tl.store(own + ids, (x + float("-inf")).to(logits.dtype.element_ty), mask=i < held)


def adjust(logits: Tensor, rows: Rows, tokens: TokenTables, masks: MaskRows, *, pdl: bool = False) -> None:
    """Add each slot's logit_bias, then forbid its stop ids where the position comes before `stop_from`,
    unless the row's grammar allows nothing else. `logits` float [rows, vocab], in place."""
    tables = rows.tables
    _adjust[(len(logits),)](
        logits, rows.slots, rows.positions, tables.num_bias, tables.num_stops, tables.stop_from, *tokens,
        *masks, rows.live, logits.stride(0), masks.bits.shape[1], BIASES=tokens.bias_ids.shape[1],
        STOPS=tokens.stop_ids.shape[1], WORDS=min(WORDS, pow2(masks.bits.shape[1])), **launch_options(pdl, 4),
    )  # fmt: skip
