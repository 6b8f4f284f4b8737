"""The two grouped GEMMs of routed experts, over the tiles of `route`.

    gate_up    hidden[place] = silu(x[row] · gateᵀ) · (x[row] · upᵀ)      place = 0 ... T * k - 1
    down       out[pair]     = hidden[place] · downᵀ

The list is sorted by expert, so `hidden` lies in that order and its tiles are contiguous; `out` lies
in pair order (row * k + j), where the sum over a row's experts reads it.

Tiles of 192 rows are `grouped_gemm_tma`'s. For all others one kernel body serves both, and three ways to lay
a tile on the tensor cores:

    swap      the weights are the left operand. At few rows per expert the left side (64 at least for
              wgmma) is then filled with weights, and the rows are the narrow right side.
    half      tiles with at most half of BLOCK_M rows run at that height: the last tile of an expert is half
              empty on average.
    tma       weights are loaded through tensor descriptors: one thread asks for a tile.

A tile of `down` needs the outputs of its own rows alone: `gate_up` counts them in the table of tiles, and
`down` begins where they are done (`gpu.kernels.moe.tile_dependency`).

In 8 bits both operands are e4m3 or int8 with float32 scales, of `a` by row and of the weights by output,
which meet the sums behind the loop; or of `a` by groups of 128 inputs and of the weights by blocks of 128 x
128, which meet the sums of each step over K.

Weights of 4 bits, MXFP4 (`gpu.quant.mxfp4`) or integers (`gpu.quant.int4`), become 16 bits in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from core.models import ClampedGate
from core.models.quant import BLOCK, MXFP4_GROUP
from gpu.kernels.gemm.int4 import pairs_of, weights_of
from gpu.kernels.jit import cdiv, jit, jit_loose, launch_options, wait
from gpu.kernels.moe.adapters import PairDelta, PairDeltaShape, adapters_of, add_pair_delta
from gpu.kernels.moe.gemm_config import GemmShape, TileConfig
from gpu.kernels.moe.grouped_gemm_tma import TALL, tma_gemm
from gpu.kernels.moe.route import Tiles
from gpu.kernels.moe.tile_dependency import finish, signal, take_tile, wait_for
from gpu.kernels.silu_mul import gated
from gpu.quant.int4 import span

Scales = tuple[Tensor, Tensor]
"""float32 scales of rows of 8 bits [n] and of weights [experts, outputs], or of their groups [n, inputs /
128] and blocks [experts, outputs / 128, inputs / 128]."""

_BLOCK = tl.constexpr(BLOCK)


@jit
def _weight_tile(
    w: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tl.tensor:
    """[block_n, block_k] from rows `row + n` on of the weights seen as one matrix with rows of K. Columns
    past N are not stored; a descriptor takes what lies there, or zeros behind the last expert, and a
    pointer must not leave the allocation, so it stays on row N - 1."""
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    if CONFIG.tma:
        tile = w.load([row + n, k])
    else:
        column = n + tl.arange(0, CONFIG.block_n)
        column = column if N % CONFIG.block_n == 0 else tl.minimum(column, N - 1)
        at = w + row.to(tl.int64) * K + k + column[:, None] * K
        d = tl.arange(0, CONFIG.block_k)[None, :]
        tile = tl.load(at + d) if K % CONFIG.block_k == 0 else tl.load(at + d, mask=k + d < K, other=0.0)
    return tile


@jit
def _multiply(x: tl.tensor, w: tl.tensor, acc: tl.tensor, SWAP: tl.constexpr) -> tl.tensor:
    # In FP8 Hopper's tensor cores keep 14 bits of a sum: after each step over K it goes on in float32.
    most: tl.constexpr = x.shape[1] if x.dtype.is_fp8() else None
    left, right = (w, tl.trans(x)) if SWAP else (x, tl.trans(w))
    return tl.dot(left, right, acc, input_precision="ieee", max_num_imprecise_acc=most, out_dtype=acc.dtype)


@jit
def _scaled(
    acc: tl.tensor,
    by_row: tl.tensor,
    by_column: tl.tensor,
    n: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tl.tensor:
    """`acc` times the scales of its rows and of the outputs `n` to n + block_n, at `by_column`: float32."""
    acc = acc.to(tl.float32)
    cols = n + tl.arange(0, CONFIG.block_n)
    scale = tl.load(by_column + cols, mask=cols < SHAPE.n, other=0.0)
    return acc * scale[:, None] * by_row[None, :] if CONFIG.swap else acc * by_row[:, None] * scale[None, :]


@jit
def _add_scaled(
    acc: tl.tensor,
    x: tl.tensor,
    w: tl.tensor,
    by_row: tl.tensor,
    by_block: tl.tensor,
    SWAP: tl.constexpr,
) -> tl.tensor:
    """`acc` and this step's products, scaled by the rows' [BLOCK_M] and the weights' own number."""
    scale = by_row * by_block
    if SWAP:
        acc += tl.dot(w, tl.trans(x), out_dtype=tl.float32) * scale[None, :]
    else:
        acc += tl.dot(x, tl.trans(w), out_dtype=tl.float32) * scale[:, None]
    return acc


@jit
def _add_deltas(
    acc: tl.tensor,
    up: tl.tensor,
    delta: PairDelta,
    adapter: tl.tensor,
    place: tl.tensor,
    expert: tl.tensor,
    cols: tl.tensor,
    places: int,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both sums with the deltas of their adapters, if there are any (DELTA), once they are known."""
    N: tl.constexpr = SHAPE.n
    if DELTA is not None:
        swap: tl.constexpr = CONFIG.swap
        wait(PDL)
        acc = add_pair_delta(acc, delta, adapter, place, expert, cols, 0, N, places, DELTA, swap)
        if SHAPE.gated:
            up = add_pair_delta(up, delta, adapter, place, expert, N + cols, 1, 2 * N, places, DELTA, swap)
    return acc, up


@jit
def _with_bias(
    acc: tl.tensor,
    bias: tl.tensor | None,
    row: tl.tensor,
    cols: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tl.tensor:
    """`acc` with the biases of the outputs `cols` from `row` on, if there are any."""
    if bias is not None:
        more = tl.load(bias + row + cols, mask=cols < SHAPE.n, other=0.0).to(tl.float32)
        acc = acc + more[:, None] if CONFIG.swap else acc + more[None, :]
    return acc


@jit
def _sums(
    acc: tl.tensor,
    up: tl.tensor,
    a_at: tl.tensor,
    w: tl.tensor,
    a_scales: tl.tensor,
    w_scales: tl.tensor,
    row: tl.tensor,
    w_row: tl.tensor,
    n: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both sums of a tile, over all inputs; `a_at` points to the first [BLOCK_M, block_k] of `row`."""
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    BLOCK_K: tl.constexpr = CONFIG.block_k
    d = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        x = tl.load(a_at + k) if K % BLOCK_K == 0 else tl.load(a_at + k, mask=(k + d < K)[None, :], other=0.0)
        tile = _weight_tile(w, w_row, n, k, SHAPE, CONFIG)
        if SHAPE.by_block:
            by_group = tl.load(a_scales + row * (K // _BLOCK) + k // _BLOCK)
            at = w_scales + (w_row + n) // _BLOCK * (K // _BLOCK) + k // _BLOCK
            acc = _add_scaled(acc, x, tile, by_group, tl.load(at), CONFIG.swap)
        else:
            acc = _multiply(x, tile, acc, CONFIG.swap)
        if SHAPE.gated:
            tile = _weight_tile(w, w_row + N, n, k, SHAPE, CONFIG)
            if SHAPE.by_block:
                by_block = tl.load(at + N // _BLOCK * (K // _BLOCK))
                up = _add_scaled(up, x, tile, by_group, by_block, CONFIG.swap)
            else:
                up = _multiply(x, tile, up, CONFIG.swap)
    return acc, up


@jit
def _restored(words: tl.tensor, scales: tl.tensor, AT: tl.constexpr, like: tl.tensor) -> tl.tensor:
    """The weights [outputs, 32] whose numbers are `AT` in `words`, and their scales [outputs] in `scales`, in
    the dtype of `like`.

    The three bits behind a sign are the number times 2^-126 where a float32 has the lowest of its exponent
    and the first behind the point, those without an exponent too. So one product with 2^(scale - 1), whose
    bits are made likewise, is the weight (scales up to `gpu.quant.mxfp4.MOST`)."""
    code = words.to(tl.int32) >> 4 * AT
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    by = ((((scales >> 8 * AT) & 255) + 126) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * by[:, None]).to(like.dtype)


@jit
def _add_packed(
    acc: tl.tensor,
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    column: tl.tensor,
    step: tl.tensor,
    like: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tl.tensor:
    """`acc` and the products of four tiles `x` of rows with the weights of a tile of `words`. These belong to
    the outputs `column` of an expert, whose `scales` they are, and become numbers as `like` points to."""
    span: tl.constexpr = SHAPE.span
    outputs: tl.constexpr = 2 * SHAPE.n if SHAPE.gated else SHAPE.n
    if SHAPE.packed == "int4":
        by = pairs_of(scales, column, outputs, step, SHAPE.group, span)
        for at in tl.static_range(4):
            tile = weights_of(words, by[at * span // SHAPE.group], like, at)
            acc = _multiply(x[at], tile, acc, CONFIG.swap)
    else:
        exponents = tl.load(scales + step * outputs + column)
        for at in tl.static_range(4):
            acc = _multiply(x[at], _restored(words, exponents, at, x[at]), acc, CONFIG.swap)
    return acc


@jit
def _packed_sums(
    acc: tl.tensor,
    up: tl.tensor,
    a: tl.tensor,
    row: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    n: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`_sums` of weights of 4 bits, which become 16 bits on their way: a tile of words a step, of four tiles
    of `SHAPE.span` inputs."""
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    span: tl.constexpr = SHAPE.span
    outputs: tl.constexpr = 2 * N if SHAPE.gated else N
    steps: tl.constexpr = (K + 4 * span - 1) // (4 * span)
    d = tl.arange(0, span)[None, :]
    a_at = a + row.to(tl.int64)[:, None] * K + d
    column = n + tl.arange(0, CONFIG.block_n)
    column = column if N % CONFIG.block_n == 0 else tl.minimum(column, N - 1)
    w_at = w + (expert * outputs + column).to(tl.int64)[:, None] * (steps * span) + d
    each: tl.constexpr = 2 if scales.dtype.element_ty == tl.float32 else 1  # numbers of a pair
    groups: tl.constexpr = K // SHAPE.group if SHAPE.packed == "int4" else steps
    own = scales + expert.to(tl.int64) * (groups * outputs * each)
    for step in range(steps):
        x: tl.tensor = ()
        for at in tl.static_range(4):
            k = (step * 4 + at) * span
            if steps * 4 * span == K:
                x += (tl.load(a_at + k),)
            else:
                x += (tl.load(a_at + k, mask=k + d < K, other=0.0),)
        words = tl.load(w_at + step * span)
        acc = _add_packed(acc, x, words, own, column, step, a, SHAPE, CONFIG)
        if SHAPE.gated:
            words = tl.load(w_at + N * steps * span + step * span)
            up = _add_packed(up, x, words, own, N + column, step, a, SHAPE, CONFIG)
    return acc, up


@jit
def _tile(
    a: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    a_scales: tl.tensor,
    w_scales: tl.tensor,
    pairs: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    places: int,
    delta: PairDelta,
    BLOCK_M: tl.constexpr,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    BLOCK_N: tl.constexpr = CONFIG.block_n
    BLOCK_K: tl.constexpr = CONFIG.block_k
    m = tl.arange(0, BLOCK_M)
    inside = m < count
    # Rows behind `count` are computed on other rows and dropped: cheaper than masking.
    place = tl.minimum(first + m, places - 1)
    row = tl.load(pairs + place, mask=inside, other=0) // SHAPE.top_k if SHAPE.gated else place
    adapter = row if DELTA is None else adapters_of(delta, pairs, place, inside, DELTA)
    w_row = expert * (2 * N if SHAPE.gated else N)
    SUM: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    if CONFIG.swap:
        acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
        up = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], SUM)
        up = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    if SHAPE.packed != "":
        acc, up = _packed_sums(acc, up, a, row, w, w_scales, expert, n, SHAPE, CONFIG)
    else:
        a_at = a + row.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        acc, up = _sums(acc, up, a_at, w, a_scales, w_scales, row, w_row, n, SHAPE, CONFIG)
    if a_scales is not None and not SHAPE.by_block:
        by_row = tl.load(a_scales + row)
        acc = _scaled(acc, by_row, w_scales + w_row, n, SHAPE, CONFIG)
        if SHAPE.gated:
            up = _scaled(up, by_row, w_scales + w_row + N, n, SHAPE, CONFIG)
    cols = n + tl.arange(0, BLOCK_N)
    acc, up = _add_deltas(acc, up, delta, adapter, place, expert, cols, places, SHAPE, CONFIG, DELTA, PDL)
    acc = _with_bias(acc, bias, w_row, cols, SHAPE, CONFIG)
    if SHAPE.gated:
        up = _with_bias(up, bias, w_row + N, cols, SHAPE, CONFIG)
        acc = gated(acc, up, SHAPE.alpha, SHAPE.limit)
        target = place
    else:
        target = tl.load(pairs + place, mask=inside, other=0)
    result = acc.to(out.dtype.element_ty)
    if CONFIG.swap:
        result = tl.trans(result)
    at = out + target.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(at, result, mask=inside[:, None] & (cols < N)[None, :])


@jit_loose("total", "places")
def _grouped(
    a: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    a_scales: tl.tensor,
    w_scales: tl.tensor,
    tiles: Tiles,
    total: int,
    places: int,
    delta: PairDelta,
    BLOCK_M: tl.constexpr,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # Tiles of one block of rows follow each other, so that an expert's weights are read by programs
    # that run at the same time: what two blocks of it share comes from L2.
    tiles_n: tl.constexpr = (SHAPE.n + CONFIG.block_n - 1) // CONFIG.block_n
    block = tl.program_id(0) // tiles_n
    n = tl.program_id(0) % tiles_n * CONFIG.block_n
    early: tl.constexpr = AFTER > 0 or DELTA is not None
    expert, first, count, done, seen = take_tile(tiles.blocks, total, block, AFTER, early, PDL)
    if count == 0:
        if early:
            finish(PDL)
        return
    pairs = tiles.pairs
    half: tl.constexpr = BLOCK_M // 2
    if AFTER > 0:
        wait_for(done, seen, AFTER, False)
    if CONFIG.half and count <= half:
        _tile(
            a, w, bias, out, a_scales, w_scales, pairs, expert, first, count, n, places, delta,
            half, SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip
    else:
        _tile(
            a, w, bias, out, a_scales, w_scales, pairs, expert, first, count, n, places, delta,
            BLOCK_M, SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip
    if SHAPE.gated:
        signal(done)
    if early:
        finish(PDL)


def _packed(shape: GemmShape, scales: Tensor) -> tuple[GemmShape, Tensor]:
    """`shape` with weights of 4 bits, and their `scales` as the kernel reads them: scale and zero point of 16
    bits as one number."""
    if not scales.is_floating_point():
        return shape._replace(packed="mxfp4", span=MXFP4_GROUP), scales
    group = shape.k // scales.shape[1]
    whole = scales if scales.dtype == torch.float32 else scales.view(torch.int32)
    return shape._replace(packed="int4", span=span(shape.k, group), group=group), whole


def grouped_gemm(
    a: Tensor,
    w: Tensor,
    tiles: Tiles,
    block_m: int,
    config: TileConfig,
    *,
    gated: bool = False,
    bias: Tensor | None = None,
    clamped: ClampedGate | None = None,
    scales: Scales | None = None,
    packed: Tensor | None = None,
    dtype: torch.dtype | None = None,
    after: int = 0,
    delta: tuple[PairDelta, PairDeltaShape] | None = None,
    pdl: bool = False,
) -> Tensor:
    """`gate_up` where `gated`, else `down`, for every pair.

    a        of `gate_up` the rows x [T, hidden], of `down` what that made of them, [T * k, width]; contiguous
    w        [experts, 2 * width, hidden], gate over up, or [experts, hidden, width]; contiguous. Of 4 bits
             int16 words with scales `packed`, and `config.block_k` counts for nothing
    block_m  what `tiles` was cut with
    bias     [experts, 2 * width], gate before up, or [experts, hidden], contiguous
    clamped  of `gate_up`: how gate and up are joined; None: by silu
    scales   of a and w, where they are e4m3 or int8
    packed   the scales of w, where that has 4 bits: of MXFP4 (`gpu.quant.mxfp4`) int32 [experts, inputs /
             128, outputs], rounded up; of integers (`gpu.quant.int4`) [experts, inputs / group, outputs, 2],
             in a's dtype
    dtype    of the result, None for a's
    after    of `down`, launched right behind `gate_up` or its own `shrink_pairs`: how many programs of that a
             tile waits for, those of its own rows (`gpu.kernels.moe.tile_dependency`); 0: for all kernels
    delta    of the rows' adapters, from the `shrink_pairs` launched right before: added before silu
    returns  [T * k, width] in the order of `tiles`, or [T * k, hidden] in pair order (row * k + j). Places
             behind the last pair, and rows of pairs that went nowhere, are not written
    """
    n, k = w.shape[1] // 2 if gated else w.shape[1], a.shape[1]
    out = a.new_empty(len(tiles.pairs), n, dtype=dtype or a.dtype)
    a_scales, w_scales = scales if scales is not None else (None, None)
    by_block = w_scales is not None and w_scales.dim() == w.dim()
    gate = (0.0, 0.0) if clamped is None else (clamped.alpha, clamped.limit)
    shape = GemmShape(n, k, len(tiles.pairs) // len(a), gated, by_block, *gate)
    if packed is not None:
        shape, w_scales = _packed(shape, packed)
    if block_m == TALL:
        assert scales is None and packed is None, "weights in 8 and 4 bits have lower tiles"
        tma_gemm(a, w, bias, out, tiles, shape, config, after=after, delta=delta, pdl=pdl)
        return out
    if by_block:  # a tile lies within blocks, and a step over K in one
        assert config.block_k == BLOCK and BLOCK % config.block_n == 0 and not (n % BLOCK or k % BLOCK)
    total = tiles.blocks.shape[1]
    added, delta_shape = delta or (None, None)
    weights: Any = w
    if config.tma:
        weights = TensorDescriptor.from_tensor(w.view(-1, k), [config.block_n, config.block_k])
    _grouped[(total * cdiv(n, config.block_n),)](
        a,
        weights,
        bias,
        out,
        a_scales,
        w_scales,
        tiles,
        total,
        len(tiles.pairs),
        added,
        BLOCK_M=block_m,
        SHAPE=shape,
        CONFIG=config,
        DELTA=delta_shape,
        AFTER=after,
        **launch_options(pdl, config.warps, config.stages),
    )
    return out
