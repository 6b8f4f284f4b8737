"""Online softmax over tiles of paged keys."""

from __future__ import annotations

import triton.language as tl

from gpu.kernels.jit import INTERPRETED, jit
from gpu.kernels.paths import drafts_beside

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

KEPT: tl.constexpr = tl.constexpr("evict_last")
"""How L2 takes what all layers read: the keys and values of one pass through it before the next."""

SPLIT: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 low, high;"
    " prmt.b32 t, $2, 0, 0x3120; mov.b32 {low, high}, t;"
    " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
"""PTX that converts two pairs of e4m3 in a register to float16: both lower numbers, then both upper ones."""


@jit
def beside_sinks(
    found: tl.tensor, sums: tl.tensor, sinks: tl.tensor | None, head: tl.tensor, known: tl.tensor
) -> tl.tensor:
    """Apply attention sinks to the output `found` [n, block_d]: a sink is one more logit per head without a
    value. `sums` [n] are the base-2 log-sum-exps of the scores. Rows that are not `known` stay unchanged."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=known, other=float("-inf")).to(tl.float32) * LOG2E
        found = found / (1.0 + tl.exp2(sink - sums))[:, None]
    return found


@jit
def load_pages(
    table: tl.tensor,
    tile: tl.tensor,
    end: tl.tensor,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    CACHE: tl.constexpr,
) -> tl.tensor:
    """Load the page of each key of a tile, [TILE], or the one page that holds all, with the cache modifier
    CACHE. Keys from `end` on get page 0."""
    policy: tl.constexpr = KEPT if CACHE == "" else ""
    if PAGE % TILE == 0:
        at = table + tile // (PAGE // TILE)
        page = tl.load(at, mask=tile * TILE < end, other=0, cache_modifier=CACHE, eviction_policy=policy)
    else:
        # One load a page, not one a key: Triton 3.9 does not compile the other in programs of two warps.
        pages: tl.constexpr = TILE // PAGE
        at = tile * pages + tl.arange(0, pages)
        each = tl.load(
            table + at, mask=at * PAGE < end, other=0, cache_modifier=CACHE, eviction_policy=policy
        )
        page = each if PAGE == 1 else tl.reshape(tl.broadcast_to(each[:, None], [pages, PAGE]), [TILE])
    return page


@jit
def load_tails(q_row: tl.tensor, live: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor | None:
    """Load the rotated part [n, block_t] of MLA queries at `q_row` [n, 1], where `live` [n, 1]; None if keys
    are not latents."""
    tails: tl.tensor = None
    if SHAPE.tail > 0:
        t = tl.arange(0, SHAPE.block_t)
        tails = tl.load(q_row + SHAPE.dim + t[None, :], mask=live & (t < SHAPE.tail)[None, :], other=0.0)
    return tails


@jit
def add_tail_scores(
    s: tl.tensor, q_tail: tl.tensor, tail_at: tl.tensor, seen: tl.tensor, SHAPE: tl.constexpr
) -> tl.tensor:
    """Add the scores of the rotated keys at `tail_at` [TILE, block_t], where `seen` [TILE, 1], to the scores
    `s` of the latents."""
    t = tl.arange(0, SHAPE.block_t)
    tail = tl.load(tail_at, mask=seen & (t < SHAPE.tail)[None, :], other=0.0)
    return tl.dot(q_tail, tl.trans(tail.to(q_tail.dtype)), s, input_precision="ieee")


@jit
def zero_values(N: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Return zeros, as `attend_tile` expects the accumulator `acc` of N queries at first."""
    block_d: tl.constexpr = SHAPE.block_d // 2 if SHAPE.paired else SHAPE.block_d
    acc = tl.zeros([N, block_d], tl.float32)
    return (acc, acc) if SHAPE.paired else acc


@jit
def zero_where(ends: tl.tensor, acc: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Return `acc`, or zeros where `ends`."""
    if SHAPE.paired:
        even, odd = acc
        kept = tl.where(ends, 0.0, even), tl.where(ends, 0.0, odd)
    else:
        kept = tl.where(ends, 0.0, acc)
    return kept


@jit
def columns(acc: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Return the weighted values `acc` as one tensor [n, block_d]."""
    if SHAPE.paired:
        even, odd = acc
        whole = tl.interleave(even, odd)
    else:
        whole = acc
    return whole


@jit
def _float16_pairs(pairs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the lower and the upper e4m3 number of each of the 16-bit `pairs` in float16."""
    if INTERPRETED:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        low, high = tl.inline_asm_elementwise(
            SPLIT, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return low, high


@jit
def _elements(
    token: tl.tensor, seen: tl.tensor, stride: int, SHAPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the offsets [TILE, block_d] of the keys or values of `token` [TILE], and a mask of those
    `seen`."""
    d = tl.arange(0, SHAPE.block_d)
    mask = seen[:, None]
    if SHAPE.dim != SHAPE.block_d:
        mask = mask & (d < SHAPE.dim)[None, :]
    return token[:, None] * stride + d[None, :], mask


@jit
def load_ahead(
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,
    tile: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    stride: int,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    NEWEST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load the keys and values [TILE, block_d] of a tile from `start` to `end`, without the NEWEST ones,
    past L1. Not for latents or float8 pages. Returns `page`, keys and values."""
    at = tile * TILE + tl.arange(0, TILE)
    token = page.to(tl.int64 if SHAPE.wide else tl.int32) * SHAPE.page + at % SHAPE.page
    place, mask = _elements(token, (at >= start) & (at < end - NEWEST), stride, SHAPE)
    k = tl.load(k_cache + place, mask=mask, other=0.0, cache_modifier=".cg")
    v = tl.load(v_cache + place, mask=mask, other=0.0, cache_modifier=".cg")
    return page, k, v


@jit
def attend_tile(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,
    tile: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    stride: int,
    scale: float,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    ends: tl.tensor | None = None,
    WINDOW: tl.constexpr = 0,
    ancestors: tl.tensor | None = None,
    q_tail: tl.tensor | None = None,
    ahead: tl.tensor | None = None,
    NEWEST: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A step of the online softmax of queries [n, block_d] over a tile of keys, `start` to `end` of which
    are seen, at least one: the greatest score in powers of two `high` [n], the sum `total` [n] relative to
    it, and the weighted values `acc` [n, block_d]. SHAPE is a `Shape`.

    With `ends` [n] each query sees the keys before its own end, at most WINDOW where that is not 0, and
    perhaps none of the tile: its `high` is then -inf and its `total` 0 until it sees one. With `ancestors`
    [n] it sees of the last 32 of them those that its bits say, as in `SlotTables.ancestors`.

    Keys with a tail are MLA latents: the part before the tail is also the value. `q_tail` [n, block_t] is the
    rotated part of the queries.

    `ahead` are the tile's keys and values but for the row's NEWEST ones, as `load_ahead` gives them.

    Where SHAPE.paired `acc` are two tensors [n, block_d / 2], of the even and the odd columns. Tensor cores
    take neighbouring keys of a column side by side, and the instruction that reads shared memory so moves 16
    bits at least: of single float8 values each was read by an instruction of its own. As pairs of columns
    they are read together and sorted in registers: 64 rows of 8,192 keys take 268 us on an H200, for 493
    (`history/h200-decode-fp8-pairs.json`)."""
    # One instruction turns two numbers of e4m3 into float16; bfloat16 takes five. A query above 65,504 would
    # be infinite, and its row would fail with a message.
    coarse: tl.constexpr = k_cache.dtype.element_ty == tl.float8e4nv
    kind: tl.constexpr = tl.float16 if coarse and q.dtype == tl.bfloat16 else q.dtype
    at = tile * TILE + tl.arange(0, TILE)
    seen = (at >= start) & (at < end)
    token = page.to(tl.int64 if SHAPE.wide else tl.int32) * SHAPE.page + at % SHAPE.page
    # What lies in pages past the length is arbitrary. A bad key's score is replaced; a bad value
    # must not be loaded, since 0 × NaN is NaN.
    place, mask = _elements(token, seen if ahead is None else seen & (at >= end - NEWEST), stride, SHAPE)
    k = tl.load(k_cache + place, mask=mask, other=0.0 if ahead is None else ahead[1])
    s = tl.dot(q.to(kind), tl.trans(k.to(kind)), input_precision="ieee")
    if SHAPE.tail > 0:
        v = k
        tail_at = k_cache + token[:, None] * stride + (SHAPE.dim + tl.arange(0, SHAPE.block_t))[None, :]
        s = add_tail_scores(s, q_tail, tail_at, seen[:, None], SHAPE)
    elif SHAPE.paired:
        two = tl.arange(0, SHAPE.block_d // 2)
        pairs_at = v_cache.to(tl.pointer_type(tl.int16)) + token[:, None] * (stride // 2) + two[None, :]
        v = tl.load(pairs_at, mask=seen[:, None] & (two < SHAPE.dim // 2)[None, :], other=0)
    else:
        v = tl.load(v_cache + place, mask=mask, other=0.0 if ahead is None else ahead[2])
    s *= scale
    if SHAPE.cap > 0:
        # tanh from a sigmoid: there is no other in both the compiler and the interpreter
        s = SHAPE.cap * (2 * tl.sigmoid(2 * s / SHAPE.cap) - 1)
    shown = seen[None, :]
    if ends is not None:
        shown = shown & (at[None, :] < ends[:, None])
        first = ends - WINDOW
        if ancestors is not None:
            behind = tl.minimum(tl.maximum(ends[:, None] - 1 - at[None, :], 0), 31)
            shown = shown & (((ancestors[:, None] >> behind) & 1) > 0)
            first -= drafts_beside(ancestors)
        if WINDOW > 0:
            shown = shown & (at[None, :] >= first[:, None])
    s = tl.where(shown, s * LOG2E, float("-inf"))
    top = tl.maximum(high, tl.max(s, 1))
    level = top
    if ends is not None:  # -inf minus -inf is NaN
        level = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - level[:, None])
    shrink = tl.exp2(high - level)
    total = total * shrink + tl.sum(p, 1)
    if SHAPE.paired:
        even, odd = acc
        low, high = _float16_pairs(v)
        even = tl.dot(p.to(kind), low.to(kind), even * shrink[:, None], input_precision="ieee")
        odd = tl.dot(p.to(kind), high.to(kind), odd * shrink[:, None], input_precision="ieee")
        acc = even, odd
    else:
        acc = tl.dot(p.to(kind), v.to(kind), acc * shrink[:, None], input_precision="ieee")
    return top, total, acc
