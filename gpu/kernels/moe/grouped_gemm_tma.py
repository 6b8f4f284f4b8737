"""The grouped GEMMs of routed experts where each gets rows by the hundred: up to 192 rows by 256 outputs.

What feeds the tensor cores sets the time of such a product, not they themselves. Per step over K, in units
of 64 rows of either operand, and per processor of 132 that share 6 to 7 TB/s of L2:

    rows x outputs      128 x 128   128 x 256   192 x 256
    units read                  4           6           7
    units multiplied            4           8          12
    registers of sums          64         128         192    of a thread's 255, 256 threads

Triton's tiles are powers of two, so the 192 rows are two products with one tile of weights between them,
of 128 and of 64 rows. Gate and up are one operand too, fetched as a box [2, outputs, K]: as two, of half the
width, each would read the rows from shared memory once more, and shared memory was the limit then.

A tile with fewer rows runs at a height of 128 or 64; `route` cuts an expert's rows so that none is small
next to the others. On an H200, E 128, N 768, hidden 2,048, 8 of 128, us of `gate_up` and `down`:

    8,192 tokens   646 and 357   with tiles of 128 rows, gate and up apart,  724 and 458
    4,096          361 and 207   on another card                             411 and 257
    2,048          233 and 136                                               254 and 149

Rows that a tile does not have are zeros and not fetched, half a unit of the 12 or 13 that 256 rows read: 637
to 631 us a layer at 4,096 tokens on one card, nothing that could be seen at 8,192. Weights loaded before
the rows, whose addresses take a load more to be known, cost 6 us in either product
(bench/results/history/h200-experts-variants-*).

Inside a step of 8,192 tokens, at the power limit, 732 and 414: 68% of what the tensor cores can do there.
Blocks of 256 rows in tiles of 256 x 192 read a seventh less from L2 at 4,096 tokens and were no gain: 388 and
209 us where this took 369 and 208 on the same card, probably because 128 and 64 columns ask more of shared
memory than 256 do; with the weights on the left, 399 and 204.

Nor was a kernel by warp roles a gain, written in Gluon: 132 programs, in each a warpgroup that fetches the
tiles one after the other and three that multiply 64 rows each. It hides how a tile begins, and took 466 and
248 us at 4,096 tokens, 709 and 462 at 8,192, where this took 374 and 210, 654 and 361; with three stages or
four, a tile of 128 rows as long as one of 192. A tile's beginning is not what costs. ncu shows L2 at 87%
here: left to try is one fetch for two processors, a multicast, which Triton 3.6 does not have.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu.kernels.jit import cdiv, jit, jit_loose, launch_options, wait
from gpu.kernels.moe.adapters import PairDelta, PairDeltaShape, adapters_of, add_pair_delta
from gpu.kernels.moe.gemm_config import GemmShape, TileConfig
from gpu.kernels.moe.route import Tiles
from gpu.kernels.moe.tile_dependency import finish, signal, take_tile, wait_for
from gpu.kernels.silu_mul import gated

TALL = 192
"""Rows of a tile: what `route` cuts for these kernels."""


@jit
def _store(
    acc: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    target: tl.tensor,
    inside: tl.tensor,
    pairs: tl.tensor,
    expert: tl.tensor,
    index: tl.tensor,
    n: tl.tensor,
    places: int,
    delta: PairDelta,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    BLOCK_N: tl.constexpr = CONFIG.block_n
    if DELTA is not None:
        # Gate and up are one operand here too: of each column its part and its output.
        c = tl.arange(0, acc.shape[1])
        part = c // BLOCK_N
        there = n + c % BLOCK_N < SHAPE.n
        own = tl.where(there, part * SHAPE.n + n + c % BLOCK_N, 2 * SHAPE.n)
        # Not in front of the loop, where no register is left.
        adapter = adapters_of(delta, pairs, index, inside, DELTA)
        wait(PDL)
        acc = add_pair_delta(acc, delta, adapter, index, expert, own, part, 2 * SHAPE.n, places, DELTA, False)
    if bias is not None:
        b = tl.arange(0, acc.shape[1])
        own_bias = expert * (acc.shape[1] // BLOCK_N * SHAPE.n) + b // BLOCK_N * SHAPE.n + n + b % BLOCK_N
        more = tl.load(bias + own_bias, mask=n + b % BLOCK_N < SHAPE.n, other=0.0)
        acc += more.to(tl.float32)[None, :]
    if SHAPE.gated:
        # A thread has gate and up of a row in its registers: nothing moves.
        rows: tl.constexpr = acc.shape[0]
        gate, up = tl.split(tl.permute(tl.reshape(acc, [rows, 2, BLOCK_N]), [0, 2, 1]))
        acc = gated(gate, up, SHAPE.alpha, SHAPE.limit)
    cols = n + tl.arange(0, BLOCK_N)
    at = out + target.to(tl.int64)[:, None] * SHAPE.n + cols[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (cols < SHAPE.n)[None, :])


@jit
def _rows(
    a: tl.tensor,
    pairs: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """ROWS rows of a tile from OFFSET on: which there are, where their results go, and, where they are
    gathered, where they lie. What is computed on those behind `count` is dropped."""
    m = OFFSET + tl.arange(0, ROWS)
    inside = m < count
    place = first + m
    pair = tl.load(pairs + place, mask=inside, other=0)
    if SHAPE.gated:
        row = (pair // SHAPE.top_k).to(tl.int64)
        at = a + row[:, None] * SHAPE.k + tl.arange(0, CONFIG.block_k)[None, :]
        target = place
    else:
        at = place
        target = pair
    return inside, target, at


@jit
def _load_rows(
    a: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
) -> tl.tensor:
    """A step over K of the rows: gathered from `at`, zeros where not `inside`, or those from `first` on of
    the descriptor `a`, which may be another tile's."""
    if not SHAPE.gated:
        x = a.load([first, k])
    else:
        mask = inside[:, None]
        if SHAPE.k % CONFIG.block_k != 0:
            mask = mask & (k + tl.arange(0, CONFIG.block_k) < SHAPE.k)[None, :]
        x = tl.load(at + k, mask=mask, other=0.0)
    return x


@jit
def _tile(
    a: tl.tensor,
    a_low: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    pairs: tl.tensor,
    expert: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    places: int,
    delta: PairDelta,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """ROWS rows, and with MORE 64 behind them, by block_n outputs."""
    width: tl.constexpr = 2 * CONFIG.block_n if SHAPE.gated else CONFIG.block_n
    inside, target, at = _rows(a, pairs, first, count, 0, ROWS, SHAPE, CONFIG)
    acc = tl.zeros([ROWS, width], tl.float32)
    if MORE:
        inside_low, target_low, at_low = _rows(a, pairs, first, count, ROWS, 64, SHAPE, CONFIG)
        acc_low = tl.zeros([64, width], tl.float32)
    for k in range(0, SHAPE.k, CONFIG.block_k):
        x = _load_rows(a, at, inside, first, k, SHAPE, CONFIG)
        if MORE:
            x_low = _load_rows(a_low, at_low, inside_low, first + ROWS, k, SHAPE, CONFIG)
        if SHAPE.gated:
            tile = tl.reshape(w.load([2 * expert, n, k]), [width, CONFIG.block_k])
        else:
            tile = w.load([expert * SHAPE.n + n, k])
        weights = tl.trans(tile)
        acc = tl.dot(x, weights, acc, input_precision="ieee")
        if MORE:
            acc_low = tl.dot(x_low, weights, acc_low, input_precision="ieee")
    index = first + tl.arange(0, ROWS)
    _store(acc, bias, out, target, inside, pairs, expert, index, n, places, delta, SHAPE, CONFIG, DELTA, PDL)
    if MORE:
        index_low = first + ROWS + tl.arange(0, 64)
        _store(
            acc_low, bias, out, target_low, inside_low, pairs, expert, index_low, n, places, delta,
            SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip


@jit_loose("total", "places")
def _grouped_tma(
    a: tl.tensor,
    a_low: tl.tensor,
    w: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    tiles: Tiles,
    total: int,
    places: int,
    delta: PairDelta,
    SHAPE: tl.constexpr,
    CONFIG: tl.constexpr,
    DELTA: tl.constexpr,
    AFTER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    tiles_n: tl.constexpr = (SHAPE.n + CONFIG.block_n - 1) // CONFIG.block_n
    block = tl.program_id(0) // tiles_n
    n = tl.program_id(0) % tiles_n * CONFIG.block_n
    early: tl.constexpr = AFTER > 0 or DELTA is not None
    expert, first, count, done, seen = take_tile(tiles.blocks, total, block, AFTER, early, PDL)
    if AFTER > 0 and count > 0:  # a tile without rows waits for nothing
        wait_for(done, seen, AFTER, PDL)
    if count > 128:
        _tile(
            a, a_low, w, bias, out, tiles.pairs, expert, first, count, n, places, delta,
            128, True, SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip
    elif count > 64:
        _tile(
            a, a_low, w, bias, out, tiles.pairs, expert, first, count, n, places, delta,
            128, False, SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip
    elif count > 0:
        _tile(
            a_low, a_low, w, bias, out, tiles.pairs, expert, first, count, n, places, delta,
            64, False, SHAPE, CONFIG, DELTA, PDL,
        )  # fmt: skip
    if SHAPE.gated and count > 0:
        signal(done)
    if early:
        finish(PDL)


def tma_gemm(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    shape: GemmShape,
    config: TileConfig,
    *,
    after: int,
    delta: tuple[PairDelta, PairDeltaShape] | None,
    pdl: bool,
) -> None:
    """Like `gpu.kernels.moe.grouped_gemm`, into `out`, with `tiles` cut with TALL rows. Rows of `w`, and for
    `down` of `a`, are fetched by descriptor: a multiple of 16 bytes each. `after` is how many programs of
    `gate_up` a tile of `down` waits for; 0: for all kernels before.
    """
    n, k, block_n, block_k = shape.n, shape.k, config.block_n, config.block_k
    total = tiles.blocks.shape[1]
    added, delta_shape = delta or (None, None)
    if shape.gated:
        weights = TensorDescriptor.from_tensor(w.view(-1, n, k), [2, block_n, block_k])
        high = low = a
    else:
        weights = TensorDescriptor.from_tensor(w.view(-1, k), [block_n, block_k])
        high, low = (TensorDescriptor.from_tensor(a, [height, block_k]) for height in (128, 64))
    _grouped_tma[(total * cdiv(n, block_n),)](
        high,
        low,
        weights,
        bias,
        out,
        tiles,
        total,
        len(tiles.pairs),
        added,
        SHAPE=shape,
        CONFIG=config,
        DELTA=delta_shape,
        AFTER=after,
        **launch_options(pdl, config.warps, config.stages),
    )
