"""Tokens from logits: argmax, or Gumbel-max under the noise of `gpu.sample.noise`, filtered or not.

Two stages, since a row of 150,000 logits is too long for one program and 512 programs too few for the
memory: each program finds the best of a run of the vocabulary, then one per row the best of those.

The race of a row with temperature t is argmax(logit / t + gumbel), gumbel = -log(-log(1 - v)) with v
from the same 31 bits as `noise.exponential`: no maximum, no sum, one pass. The logarithms are the
device's, so scores agree with the CPU's to about 3e-6, and tokens wherever the best two are further
apart.

top_k, top_p and min_p (as in `gpu.sample.filters`) sort nothing either. What they leave is always the n
largest, and a race won by a token of that set was won within it. So the winner of all is looked at: one
more pass counts and weighs the tokens above it, and finds the winner among those. If the first winner
stands within the filters it is the token; if not, no token below it does, and the next winner is looked
at. The mass above a winner halves each time on average, so this ends after a pass or two, and is exact.
Only top_k and top_p together need the mass of the k largest first: a search over the order of the bits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, options, padding, pow2
from gpu.sample.filters import Filters
from gpu.sample.rows import Rows

BLOCK = 1024
RUN = 4
"""Blocks per program: 16 KiB of float32 logits, so 256 rows of 152,000 make 9,700 programs."""

FILTER_BLOCK = 8192
"""Logits a row's one filtering program looks at at a time: 16 for each of 512 threads."""


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
def _cool(heat: tl.tensor) -> tl.tensor:
    """1 / temperature. Under 1e-6 the noise is lost beside the logits in float32 anyway."""
    return 1.0 / tl.where(heat > 0, tl.maximum(heat, 1e-6), 1.0)


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
    masses: tl.tensor,
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
    cool = _cool(heat)
    mass = tl.full([], 0.0, tl.float32)  # of exp(logit / t), relative to exp(high / t)
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
        peaks = tl.maximum(high, tl.max(x, 0))
        if draws:
            # A row with +inf has no token: its mass may be anything, but not make inf - inf.
            level = tl.where((peaks > float("-inf")) & (peaks < float("inf")), peaks, 0.0)
            old = tl.exp((tl.minimum(high, level) - level) * cool)
            mass = mass * old + tl.sum(tl.exp((tl.minimum(x, level) - level) * cool), 0)
            x = x * cool + _gumbel(_bits(key0, key1, ids))
        high = peaks
        found = tl.max(x, 0)
        at = tl.min(tl.where((x == found) & inside, ids, 2147483647), 0)
        better = found > top  # blocks ascend, so an equal one later has the higher id
        top = tl.where(better, found, top)
        where = tl.where(better, at, where)
    out = row * runs + run
    tl.store(best + out, top)
    tl.store(index + out, where)
    tl.store(peak + out, high)
    tl.store(masses + out, mass)


@jit
def _choose(
    best: tl.tensor,
    index: tl.tensor,
    peak: tl.tensor,
    masses: tl.tensor,
    slots: tl.tensor,
    temperatures: tl.tensor,
    cells: tl.tensor,
    tokens: tl.tensor,
    highs: tl.tensor,
    totals: tl.tensor,
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
    peaks = tl.load(peak + row * runs + r, mask=inside, other=float("-inf"))
    high = tl.max(peaks, 0)
    token = tl.min(tl.where(x == tl.max(x, 0), ids, 2147483647), 0)
    finite = (high > float("-inf")) & (high < float("inf"))
    tl.store(tokens + row, tl.where(finite, token, -1).to(tokens.dtype.element_ty))
    if totals is not None:
        cool = _cool(tl.load(temperatures + tl.load(slots + row)))
        mass = tl.load(masses + row * runs + r, mask=inside, other=0.0)
        level = tl.where(finite, high, 0.0)
        tl.store(totals + row, tl.sum(mass * tl.exp((tl.minimum(peaks, level) - level) * cool), 0))
        tl.store(highs + row, level)
    if cells is not None:
        # The next step embeds the cell, so it must name a row of the table.
        cell = cells + tl.load(slots + row)
        tl.store(cell, tl.where(finite, token, 0).to(cells.dtype.element_ty))


@jit
def _order(x: tl.tensor) -> tl.tensor:
    """int64 in [0, 2**32) with the order of float32 `x`."""
    word = (x + 0.0).to(tl.int32, bitcast=True)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@jit
def _value(order: tl.tensor) -> tl.tensor:
    """What `_order` was made of."""
    word = (order - 2147483648).to(tl.int32)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _mass_of_largest(
    row: tl.tensor,
    k: tl.tensor,
    high: tl.tensor,
    cool: tl.tensor,
    vocab: int,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float64 sum of the `k` largest weights exp((x - high) · cool) of `row`.

    The k-th value is found by its bits, eight at a time. Values equal to it weigh the same, so which
    of them belong does not matter here.
    """
    low = tl.full([], 0, tl.int64)  # the bits known so far, of a value that at least k reach
    left = k  # rank of the k-th among those that share them
    bins = tl.arange(0, 256)
    for turn in range(4):
        shift = 24 - 8 * turn
        counts = tl.zeros([256], tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            order = _order(tl.load(row + ids, mask=ids < vocab, other=0.0).to(tl.float32))
            same = (ids < vocab) & ((order >> (shift + 8)) == low)
            counts += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=same)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        mine = (above < left) & (above + counts >= left)
        low = low * 256 + tl.sum(tl.where(mine, bins, 0), 0)
        left = left - tl.sum(tl.where(mine, above, 0), 0)
    floor = _value(low)
    mass = tl.full([], 0.0, tl.float64)
    more = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        above = x > floor
        mass += tl.sum(tl.where(above, tl.exp((x - high) * cool), 0.0), 0).to(tl.float64)
        more += tl.sum(above.to(tl.int32), 0)
    return mass + (k - more).to(tl.float64) * tl.exp((floor - high) * cool).to(tl.float64)


@jit
def _filter(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    num_rows: tl.tensor,
    tokens: tl.tensor,
    highs: tl.tensor,
    totals: tl.tensor,
    cells: tl.tensor,
    stride: int,
    vocab: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    heat = tl.load(temperatures + slot)
    k, p, least = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
    token = tl.load(tokens + row).to(tl.int32)
    if (heat <= 0) | (token < 0) | ((k <= 0) & (p >= 1.0) & (least <= 0.0)):
        return
    own = logits + row.to(tl.int64) * stride
    seed, position = tl.load(seeds + slot).to(tl.int64), tl.load(positions + row).to(tl.int64)
    key0 = _key(tl.full([], _A, tl.uint32), seed, position)
    key1 = _key(tl.full([], _B, tl.uint32), seed, position)
    high, cool = tl.load(highs + row), _cool(heat)
    k = tl.where((k <= 0) | (k > vocab), vocab, k)
    total = tl.load(totals + row).to(tl.float64)
    if (k < vocab) & (p < 1.0):
        total = _mass_of_largest(own, k, high, cool, vocab, BLOCK)
    # The slack of gpu/sample/filters.py. No top_p: no mass is too much.
    need = tl.where(p < 1.0, p.to(tl.float64) * total * (1.0 - 1e-6), float("inf"))
    mark = tl.load(own + token).to(tl.float32)
    open_ = token >= 0
    while open_:
        count = tl.full([], 0, tl.int32)
        mass = tl.full([], 0.0, tl.float64)
        top = tl.full([], float("-inf"), tl.float32)
        winner = tl.full([], 2147483647, tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            x = tl.load(own + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            above = (x > mark) | ((x == mark) & (ids < token))
            here = tl.sum(above.to(tl.int32), 0)
            if here > 0:  # the noise is dear, and above a winner there is mostly nothing
                count += here
                mass += tl.sum(tl.where(above, tl.exp((x - high) * cool), 0.0), 0).to(tl.float64)
                score = tl.where(above, x * cool + _gumbel(_bits(key0, key1, ids)), float("-inf"))
                found = tl.max(score, 0)
                at = tl.min(tl.where((score == found) & above, ids, 2147483647), 0)
                winner = tl.where(found > top, at, winner)
                top = tl.maximum(top, found)
        stays = (count < k) & (mass < need) & (tl.exp((mark - high) * cool) >= least)
        open_ = (stays == 0) & (count > 0)
        token = tl.where(open_, winner, token)
        mark = tl.load(own + token).to(tl.float32)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))
    if cells is not None:
        tl.store(cells + slot, token.to(cells.dtype.element_ty))


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    *,
    filters: Filters | None = None,
    cells: Tensor | None = None,
    out: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """A token per row: the argmax where the slot's temperature is 0 (lowest id on ties), else drawn.

    logits        float [rows, vocab], rows may be strided
    slots         integer [rows]
    positions     integer [rows]: of the token to choose
    temperatures  float32 [max_slots]
    seeds         int64 [max_slots], in [0, 2**63)
    filters       of all slots; None where no row has one: a launch less
    cells         integer [max_slots] that get the slots' tokens too, 0 for -1
    returns       int64 [rows] (`out` where there is one), -1 where a logit is NaN or +inf or all are -inf;
                  rows from `num_rows` (int32 [1], device) on are not written
    """
    rows, vocab = logits.shape
    runs = cdiv(vocab, BLOCK * RUN)
    device = logits.device
    best, peak, masses = (torch.empty(rows, runs, dtype=torch.float32, device=device) for _ in range(3))
    highs, totals = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    index = torch.empty(rows, runs, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device) if out is None else out
    _look[(rows, runs)](
        logits, slots, positions, temperatures, seeds, num_rows, best, index, peak, masses,
        logits.stride(0), vocab, runs, BLOCK=BLOCK, RUN=RUN, PDL=pdl, **options(4, pdl=pdl),
    )  # fmt: skip
    _choose[(rows,)](
        best, index, peak, masses, slots, temperatures, cells, tokens, highs,
        None if filters is None else totals,
        num_rows, runs, BLOCK=pow2(runs), PDL=pdl, **options(1, pdl=pdl),
    )  # fmt: skip
    if filters is not None:
        _filter[(rows,)](
            logits, slots, positions, temperatures, seeds, *filters, num_rows, tokens, highs, totals, cells,
            logits.stride(0), vocab, BLOCK=min(FILTER_BLOCK, pow2(vocab)), PDL=pdl,
            **options(16, pdl=pdl),
        )  # fmt: skip
    return tokens


def choose(logits: Tensor, rows: Rows, tokens: Tensor, *, filtered: bool, pdl: bool = False) -> None:
    """`sample` by the slots' tables, into `tokens` int64 [rows] and the slots' cells."""
    tables = rows.tables
    sample(
        logits, rows.slots, rows.positions, tables.temperature, tables.seed,
        filters=Filters(tables.top_k, tables.top_p, tables.min_p) if filtered else None,
        cells=tables.last_token, out=tokens, num_rows=rows.live, pdl=pdl,
    )  # fmt: skip
