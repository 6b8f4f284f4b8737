"""The gated delta rule with its convolution, over states that lie by slot: three launches a layer.

    convolve  a program for each token and span of channels
    advance   one for each row or chunk, head and span of values: its memory stays in registers from the first
              token to the last
    remember  one for each row or chunk and span of channels: the convolution's last inputs

Where rows have drafts (DRAFTS), those accepted of the step before (`gpu.kv.states.Pending`) lie between a
state and a row's tokens: `convolve` finds inputs among them, `advance` takes them in, and `remember`, when
all programs have read them, puts the drafts of this step in their place.

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
"""Channels that a program of the convolution takes."""
VALUES = 32
"""Columns of a memory that a program holds: 128 x 32 numbers are 32 registers of each of its 128 threads."""
EPSILON = 1e-6


@jit
def _segment(
    segment: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    ROWS: tl.constexpr,
    DRAFTS: tl.constexpr,
    QUERY: tl.constexpr,
) -> tl.tensor:
    """Return a segment's slot, position of its first token, row of that token, number of tokens, and how many
    of these update the slot's state. Segments below `ROWS` are decode rows, the others chunks. A decode row
    and its drafts, at most 1 + DRAFTS tokens, are the segment of the row's first token; those of its drafts
    and of padding have 0 tokens. QUERY is 1 + DRAFTS as a power of two."""
    slot, start, first, tokens, taken = 0, 0, segment, 0, 0
    if segment < ROWS:
        decoding = tl.load(counts + 1)
        if segment < decoding:
            slot = tl.load(decode_slots + segment)
            start = tl.load(positions + segment)
            tokens, taken = 1, 1
            if DRAFTS:
                at = tl.arange(0, QUERY)
                live = (at <= DRAFTS) & (segment + at < decoding)
                owners = tl.load(decode_slots + segment + at, mask=live, other=-1)
                before = tl.load(decode_slots + segment - 1, mask=segment > 0, other=-1)
                tokens = tl.where(before == slot, 0, tl.sum((owners == slot).to(tl.int32), 0))
                slot = _states_of(slot, tl.load(mapping + segment))
    elif segment - ROWS < tl.load(counts + 2):
        chunk = segment - ROWS
        slot = tl.load(chunk_slots + chunk)
        start = tl.load(chunk_starts + chunk)
        first = tl.load(chunk_firsts + chunk)
        tokens = tl.load(chunk_firsts + chunk + 1) - first
        taken = tokens
    return slot, start, first, tokens, taken


@jit
def _states_of(slot: tl.tensor, cell: tl.tensor) -> tl.tensor:
    """Return the slot whose states a row updates, by the `cell` of its first token's K and V. A row at its
    length limit writes to cell 0, which nobody reads, and so to the states of slot 0."""
    return tl.where(cell > 0, slot, 0)


@jit
def _convolve(
    x: tl.tensor,
    stride: tl.tensor,
    weight: tl.tensor,
    conv: tl.tensor,
    held: tl.tensor | None,
    inputs: tl.tensor | None,
    out: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_firsts: tl.tensor,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    KERNEL: tl.constexpr,
    DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    cols = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = cols < WIDTH
    begin(PDL)
    if row >= tl.load(counts):
        return
    # `before` tokens behind the state, pending ones among them, come before this one; `near` of these are of
    # this step.
    owner, near = -1, 0
    if row < tl.load(counts + 1):
        slot, before = tl.load(decode_slots + row), 0
        if DRAFTS:
            owner = slot
            slot = _states_of(owner, tl.load(mapping + row))
            before = tl.load(positions + row) - tl.load(held + slot)
    else:
        at = tl.arange(0, PADDED)
        firsts = tl.load(
            chunk_firsts + at, mask=at < tl.minimum(tl.load(counts + 2), CHUNKS), other=2147483647
        )
        chunk = tl.sum((firsts <= row).to(tl.int32), 0) - 1
        slot, before = tl.load(chunk_slots + chunk), row - tl.load(chunk_firsts + chunk)
        near = before
    kept = conv + (slot.to(tl.int64) * WIDTH + cols) * (KERNEL - 1)
    total = tl.zeros([SPAN], tl.float32)
    for i in tl.static_range(KERNEL):
        back = KERNEL - 1 - i
        own = near >= back
        if DRAFTS:
            earlier = tl.load(decode_slots + row - back, mask=(owner >= 0) & (row >= back), other=-2)
            own |= earlier == owner
        here = tl.load(x + (row - back).to(tl.int64) * stride + cols, mask=mask & own, other=0.0)
        place = before - back
        state = mask & (own == 0) & (place < 0)
        if DRAFTS:
            state &= place > -KERNEL
        old = tl.load(kept + KERNEL - 1 + place, mask=state, other=0.0)
        taken = here.to(tl.float32) + old.to(tl.float32)
        if DRAFTS:
            draft = inputs + (slot.to(tl.int64) * DRAFTS + place) * WIDTH + cols
            draft = tl.load(draft, mask=mask & (own == 0) & (place >= 0) & (place < DRAFTS), other=0.0)
            taken += draft.to(tl.float32)
        total += taken * tl.load(weight + cols * KERNEL + i, mask=mask, other=0.0).to(tl.float32)
    found = total * tl.sigmoid(total)
    tl.store(out + row.to(tl.int64) * WIDTH + cols, found.to(out.dtype.element_ty), mask=mask)


@jit
def _remember(
    x: tl.tensor,
    stride: tl.tensor,
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    conv: tl.tensor,
    held: tl.tensor | None,
    inputs: tl.tensor | None,
    outputs: tl.tensor | None,
    gates: tl.tensor | None,
    due: tl.tensor | None,
    saves: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
    chunk_slots: tl.tensor,
    chunk_starts: tl.tensor,
    chunk_firsts: tl.tensor,
    ROWS: tl.constexpr,
    SAVES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    KEPT: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DRAFTS: tl.constexpr,
    QUERY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    cols = tl.program_id(1) * SPAN + tl.arange(0, SPAN)[:, None]
    at = tl.arange(0, PADDED)[None, :]
    mask = (cols < WIDTH) & (at < KEPT)
    begin(PDL)
    slot, start, first, tokens, taken = _segment(
        tl.program_id(0), counts, decode_slots, positions, mapping, chunk_slots, chunk_starts, chunk_firsts,
        ROWS, DRAFTS, QUERY,
    )  # fmt: skip
    if tokens == 0:
        return
    own = conv + slot.to(tl.int64) * WIDTH * KEPT + cols * KEPT
    ready = 0
    if DRAFTS:
        pending, ready = slot.to(tl.int64) * DRAFTS, tl.load(due + slot)
    for i in range(SAVES + 1):
        # The slot's own come last: they are written over those before the step, of which the others are made.
        passed, entry = taken, slot
        if i < SAVES:
            passed = tl.load(saves + (slot * SAVES + i) * 2) - start
            entry = tl.load(saves + (slot * SAVES + i) * 2 + 1)
        if (passed > 0) & (passed <= tokens):
            back = passed - KEPT + at
            place = back + ready
            here = tl.load(
                x + (first + back).to(tl.int64) * stride + cols, mask=mask & (back >= 0), other=0.0
            )
            old = tl.load(own + KEPT + place, mask=mask & (place < 0), other=0.0)
            found = here.to(tl.float32) + old.to(tl.float32)
            if DRAFTS:
                draft = inputs + (pending + place) * WIDTH + cols
                draft = tl.load(draft, mask=mask & (back < 0) & (place >= 0), other=0.0)
                found += draft.to(tl.float32)
            tl.debug_barrier()  # all threads' loads, before one stores where another loads
            into = conv + entry.to(tl.int64) * WIDTH * KEPT + cols * KEPT + at
            tl.store(into, found.to(conv.dtype.element_ty), mask=mask)
    if DRAFTS:
        heads = tl.arange(0, HEADS_PADDED)
        for token in range(taken, tokens):
            row, place = (first + token).to(tl.int64), pending + token - taken
            value = tl.load(x + row * stride + cols, mask=cols < WIDTH)
            tl.store(inputs + place * WIDTH + cols, value, mask=cols < WIDTH)
            value = tl.load(mixed + row * WIDTH + cols, mask=cols < WIDTH)
            tl.store(outputs + place * WIDTH + cols, value, mask=cols < WIDTH)
            mine = (heads < HEADS) & (tl.program_id(1) == 0)
            value = tl.load(decay + row * HEADS + heads, mask=mine)
            tl.store(gates + place * 2 * HEADS + heads, value, mask=mine)
            value = tl.load(beta + row * HEADS + heads, mask=mine)
            tl.store(gates + (place * 2 + 1) * HEADS + heads, value, mask=mine)
        tl.store(held + slot, start + taken)


@jit
def _absorb(
    state: tl.tensor,
    line: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_mask: tl.tensor,
    value_mask: tl.tensor,
    EPS: tl.constexpr,
) -> tl.tensor:
    """Update the state of a head by one token. `line` points to the token's key, at `keys`, and value, at
    `values`."""
    k = tl.load(line + keys, mask=key_mask, other=0.0).to(tl.float32)
    v = tl.load(line + values, mask=value_mask, other=0.0).to(tl.float32)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + EPS)
    state = state * tl.exp(tl.load(decay))
    change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta)
    return state + k[:, None] * change[None, :]


@jit
def _advance(
    mixed: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    memory: tl.tensor,
    held: tl.tensor | None,
    outputs: tl.tensor | None,
    gates: tl.tensor | None,
    due: tl.tensor | None,
    saves: tl.tensor,
    out: tl.tensor,
    counts: tl.tensor,
    decode_slots: tl.tensor,
    positions: tl.tensor,
    mapping: tl.tensor,
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
    DRAFTS: tl.constexpr,
    QUERY: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    dims = tl.arange(0, KEY_PADDED)
    columns = tl.program_id(2) * SPAN + tl.arange(0, SPAN)
    key_mask, value_mask = dims < KEY, columns < VALUE
    cells = head * KEY * VALUE + dims[:, None] * VALUE + columns[None, :]
    cell_mask = key_mask[:, None] & value_mask[None, :]
    key_size: tl.constexpr = HEADS // SHARED * KEY
    width: tl.constexpr = 2 * key_size + HEADS * VALUE
    entry_size: tl.constexpr = HEADS * KEY * VALUE
    queries = head // SHARED * KEY + dims
    keys, values = key_size + queries, 2 * key_size + head * VALUE + columns
    begin(PDL)
    slot, start, first, tokens, taken = _segment(
        tl.program_id(0), counts, decode_slots, positions, mapping, chunk_slots, chunk_starts, chunk_firsts,
        ROWS, DRAFTS, QUERY,
    )  # fmt: skip
    if tokens == 0:
        return
    at = tl.arange(0, SAVES_PADDED)
    save = saves + (slot * SAVES + at) * 2
    passed = tl.load(save, mask=at < SAVES, other=0) - start
    into = tl.load(save + 1, mask=at < SAVES, other=0)
    own = memory + slot.to(tl.int64) * entry_size + cells
    state = tl.load(own, mask=cell_mask, other=0.0)
    if DRAFTS:
        ready = tl.minimum(tl.maximum(start - tl.load(held + slot), 0), DRAFTS)
        ready = tl.where(tl.program_id(0) < ROWS, ready, 0)
        for draft in range(ready):
            row = slot.to(tl.int64) * DRAFTS + draft
            gate = gates + row * 2 * HEADS + head
            state = _absorb(
                state, outputs + row * width, gate, gate + HEADS, keys, values, key_mask, value_mask, EPS
            )
        tl.store(due + slot, ready)  # all programs of the segment store the same
    for token in range(tokens):
        row = (first + token).to(tl.int64)
        line, gate = mixed + row * width, row * HEADS + head
        state = _absorb(state, line, decay + gate, beta + gate, keys, values, key_mask, value_mask, EPS)
        q = tl.load(line + queries, mask=key_mask, other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale)
        found = tl.sum(state * q[:, None], 0)
        line_out = out + (row * HEADS + head) * VALUE + columns
        tl.store(line_out, found.to(out.dtype.element_ty), mask=value_mask)
        entry = tl.max(tl.where(passed == token + 1, into, 0), 0)
        if entry > 0:
            tl.store(memory + entry.to(tl.int64) * entry_size + cells, state, mask=cell_mask)
        if DRAFTS:
            tl.store(own, state, mask=cell_mask & (token + 1 == taken))
    if not DRAFTS:
        tl.store(own, state, mask=cell_mask)


def gated_delta(
    pool: StatePool, layer: int, view: StepView, inputs: DeltaInputs, *, pdl: bool = False
) -> Tensor:
    """See `gpu.state.recurrent.DeltaRule`. `inputs.qkv` may have strided rows."""
    qkv, decay, beta, weight, linear = inputs
    conv, memory = pool.conv[layer], pool.memory[layer]
    decay, beta = decay.contiguous(), beta.contiguous()
    rows, chunks, width, kept = view.max_decode, view.max_chunks, linear.channels, linear.kernel - 1
    mixed = qkv.new_empty(len(qkv), width)
    out = qkv.new_empty(len(qkv), linear.value_heads, linear.value_dim)
    span = min(CHANNELS, pow2(width))
    spans, shared = cdiv(width, span), launch_options(pdl, 4)
    held, before, outputs, gates, due = pool.pending.of(layer) if pool.pending else (None,) * 5
    drafts = 0 if before is None else before.shape[1]
    decoding = (view.decode_slots, view.positions, view.kv_slot_mapping)
    segments = (view.counts, *decoding, view.chunk_slots, view.chunk_starts, view.chunk_firsts)
    _convolve[(len(qkv), spans)](
        qkv, qkv.stride(0), weight, conv, held, before, mixed, view.counts, *decoding, view.chunk_slots,
        view.chunk_firsts, CHUNKS=chunks, PADDED=pow2(chunks + 1), WIDTH=width, SPAN=span, KERNEL=kept + 1,
        DRAFTS=drafts, **shared,
    )  # fmt: skip
    values = min(VALUES, pow2(linear.value_dim))
    grid = (rows + chunks, linear.value_heads, cdiv(linear.value_dim, values))
    shared |= {"ROWS": rows, "SAVES": MOST_SAVES, "HEADS": linear.value_heads}
    shared |= {"DRAFTS": drafts, "QUERY": pow2(1 + drafts)}
    _advance[grid](
        mixed, decay, beta, memory, held, outputs, gates, due, pool.saves, out, *segments,
        linear.key_dim**-0.5, SAVES_PADDED=pow2(MOST_SAVES), SHARED=linear.value_heads // linear.key_heads,
        KEY=linear.key_dim, KEY_PADDED=pow2(linear.key_dim), VALUE=linear.value_dim, SPAN=values, EPS=EPSILON,
        **shared,
    )  # fmt: skip
    _remember[(rows + chunks, spans)](
        qkv, qkv.stride(0), mixed, decay, beta, conv, held, before, outputs, gates, due, pool.saves,
        *segments, WIDTH=width, SPAN=span, KEPT=kept, PADDED=pow2(kept),
        HEADS_PADDED=pow2(linear.value_heads), **shared,
    )  # fmt: skip
    return out
