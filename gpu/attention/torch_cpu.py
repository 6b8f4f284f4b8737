"""Attention in plain torch: what the CPU runs and what every other backend is tested against.

Decode rows are one batched call: their pages are gathered to [rows, longest] and masked by length.
Query heads that share a KV head are laid along the query axis, so grouped heads need no copy of K
and V. Chunks are one call each over their prefix and themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpu.inputs import ChunkRow, StepInputs
from gpu.kv.pool import KvPool
from gpu.state.slots import SlotState

QUERY_BLOCK = 512
"""Queries of a chunk per call: bounds a mask to 512 × context × 4 bytes (256 MiB at 128k)."""


class _Decode(NamedTuple):
    """All decode rows, for layers of one window. `pages` int64 [rows * p] or, when one row's pages
    are consecutive, the first of them; `mask` [rows, 1, 1, keys] is added to scores, None when every
    key counts."""

    pages: torch.Tensor | int
    keys: int
    mask: torch.Tensor | None


class _Block(NamedTuple):
    """Queries `first` ... `last - 1` of the step, one chunk's or a part of it, and the `keys` they
    see: from position `pages[0] * page_size` of the slot on."""

    first: int
    last: int
    pages: torch.Tensor | int
    keys: int
    mask: torch.Tensor | None
    causal: bool


class TorchAttention:
    """`AttentionBackend` on any device that torch has kernels for.

    `windows[layer]` is the positions a layer sees, 0 for all.

    Owner: launch thread.
    """

    __slots__ = (
        "_blocks",
        "_decode",
        "_inputs",
        "_pages",
        "_pool",
        "_slots",
        "_tokens",
        "_windows",
    )

    def __init__(self, pool: KvPool, slots: SlotState, windows: Sequence[int]) -> None:
        self._pool = pool
        self._slots = slots
        self._windows = tuple(windows)
        self._tokens = pool.tokens()
        self._pages = pool.pages()
        self._inputs: StepInputs | None = None
        self._decode: dict[int, _Decode] = {}
        self._blocks: dict[int, list[_Block]] = {}

    def prepare(self, inputs: StepInputs) -> None:
        """Page lists and masks of the step, once for all layers of the same window."""
        self._inputs = inputs
        self._clear_tails(inputs)
        kinds = set(self._windows)
        if len(inputs.decode_slots):
            self._decode = {window: self._decode_view(inputs, window) for window in kinds}
        self._blocks = {
            window: [block for chunk in inputs.chunks for block in self._chunk_blocks(chunk, window)]
            for window in kinds
        }

    def run(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        inputs = self._inputs
        assert inputs is not None, "prepare() comes first"
        _, heads, dim = q.shape
        kv_heads = kv.shape[2]
        self._tokens[layer].index_copy_(0, inputs.where, kv.flatten(1))
        window = self._windows[layer]
        rows = len(inputs.decode_slots)
        group = heads // kv_heads
        outs: list[torch.Tensor] = []
        if rows:
            view = self._decode[window]
            k, v = self._gather(layer, view.pages, rows, view.keys, (kv_heads, dim))
            grouped = q[:rows].view(rows, kv_heads, group, dim)
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=view.mask)
            outs.append(out.reshape(rows, heads * dim))
        outs.extend(self._attend_block(layer, block, q, kv) for block in self._blocks[window])
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_block(self, layer: int, block: _Block, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """[last - first, heads * head_dim] of one block of a chunk's queries."""
        _, heads, dim = q.shape
        kv_heads = kv.shape[2]
        queries = q[block.first : block.last].transpose(0, 1).unsqueeze(0)
        k, v = self._gather(layer, block.pages, 1, block.keys, (kv_heads, dim))
        out = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=block.mask, is_causal=block.causal, enable_gqa=heads != kv_heads
        )
        return out[0].transpose(0, 1).reshape(-1, heads * dim)

    def _gather(
        self, layer: int, pages: torch.Tensor | int, rows: int, keys: int, heads: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [rows, kv_heads, keys, head_dim] of each row's pages. Consecutive pages are a view."""
        if isinstance(pages, int):
            first = pages * self._pool.page_size
            both = self._tokens[layer][first : first + keys].view(1, keys, 2, *heads)
        else:
            both = self._pages[layer].index_select(0, pages).view(rows, -1, 2, *heads)[:, :keys]
        both = both.permute(2, 0, 3, 1, 4)
        return both[0], both[1]

    def _decode_view(self, inputs: StepInputs, window: int) -> _Decode:
        """Pages and mask of the decode rows, trimmed to the longest row."""
        size = self._pool.page_size
        lengths = inputs.decode_lengths
        device = lengths.device
        rows = len(lengths)
        # A row's keys begin at the page that holds the oldest position it still sees.
        begin = (lengths - window).clamp(min=0) // size if window else torch.zeros_like(lengths)
        longest = int((lengths - begin * size).max())
        count = -(-longest // size)
        index = begin[:, None] + torch.arange(count, device=device)
        used = index * size < lengths[:, None]
        table = self._slots.page_table[inputs.decode_slots[:, None], index.where(used, 0)]
        # Page 0 is never written on this backend: what a shorter row gathers past its end is zero.
        pages = table.where(used, 0).flatten()
        if rows == 1 and (run := _consecutive(pages)) is not None and not window:
            return _Decode(run, longest, None)
        at = begin[:, None] * size + torch.arange(longest, device=device)
        hidden = at >= lengths[:, None]
        if window:
            hidden |= at < lengths[:, None] - window
        if not bool(hidden.any()):
            return _Decode(pages, longest, None)
        return _Decode(pages, longest, self._additive(hidden)[:, None, None])

    def _chunk_blocks(self, chunk: ChunkRow, window: int) -> list[_Block]:
        """A chunk in runs of at most QUERY_BLOCK queries, each with the keys it can see."""
        blocks = []
        size = self._pool.page_size
        row = self._slots.page_table[chunk.slot]
        for offset in range(0, chunk.tokens, QUERY_BLOCK):
            count = min(QUERY_BLOCK, chunk.tokens - offset)
            start = chunk.start + offset
            begin = max(start + 1 - window, 0) // size if window else 0
            end = start + count
            pages = row[begin : -(-end // size)]
            keys = end - begin * size
            # Aligned to the first key, torch's own causal flag needs no mask at all.
            causal = start == begin * size and (not window or count <= window)
            bare = causal or (count == 1 and not window)
            mask = None if bare else self._causal(start, count, begin * size, window, keys)
            run = _consecutive(pages)
            first = chunk.first + offset
            blocks.append(
                _Block(first, first + count, pages.long() if run is None else run, keys, mask, causal)
            )
        return blocks

    def _causal(self, start: int, count: int, begin: int, window: int, keys: int) -> torch.Tensor:
        """[count, keys] added to scores: 0 where position `start + i` sees `begin + j`, else -inf."""
        device = self._pool.data.device
        queries = torch.arange(start, start + count, device=device)[:, None]
        at = torch.arange(begin, begin + keys, device=device)
        hidden = at > queries
        if window:
            hidden |= at <= queries - window
        return self._additive(hidden)

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        # Made once a step: given booleans, torch would turn them into this in every layer.
        mask = torch.zeros(hidden.shape, dtype=self._pool.data.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _clear_tails(self, inputs: StepInputs) -> None:
        """Zero the pages that this step begins and does not fill.

        A reused page may hold NaN of a request that failed, and a mask cannot hide it: NaN - inf is
        NaN. One page per row and page_size steps, so the cost is nothing; after it, whatever lies
        behind a row's length in its last page is finite.
        """
        size = self._pool.page_size
        if size == 1:
            return
        rows = len(inputs.decode_slots)
        fresh = inputs.where[:rows][inputs.positions[:rows] % size == 0].tolist()
        for chunk in inputs.chunks:
            end = chunk.start + chunk.tokens
            if end % size and end - end % size >= chunk.start:
                fresh.append(int(inputs.where[chunk.first + chunk.tokens - end % size]))
        if fresh:
            pages = torch.tensor(fresh, device=inputs.where.device) // size
            self._pool.data.index_fill_(1, pages, 0)


def _consecutive(pages: torch.Tensor) -> int | None:
    """First of a run of pages p, p + 1, ..., or None."""
    ids = pages.tolist()
    return ids[0] if ids == list(range(ids[0], ids[0] + len(ids))) else None
