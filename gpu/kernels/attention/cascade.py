"""Attention of all decode rows over the pages that they have in common.

The queries of all rows and of a KV head's group are one matrix, so the common keys are read once per
tile of queries instead of once per row: 128 rows over a prefix of 2,048 tokens read 4 MB, not 537. No
key is masked by position, since every row stands behind the prefix. The keys are split among PARTS
programs to fill the device; `merge_state` joins the parts with what `paged_decode` made of the rest
(`skip` of `plan_decode` is this kernel's `common`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import find_pages, fold
from gpu.kernels.jit import begin, cdiv, jit_loose, launch_options, pow2


class PrefixConfig(NamedTuple):
    """Queries and keys per tile, and parts of the prefix. 64 queries, the least that fills wgmma, make 16
    tiles of 128 rows in groups of 8: with 4 KV heads and 4 parts, 256 programs."""

    queries: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 3
    parts: int = 4


class Prefix(NamedTuple):
    """Partial results: float32 [parts, rows, heads, dim] and base-2 log-sum-exp [parts, rows, heads]."""

    parts: Tensor
    lse: Tensor


def prefix_config(head_dim: int) -> PrefixConfig:
    """Above head_dim 128 a tile of keys is halved, so that three stages still fit shared memory."""
    return PrefixConfig() if head_dim <= 128 else PrefixConfig(tile=32)


def prefix_space(rows: int, heads: int, head_dim: int, config: PrefixConfig, device: torch.device) -> Prefix:
    """Where the results of so many rows go: at 512 rows of 32 heads 33 MB a part, one for all layers."""
    return Prefix(
        torch.empty(config.parts, rows, heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(config.parts, rows, heads, dtype=torch.float32, device=device),
    )


@jit_loose("rows")
def _prefix(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    common: tl.tensor,
    num_rows: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    rows: int,
    q_stride: int,
    stride: int,
    table_stride: int,
    scale: float,
    v_scale: float,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAP: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    k_cache += kv_head * DIM
    v_cache += kv_head * DIM
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = i // GROUP
    head = kv_head * GROUP + i % GROUP
    d = tl.arange(0, BLOCK_D)
    begin(PDL)
    n = rows
    if num_rows is not None:
        n = tl.minimum(tl.load(num_rows).to(tl.int32), rows)
    if tl.program_id(0) * BLOCK_Q >= n * GROUP:
        return
    live = row < n
    place = (part * rows + row) * (KV * GROUP) + head
    total = tl.load(common).to(tl.int32)
    tiles = (total + TILE - 1) // TILE
    each = (tiles + PARTS - 1) // PARTS
    first = part * each
    last = tl.minimum(first + each, tiles)
    if first < last:
        inside = live[:, None] & (d < DIM)[None, :]
        q_at = q + row.to(tl.int64)[:, None] * q_stride + head[:, None] * DIM + d[None, :]
        queries = tl.load(q_at, mask=inside, other=0.0)
        slot = tl.load(slots).to(tl.int64)  # any row's pages will do
        own = table + slot * table_stride
        high = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        sums = tl.zeros([BLOCK_Q], tl.float32)
        acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
        for tile in range(first, last):
            page = find_pages(own, tile, total, PAGE, TILE)
            high, sums, acc = fold(
                queries, k_cache, v_cache, page, tile, 0, total, high, sums, acc, stride, scale,
                DIM, PAGE, CAP, WIDE, TILE, BLOCK_D,
            )  # fmt: skip
        acc = acc * (v_scale / sums)[:, None]
        sums = high + tl.log2(sums)
        tl.store(parts + place.to(tl.int64)[:, None] * DIM + d[None, :], acc, mask=inside)
        tl.store(parts_lse + place, sums, mask=live)
    else:
        tl.store(parts_lse + place, tl.zeros([BLOCK_Q], tl.float32) - float("inf"), mask=live)


def prefix_attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    page_table: Tensor,
    slots: Tensor,
    common: Tensor,
    config: PrefixConfig,
    *,
    page_size: int,
    scale: float,
    cap: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    num_rows: Tensor | None = None,
    found: Prefix | None = None,
    pdl: bool = False,
) -> Prefix:
    """One query per row over the first `common` keys, which all rows share.

    q           [rows, heads, dim], heads and dim contiguous
    cache       K and V as for `paged_decode`
    page_table  integer [max_slots, pages]
    slots       integer [rows]; the first one's pages are read
    common      integer [1] on the device: tokens; 0 leaves every log-sum-exp at -inf
    scales      what K and V of a cache in float8 are multiplied by
    num_rows    int32 [1] on the device; rows from there on are not written
    found       where the results go; None for new tensors
    """
    k, v = cache
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if found is None:
        found = prefix_space(rows, heads, dim, config, q.device)
    _prefix[(cdiv(rows * group, config.queries), kv_heads, config.parts)](
        q,
        k,
        v,
        page_table,
        slots,
        common,
        num_rows,
        *found,
        rows,
        q.stride(0),
        k.stride(0),
        page_table.stride(0),
        scale * scales[0],
        scales[1],
        KV=kv_heads,
        GROUP=group,
        DIM=dim,
        PAGE=page_size,
        CAP=cap,
        WIDE=len(k) * k.stride(0) >= 2**31,
        TILE=config.tile,
        PARTS=config.parts,
        BLOCK_Q=config.queries,
        BLOCK_D=pow2(dim),
        **launch_options(pdl, config.warps, config.stages),
    )
    return found
