"""A x and B h of each row's adapter: grouped products over the tiles of `gpu.kernels.lora_rows`.

    shrink    h[part, row] = A[place] x[row]      inputs are divided among `part` programs (split-K)
    expand    y[row]      += B[place] Σ h[part, row]

One pair of kernels serves all row counts: a tile of 16 rows, the least that a tensor core takes, is a row's
own where each has another adapter, and reads A and B as a product of one row would. What counts is the
bytes of A and B, and that there are programs enough to ask for them: at few rows there is one tile for each
adapter, so `shrink` divides its inputs. It leaves the parts of its sums to `expand`, which adds them in one
order: no counter, no launch and nothing to clear in between.

Both find their tile, and `expand` also loads its weights, before they wait for the kernel in front of them:
under dependent launch the list must be older than that kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.gemm.skinny import PROCESSORS
from gpu.kernels.jit import begin, cdiv, jit, jit_loose, launch_options, options, pow2
from gpu.kernels.lora_rows import max_tiles, take_tile
from gpu.lora import LoraMatrix, LoraRows

MOST_PARTS = 32
"""Maximum number of parts of the inputs of a `shrink`: each program of `expand` reads all of them."""


MOST_SUMS = 8192
"""Sums of a program of four warps, 64 a thread; of gate and up half as many each."""


class LoraConfig(NamedTuple):
    """How a matrix's two products are cut.

    rows_in   of a tile of `shrink`
    block_k   inputs at a time
    parts     that the inputs are divided into
    rows_out  of a tile of `expand`
    block_n   outputs of a program
    """

    rows_in: int
    block_k: int
    parts: int
    rows_out: int
    block_n: int


def split_inputs(programs: int, steps: int) -> int:
    """Parts of inputs that are read in `steps` steps: a power of two, about `programs`."""
    most = max(min(MOST_PARTS, programs, steps), 1)
    return 1 << most.bit_length() - 1


def lora_config(rows: int, lora: LoraMatrix) -> LoraConfig:
    """For a step of `rows` rows: a wave of programs in `shrink`, two in `expand`.

    For more than 256 rows, as prompts have, the sizes are what was fastest on an H200 for an 8B's matrices
    with 8 adapters of rank 16, at 512 to 8,192 rows: `shrink` and `expand` within 1.2 of the time for their
    bytes from 2,048 rows on, `expand_silu` within 1.5. For fewer they are by reasoning, not measured.
    """
    places, wide, inputs = lora.a.shape[0], lora.a.shape[-2], lora.a.shape[-1]
    block_k = 128 if wide <= 64 else 64
    if rows <= 256:
        rows_in, rows_out, programs, most = 16, 16, PROCESSORS, MOST_PARTS
    else:
        rows_in, rows_out, programs, most = 64, 16 if rows <= 512 else 32, 2 * PROCESSORS, 4
    parts = min(split_inputs(programs // max_tiles(rows, places, rows_in), cdiv(inputs, block_k)), most)
    tiles = max_tiles(rows, places, rows_out)
    blocks = {n: sum(cdiv(size, n) for size in lora.parts) * tiles for n in (256, 128, 64)}
    wanted = (n for n, count in blocks.items() if count >= 2 * PROCESSORS and n * rows_out <= MOST_SUMS)
    return LoraConfig(rows_in, block_k, parts, rows_out, next(wanted, 64))


class _Sizes(NamedTuple):
    """Constants of both kernels: those of a matrix and of the list; `block_r` is the power of two of at least
    `rank` (`shrink`: of all parts' ranks together) that a tensor core takes, `by_place` the words from the
    rank of one place to that of the next."""

    places: int
    block_p: int
    rank: int
    block_r: int
    by_place: int


def _sizes(lora: LoraMatrix, rank: int) -> _Sizes:
    places = lora.a.shape[0]
    return _Sizes(places, pow2(places + 1), rank, max(pow2(rank), 16), lora.ranks.stride(0))


@jit
def _rank_of(ranks: tl.tensor, place: tl.tensor, there: tl.tensor, SIZES: tl.constexpr) -> tl.tensor:
    """Rank of the adapter at `place`, which lies beside its factors; 0 unless `there`."""
    return tl.load(ranks + place.to(tl.int64) * SIZES.by_place, mask=there, other=0)


@jit_loose("n")
def _shrink(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    rows: LoraRows,
    h: tl.tensor,
    n: int,
    stride: int,
    K: tl.constexpr,
    SIZES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    R: tl.constexpr = SIZES.rank
    BLOCK_R: tl.constexpr = SIZES.block_r
    part = tl.program_id(1)
    place, first, count = take_tile(rows.starts, None, tl.program_id(0), SIZES.places, SIZES.block_p, BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    inside = m < count
    row = tl.load(rows.order + first + m, mask=inside, other=0)
    changed = _rank_of(ranks, place, count > 0, SIZES)
    begin(PDL)
    if changed == 0:
        return
    r = tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * K + d[None, :]
    a_at = a + place.to(tl.int64) * stride + r[:, None] * K + d[None, :]
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for k in range(steps * part // PARTS * BLOCK_K, steps * (part + 1) // PARTS * BLOCK_K, BLOCK_K):
        there = (k + d < K)[None, :]
        some = tl.load(x_at + k, mask=inside[:, None] & there, other=0.0)
        weights = tl.load(a_at + k, mask=(r < R)[:, None] & there, other=0.0)
        acc = tl.dot(some, tl.trans(weights), acc, input_precision="ieee")
    at = h + (part * n + row)[:, None] * R + r[None, :]
    tl.store(at, acc, mask=inside[:, None] & (r < R)[None, :])


def shrink(
    x: Tensor, lora: LoraMatrix, rows: LoraRows, *, config: LoraConfig | None = None, pdl: bool = False
) -> Tensor:
    """A[place] x of contiguous `x` [n, inputs] in the dtype of A: a new float32 [parts, n, all ranks], to be
    summed over parts. Rows without a place, or whose adapter leaves this matrix alone, are not written."""
    n, size = x.shape
    use = config or lora_config(n, lora)
    wide = lora.a.shape[-2]
    h = x.new_empty(use.parts, n, wide, dtype=torch.float32)
    sizes = _sizes(lora, wide)
    _shrink[(max_tiles(n, sizes.places, use.rows_in), use.parts)](
        x,
        lora.a,
        lora.ranks,
        rows,
        h,
        n,
        lora.a.stride(0),
        K=size,
        SIZES=sizes,
        PARTS=use.parts,
        BLOCK_M=use.rows_in,
        BLOCK_K=use.block_k,
        **launch_options(pdl, 4, 4),
    )
    return h


@jit
def outputs_of(
    block: tl.tensor, PARTS: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The part that block `block` of outputs is of, its first output, and where the part ends: each of PARTS
    outputs is cut into blocks of BLOCK_N of its own."""
    part = block * 0
    first = block * BLOCK_N
    end = first * 0 + PARTS[0]
    blocks = (PARTS[0] + BLOCK_N - 1) // BLOCK_N
    begins = PARTS[0]
    for i in tl.static_range(1, len(PARTS)):
        if block >= blocks:
            part = block * 0 + i
            first = begins + (block - blocks) * BLOCK_N
            end = first * 0 + begins + PARTS[i]
        blocks += (PARTS[i] + BLOCK_N - 1) // BLOCK_N
        begins += PARTS[i]
    return part, first, end


@jit
def _weights(b: tl.tensor, cols: tl.tensor, end: tl.tensor, SIZES: tl.constexpr) -> tl.tensor:
    """Weights of the outputs `cols` of `b` [outputs, rank] that are before `end`: [block_r, cols]."""
    r = tl.arange(0, SIZES.block_r)[:, None]
    mask = (cols < end)[None, :] & (r < SIZES.rank)
    return tl.load(b + cols[None, :] * SIZES.rank + r, mask=mask, other=0.0)


@jit
def _sums(
    h: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    part: tl.tensor,
    n: int,
    SIZES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """What `shrink` found for the rows `inside` and part `part` of OUTPUTS of the outputs, float32
    [rows, block_r]: PARTS sums."""
    # All parts in one load: loaded one after another, each waited for the one before (0.35 µs each).
    i = tl.arange(0, PARTS)[:, None, None]
    r = tl.arange(0, SIZES.block_r)[None, None, :]
    at = h + ((i * n + row[None, :, None]) * OUTPUTS + part) * SIZES.rank + r
    return tl.sum(tl.load(at, mask=inside[None, :, None] & (r < SIZES.rank), other=0.0), 0)


@jit_loose("n")
def _expand(
    h: tl.tensor,
    ids: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    rows: LoraRows,
    y: tl.tensor,
    n: int,
    stride: int,
    a_stride: int,
    N: tl.constexpr,
    SIZES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    R: tl.constexpr = SIZES.rank
    place, first, count = take_tile(rows.starts, None, tl.program_id(0), SIZES.places, SIZES.block_p, BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    inside = m < count
    row = tl.load(rows.order + first + m, mask=inside, other=0)
    changed = _rank_of(ranks, place, count > 0, SIZES)
    part, start, end = outputs_of(tl.program_id(1), OUTPUTS, BLOCK_N)
    cols = start + tl.arange(0, BLOCK_N)
    r = tl.arange(0, SIZES.block_r)
    weights = _weights(b + place.to(tl.int64) * stride, cols, tl.where(changed > 0, end, 0), SIZES)
    begin(PDL)
    if changed == 0:
        return
    if ids is None:
        sums = _sums(h, row, inside, part, n, SIZES, len(OUTPUTS), PARTS)
    else:
        column = tl.load(ids + row, mask=inside, other=0)
        at = a + place.to(tl.int64) * a_stride + r.to(tl.int64)[None, :] * VOCAB + column[:, None]
        sums = tl.load(at, mask=inside[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)
    delta = tl.dot(sums.to(weights.dtype), weights, input_precision="ieee")
    mask = inside[:, None] & (cols < end)[None, :]
    at = y + row.to(tl.int64)[:, None] * N + cols[None, :]
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (old + delta).to(y.dtype.element_ty), mask=mask)


def expand(
    h: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    y: Tensor,
    *,
    config: LoraConfig | None = None,
    pdl: bool = False,
    joined: bool = False,
) -> None:
    """Add B[place] h to `y` contiguous [n, outputs] in place, where `h` is `shrink`'s: h is rounded to the
    dtype of B, sums are float32. `joined`: this kernel waits for two, so it is launched without dependent
    launch, and the next one still with."""
    _run_expand(lora, rows, y, config, pdl, joined, h=h)


def embed(
    ids: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    y: Tensor,
    *,
    config: LoraConfig | None = None,
    pdl: bool = False,
) -> None:
    """Add B[place] A[place][:, id] of integer `ids` [n], all within the vocabulary, to `y` contiguous
    [n, hidden], in place."""
    _run_expand(lora, rows, y, config, pdl, False, ids=ids)


def _run_expand(
    lora: LoraMatrix,
    rows: LoraRows,
    y: Tensor,
    config: LoraConfig | None,
    pdl: bool,
    joined: bool,
    *,
    h: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    n = len(y)
    use = config or lora_config(n, lora)
    sizes = _sizes(lora, lora.rank)
    blocks = sum(cdiv(size, use.block_n) for size in lora.parts)
    _expand[(max_tiles(n, sizes.places, use.rows_out), blocks)](
        h,
        ids,
        lora.a,
        lora.b,
        lora.ranks,
        rows,
        y,
        n,
        lora.b.stride(0),
        lora.a.stride(0),
        N=y.shape[1],
        SIZES=sizes,
        OUTPUTS=lora.parts,
        VOCAB=lora.a.shape[-1],
        PARTS=1 if h is None else len(h),
        BLOCK_M=use.rows_out,
        BLOCK_N=use.block_n,
        PDL=pdl,
        **options(4, pdl=pdl and not joined),
    )


@jit_loose("n")
def _expand_silu(
    h: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    rows: LoraRows,
    both: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    n: int,
    stride: int,
    N: tl.constexpr,
    SIZES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    place, first, count = take_tile(rows.starts, n, tl.program_id(0), SIZES.places, SIZES.block_p, BLOCK_M)
    m = tl.arange(0, BLOCK_M)
    inside = m < count
    row = tl.load(rows.order + first + m, mask=inside, other=0)
    changed = _rank_of(ranks, place, (count > 0) & (place < SIZES.places), SIZES)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_at = b + place.to(tl.int64) * stride
    end = tl.where(changed > 0, N, 0)
    gates = _weights(b_at, cols, end, SIZES)
    ups = _weights(b_at + N * SIZES.rank, cols, end, SIZES)
    begin(PDL)
    if num_rows is not None:
        inside &= row < tl.load(num_rows)
    mask = inside[:, None] & (cols < N)[None, :]
    at = both + row.to(tl.int64)[:, None] * (2 * N) + cols[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=mask, other=0.0).to(tl.float32)
    if changed > 0:
        of_gate = _sums(h, row, inside, 0, n, SIZES, 2, PARTS)
        of_up = _sums(h, row, inside, 1, n, SIZES, 2, PARTS)
        gate += tl.dot(of_gate.to(gates.dtype), gates, input_precision="ieee")
        up += tl.dot(of_up.to(ups.dtype), ups, input_precision="ieee")
    result = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * N + cols[None, :], result, mask=mask)


def expand_silu(
    h: Tensor,
    lora: LoraMatrix,
    rows: LoraRows,
    both: Tensor,
    *,
    num_rows: Tensor | None = None,
    config: LoraConfig | None = None,
    pdl: bool = False,
    joined: bool = False,
) -> Tensor:
    """silu(g) · u of the halves g and u of `both` contiguous [n, 2 * width] + B[place] h: a new [n, width],
    for rows without a place too, as `silu_mul`. `h` and `joined` as for `expand`; `num_rows` int32 [1] on the
    device: rows from there on are left out."""
    n, width = len(both), both.shape[1] // 2
    use = config or lora_config(n, lora)
    sizes = _sizes(lora, lora.rank)
    out = both.new_empty(n, width)
    # A block has outputs of both halves: 256 were a tenth slower than 128 from 512 rows on.
    block_n = min(use.block_n, 128)
    _expand_silu[(max_tiles(n, sizes.places + 1, use.rows_out), cdiv(width, block_n))](
        h,
        lora.b,
        lora.ranks,
        rows,
        both,
        out,
        num_rows,
        n,
        lora.b.stride(0),
        N=width,
        SIZES=sizes,
        PARTS=len(h),
        BLOCK_M=use.rows_out,
        BLOCK_N=block_n,
        PDL=pdl,
        **options(4, pdl=pdl and not joined),
    )
    return out
