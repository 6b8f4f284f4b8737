"""Split KV: how partial results of a row's keys are stored, and how they are merged.

The program that finds by a counter that it is the last one merges. (Flags that all programs of a row poll
took 1 µs less at a row of 1,040 keys; but they deadlock where not all programs of a launch are resident at
once, and at 200 keys they were no faster.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import beside_sinks
from gpu.kernels.jit import jit


class Partials(NamedTuple):
    """Results over parts of the keys: float32 [..., head_dim], and their base-2 log-sum-exps [...]."""

    out: Tensor
    lse: Tensor


def partials(*shape: int, head_dim: int, device: torch.device) -> Partials:
    """Room for so many, uninitialised: one for all layers."""
    return Partials(
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@jit
def store_row(
    found: tl.tensor,
    sums: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor | None,
    sinks: tl.tensor | None,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:
    """Store the result `found` [n, block_d] of a row after applying its `sinks`, and its log-sum-exps `sums`
    [n] if `lse` is given; `head` as in `store_segment`."""
    d = tl.arange(0, found.shape[1])
    known = head < HEADS * QUERIES
    found = beside_sinks(found, sums, sinks, head % HEADS, known)
    out_at = out + (row * HEADS + head)[:, None] * DIM + d[None, :]
    tl.store(out_at, found.to(out.dtype.element_ty), mask=known[:, None] & (d < DIM)[None, :])
    if lse is not None:
        tl.store(lse + row * HEADS + head, sums, mask=known)


@jit
def store_segment(
    acc: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    segment: tl.tensor,
    pieces: tl.tensor,
    parts: Partials,
    out: tl.tensor,
    lse: tl.tensor,
    head: tl.tensor,
    v_scale: float,
    sinks: tl.tensor | None,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
) -> None:
    """Store the result of a segment: the row's own, beside its `sinks`, where it is the only one, else a part
    of it. Of the up to
    QUERIES queries of a row each has HEADS heads, and `head` counts them from the first one's on."""
    if QUERIES > 1:  # a query that sees none of the segment's keys
        total = tl.where(total == 0, 1.0, total)
    found, sums = acc * (v_scale / total)[:, None], high + tl.log2(total)
    if pieces == 1:
        store_row(found, sums, row, head, out, lse, sinks, HEADS, DIM, QUERIES)
    else:
        d = tl.arange(0, acc.shape[1])
        known = head < HEADS * QUERIES
        at_d = parts.out + (segment * HEADS + head)[:, None] * DIM + d[None, :]
        tl.store(at_d, found, mask=known[:, None] & (d < DIM)[None, :])
        tl.store(parts.lse + segment * HEADS + head, sums, mask=known)


@jit
def merge_parts(
    parts: Partials,
    first: tl.tensor,
    count: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNROLL: tl.constexpr,
    STEP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Partials `first`, `first + STEP`, ..., `count` of them, of heads `head` as one, UNROLL of them at once:
    their loads are under way together, and so is their arithmetic. Past L1: other processors wrote them."""
    high = tl.zeros([head.shape[0]], tl.float32) - float("inf")
    total = tl.zeros([head.shape[0]], tl.float32)
    acc = tl.zeros([head.shape[0], d.shape[0]], tl.float32)
    inside = (d < DIM)[None, :]
    for at in range(0, count, UNROLL):
        sums: tl.tensor = ()
        found: tl.tensor = ()
        top = high
        for i in tl.static_range(UNROLL):
            place = first + at * STEP + i * STEP
            here = head < tl.where(at + i < count, HEADS * STEP, 0)
            lse_at = parts.lse + place * HEADS + head
            lse = tl.load(lse_at, mask=here, other=float("-inf"), cache_modifier=".cg")
            at_d = parts.out + (place * HEADS + head)[:, None] * DIM + d[None, :]
            found += (tl.load(at_d, mask=here[:, None] & inside, other=0.0, cache_modifier=".cg"),)
            sums += (lse,)
            top = tl.maximum(top, lse)
        # Heads past the group stay at -inf, and so does their maximum.
        level = tl.where(top > float("-inf"), top, 0.0)
        old = tl.exp2(high - level)
        acc *= old[:, None]
        total *= old
        for i in tl.static_range(UNROLL):
            share = tl.exp2(sums[i] - level)
            acc += found[i] * share[:, None]
            total += share
        high = top
    total = tl.where(total > 0, total, 1.0)
    return acc / total[:, None], high + tl.log2(total)
