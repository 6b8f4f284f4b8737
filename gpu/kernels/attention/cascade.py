"""Attention of all decode rows over the pages that they have in common.

The queries of all rows and of a KV head's group are one matrix, so the common keys are read once per
tile of queries instead of once per row: 128 rows over a prefix of 2,048 tokens read 4 MB, not 537. No
key is masked by position, since every row stands behind the prefix. The keys are split among PARTS
programs to fill the device; `merge_state` joins the parts with what `paged_decode` made of the rest
(`skip` of `plan_decode` is this kernel's `common`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import attend_tile, columns, load_pages, zero_values
from gpu.kernels.attention.pages import Keys, Pages, kernel_args
from gpu.kernels.attention.split_kv import Partials, partials
from gpu.kernels.jit import begin, cdiv, jit_loose, launch_options, true_rows


class PrefixConfig(NamedTuple):
    """Queries and keys per tile, and parts of the prefix. 64 queries, the least that fills wgmma, make 16
    tiles of 128 rows in groups of 8: with 4 KV heads and 4 parts, 256 programs."""

    queries: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 3
    parts: int = 4


def prefix_config(head_dim: int) -> PrefixConfig:
    """Above head_dim 128 a tile of keys is halved, so that three stages still fit shared memory."""
    return PrefixConfig() if head_dim <= 128 else PrefixConfig(tile=32)


@jit_loose("rows")
def _prefix(
    q: tl.tensor,
    keys: Keys,
    slots: tl.tensor,
    common: tl.tensor,
    num_rows: tl.tensor,
    found: Partials,
    rows: int,
    q_stride: int,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    dim: tl.constexpr = SHAPE.dim
    group: tl.constexpr = SHAPE.group
    block_d: tl.constexpr = SHAPE.block_d
    k_cache = keys.k + kv_head * dim
    v_cache = keys.v + kv_head * dim
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = i // group
    head = kv_head * group + i % group
    d = tl.arange(0, block_d)
    begin(PDL)
    n = true_rows(num_rows, rows)
    if tl.program_id(0) * BLOCK_Q >= n * group:
        return
    live = row < n
    place = (part * rows + row) * (SHAPE.kv * group) + head
    total = tl.load(common).to(tl.int32)
    tiles = (total + TILE - 1) // TILE
    each = (tiles + PARTS - 1) // PARTS
    first = part * each
    last = tl.minimum(first + each, tiles)
    if first < last:
        inside = live[:, None] & (d < dim)[None, :]
        q_at = q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * dim + d[None, :]
        queries = tl.load(q_at, mask=inside, other=0.0)
        slot = tl.load(slots).to(tl.int64)  # any row's pages will do
        own = keys.table + slot * keys.table_stride
        high = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        sums = tl.zeros([BLOCK_Q], tl.float32)
        acc = zero_values(BLOCK_Q, SHAPE)
        for tile in range(first, last):
            page = load_pages(own, tile, total, SHAPE.page, TILE, "")
            high, sums, acc = attend_tile(
                queries, k_cache, v_cache, page, tile, 0, total, high, sums, acc, keys.stride, keys.scale,
                SHAPE, TILE,
            )  # fmt: skip
        values = columns(acc, SHAPE) * (keys.v_scale / sums)[:, None]
        sums = high + tl.log2(sums)
        tl.store(found.out + place.to(tl.int64)[:, None] * dim + d[None, :], values, mask=inside)
        tl.store(found.lse + place, sums, mask=live)
    else:
        tl.store(found.lse + place, tl.zeros([BLOCK_Q], tl.float32) - float("inf"), mask=live)


def prefix_attention(
    q: Tensor,
    pages: Pages,
    slots: Tensor,
    common: Tensor,
    config: PrefixConfig,
    *,
    num_rows: Tensor | None = None,
    found: Partials | None = None,
    pdl: bool = False,
) -> Partials:
    """One query per row over the first `common` keys, which all rows share.

    q         [rows, heads, dim], heads and dim contiguous
    slots     integer [rows]; the first one's pages are read
    common    integer [1] on the device: tokens; 0 leaves every log-sum-exp at -inf
    num_rows  int32 [1] on the device; rows from there on are not written
    found     where the results go, [parts, rows, heads]: 33 MB a part at 512 rows of 32 heads of 128; None
              for new tensors
    """
    rows, heads, dim = q.shape
    keys, shape = kernel_args(q, pages)
    if found is None:
        found = partials(config.parts, rows, heads, head_dim=dim, device=q.device)
    _prefix[(cdiv(rows * shape.group, config.queries), shape.kv, config.parts)](
        q,
        keys,
        slots,
        common,
        num_rows,
        found,
        rows,
        q.stride(0),
        SHAPE=shape,
        TILE=config.tile,
        PARTS=config.parts,
        BLOCK_Q=config.queries,
        **launch_options(pdl, config.warps, config.stages),
    )
    return found
