"""The gated delta rule with its convolution, over states that lie by slot: three launches a layer.

    convolve  a program for each token and span of channels
    advance   one for each row or chunk, head and span of values: its memory stays in registers from the first
              token to the last
    remember  one for each row or chunk and span of channels: the convolution's last inputs

`advance` takes the tokens of a chunk one by one. Decode rows lose nothing by that; a long chunk has few
programs (32 heads x 4 spans of a Qwen3-Next), each of which waits for every token: slower than blocks of
matrix products would be. `gpu.ops.delta` has the same in plain torch.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from core.plan import MOST_SAVES
from gpu.kernels.jit import begin, cdiv, jit, launch_options, pow2
from gpu.kv.states import StatePool
from gpu.state.recurrent import DeltaInputs
from gpu.state.view import StepView

CHANNELS = 256
"""Of a program of the convolution."""
VALUES = 32
"""Columns of a memory that a program holds: 128 x 32 numbers are 32 registers of each of its 128 threads."""
EPSILON = 1e-6


@jit
def _segment(
    segment: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Slot, position of the first token, row of the first token and number of tokens of a segment: a decode
    row below `ROWS`, a chunk from there on. Padding has 0 tokens."""
    slot, start, first, tokens = 0, 0, segment, 0
    if segment < ROWS:
        if segment < tl.load(counts + 1):
            slot = tl.load(decode_slots + segment)
            start = tl.load(positions + segment)
            tokens = 1
    elif segment - ROWS < tl.load(counts + 2):
        chunk = segment - ROWS
        slot = tl.load(chunk_slots + chunk)
        start = tl.load(chunk_starts + chunk)
        first = tl.load(chunk_firsts + chunk)
        tokens = tl.load(chunk_firsts + chunk + 1) - first
    return slot, start, first, tokens


@jit
def _convolve(
    x: tl.tensor,
    stride: tl.tensor,
    weight: tl.tensor,
    conv: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_firsts: tl.tensor,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    KERNEL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    cols = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = cols < WIDTH
    begin(PDL)
    if row >= tl.load(counts):
        return
    if row < tl.load(counts + 1):
        slot, before = tl.load(decode_slots + row), 0
    else:
        at = tl.arange(0, PADDED)
        firsts = tl.load(
            chunk_firsts + at, mask=at < tl.minimum(tl.load(counts + 2), CHUNKS), other=2147483647
        )
        chunk = tl.sum((firsts <= row).to(tl.int32), 0) - 1
        slot, before = tl.load(chunk_slots + chunk), row - tl.load(chunk_firsts + chunk)
    kept = conv + (slot.to(tl.int64) * WIDTH + cols) * (KERNEL - 1)
    total = tl.zeros([SPAN], tl.float32)
    for i in tl.static_range(KERNEL):
        back = KERNEL - 1 - i
        own = before >= back
        here = tl.load(x + (row - back).to(tl.int64) * stride + cols, mask=mask & own, other=0.0)
        old = tl.load(kept + before + i, mask=mask & (before < back), other=0.0)
        taken = here.to(tl.float32) + old.to(tl.float32)
        total += taken * tl.load(weight + cols * KERNEL + i, mask=mask, other=0.0).to(tl.float32)
    found = total * tl.sigmoid(total)
    tl.store(out + row.to(tl.int64) * WIDTH + cols, found.to(out.dtype.element_ty), mask=mask)


@jit
def _remember(
    x: tl.tensor,
    stride: tl.tensor,
    conv: tl.tensor,
    saves: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    ROWS: tl.constexpr,
    SAVES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    cols = tl.program_id(1) * SPAN + tl.arange(0, SPAN)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    mask = (cols < WIDTH) & (at < KEPT)
    begin(PDL)
    slot, start, first, tokens = _segment(
        tl.program_id(0), counts, decode_slots, positions, chunk_slots, chunk_starts, chunk_firsts, ROWS
    )
    if tokens == 0:
        return
    own = conv + slot.to(tl.int64) * WIDTH * KEPT + cols * KEPT
    for i in range(SAVES + 1):
        # The slot's own come last: they are written over those before the step, of which the others are made.
        passed, entry = tokens, slot
        if i < SAVES:
            passed = tl.load(saves + (slot * SAVES + i) * 2) - start
            entry = tl.load(saves + (slot * SAVES + i) * 2 + 1)
        if (passed > 0) & (passed <= tokens):
            back = passed - KEPT + at
            here = tl.load(
                x + (first + back).to(tl.int64) * stride + cols, mask=mask & (back >= 0), other=0.0
            )
            old = tl.load(own + passed + at, mask=mask & (back < 0), other=0.0)
            tl.debug_barrier()  # all threads' loads, before one stores where another loads
            into = conv + entry.to(tl.int64) * WIDTH * KEPT + cols * KEPT + at
            tl.store(into, (here.to(tl.float32) + old.to(tl.float32)).to(conv.dtype.element_ty), mask=mask)


@jit
def _advance(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    memory: tl.tensor,
    saves: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    scale: float,
    ROWS: tl.constexpr,
    SAVES: tl.constexpr,
    SAVES_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    SPAN: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    keys = tl.arange(0, KEY_PADDED)
    values = tl.program_id(2) * SPAN + tl.arange(0, SPAN)
    key_mask, value_mask = keys < KEY, values < VALUE
    cells = head * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    cell_mask = key_mask[:, None] & value_mask[None, :]
    key_size: tl.constexpr = HEADS // SHARED * KEY
    width: tl.constexpr = 2 * key_size + HEADS * VALUE
    entry_size: tl.constexpr = HEADS * KEY * VALUE
    begin(PDL)
    slot, start, first, tokens = _segment(
        tl.program_id(0), counts, decode_slots, positions, chunk_slots, chunk_starts, chunk_firsts, ROWS
    )
    if tokens == 0:
        return
    at = tl.arange(0, SAVES_PADDED)
    save = saves + (slot * SAVES + at) * 2
    due = tl.load(save, mask=at < SAVES, other=0) - start
    into = tl.load(save + 1, mask=at < SAVES, other=0)
    own = memory + slot.to(tl.int64) * entry_size + cells
    state = tl.load(own, mask=cell_mask, other=0.0)
    for token in range(tokens):
        row = (first + token).to(tl.int64)
        line = mixed + row * width
        q = tl.load(line + head // SHARED * KEY + keys, mask=key_mask, other=0.0).to(tl.float32)
        k = tl.load(line + key_size + head // SHARED * KEY + keys, mask=key_mask, other=0.0).to(tl.float32)
        v = tl.load(line + 2 * key_size + head * VALUE + values, mask=value_mask, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
        state = state * tl.exp(tl.load(decay + row * HEADS + head))
        change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * HEADS + head)
        state = state + k[:, None] * change[None, :]
        found = tl.sum(state * q[:, None], 0)
        line_out = out + (row * HEADS + head) * VALUE + values
        tl.store(line_out, found.to(out.dtype.element_ty), mask=value_mask)
        entry = tl.max(tl.where(due == token + 1, into, 0), 0)
        if entry > 0:
            tl.store(memory + entry.to(tl.int64) * entry_size + cells, state, mask=cell_mask)
    tl.store(own, state, mask=cell_mask)


def gated_delta(
    pool: StatePool, layer: int, view: StepView, inputs: DeltaInputs, *, pdl: bool = False
) -> Tensor:
    """See `gpu.state.recurrent.DeltaRule`. `inputs.qkv` may have strided rows. Decode rows have one token."""
    qkv, decay, beta, weight, linear = inputs
    conv, memory = pool.conv[layer], pool.memory[layer]
    rows, chunks, width, kept = view.max_decode, view.max_chunks, linear.channels, linear.kernel - 1
    mixed = qkv.new_empty(len(qkv), width)
    out = qkv.new_empty(len(qkv), linear.value_heads, linear.value_dim)
    span = min(CHANNELS, pow2(width))
    spans, shared = cdiv(width, span), launch_options(pdl, 4)
    chunked = (view.chunk_slots, view.chunk_starts, view.chunk_firsts)
    segments = (view.counts, view.decode_slots, view.positions, *chunked)
    _convolve[(len(qkv), spans)](
        qkv, qkv.stride(0), weight, conv, mixed, view.counts, view.decode_slots, view.chunk_slots,
        view.chunk_firsts, CHUNKS=chunks, PADDED=pow2(chunks + 1), WIDTH=width, SPAN=span, KERNEL=kept + 1,
        **shared,
    )  # fmt: skip
    values = min(VALUES, pow2(linear.value_dim))
    grid = (rows + chunks, linear.value_heads, cdiv(linear.value_dim, values))
    _advance[grid](
        mixed, decay.contiguous(), beta.contiguous(), memory, pool.saves, out, *segments,
        linear.key_dim**-0.5, ROWS=rows, SAVES=MOST_SAVES, SAVES_PADDED=pow2(MOST_SAVES),
        HEADS=linear.value_heads, SHARED=linear.value_heads // linear.key_heads, KEY=linear.key_dim,
        KEY_PADDED=pow2(linear.key_dim), VALUE=linear.value_dim, SPAN=values, EPS=EPSILON, **shared,
    )  # fmt: skip
    _remember[(rows + chunks, spans)](
        qkv, qkv.stride(0), conv, pool.saves, *segments, ROWS=rows, SAVES=MOST_SAVES, WIDTH=width, SPAN=span,
        KEPT=kept, PADDED=pow2(kept), **shared,
    )  # fmt: skip
    return out
