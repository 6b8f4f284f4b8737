"""y = x Wᵀ of weights of 4 bits (`gpu.quant.int4`) for up to some hundred rows, at the speed at which the
weights are read, and these weights in 16 bits for products of more.

As in `skinny_gemm` the weights are the left operand of the tensor cores and the rows, padded to 8, 16, 32 or
64, their narrow right side. A number is turned into 16 bits in registers: its four bits take the place of the
lowest of the mantissa of 128 (of 1,024 in float16), which gives 128 + number, for two numbers at once. What
is left to do depends on the rows:

    up to 16   products of these are summed for each group, and so are the rows, by ones. Then
               scale × (products - (128 + zero) × sum of the rows) is added, in float32
    above      128 + zero is subtracted, which is exact, and the difference is multiplied by the scale

That is 0.9 and 1.9 operations a weight. At one row the 6.9e9 weights of Qwen3-8B's layers are 0.9 ms of
reading on an H200, in which it has time for 3.6 operations a weight.

Under programmatic dependent launch each program asks for its first words into L2 before it waits for the
kernel that makes `x`: of a product whose K is split into short parts, which are in a pipeline all at once,
most of them.

Where K is split each program stores float32 sums, and the last program of a tile (a counter per tile) adds
them in the order of K, so that the same rows give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.gemm.skinny import COUNTERS, FILLED, PROCESSORS, prefetch
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, pow2
from gpu.quant.int4 import WORD, span

MOST_ROWS = 256
"""From more rows on weights are turned into 16 bits once, for a product by cuBLAS."""

NARROWEST, WIDEST = 8, 64
"""Rows of a program: to so many at least they are padded, and more are other programs'."""

MOST_LATE = 16
"""Rows up to which it is the sums of products that are scaled."""

AHEAD = 512
"""Bytes of each output prefetched before the wait, at most."""


class Int4Config(NamedTuple):
    """How a product is cut.

    block_n  outputs of a program; of a gated product as many pairs
    split    programs that share the inputs of a tile
    warps    of a program
    stages   tiles of words on their way, by a program
    """

    block_n: int
    split: int
    warps: int
    stages: int


def _adding(shift: int, base: int) -> str:
    """Instructions for two words in a register: `base` + the numbers from bit `shift` on. `base` are the bits
    of 128 in bfloat16 or of 1,024 in float16, twice."""
    return (
        f"mov.b32 base, {base:#x}; shr.b32 t, $1, {shift}; "
        "lop3.b32 t, t, 0x000f000f, base, 0xea;"  # (t & 0x000f000f) | base
    )


def _asm(shift: int, base: int) -> tl.constexpr:
    """PTX of `numbers_of`."""
    return tl.constexpr(f"{{ .reg .b32 t, base; {_adding(shift, base)} mov.b32 $0, t; }}")


_BF16_0, _BF16_1, _BF16_2, _BF16_3 = (_asm(4 * at, 0x43004300) for at in range(WORD))
_FP16_0, _FP16_1, _FP16_2, _FP16_3 = (_asm(4 * at, 0x64006400) for at in range(WORD))
_WORD = tl.constexpr(WORD)


@jit
def _base(x: tl.tensor) -> tl.tensor:
    """The constant that `numbers_of` adds to numbers."""
    kind: tl.constexpr = x.dtype.element_ty
    return 128.0 if kind == tl.bfloat16 else (1024.0 if kind == tl.float16 else 0.0)


@jit
def numbers_of(words: tl.tensor, x: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The numbers `AT` of `words`, plus `_base`, in the dtype of what `x` points to."""
    kind: tl.constexpr = x.dtype.element_ty
    if kind == tl.float32:
        found = ((words >> 4 * AT) & 15).to(tl.float32)
    elif kind == tl.bfloat16:
        # Strings of a kernel cannot be picked from a list.
        ASM: tl.constexpr = (_BF16_0 if AT == 0 else _BF16_1) if AT < 2 else (_BF16_2 if AT == 2 else _BF16_3)
        found = tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        HALF: tl.constexpr = (
            (_FP16_0 if AT == 0 else _FP16_1) if AT < 2 else (_FP16_2 if AT == 2 else _FP16_3)
        )
        found = tl.inline_asm_elementwise(HALF, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return found


@jit
def load_pair(scales: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load the scales and zero points at the offsets `at`, 0 where `mask` is false. A pair of 16-bit values
    is loaded as one 32-bit integer, which software pipelining supports."""
    other: tl.constexpr = None if mask is None else 0
    if scales.dtype.element_ty == tl.float32:
        found = (
            tl.load(scales + 2 * at, mask=mask, other=other),
            tl.load(scales + 2 * at + 1, mask=mask, other=other),
        )
    else:
        found = tl.load(scales + at, mask=mask, other=other)
    return found


@jit
def pairs_of(
    scales: tl.tensor,
    row: tl.tensor,
    N: tl.tensor,
    tile: tl.tensor,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Load the scales and zero points of `tile` of the words of `row`, outputs of N: one `load_pair` a
    group."""
    found: tl.tensor = ()
    for k in tl.static_range(0, _WORD * SPAN, GROUP):
        found += (load_pair(scales, (tile * (_WORD * SPAN) + k) // GROUP * N + row, None),)
    return found


@jit
def split_pair(pair: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Scale and `_base` + zero, in the dtype of what `x` points to."""
    kind: tl.constexpr = x.dtype.element_ty
    if kind == tl.float32:
        scale, zero = pair[0], pair[1]
    else:
        scale = (pair & 0xFFFF).to(tl.int16).to(kind, bitcast=True)
        zero = (pair >> 16).to(tl.int16).to(kind, bitcast=True)
        zero = (zero.to(tl.float32) + _base(x)).to(kind)
    return scale, zero


@jit
def weights_of(words: tl.tensor, pair: tl.tensor, x: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The weights whose numbers are `AT` in `words` [BLOCK_N, SPAN], in the dtype of what `x` points to."""
    scale, zero = split_pair(pair, x)
    return (numbers_of(words, x, AT) - zero[:, None]) * scale[:, None]


@jit
def _rows(x: tl.tensor, inside: tl.tensor, tile: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """Four tiles [rows, SPAN] of the activations `x`, to multiply with the numbers of a tile of words."""
    found: tl.tensor = ()
    for at in tl.static_range(_WORD):
        k = (tile * _WORD + at) * SPAN + tl.arange(0, SPAN)
        found += (tl.load(x[:, None] + k[None, :], mask=inside[:, None], other=0.0),)
    return found


@jit
def _words(w: tl.tensor, tile: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """A tile [outputs, SPAN] of words; `w` points to the outputs' rows."""
    # evict_first: a weight is read once a step, and L2 is needed for what is read again.
    place = w[:, None] + (tile * SPAN + tl.arange(0, SPAN))[None, :]
    return tl.load(place, eviction_policy="evict_first")


@jit
def _sums(
    some: tl.tensor,
    x: tl.tensor,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Sums over each quantisation group of the inputs in the four tiles `some`, repeated for each output:
    [BLOCK_N, BLOCK_M] a group. The tensor cores compute them, in the layout that `_multiply_add` needs."""
    ones = tl.full([BLOCK_N, SPAN], 1.0, x.dtype.element_ty)
    found: tl.tensor = ()
    for k in tl.static_range(0, _WORD * SPAN, GROUP):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for at in tl.static_range(_WORD):
            if at * SPAN >= k and at * SPAN < k + GROUP:
                acc = tl.dot(ones, tl.trans(some[at]), acc, input_precision="ieee")
        found += (acc,)
    return found


@jit
def _multiply_add(
    acc: tl.tensor,
    words: tl.tensor,
    pairs: tl.tensor,
    some: tl.tensor,
    sums: tl.tensor,
    x: tl.tensor,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """`acc` and the product of a tile of words, scaled by `pairs`, and the four tiles `some` of rows. With
    `sums` it is the products of numbers that are scaled."""
    if len(sums) == 0:
        for at in tl.static_range(_WORD):
            weights = weights_of(words, pairs[at * SPAN // GROUP], x, at)
            acc = tl.dot(weights, tl.trans(some[at]), acc, input_precision="ieee")
    else:
        for k in tl.static_range(0, _WORD * SPAN, GROUP):
            scale, zero = split_pair(pairs[k // GROUP], x)
            products = tl.zeros(acc.shape, tl.float32)
            for at in tl.static_range(_WORD):
                if at * SPAN >= k and at * SPAN < k + GROUP:
                    numbers = numbers_of(words, x, at)
                    products = tl.dot(numbers, tl.trans(some[at]), products, input_precision="ieee")
            by, less = scale.to(tl.float32), zero.to(tl.float32)
            acc += (products - less[:, None] * sums[k // GROUP]) * by[:, None]
    return acc


@jit
def _sum_parts(
    held: tl.tensor, at: tl.tensor, inside: tl.tensor, SPLIT: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """The sum of the parts of a tile, WHOLE apart, in order."""
    acc = tl.load(held + at, mask=inside, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SPLIT):
        acc += tl.load(held + i * WHOLE + at, mask=inside, other=0.0, cache_modifier=".cg")
    return acc


@jit_loose("rows")
def _multiply(
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    rows: int,
    N: int,
    WIDTH: int,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < rows
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = N * (1 + GATED)
    # Rows of weights behind the last are not stored: they stay on it.
    row = tl.minimum(cols, N - 1)
    first = WIDTH // SPAN * part // SPLIT
    steps = WIDTH // SPAN * (part + 1) // SPLIT - first
    x_at, w_at = x + m.to(tl.int64) * (WIDTH * _WORD), w + row.to(tl.int64) * WIDTH
    up_at = w + (N + row).to(tl.int64) * WIDTH
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Each tile starts elsewhere: not all programs then read the rows from the same slices of L2 at once.
    shift = tile % steps
    if AHEAD:
        prefetch(w_at + tl.minimum((first + shift) * SPAN, (first + steps) * SPAN - AHEAD // 2), AHEAD)
        if GATED:
            prefetch(up_at + tl.minimum((first + shift) * SPAN, (first + steps) * SPAN - AHEAD // 2), AHEAD)
    begin(PDL)
    # With a number of stages all loads are pipelined, those of scales too.
    for i in tl.range(steps, num_stages=STAGES):
        step = i + shift
        k = first + tl.where(step < steps, step, step - steps)
        words = _words(w_at, k, SPAN)
        by = pairs_of(scales, row, outputs, k, GROUP, SPAN)
        some = _rows(x_at, inside, k, SPAN)
        sums = _sums(some, x, GROUP, SPAN, BLOCK_M, BLOCK_N) if LATE else ()
        acc = _multiply_add(acc, words, by, some, sums, x, GROUP, SPAN)
        if GATED:
            words = _words(up_at, k, SPAN)
            by = pairs_of(scales, N + row, outputs, k, GROUP, SPAN)
            up = _multiply_add(up, words, by, some, sums, x, GROUP, SPAN)
    if SPLIT > 1:
        whole: tl.constexpr = BLOCK_N * BLOCK_M * (1 + GATED)
        at_tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT) + tile
        held = parts + at_tile * (SPLIT * whole)
        own = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        live = inside[None, :] & (cols < N)[:, None]
        tl.store(held + part * whole + own, acc, mask=live)
        if GATED:
            tl.store(held + part * whole + BLOCK_N * BLOCK_M + own, up, mask=live)
        tl.debug_barrier()  # all threads' sums, before one thread increments the counter
        if tl.atomic_add(counters + at_tile, 1, sem="acq_rel", scope="gpu") < SPLIT - 1:
            return
        tl.store(counters + at_tile, 0)
        acc = _sum_parts(held, own, live, SPLIT, whole)
        if GATED:
            up = _sum_parts(held + BLOCK_N * BLOCK_M, own, live, SPLIT, whole)
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        if bias is not None:
            up += tl.load(bias + N + row).to(tl.float32)[:, None]
        acc = acc * tl.sigmoid(acc) * up
    place = out + m.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(place, tl.trans(acc.to(out.dtype.element_ty)), mask=inside[:, None] & (cols < N)[None, :])


def int4_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    config: Int4Config,
    counters: Tensor | None,
    *,
    gated: bool = False,
    pdl: bool = False,
) -> Tensor:
    """x Wᵀ + b of `x` contiguous [n, inputs], `weight` int16 [outputs, inputs / 4] and `scale` [inputs /
    group, outputs, 2] in x's dtype (`gpu.quant.int4`), both contiguous, `bias` [outputs]: a new [n, outputs].
    `gated`: silu(g) · u of the halves g and u, which are not rounded in between: a new [n, outputs / 2]. One
    kernel serves up to 8, 16, 32 or 64 rows, and as many more times 64. `config` from `int4_config`,
    `counters` from `split_k_counters`, needed where K is split."""
    rows, size = x.shape
    width = len(weight) // 2 if gated else len(weight)
    group, block_m = size // len(scale), min(max(pow2(rows), NARROWEST), WIDEST)
    apart, tiles = span(size, group), cdiv(width, config.block_n)
    blocks = cdiv(rows, block_m)
    steps = size // (WORD * apart)
    assert steps >= config.split and x.is_contiguous() and scale.dtype == x.dtype
    out = x.new_empty(rows, width)
    parts = None
    if config.split > 1:
        assert counters is not None and tiles * blocks <= len(counters)
        each = config.split * config.block_n * block_m * (1 + gated)
        parts = x.new_empty(tiles * blocks * each, dtype=torch.float32)
    _multiply[(tiles * config.split, blocks)](
        x,
        weight,
        scale if scale.dtype == torch.float32 else scale.view(torch.int32),
        bias,
        out,
        parts,
        counters if config.split > 1 else None,
        rows,
        width,
        size // WORD,
        GROUP=group,
        SPAN=apart,
        GATED=gated,
        SPLIT=config.split,
        AHEAD=min(AHEAD, 2 * apart * (steps // config.split)) if pdl else 0,
        LATE=block_m <= MOST_LATE,
        STAGES=config.stages,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        **launch_options(pdl, config.warps, config.stages),
    )
    return out


@jit
def _restore(
    w: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    N: int,
    WIDTH: int,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, tile = tl.minimum(cols, N - 1), tl.program_id(1)
    words = _words(w + row.to(tl.int64) * WIDTH, tile, SPAN)
    pairs = pairs_of(scales, row, N, tile, GROUP, SPAN)
    begin(PDL)
    for at in tl.static_range(_WORD):
        weights = weights_of(words, pairs[at * SPAN // GROUP], out, at)
        k = (tile * _WORD + at) * SPAN + tl.arange(0, SPAN)
        place = out + cols.to(tl.int64)[:, None] * (WIDTH * _WORD) + k[None, :]
        tl.store(place, weights, mask=(cols < N)[:, None])


def int4_restore(weight: Tensor, scale: Tensor, *, pdl: bool = False) -> Tensor:
    """The weights that `weight` int16 [outputs, inputs / 4] and `scale` [inputs / group, outputs, 2] stand
    for: a new [outputs, inputs] in the dtype of `scale`."""
    outputs, width = weight.shape
    group = width * WORD // len(scale)
    apart = span(width * WORD, group)
    out = scale.new_empty(outputs, width * WORD)
    block_n = 64
    _restore[(cdiv(outputs, block_n), width // apart)](
        weight,
        scale if scale.dtype == torch.float32 else scale.view(torch.int32),
        out,
        outputs,
        width,
        GROUP=group,
        SPAN=apart,
        BLOCK_N=block_n,
        **launch_options(pdl, 4),
    )
    return out


def int4_config(
    rows: int, weight: Tensor, scale: Tensor, gated: bool = False, roomy: bool = True
) -> Int4Config | None:
    """How to cut `weight` and `scale` at `rows` rows, on a device with 132 multiprocessors of 228 KiB; None
    where weights turned into 16 bits are multiplied instead. `roomy` False: there are no counters, and a
    multiprocessor has less room."""
    if rows > (MOST_ROWS if roomy else MOST_LATE):
        return None
    outputs, width = len(weight) // 2 if gated else len(weight), weight.shape[1]
    steps = width // span(width * WORD, width * WORD // len(scale))
    # The fastest for Qwen3-8B on an H200 of some sixty cuts (`python -m bench.kernels.int4 --cuts`).
    if rows <= NARROWEST:
        cut, wanted = Int4Config(32, 1, 2, 3), (4 if gated else 3) * PROCESSORS - 16
    elif rows <= 32:
        cut, wanted = Int4Config(32, 1, 2, 5 if rows <= MOST_LATE else 3), 2 * FILLED
    else:
        cut, wanted = Int4Config(128, 1, 8, 3), FILLED
    tiles = cdiv(outputs, cut.block_n) * cdiv(rows, WIDEST)
    if tiles > COUNTERS or not roomy:
        return cut
    splits = [each for each in (1, 2, 4, 8, 16) if each <= steps and steps % each == 0]
    return cut._replace(split=next((each for each in splits if tiles * each >= wanted), splits[-1]))
