"""One step's flat tensors, gathered from a plan and the slots' tables."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from core.plan import Chunk, StepPlan
from gpu.state.slots import SlotState


class ChunkRow(NamedTuple):
    """Where a chunk lies: its tokens are rows `first` ... `first + tokens - 1` of the step."""

    slot: int
    start: int
    first: int
    tokens: int


class StepInputs(NamedTuple):
    """What the forward, the attention backend and the sampler read. n tokens, d decode rows first.

    ids, positions   int64 [n]
    where            int64 [n]   page * page_size + offset: where a token's K and V go
    decode_slots     int64 [d]
    decode_lengths   int64 [d]   this step's token included
    chunks           one per chunk, in order
    sample_rows      int64 [s]   tokens whose logits are sampled
    sample_slots     int64 [s]
    sample_positions int64 [s]   position of the token being sampled
    """

    ids: torch.Tensor
    positions: torch.Tensor
    where: torch.Tensor
    decode_slots: torch.Tensor
    decode_lengths: torch.Tensor
    chunks: tuple[ChunkRow, ...]
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor


def gather(plan: StepPlan, slots: SlotState, page_size: int) -> StepInputs:
    """Build the step's inputs and advance the lengths of its slots."""
    device = slots.length.device
    decode = torch.tensor(plan.decode_slots, dtype=torch.int64, device=device)
    before = slots.length[decode]
    lengths = before + 1
    slots.length[decode] = lengths
    ids, positions, rows = slots.last_token[decode], before, decode
    chunks = place(plan)
    if chunks:
        known = np.concatenate([chunk.tokens for chunk in plan.chunks])
        spans = [np.arange(chunk.start, chunk.start + chunk.tokens) for chunk in chunks]
        owners = np.repeat([chunk.slot for chunk in chunks], [chunk.tokens for chunk in chunks])
        ids = torch.cat([ids, torch.tensor(known, dtype=torch.int64, device=device)])
        positions = torch.cat([before, torch.tensor(np.concatenate(spans), device=device)])
        rows = torch.cat([decode, torch.tensor(owners, dtype=torch.int64, device=device)])
        ends = torch.tensor([chunk.start + chunk.tokens for chunk in chunks], device=device)
        slots.length[torch.tensor([chunk.slot for chunk in chunks], device=device)] = ends
    pages = slots.page_table[rows, positions // page_size]
    sample_rows, sample_slots = _samples(plan.chunks, chunks, decode)
    return StepInputs(
        ids=ids,
        positions=positions,
        where=pages * page_size + positions % page_size,
        decode_slots=decode,
        decode_lengths=lengths,
        chunks=chunks,
        sample_rows=sample_rows,
        sample_slots=sample_slots,
        sample_positions=slots.length[sample_slots],
    )


def place(plan: StepPlan) -> tuple[ChunkRow, ...]:
    """Where the chunks of `plan` lie, in order: behind its decode rows."""
    rows: list[ChunkRow] = []
    first = len(plan.decode_slots)
    for chunk in plan.chunks:
        rows.append(ChunkRow(chunk.slot, chunk.start, first, len(chunk.tokens)))
        first += len(chunk.tokens)
    return tuple(rows)


def _samples(
    chunks: tuple[Chunk, ...], placed: tuple[ChunkRow, ...], decode: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and slots that sample: every decode row, then the last token of each sampling chunk."""
    rows = torch.arange(len(decode), device=decode.device)
    ends = [at for chunk, at in zip(chunks, placed, strict=True) if chunk.samples]
    if not ends:
        return rows, decode
    last = torch.tensor([at.first + at.tokens - 1 for at in ends], device=decode.device)
    owners = torch.tensor([at.slot for at in ends], device=decode.device)
    return torch.cat([rows, last]), torch.cat([decode, owners])
