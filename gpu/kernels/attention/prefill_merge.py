"""Merge the partial results of a chunk's blocks: the end of `prefill` where keys were split.

A kernel of its own: where the last of a block's programs merged alone, all other multiprocessors idled, and
128 tokens behind 2,048 keys took 27 us on an H200 that take 22 so. A block has as many entries of the work
list as parts; the programs of an entry merge its share of the block's rows, parts in their order, so that the
same step gives the same bits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import beside_sinks
from gpu.kernels.attention.pages import Shape
from gpu.kernels.attention.prefill_plan import FIELDS, PrefillConfig, read_entry
from gpu.kernels.attention.split_kv import Partials, partials
from gpu.kernels.jit import begin, jit, launch_options

ROWS = 8
"""Queries that a program merges at once."""

PARTS = 4
"""Parts of them that are loaded at once: 80 registers a thread of four warps, so that all programs of a
step are resident. Log-sum-exps are loaded as the third dimension lies: converted for every part apart they
cost a barrier each, and the loads behind it wait: 4 us for every ROWS of a program."""

LANES = 4
"""Programs per entry: with four parts each has its rows at once."""


def prefill_space(
    config: PrefillConfig, kv_heads: int, head_dim: int, device: torch.device
) -> Partials | None:
    """Partial results [programs, kv_heads, queries] by entry of the work list, None where `config` cuts no
    keys. 8.7 MB on an H200 at head_dim 128, 17 at 256."""
    if not config.programs:
        return None
    return partials(config.programs, kv_heads, config.queries, head_dim=head_dim, device=device)


@jit
def _merge(
    items: tl.tensor,
    space: Partials,
    out: tl.tensor,
    sinks: tl.tensor | None,
    SHAPE: tl.constexpr,
    WINDOW: tl.constexpr,
    CONFIG: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    entry = tl.program_id(2)
    r = tl.arange(0, ROWS)
    p = tl.arange(0, PARTS)
    dim: tl.constexpr = SHAPE.dim
    group: tl.constexpr = SHAPE.group
    block_d: tl.constexpr = SHAPE.block_d
    d = tl.arange(0, block_d)
    # Older than the kernel before, which has waited for it: so nothing here has to. Past L1, which may hold
    # the last step's.
    row, _, tokens, at, part, pieces, _, _, _ = read_entry(
        items + entry * FIELDS, group, WINDOW, CONFIG, ".cg"
    )
    begin(PDL)
    if (tokens == 0) | (part >= pieces) | (pieces == 1):
        return
    last = tl.minimum(CONFIG.queries, tokens * group - at)
    step = pieces * ROWS
    for i in range((tl.program_id(0) * pieces + part) * ROWS, last, tl.num_programs(0) * step):
        query = i + r
        inside = (query < last)[:, None] & (d < dim)[None, :]
        high = tl.zeros([ROWS], tl.float32) - float("inf")
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, block_d], tl.float32)
        for j in range(0, pieces, PARTS):
            known = (query < last)[:, None] & (j + p < pieces)[None, :]
            place = ((entry - part + j + p)[None, :] * SHAPE.kv + kv_head) * CONFIG.queries + query[:, None]
            found_at = space.out + place[:, :, None] * dim + d[None, None, :]
            found = tl.load(found_at, mask=known[:, :, None] & (d < dim)[None, None, :], other=0.0)
            lse = tl.load(space.lse + place, mask=known, other=float("-inf"))
            top = tl.maximum(high, tl.max(lse, 1))
            level = tl.where(top > float("-inf"), top, 0.0)  # of rows behind the last nothing is known
            weight, shrink = tl.exp2(lse - level[:, None]), tl.exp2(high - level)
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.sum(found * weight[:, :, None], 1)
            high = top
        token, head = (at + query) // group, kv_head * group + (at + query) % group
        out_at = out + (row + token)[:, None] * (SHAPE.kv * group * dim) + head[:, None] * dim + d[None, :]
        total = tl.where(total > 0, total, 1.0)
        result = beside_sinks(acc / total[:, None], high + tl.log2(total), sinks, head, query < last)
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


def merge_blocks(
    items: Tensor,
    space: Partials,
    config: PrefillConfig,
    out: Tensor,
    shape: Shape,
    sinks: Tensor | None = None,
    *,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Merge into `out` [n, heads * head_dim] the blocks that have several parts, and leave the rest.

    items  of `plan_prefill` with the same `config`; written before the kernel before this one
    space  the results of the parts
    sinks  as of `Pages`
    """
    _merge[(LANES, shape.kv, config.programs)](
        items,
        space,
        out,
        sinks,
        SHAPE=shape,
        WINDOW=window,
        CONFIG=config,
        ROWS=ROWS,
        PARTS=PARTS,
        **launch_options(pdl, 4),
    )
