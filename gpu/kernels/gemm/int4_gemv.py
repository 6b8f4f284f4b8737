"""GEMV of 4-bit weights (`gpu.quant.int4`): y = x Wᵀ for one row.

As in `gemv`, a program computes a few outputs over all of K, and loads its first words and scales before it
waits for the kernel that makes `x`. `int4_gemm` keeps only a few tiles in flight, so every product has to
fill its pipeline again after the wait. A program here keeps `x` in registers and goes on to further outputs:
it loads their words while it multiplies the previous ones.

The products are computed with integers. Each thread converts its 32 inputs to 16-bit integers with a scale
of its own: the rounding error is at most 1/65,534 of the largest input, while bfloat16 rounds the result by
up to 1/512. The instruction dp2a multiplies two inputs by two weights and adds the products, so that a pair
of words takes eight instructions; with float32 it took nineteen, and the kernel was limited by them. The
weights at odd positions of a word are not shifted down, so their sums are 16 times too large, which the
scale takes back. A thread loads four neighbouring pairs of words at once. Their weights at the same
position are in the same group.

A decode step of one row of Qwen3-8B takes 2.04 ms on an H200. It took 2.41 ms with float32 products, 2.53 on
tensor cores with all words in registers, and 2.98 with `int4_gemm`. Times of single products in us
(`bench/results/history/h200-int4-one-row.json`):

    outputs x inputs    here    int4_gemm    at 4.3 TB/s
    5,120 x 2,048        2.8          5.4            1.3
    4,096 x 14,336      10.9         14.2            7.2
    8,192 x 28,672      32.0         45.4           29.0
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.gemm.gemv import tiles
from gpu.kernels.gemm.skinny import PROCESSORS
from gpu.kernels.jit import begin, cdiv, jit, launch_options, pow2
from gpu.quant.int4 import WORD, span

_WORD = tl.constexpr(WORD)

# PTX instructions. The first two read the weights of a pair of words, one in each byte: those at positions 0
# and 2 in $1, at 1 and 3 in $2. They return the weights at positions 0 and 1, or at 2 and 3, of both words.
_FIRST = tl.constexpr("prmt.b32 $0, $1, $2, 0x6420;")
_SECOND = tl.constexpr("prmt.b32 $0, $1, $2, 0x7531;")
# Returns the low 16 bits of both registers.
_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;")
# Multiply two 16-bit integers in $1 by the lower or the upper two bytes of $2, and add both products to $3.
_LOW = tl.constexpr("dp2a.lo.s32.u32 $0, $1, $2, $3;")
_HIGH = tl.constexpr("dp2a.hi.s32.u32 $0, $1, $2, $3;")

_LARGEST = tl.constexpr(32767.0)
"""The integer that the largest input of a thread becomes."""

_LEAST = tl.constexpr(1e-30)
"""Lower bound of the largest input: for smaller ones the scale would be infinite in float32."""

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2**23. The low bits of a float32 of at most 2**22 plus this are its nearest integer."""

BESIDE: tl.constexpr = tl.constexpr(4)
"""Pairs of words that a thread holds side by side: 16 bytes, one load."""

BLOCK = 512
"""Pairs of words of an output at a time: one load of each of 128 threads."""


class Int4GemvConfig(NamedTuple):
    """How a product is cut.

    columns   outputs of a program at a time; of a gated product as many pairs
    warps     of a program
    programs  that share the columns; 0: a program for each
    block     pairs of words of an output that are loaded at a time, a power of two
    """

    columns: int
    warps: int
    programs: int
    block: int = BLOCK


@jit
def _bytes(ASM: tl.constexpr, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return four bytes of `a` and `b`, selected by the instruction `ASM`."""
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@jit
def _dot(ASM: tl.constexpr, x: tl.tensor, numbers: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return `total` plus the dot product of two integers of `x` and two bytes of `numbers`, by `ASM`."""
    return tl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [x, numbers, total], dtype=tl.int32, is_pure=True, pack=1
    )


@jit
def _apart(some: tl.tensor) -> tl.tensor:
    """`some` [n, BLOCK] as BESIDE tensors [n, BLOCK / BESIDE]: what a thread holds side by side."""
    evens, odds = tl.split(tl.reshape(some, [some.shape[0], some.shape[1] // 4, 2, 2]))
    return tl.split(evens) + tl.split(odds)  # 0, 2 and 1, 3


@jit
def _half(pair: tl.tensor, HIGH: tl.constexpr, like: tl.tensor) -> tl.tensor:
    """float32 of the low or the HIGH 16 bits of int32 `pair`, in the dtype that `like` points to."""
    bits = pair >> 16 if HIGH else pair & 0xFFFF
    return bits.to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)


@jit
def _row(
    x: tl.tensor,
    like: tl.tensor,
    first: int,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load the inputs of BLOCK pairs of words, from `first` on, for `_dots`. Returns three values, with
    tensors of [1, BLOCK / BESIDE]: the inputs as 16-bit integers, two in an int32, as a tuple of BESIDE
    for each position in a word; the scale of a sum of products, float32; 16 times the sum of each group,
    float32."""
    pair = first + tl.arange(0, BLOCK)[None, :]
    inside = None if PAIRS % BLOCK == 0 else pair < PAIRS
    plain: tl.tensor = ()
    largest = tl.full([1, BLOCK // BESIDE], _LEAST, tl.float32)
    for at in tl.static_range(_WORD):
        # Two inputs side by side belong to the two words of a pair.
        place = (pair // (SPAN // 2) * _WORD + at) * (SPAN // 2) + pair % (SPAN // 2)
        both = _apart(tl.load(x + place, mask=inside, other=None if inside is None else 0))
        some: tl.tensor = ()
        for i in tl.static_range(BESIDE):
            some += (_half(both[i], False, like), _half(both[i], True, like))
            for each in tl.static_range(2):
                # A NaN among the inputs makes the result NaN.
                largest = tl.maximum(largest, tl.abs(some[2 * i + each]), tl.PropagateNan.ALL)
        plain += (some,)
    scale = _LARGEST / largest
    found: tl.tensor = ()
    sums: tl.tensor = ()
    for k in tl.static_range(0, _WORD * SPAN, GROUP):
        total = tl.zeros([1, BLOCK // BESIDE], tl.int32)
        for at in tl.static_range(_WORD):
            if at * SPAN >= k and at * SPAN < k + GROUP:
                whole: tl.tensor = ()
                for i in tl.static_range(BESIDE):
                    low = (plain[at][2 * i] * scale + _ROUND).to(tl.int32, bitcast=True)
                    high = (plain[at][2 * i + 1] * scale + _ROUND).to(tl.int32, bitcast=True)
                    whole += (_bytes(_HALVES, low, high),)
                    total = _dot(_LOW, whole[i], tl.full(total.shape, 0x0101, tl.int32), total)
                found += (whole,)
        sums += (16.0 * total.to(tl.float32),)
    return found, largest / (16 * _LARGEST), sums


@jit
def _scales(
    scales: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    N: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Scale and zero point of the outputs `rows`, of N, for what a thread sums: a tuple of int32 [rows, BLOCK
    / BESIDE], tile by tile and in these group by group."""
    found: tl.tensor = ()
    for first in tl.static_range(0, PAIRS, BLOCK):
        pair = first + tl.arange(0, BLOCK // BESIDE) * BESIDE
        for k in tl.static_range(0, _WORD * SPAN, GROUP):
            group = (pair // (SPAN // 2) * (_WORD * SPAN) + k) // GROUP
            there = (pair < PAIRS)[None, :] if live is None else live[:, None] & (pair < PAIRS)[None, :]
            found += (tl.load(scales + group[None, :] * N + rows[:, None], mask=there, other=0),)
    return found


@jit
def _dots(
    words: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    like: tl.tensor,
    tile: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """float32 [outputs, BLOCK / BESIDE] that sum along the second axis to the products of a tile of pairs of
    words [outputs, BLOCK] with a `_row`."""
    GROUPS: tl.constexpr = (_WORD * SPAN + GROUP - 1) // GROUP
    inputs, unit, sums = row
    held = _apart(words)
    none = tl.zeros(held[0].shape, tl.int32)
    found = none, none, none, none
    for i in tl.static_range(BESIDE):
        even, odd = held[i] & 0x0F0F0F0F, held[i] & -0x0F0F0F10
        first, second = _bytes(_FIRST, even, odd), _bytes(_SECOND, even, odd)
        found = (
            _dot(_LOW, inputs[0][i], first, found[0]),
            _dot(_HIGH, inputs[1][i], first, found[1]),
            _dot(_LOW, inputs[2][i], second, found[2]),
            _dot(_HIGH, inputs[3][i], second, found[3]),
        )
    total = tl.zeros(none.shape, tl.float32)
    for k in tl.static_range(0, _WORD * SPAN, GROUP):
        whole = none
        for at in tl.static_range(_WORD):
            if at * SPAN >= k and at * SPAN < k + GROUP:
                whole += found[at] if at % 2 else found[at] * 16
        pair = scales[tile * GROUPS + k // GROUP]
        products = whole.to(tl.float32) - _half(pair, True, like) * sums[k // GROUP]
        total += products * _half(pair, False, like)
    return total * unit


@jit
def _held(
    w: tl.tensor,
    scales: tl.tensor,
    cols: tl.tensor,
    live: tl.tensor,
    N: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Words and scales of the outputs `cols`, and of those N further on if GATED."""
    outputs: tl.constexpr = N * (1 + GATED)
    found: tl.tensor = (tiles(w, cols, live, PAIRS, BLOCK),)
    found += (_scales(scales, cols, live, outputs, PAIRS, GROUP, SPAN, BLOCK),)
    if GATED:
        found += (tiles(w, cols + N, live, PAIRS, BLOCK),)
        found += (_scales(scales, cols + N, live, outputs, PAIRS, GROUP, SPAN, BLOCK),)
    return found


@jit
def _int4_gemv(
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (PAIRS + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = BLOCK // BESIDE
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stride = tl.num_programs(0) * COLUMNS
    live = None if N % COLUMNS == 0 and ROUNDS == 1 else cols < N
    held = _held(w, scales, cols, live, N, PAIRS, GROUP, SPAN, GATED, BLOCK)
    begin(PDL)
    rows: tl.tensor = ()
    for i in tl.static_range(TILES):
        rows += (_row(x, out, i * BLOCK, PAIRS, GROUP, SPAN, BLOCK),)
    for _ in tl.range(ROUNDS, num_stages=1):
        ahead = held
        if ROUNDS > 1:
            ahead = _held(w, scales, cols + stride, cols + stride < N, N, PAIRS, GROUP, SPAN, GATED, BLOCK)
        y = tl.zeros([COLUMNS, EACH], tl.float32)
        up = tl.zeros([COLUMNS, EACH], tl.float32)
        for i in tl.static_range(TILES):
            y += _dots(held[0][i], held[1], rows[i], out, i, GROUP, SPAN)
            if GATED:
                up += _dots(held[2][i], held[3], rows[i], out, i, GROUP, SPAN)
        y = tl.sum(y, 1)
        if bias is not None:
            y += tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
        if GATED:
            up = tl.sum(up, 1)
            if bias is not None:
                up += tl.load(bias + N + cols, mask=cols < N, other=0.0).to(tl.float32)
            y = y * tl.sigmoid(y) * up
        tl.store(out + cols, y.to(out.dtype.element_ty), mask=cols < N)
        held = ahead
        cols += stride


def int4_gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    config: Int4GemvConfig,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b of one row `x` [1, inputs] of 16 bits, `weight` int16 [outputs, inputs / 4] and `scale`
    [inputs / group, outputs, 2] in x's dtype (`gpu.quant.int4`), all contiguous, `bias` [outputs]: a new
    [1, outputs]. `gated`: silu(g) · u of the halves g and u, which are not rounded in between: a new
    [1, outputs / 2]. `config` from `int4_gemv_config`."""
    size = x.shape[1]
    width = len(weight) // 2 if gated else len(weight)
    group = size // len(scale)
    assert len(x) == 1 and x.is_contiguous() and scale.dtype == x.dtype
    out = x.new_empty(1, width)
    pairs = size // (2 * WORD)
    parts = cdiv(width, config.columns)
    programs = min(parts, config.programs or parts)
    _int4_gemv[(programs,)](
        x.view(torch.int32),
        weight.view(torch.int32),
        scale.view(torch.int32),
        bias,
        out,
        N=width,
        PAIRS=pairs,
        GROUP=group,
        SPAN=span(size, group),
        GATED=gated,
        COLUMNS=config.columns,
        ROUNDS=cdiv(parts, programs),
        BLOCK=min(config.block, pow2(pairs)),
        **launch_options(pdl, config.warps),
    )
    return out


# Cuts by the number of blocks in a row: the fastest of some 15 for each product of Qwen3-8B on an H200, and
# of some ten for rows of 2,048 to 28,672 inputs (`bench/results/history/h200-int4-one-row.json`).
_CUTS = [
    Int4GemvConfig(columns, 4, each * PROCESSORS)
    for columns, each in ((4, 4), (4, 3), (4, 3), (2, 3), (2, 2), (2, 2), (2, 2))
]
_GATED_CUTS = [_CUTS[0], _CUTS[1], _CUTS[3]]


def int4_gemv_config(rows: int, weight: Tensor, scale: Tensor, gated: bool = False) -> Int4GemvConfig | None:
    """How to cut `weight` and `scale` at one row; None for more, for float32, and where the registers do not
    hold a row and the words that are multiplied with it."""
    pairs = weight.shape[1] // 2
    blocks, cuts = cdiv(pairs, BLOCK), _GATED_CUTS if gated else _CUTS
    if rows != 1 or scale.element_size() != 2 or blocks > len(cuts):
        return None
    if pairs <= BLOCK // 2:
        return Int4GemvConfig(4 if gated else 8, 2, 6 * PROCESSORS, BLOCK // 2)
    if blocks == 1 and not gated and len(weight) <= 8 * 4 * PROCESSORS:
        return Int4GemvConfig(8, 4, 4 * PROCESSORS)  # all programs are resident at once
    if blocks > 1 and 4 * blocks * BLOCK > 5 * pairs:  # more than a fifth of the last block would be empty
        return Int4GemvConfig(2, 4 if gated else 2, (3 if gated else 6) * PROCESSORS, BLOCK // 2)
    return cuts[blocks - 1]
