"""What a step reads: tensors on the device, and the sizes that the host knows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from core.plan import StepPlan


class ChunkRow(NamedTuple):
    """Where a chunk lies: its tokens are rows `first` ... `first + tokens - 1` of the step."""

    slot: int
    start: int
    first: int
    tokens: int


def place(plan: StepPlan) -> tuple[ChunkRow, ...]:
    """Where the chunks of `plan` lie, in order: behind its decode rows."""
    rows: list[ChunkRow] = []
    first = len(plan.decode_slots)
    for chunk in plan.chunks:
        rows.append(ChunkRow(chunk.slot, chunk.start, first, len(chunk.tokens)))
        first += len(chunk.tokens)
    return tuple(rows)


class StepView(NamedTuple):
    """The inputs of one forward. Sizes in Python are padded where the forward is a graph; true counts are on
    the device. Tokens are packed: those of decode rows first, then each chunk's, then padding.

    A decode row has its last token and its drafts. Attention sees each of these as a row of its own, with the
    keys up to itself: those of the tokens before it are written ahead of every layer's attention.

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
    placed          the chunks as the host knows them, in forwards that no graph holds

    Entries behind the true counts are arbitrary in ids, positions, slots, lengths and starts, but always
    in bounds: slot 0, position 0, length 1. `kv_slot_mapping` is 0 there (page 0, the dump).
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
    placed: tuple[ChunkRow, ...] = ()

    @property
    def num_tokens(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over tokens."""
        return self.counts[0:1]

    @property
    def num_decode(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over tokens of decode rows."""
        return self.counts[1:2]
