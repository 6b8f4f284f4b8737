"""What a captured step reads: device tensors whose addresses never change, and the sizes that do not."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepView(NamedTuple):
    """The inputs of one graph. Sizes in Python are the graph's own and padded; true counts are on the
    device. Rows are packed: decode rows first, then each chunk's tokens, then padding.

    tokens          N, rows of the graph
    max_decode      D, decode rows it can hold: N in a decode graph, at most N in a mixed one
    max_chunks      C, 0 in a decode graph
    counts          int32 [4]: true tokens, true decode rows, true chunks, true samples
    ids             int32 [N]
    positions       int32 [N]
    kv_slot_mapping int32 [N]: page * page_size + offset, where a token's K and V go
    page_table      int32 [max_slots, max_pages]; entries past a slot's length are stale
    decode_slots    int32 [D]: a slot per decode row
    decode_lengths  int32 [D]: keys a decode row sees, this step's token included
    chunk_slots     int32 [C]
    chunk_starts    int32 [C]: position of a chunk's first token
    chunk_firsts    int32 [C + 1]: row of a chunk's first token; entry i + 1 is where chunk i ends
    common          int32 [1]: leading keys that all decode rows share (whole pages), 0 for none
    shared          whether the graph attends to those keys apart; one that does not leaves `common` alone
    deep            whether the graph is for few queries behind many keys, which are then cut among processors

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

    @property
    def num_tokens(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over tokens."""
        return self.counts[0:1]

    @property
    def num_decode(self) -> Tensor:
        """int32 [1] on the device: the `num_rows` of kernels over decode rows."""
        return self.counts[1:2]
