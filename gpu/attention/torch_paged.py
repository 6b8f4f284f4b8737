"""Attention in plain torch: what the CPU runs and what every other backend is tested against.

Decode rows are one batched call: their pages are gathered to [rows, longest] and masked by length.
Query heads that share a KV head are laid along the query axis, so grouped heads need no copy of K
and V. Chunks are one call each over their prefix and themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import ModelSpec
from core.types import Ints
from gpu.kv.pool import KvPool
from gpu.state.view import ChunkRow, StepView

QUERY_BLOCK = 512
"""Queries of a chunk per call: bounds a mask to 512 × context × 4 bytes (256 MiB at 128k)."""


STEPS_BLOCK = 64
"""Queries of a chunk per call where attention is in steps, with a score of each head and key: 1,024 tokens of
64 heads took 0.12 s on one core, 0.7 in blocks of 512."""

MERGED_KEYS = 128
"""Decode rows up to this length share a call whatever their lengths: padding them costs less than a
call more per layer."""


class _Decode(NamedTuple):
    """Decode rows of similar length, for layers of one window. `rows` of the step are theirs; `pages`
    int64 [rows * p] or, when one row's pages are consecutive, the first of them; `mask`
    [rows, 1, 1, keys] is added to scores, None when every key counts."""

    rows: slice | Tensor
    pages: Tensor | int
    keys: int
    mask: Tensor | None


class _Block(NamedTuple):
    """Queries `rows` of the step, one chunk's or a part of it, and the `keys` they see, from the start
    of the first of `pages` on."""

    rows: slice
    pages: Tensor | int
    keys: int
    mask: Tensor | None
    causal: bool


class TorchAttention:
    """`TorchBackend` over pages. A view's numbers are read on the host, where they lie.

    `windows[layer]` is the positions a layer sees, 0 for all.

    Owner: launch thread.
    """

    name = "torch"

    def __init__(
        self,
        windows: Sequence[int],
        scale: float | None = None,
        cap: float = 0.0,
        sinks: bool = False,
        values: int = 0,
    ) -> None:
        """`scale` of the scores; None: 1 / sqrt(head_dim). `cap`, `sinks` and `values` as in
        `AttentionConfig`."""
        self._windows, self._scale, self._cap, self._values = tuple(windows), scale, cap, values
        self._in_steps = cap > 0 or sinks or values > 0  # torch's kernel copies a latent for each head
        self.bind(None)
        self._kv_slot_mapping = torch.empty(0)
        self._decode: dict[int, list[_Decode]] = {}
        self._blocks: dict[int, list[_Block]] = {}

    def bind(self, pool: KvPool | None) -> None:
        """See `AttentionBackend.bind`."""
        self._page_size = 1 if pool is None else pool.page_size
        self._tokens = [] if pool is None else pool.tokens()
        self._pages = [] if pool is None else pool.pages()
        self._data = torch.empty(0) if pool is None else pool.data

    def plan(self, view: StepView) -> None:
        """See `AttentionBackend.plan`: page lists and masks for all layers of the same window."""
        _, rows, count, _ = view.counts.tolist()
        owners, starts = view.chunk_slots[:count].tolist(), view.chunk_starts[:count].tolist()
        spans = pairwise(view.chunk_firsts[: count + 1].tolist())
        chunks = [
            ChunkRow(slot, start, first, end - first)
            for slot, start, (first, end) in zip(owners, starts, spans, strict=True)
        ]
        self._kv_slot_mapping = view.kv_slot_mapping.long()
        self._clear_tails(view, rows, chunks)
        kinds = set(self._windows)
        self._plan_decode(view, rows, kinds)
        self._blocks = {
            window: [
                block
                for chunk in chunks
                for block in self._chunk_blocks(view.page_table[chunk.slot], chunk, window)
            ]
            for window in kinds
        }

    def _plan_decode(self, view: StepView, rows: int, windows: set[int]) -> None:
        slots, lengths = view.decode_slots[:rows].long(), view.decode_lengths[:rows].long()
        decode = view._replace(decode_slots=slots, decode_lengths=lengths)
        if view.ancestors is not None:
            decode = decode._replace(ancestors=view.ancestors[:rows], positions=view.positions[:rows])
        self._decode = {window: self._decode_groups(decode, window) for window in windows}

    def store(self, layer: int, kv: Tensor) -> None:
        """See `TorchBackend.store`."""
        self._tokens[layer].index_copy_(0, self._kv_slot_mapping, kv.flatten(1))

    def attend(self, layer: int, q: Tensor, view: StepView, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionBackend.attend`."""
        assert sinks is None or self._in_steps, "attention was made for layers without sinks"
        window, kv_heads = self._windows[layer], self._data.shape[-2]
        groups, blocks = self._decode[window], self._blocks[window]
        if len(groups) == 1 and int(view.num_decode) == view.tokens:
            return self._attend_rows(layer, groups[0], q, kv_heads, sinks)
        out = q.new_empty(len(q), q.shape[1] * (self._values or q.shape[2]))
        out[int(view.num_tokens) :] = 0  # drafts that the plan allowed and no row had
        for group in groups:
            out[group.rows] = self._attend_rows(layer, group, q[group.rows], kv_heads, sinks)
        for block in blocks:
            out[block.rows] = self._attend_block(layer, block, q[block.rows], kv_heads, sinks)
        return out

    def _attend_rows(
        self, layer: int, group: _Decode, q: Tensor, kv_heads: int, sinks: Tensor | None
    ) -> Tensor:
        """One token of each row: [rows, heads, head_dim] to [rows, heads * head_dim]."""
        rows, heads, dim = q.shape
        k, v = self._gather(layer, group.pages, rows, group.keys, (kv_heads, dim))
        grouped = q.view(rows, kv_heads, heads // kv_heads, dim)
        if self._in_steps:
            own = None if sinks is None else sinks.view(kv_heads, -1, 1)
            return self._attend_in_steps(grouped, k, v, group.mask, own).reshape(rows, -1)
        found = F.scaled_dot_product_attention(grouped, k, v, attn_mask=group.mask, scale=self._scale)
        return found.reshape(rows, -1)

    def _attend_block(
        self, layer: int, block: _Block, q: Tensor, kv_heads: int, sinks: Tensor | None
    ) -> Tensor:
        """A run of tokens of one slot: [count, heads, head_dim] to [count, heads * head_dim]."""
        count, heads, dim = q.shape
        k, v = self._gather(layer, block.pages, 1, block.keys, (kv_heads, dim))
        if self._in_steps:
            grouped = q.view(1, count, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            mask = None if block.mask is None else block.mask.repeat(heads // kv_heads, 1)
            own = None if sinks is None else sinks.repeat_interleave(count).view(kv_heads, -1, 1)
            out = self._attend_in_steps(grouped, k, v, mask, own)
            return out[0].view(heads, count, -1).transpose(0, 1).reshape(count, -1)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=block.mask,
            is_causal=block.causal,
            scale=self._scale,
            enable_gqa=heads != kv_heads,
        )
        return out[0].transpose(0, 1).reshape(count, -1)

    def _attend_in_steps(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        """`scaled_dot_product_attention`, which takes neither cap nor sinks, in as many steps. `sinks`
        [kv_heads, queries, 1] of `q` [rows, kv_heads, queries, head_dim]. The softmax is float32."""
        scale = self._scale or q.shape[-1] ** -0.5
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
        if self._cap:
            scores = scores.div_(self._cap).tanh_().mul_(self._cap)
        if mask is not None:
            scores += mask
        scores = scores.float()
        top = scores.amax(-1, keepdim=True)
        if sinks is None:
            total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        else:
            top = torch.maximum(top, sinks)
            total = scores.sub_(top).exp_().sum(-1, keepdim=True) + torch.exp(sinks - top)
        return (torch.matmul(scores.to(v.dtype), v) / total).to(v.dtype)

    def _gather(
        self, layer: int, pages: Tensor | int, rows: int, keys: int, heads: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """K and V [rows, kv_heads, keys, head_dim] of each row's pages, V of latents narrower. Consecutive
        pages are a view."""
        sides = self._data.shape[3]
        if isinstance(pages, int):
            first = pages * self._page_size
            both = self._tokens[layer][first : first + keys].view(1, keys, sides, *heads)
        else:
            both = self._pages[layer].index_select(0, pages).view(rows, -1, sides, *heads)[:, :keys]
        both = both.permute(2, 0, 3, 1, 4)
        return both[0], both[0][..., : self._values] if self._values else both[1]

    def _decode_groups(self, decode: StepView, window: int) -> list[_Decode]:
        """The rows of `decode`, a view of decode rows alone, in calls of similar length, longest first.

        One call for all would pad every row to the longest: 63 short rows beside one of 8,192 tokens
        would gather 64 times its keys. Rows of a group differ at most by a factor of two.
        """
        lengths = decode.decode_lengths
        keys = lengths - self._begin(_seen(decode, slice(None)), window) * self._page_size
        seen = keys.tolist()
        groups: list[list[int]] = []
        for row in sorted(range(len(seen)), key=seen.__getitem__, reverse=True):
            if groups and seen[groups[-1][0]] <= max(2 * seen[row], MERGED_KEYS):
                groups[-1].append(row)
            else:
                groups.append([row])
        if len(groups) == 1:
            return [self._decode_group(decode, slice(0, len(seen)), window, max(seen))]
        return [
            self._decode_group(decode, torch.tensor(rows, device=lengths.device), window, seen[rows[0]])
            for rows in groups
        ]

    def _begin(self, lengths: Tensor, window: int) -> Tensor:
        """Index of the page with the oldest position that the last token of each row sees."""
        oldest = (lengths - window).clamp(min=0) if window else torch.zeros_like(lengths)
        return oldest // self._page_size

    def _decode_group(self, decode: StepView, rows: slice | Tensor, window: int, longest: int) -> _Decode:
        """Pages and mask of some decode rows, `longest` keys each."""
        size = self._page_size
        lengths = decode.decode_lengths[rows, None]
        slots = decode.decode_slots[rows, None]
        seen = _seen(decode, rows)[:, None]
        begin = self._begin(seen, window)
        index = begin + torch.arange(-(-longest // size), device=lengths.device)
        used = index * size < lengths
        table = decode.page_table[slots, index.where(used, 0)]
        # Page 0 is never written on this backend: what a shorter row gathers past its end is zero.
        pages = table.where(used, 0).flatten()
        at = begin * size + torch.arange(longest, device=lengths.device)
        hidden = at >= lengths
        if window:
            hidden |= at < seen - window
        if decode.ancestors is not None:
            behind = (lengths - 1 - at).clamp(0, 31)
            hidden |= (decode.ancestors[rows, None] >> behind) & 1 == 0
        mask = self._additive(hidden)[:, None, None] if bool(hidden.any()) else None
        return _Decode(rows, _run(pages) if len(lengths) == 1 else pages, longest, mask)

    def _chunk_blocks(self, row: Tensor, chunk: ChunkRow, window: int) -> list[_Block]:
        """A chunk in runs of queries, each with the keys it can see. `row` int32 [pages]
        of the page table is its slot's."""
        blocks = []
        size, most = self._page_size, STEPS_BLOCK if self._in_steps else QUERY_BLOCK
        for offset in range(0, chunk.tokens, most):
            count = min(most, chunk.tokens - offset)
            start = chunk.start + offset
            begin = max(start + 1 - window, 0) // size if window else 0
            end = start + count
            pages = row[begin : -(-end // size)]
            keys = end - begin * size
            # Aligned to the first key, torch's own causal flag needs no mask at all.
            causal = not self._in_steps and start == begin * size and (not window or count <= window)
            bare = causal or (count == 1 and not window)
            mask = None if bare else self._causal(start, count, begin * size, window, keys)
            first = chunk.first + offset
            blocks.append(_Block(slice(first, first + count), _run(pages), keys, mask, causal))
        return blocks

    def _causal(self, start: int, count: int, begin: int, window: int, keys: int) -> Tensor:
        """[count, keys] added to scores: 0 where position `start + i` sees `begin + j`, else -inf."""
        device = self._data.device
        queries = torch.arange(start, start + count, device=device)[:, None]
        at = torch.arange(begin, begin + keys, device=device)
        hidden = at > queries
        if window:
            hidden |= at <= queries - window
        return self._additive(hidden)

    def _additive(self, hidden: Tensor) -> Tensor:
        # Made once a step: given booleans, torch would turn them into this in every layer.
        mask = torch.zeros(hidden.shape, dtype=self._data.dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def _clear_tails(self, view: StepView, rows: int, chunks: Sequence[ChunkRow]) -> None:
        """Zero the pages that this step begins and does not fill.

        A reused page may hold NaN of a request that failed, and a mask cannot hide it: NaN - inf is
        NaN. One page per row and page_size steps, so the cost is nothing; after it, whatever lies
        behind a row's length in its last page is finite.
        """
        size = self._page_size
        if size == 1:
            return
        where: Ints = view.kv_slot_mapping.numpy()
        begun = (view.positions if view.ancestors is None else view.decode_lengths - 1).numpy()[
            :rows
        ] % size == 0
        fresh = where[:rows][begun].tolist()
        for chunk in chunks:
            end = chunk.start + chunk.tokens
            if end % size and end - end % size >= chunk.start:
                fresh.append(int(where[chunk.first + chunk.tokens - end % size]))
        if fresh:
            self._data.index_fill_(1, torch.tensor(fresh) // size, 0)


def torch_attention(spec: ModelSpec) -> TorchAttention:
    """Attention for a model's layers."""
    windows = [spec.window(layer) for layer in range(spec.layers) if layer not in spec.linear_layers]
    return TorchAttention(windows, spec.softmax_scale, spec.attention_cap, spec.sinks, spec.kv_shape[2])


def _seen(decode: StepView, rows: slice | Tensor) -> Tensor:
    """Keys that `rows` of `decode` see where no window hides any; a tree's drafts see one more than those at
    their position's parent."""
    return decode.decode_lengths[rows] if decode.ancestors is None else decode.positions[rows] + 1


def _run(pages: Tensor) -> Tensor | int:
    """The first of consecutive pages p, p + 1, ..., else all of them as int64."""
    ids = pages.tolist()
    return ids[0] if ids == list(range(ids[0], ids[0] + len(ids))) else pages.long()
