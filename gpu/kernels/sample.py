"""Tokens from logits: argmax, or Gumbel-max under the noise of `gpu.sample.noise`.

Two stages, since a row of 150,000 logits is too long for one program and 512 programs too few for the
memory: each program finds the best of a run of the vocabulary, then one per row the best of those.

The race of a row with temperature t is argmax(logit / t + gumbel), gumbel = -log(-log(1 - v)) with v
from the same 31 bits as `noise.exponential`: no maximum, no sum, one pass. The logarithms are the
device's, so scores agree with the CPU's to about 3e-6, and tokens wherever the best two are further
apart.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, options, padding, pow2

BLOCK = 1024
RUN = 4
"""Blocks per program: 16 KiB of float32 logits, so 256 rows of 152,000 make 9,700 programs."""

# The multipliers and starts of gpu/sample/noise.py, where they are explained.
_M1: tl.constexpr = tl.constexpr(0x7FEB352D)
_M2: tl.constexpr = tl.constexpr(0x846CA68B)
_G: tl.constexpr = tl.constexpr(0x9E3779B9)
_A: tl.constexpr = tl.constexpr(0x6A09E667)
_B: tl.constexpr = tl.constexpr(0xBB67AE85)


@jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * tl.full([], _M1, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], _M2, tl.uint32)
    return x ^ (x >> 16)


@jit
def _key(start: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """uint32 key of int64 `seed` and `position`."""
    x = _mix(start ^ (seed & 0xFFFFFFFF).to(tl.uint32))
    x = _mix(x ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return _mix(x ^ (position & 0xFFFFFFFF).to(tl.uint32))


@jit
def _bits(key0: tl.tensor, key1: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """31 uniform bits, int32, of int32 `tokens`."""
    x = tokens.to(tl.uint32) * tl.full([], _G, tl.uint32) + key0
    x = (x ^ (x >> 16)) * tl.full([], _M1, tl.uint32)
    x = x ^ key1
    x = (x ^ (x >> 15)) * tl.full([], _M2, tl.uint32)
    y = x.to(tl.int32, bitcast=True)
    return y ^ (y >> 16)


@jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    """-log(-log(1 - v)), v = (bits + 0.5) / 2**31."""
    v = (bits.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # Near 0, 1 - v would lose v's digits, and small values decide races: a series there.
    series = v * (1.0 + v * (0.5 + v * (1 / 3 + v * (0.25 + v * (0.2 + v * (1 / 6))))))
    rest = ((2147483647 - bits).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # As the CPU clamps v to 1 - 2**-24, so `rest` to 2**-24.
    e = tl.where(v < 0.0625, series, -tl.log(tl.maximum(rest, 5.9604644775390625e-8)))
    return -tl.log(e)


@jit
def _look(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    num_rows: tl.tensor,
    best: tl.tensor,
    index: tl.tensor,
    peak: tl.tensor,
    stride: int,
    vocab: int,
    runs: int,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    run = tl.program_id(1)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    heat = tl.load(temperatures + slot)
    draws = heat > 0
    seed = tl.load(seeds + slot).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    key0 = _key(tl.full([], _A, tl.uint32), seed, position)
    key1 = _key(tl.full([], _B, tl.uint32), seed, position)
    cool = 1.0 / tl.where(draws, heat, 1.0)
    top = tl.full([], float("-inf"), tl.float32)
    where = tl.full([], 2147483647, tl.int32)
    # Largest logit with NaN and +inf as +inf: it says whether the row has a token at all.
    high = tl.full([], float("-inf"), tl.float32)
    for i in range(RUN):
        ids = (run * RUN + i) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        high = tl.maximum(high, tl.max(x, 0))
        if draws:
            x = x * cool + _gumbel(_bits(key0, key1, ids))
        found = tl.max(x, 0)
        at = tl.min(tl.where((x == found) & inside, ids, 2147483647), 0)
        better = found > top  # blocks ascend, so an equal one later has the higher id
        top = tl.where(better, found, top)
        where = tl.where(better, at, where)
    out = row * runs + run
    tl.store(best + out, top)
    tl.store(index + out, where)
    tl.store(peak + out, high)


@jit
def _choose(
    best: tl.tensor,
    index: tl.tensor,
    peak: tl.tensor,
    slots: tl.tensor,
    cells: tl.tensor,
    tokens: tl.tensor,
    num_rows: tl.tensor,
    runs: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    begin(PDL)
    if padding(row, num_rows):
        return
    inside = r < runs
    x = tl.load(best + row * runs + r, mask=inside, other=float("-inf"))
    ids = tl.load(index + row * runs + r, mask=inside, other=2147483647)
    high = tl.max(tl.load(peak + row * runs + r, mask=inside, other=float("-inf")), 0)
    token = tl.min(tl.where(x == tl.max(x, 0), ids, 2147483647), 0)
    finite = (high > float("-inf")) & (high < float("inf"))
    tl.store(tokens + row, tl.where(finite, token, -1).to(tokens.dtype.element_ty))
    if cells is not None:
        # The next step embeds the cell, so it must name a row of the table.
        cell = cells + tl.load(slots + row)
        tl.store(cell, tl.where(finite, token, 0).to(cells.dtype.element_ty))


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    *,
    cells: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """A token per row: the argmax where the slot's temperature is 0 (lowest id on ties), else drawn.

    logits        float [rows, vocab], rows may be strided
    slots         integer [rows]
    positions     integer [rows]: of the token to choose
    temperatures  float32 [max_slots]
    seeds         int64 [max_slots], in [0, 2**63)
    cells         integer [max_slots] that get the slots' tokens too, 0 for -1
    returns       int64 [rows], -1 where a logit is NaN or +inf or all are -inf; rows from `num_rows`
                  (int32 [1], device) on are not written
    """
    rows, vocab = logits.shape
    runs = cdiv(vocab, BLOCK * RUN)
    device = logits.device
    best, peak = (torch.empty(rows, runs, dtype=torch.float32, device=device) for _ in range(2))
    index = torch.empty(rows, runs, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    _look[(rows, runs)](
        logits,
        slots,
        positions,
        temperatures,
        seeds,
        num_rows,
        best,
        index,
        peak,
        logits.stride(0),
        vocab,
        runs,
        BLOCK=BLOCK,
        RUN=RUN,
        PDL=pdl,
        **options(4, pdl=pdl),
    )
    _choose[(rows,)](
        best,
        index,
        peak,
        slots,
        cells,
        tokens,
        num_rows,
        runs,
        BLOCK=pow2(runs),
        PDL=pdl,
        **options(1, pdl=pdl),
    )
    return tokens
