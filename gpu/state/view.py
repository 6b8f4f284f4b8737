"""What a step reads: tensors on the device, and the sizes that the host knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from core.plan import StepPlan
from gpu.lora import StepAdapters


class ChunkRow(NamedTuple):
    """Where a chunk lies: its tokens are `first` ... `first + tokens - 1` of those of all chunks, which stand
    behind the decode rows'."""

    slot: int
    start: int
    first: int
    tokens: int


def place(plan: StepPlan) -> tuple[ChunkRow, ...]:
    """Where the chunks of `plan` lie, in order."""
    rows: list[ChunkRow] = []
    first = 0
    for chunk in plan.chunks:
        rows.append(ChunkRow(chunk.slot, chunk.start, first, len(chunk.tokens)))
        first += len(chunk.tokens)
    return tuple(rows)


class PackedRows(NamedTuple):
    """Takes rows of a plan out of tensors of its step's tokens. How many drafts decode rows have, the device
    knows alone: where they may have any, rows are gathered, else they are views.

    chunks      where the plan's lie
    num_decode  int32 [1] on the device: tokens of decode rows
    before      int32 [any] on the device: drafts of the decode rows before each, as in `DraftSamples`
    moved       where the accepted ones of a row's tokens lie, as in `Paths`; None: at its beginning
    """

    plan: StepPlan
    chunks: tuple[ChunkRow, ...]
    num_decode: Tensor
    before: Tensor
    moved: Tensor | None = None

    def of_chunk(self, tokens: Tensor, chunk: ChunkRow) -> Tensor:
        """The chunk's part of `tokens` [n, ...]."""
        first, end = chunk.first, chunk.first + chunk.tokens
        if not self.plan.drafts:
            rows = len(self.plan.decode_slots)
            return tokens[rows + first : rows + end]
        return tokens.index_select(0, torch.arange(first, end, device=tokens.device) + self.num_decode)

    def of_row(self, tokens: Tensor, row: int) -> Tensor:
        """A decode row's part of `tokens` [n, ...]: its last one and as many drafts as the plan allows,
        whatever stands behind those that it has."""
        if not self.plan.drafts:
            return tokens[row : row + 1]
        at = torch.arange(row, row + self.plan.query_length, device=tokens.device) + self.before[row]
        if self.moved is not None:
            at += self.moved[at.clamp(max=len(self.moved) - 1)]
        return tokens.index_select(0, at.clamp_(max=len(tokens) - 1))


class StepView(NamedTuple):
    """The inputs of one forward. Sizes in Python are padded where the forward is a graph; true counts are on
    the device. Tokens are packed: those of decode rows first, then each chunk's, then padding.

    A decode row has its last token and its drafts, neighbours of one slot, which no other row has. Each sees
    the keys up to itself: those of the tokens before it are written ahead of every layer's attention.

    tokens          N, tokens of the forward
    max_decode      D, tokens of decode rows it can hold: N in a decode graph, at most N in a mixed one
    max_chunks      C, 0 in a decode graph
    counts          int32 [4]: true tokens, true tokens of decode rows, true chunks, true samples
    ids             int32 [N]
    positions       int32 [N]
    kv_slot_mapping int32 [N]: page * page_size + offset, where a token's K and V go
    page_table      int32 [max_slots, max_pages]; entries past a slot's length are stale
    decode_slots    int32 [D]: a slot per token of a decode row
    decode_lengths  int32 [D]: keys it sees, its own included
    chunk_slots     int32 [C]
    chunk_starts    int32 [C]: position of a chunk's first token
    chunk_firsts    int32 [C + 1]: row of a chunk's first token; entry i + 1 is where chunk i ends
    common          int32 [1]: leading keys that all decode rows share (whole pages), 0 for none
    shared          whether the graph attends to those keys apart; one that does not leaves `common` alone
    deep            whether the graph is for few queries behind many keys, which are then cut among processors
    query           the most tokens of a decode row, which share one pass over its keys; 1: attention takes
                    each token as a row of its own, however many rows have
    adapters        which rows have adapters; None where no row has
    placed          the chunks as the host knows them, in forwards that no graph holds
    ancestors       int32 [D] where drafts may be trees: which of the keys before its own a token sees, as in
                    `SlotTables.ancestors`. Its key lies behind those of all drafts before it, its position is
                    that behind its parent's. None: a token sees all keys before its own

    Entries behind the true counts are arbitrary in ids, positions, slots, lengths and starts, but always
    in bounds: slot 0, position 0, length 1. `kv_slot_mapping` is 0 there (page 0, the dump), and for the
    token of a row at its limit.
    """

    tokens: int
    max_decode: int
    max_chunks: int
    counts: Tensor
    ids: Tensor
    positions: Tensor
    kv_slot_mapping: Tensor
    page_table: Tensor
    decode_slots: Tensor
    decode_lengths: Tensor
    chunk_slots: Tensor
    chunk_starts: Tensor
    chunk_firsts: Tensor
    common: Tensor
    shared: bool = False
    deep: bool = False
    query: int = 1
    placed: tuple[ChunkRow, ...] = ()
    ancestors: Tensor | None = None
    adapters: StepAdapters | None = None

    @property
    def num_tokens(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over tokens."""
        return self.counts[0:1]

    @property
    def num_decode(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over tokens of decode rows."""
        return self.counts[1:2]
