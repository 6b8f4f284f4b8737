"""Split KV: how partial results of a row's keys are stored, and how they are merged.

With many rows the program that finds by a counter that it is the last one of its row merges (`merge_parts`):
few rows have several parts. With few rows all have many, and a kernel of its own merges them (`merge_rows`),
in programs of a warp each: the last program alone took 2.6 to 3.2 us of a lone row's 6 on an H200, its
counter included, and the kernel takes 1.6 to 2. (Flags that all programs of a row poll deadlock where not all
programs of a launch are resident at once.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.attention.online_softmax import beside_sinks
from gpu.kernels.jit import cdiv, jit, launch_dependents, launch_options, load_record, wait


class Partials(NamedTuple):
    """Results over parts of the keys: float32 [..., head_dim], and their base-2 log-sum-exps [...]."""

    out: Tensor
    lse: Tensor


def partials(*shape: int, head_dim: int, device: torch.device) -> Partials:
    """Room for so many partial results, uninitialised: one for all layers."""
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
    of it. Each of a row's queries, up to QUERIES, has HEADS heads, and `head` counts them from the first
    one's on."""
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


PARTS, COLUMNS = 64, 32
"""Partial results and columns that a program of `merge_rows` merges at once: 64 registers a thread of its
only warp, so nothing waits at a barrier. 32 parts or 16 columns took up to 0.8 us longer at 8,000 keys, two
and four warps 1 to 5 us."""


@jit
def _merge_rows(
    rows: tl.tensor,
    parts: Partials,
    out: tl.tensor,
    lse: tl.tensor | None,
    sinks: tl.tensor | None,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # The kernel behind, a product, loads its weights meanwhile.
    launch_dependents(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    p, d = tl.arange(0, PARTS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first, count = load_record(rows + row * 2, 2, ".cg")
    wait(PDL)
    if count <= 1:
        return
    high, total = tl.max(tl.full([PARTS], float("-inf"), tl.float32), 0), 0.0
    acc = tl.zeros([COLUMNS], tl.float32)
    for i in range(0, count, PARTS):
        here = i + p < count
        place = (first + i + p) * HEADS + head
        sums = tl.load(parts.lse + place, mask=here, other=float("-inf"), cache_modifier=".cg")
        found_at = parts.out + place[:, None] * DIM + d[None, :]
        inside = here[:, None] & (d < DIM)[None, :]
        found = tl.load(found_at, mask=inside, other=0.0, cache_modifier=".cg")
        top = tl.maximum(high, tl.max(sums, 0))
        level = tl.where(top > float("-inf"), top, 0.0)
        weight, shrink = tl.exp2(sums - level), tl.exp2(high - level)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(found * weight[:, None], 0)
        high = top
    total = tl.where(total > 0, total, 1.0)
    own = head + tl.arange(0, 1)
    sums, known = high + tl.log2(total) + tl.zeros([1], tl.float32), own < HEADS
    merged = beside_sinks((acc / total)[None, :], sums, sinks, own, known)
    out_at = out + (row * HEADS + own)[:, None] * DIM + d[None, :]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=(d < DIM)[None, :])
    if lse is not None:
        tl.store(lse + row * HEADS + own, sums, mask=known)


def merge_rows(
    rows: Tensor,
    parts: Partials,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    heads: int,
    *,
    pdl: bool = False,
) -> None:
    """Merge into `out` [n, heads * head_dim] the partial results of rows that have several, and leave the
    rest.

    rows   int32 [n, 2]: the place of a row's first partial result in `parts`, and how many it has; written
           before the kernel before this one
    parts  [places, heads]; those of a row lie one behind the other
    lse    float32 [n, heads] to fill, without `sinks` [heads]
    """
    dim = parts.out.shape[-1]
    _merge_rows[(cdiv(dim, COLUMNS), heads, len(rows))](
        rows,
        parts,
        out,
        lse,
        sinks,
        HEADS=heads,
        DIM=dim,
        PARTS=PARTS,
        COLUMNS=COLUMNS,
        **launch_options(pdl, 1),
    )
