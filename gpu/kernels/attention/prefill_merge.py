"""Partial results of a chunk's blocks as one: the end of `prefill` where keys were cut.

A kernel of its own: where whoever of a block's programs came last merged alone, all other multiprocessors
idled, and 128 tokens behind 2,048 keys took 27 us on an H200 that take 22 so. A block has as many
entries of the work list as parts; the programs of an entry merge its share of the block's rows, parts in
their order, so that the same step gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.prefill_plan import FIELDS, PrefillConfig, PrefillPlan, reach
from gpu.kernels.jit import begin, jit, launch_options, pow2

ROWS = 8
"""Queries that a program merges at once."""

PARTS = 4
"""Parts of them that are asked for at once: 80 registers a thread of four warps, so that all programs of a
step are resident. Log-sum-exps are loaded as the third dimension lies: converted for every part apart they
cost a barrier each, and the loads behind it wait: 4 us for every ROWS of a program."""

LANES = 4
"""Programs per entry: with four parts each has its rows at once."""


class PrefillSpace(NamedTuple):
    """Partial results, one for all layers: float32 [programs, kv_heads, queries, head_dim] and base-2
    log-sum-exp [programs, kv_heads, queries] by entry of the work list; no more entries are ever cut."""

    found: Tensor
    lse: Tensor


def prefill_space(
    config: PrefillConfig, kv_heads: int, head_dim: int, device: torch.device
) -> PrefillSpace | None:
    """What `config` needs: None where it cuts no keys. 8.7 MB on an H200 at head_dim 128, 17 at 256."""
    if not config.programs:
        return None
    shape = config.programs, kv_heads, config.queries
    return PrefillSpace(
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@jit
def _join(
    items: tl.tensor,
    parts: tl.tensor,
    parts_lse: tl.tensor,
    out: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    entry = tl.program_id(2)
    r = tl.arange(0, ROWS)
    p = tl.arange(0, PARTS)
    d = tl.arange(0, BLOCK_D)
    item = items + entry * FIELDS
    # Older than the kernel before, which has waited for it: so nothing here has to. Past L1, which may hold
    # the last step's.
    row = tl.load(item + 1, cache_modifier=".cg").to(tl.int64)
    start = tl.load(item + 2, cache_modifier=".cg")
    tokens = tl.load(item + 3, cache_modifier=".cg")
    at = tl.load(item + 4, cache_modifier=".cg")
    part = tl.load(item + 6, cache_modifier=".cg")
    whole = tl.load(item + 7, cache_modifier=".cg")
    pieces, _, _, _ = reach(start, tokens, at, part, whole, GROUP, WINDOW, QUERIES, TILE, LEAST)
    begin(PDL)
    if (tokens == 0) | (part >= pieces) | (pieces == 1):
        return
    last = tl.minimum(QUERIES, tokens * GROUP - at)
    step = pieces * ROWS
    for i in range((tl.program_id(0) * pieces + part) * ROWS, last, tl.num_programs(0) * step):
        query = i + r
        inside = (query < last)[:, None] & (d < DIM)[None, :]
        high = tl.zeros([ROWS], tl.float32) - float("inf")
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for j in range(0, pieces, PARTS):
            known = (query < last)[:, None] & (j + p < pieces)[None, :]
            place = ((entry - part + j + p)[None, :] * KV + kv_head) * QUERIES + query[:, None]
            found_at = parts + place[:, :, None] * DIM + d[None, None, :]
            found = tl.load(found_at, mask=known[:, :, None] & (d < DIM)[None, None, :], other=0.0)
            lse = tl.load(parts_lse + place, mask=known, other=float("-inf"))
            top = tl.maximum(high, tl.max(lse, 1))
            level = tl.where(top > float("-inf"), top, 0.0)  # of rows behind the last nothing is known
            weight, shrink = tl.exp2(lse - level[:, None]), tl.exp2(high - level)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.sum(found * weight[:, :, None], 1)
            high = top
        token, head = (at + query) // GROUP, kv_head * GROUP + (at + query) % GROUP
        out_at = out + (row + token)[:, None] * (KV * GROUP * DIM) + head[:, None] * DIM + d[None, :]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


def join_parts(
    plan: PrefillPlan,
    space: PrefillSpace,
    config: PrefillConfig,
    out: Tensor,
    group: int,
    *,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Merge into `out` [n, heads * head_dim] the blocks that have several parts, and leave the rest.

    plan    of `plan_prefill` with the same `config`; written before the kernel before this one
    space   what the parts left
    group   query heads per KV head
    """
    programs, kv_heads, queries, dim = space.found.shape
    _join[(LANES, kv_heads, programs)](
        plan.items,
        *space,
        out,
        KV=kv_heads,
        GROUP=group,
        DIM=dim,
        WINDOW=window,
        QUERIES=queries,
        TILE=config.tile,
        LEAST=config.least,
        BLOCK_D=pow2(dim),
        ROWS=ROWS,
        PARTS=PARTS,
        **launch_options(pdl, 4),
    )
