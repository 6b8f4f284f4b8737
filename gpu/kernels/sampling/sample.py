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

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2
from gpu.sample.rows import Rows
from gpu.state.tables import SlotTables

BLOCK = 1024
RUN = 4
"""Blocks per program: 16 KiB of float32 logits, so 256 rows of 152,000 make 9,700 programs."""

FILTER_BLOCK = 8192
"""Logits a row's one filtering program looks at at a time: 16 for each of 512 threads."""


class Columns(NamedTuple):
    """Columns of `SlotTables`, by slot."""

    temperature: Tensor
    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, tables: SlotTables) -> Columns:
        """The columns of `tables`."""
        return cls(*(getattr(tables, name) for name in cls._fields))


class Runs(NamedTuple):
    """What a program finds in its run of a row, all [rows, runs].

    score  float32: the best logit or, of a row that draws, the best of logit / temperature + noise
    token  int32: whose it is
    high   float32: the largest logit, NaN and +inf as +inf
    mass   float32: sum of exp((logit - high) / temperature), 0 of rows that need none
    """

    score: Tensor
    token: Tensor
    high: Tensor
    mass: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, int], device: torch.device) -> Runs:
        """Room for what programs find."""
        score, high, mass = (torch.empty(shape, device=device) for _ in range(3))
        return cls(score, torch.empty(shape, dtype=torch.int32, device=device), high, mass)


class _Totals(NamedTuple):
    """`high` and `mass` of whole rows: float32 [rows]."""

    high: Tensor
    mass: Tensor


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
def _keys(seeds: tl.tensor, positions: tl.tensor, slot: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, ...]:
    """Both keys of a row's noise."""
    seed, position = tl.load(seeds + slot).to(tl.int64), tl.load(positions + row).to(tl.int64)
    return _key(tl.full([], _A, tl.uint32), seed, position), _key(tl.full([], _B, tl.uint32), seed, position)


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
    # `rest` is clamped to 2**-24, as the CPU clamps v to 1 - 2**-24.
    e = tl.where(v < 0.0625, series, -tl.log(tl.maximum(rest, 5.9604644775390625e-8)))
    return -tl.log(e)


@jit
def inverse_temperature(temperature: tl.tensor) -> tl.tensor:
    """1 / temperature. Under 1e-6 the noise is lost beside the logits in float32 anyway."""
    return 1.0 / tl.where(temperature > 0, tl.maximum(temperature, 1e-6), 1.0)


@jit
def sample_runs(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    columns: Columns,
    num_rows: tl.tensor,
    runs: Runs,
    names: tl.tensor | None,
    stride: int,
    vocab: int,
    count: int,
    WEIGHED: tl.constexpr,  # "none", "drawn" or "all"
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """`names` int64 [vocab], if any, are the ids whose noise is drawn. WEIGHED says which rows have a mass:
    none, those that draw, or all, greedy ones at temperature 1."""
    row = tl.program_id(0)
    run = tl.program_id(1)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    temperature = tl.load(columns.temperature + slot)
    draws = temperature > 0
    key0, key1 = _keys(columns.seed, positions, slot, row)
    inverse = inverse_temperature(temperature)
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
        if WEIGHED != "none" and draws | (WEIGHED == "all"):
            # A row with +inf has no token: its mass may be anything, but not make inf - inf.
            level = tl.where((peaks > float("-inf")) & (peaks < float("inf")), peaks, 0.0)
            old = tl.exp((tl.minimum(high, level) - level) * inverse)
            mass = mass * old + tl.sum(tl.exp((tl.minimum(x, level) - level) * inverse), 0)
        if draws:
            named = ids
            if names is not None:
                named = tl.load(names + ids, mask=inside, other=0).to(tl.int32)
            x = x * inverse + _gumbel(_bits(key0, key1, named))
        high = peaks
        found = tl.max(x, 0)
        at = tl.min(tl.where((x == found) & inside, ids, 2147483647), 0)
        better = found > top  # blocks ascend, so an equal one later has the higher id
        top = tl.where(better, found, top)
        where = tl.where(better, at, where)
    out = row * count + run
    tl.store(runs.score + out, top)
    tl.store(runs.token + out, where)
    tl.store(runs.high + out, high)
    tl.store(runs.mass + out, mass)


@jit
def _reduce_runs(
    runs: Runs,
    slots: tl.tensor,
    columns: Columns,
    tokens: tl.tensor,
    totals: _Totals | None,
    num_rows: tl.tensor,
    count: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    begin(PDL)
    if padding(row, num_rows):
        return
    inside = r < count
    x = tl.load(runs.score + row * count + r, mask=inside, other=float("-inf"))
    ids = tl.load(runs.token + row * count + r, mask=inside, other=2147483647)
    peaks = tl.load(runs.high + row * count + r, mask=inside, other=float("-inf"))
    high = tl.max(peaks, 0)
    token = tl.min(tl.where(x == tl.max(x, 0), ids, 2147483647), 0)
    finite = (high > float("-inf")) & (high < float("inf"))
    tl.store(tokens + row, tl.where(finite, token, -1).to(tl.int64))
    if totals is not None:
        inverse = inverse_temperature(tl.load(columns.temperature + tl.load(slots + row)))
        mass = tl.load(runs.mass + row * count + r, mask=inside, other=0.0)
        level = tl.where(finite, high, 0.0)
        tl.store(totals.mass + row, tl.sum(mass * tl.exp((tl.minimum(peaks, level) - level) * inverse), 0))
        tl.store(totals.high + row, level)


@jit
def float_order(x: tl.tensor) -> tl.tensor:
    """int64 in [0, 2**32) with the order of float32 `x`."""
    word = (x + 0.0).to(tl.int32, bitcast=True)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@jit
def _value(order: tl.tensor) -> tl.tensor:
    """What `float_order` was made of."""
    word = (order - 2147483648).to(tl.int32)
    return (word ^ ((word >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _mass_of_largest(
    row: tl.tensor,
    k: tl.tensor,
    high: tl.tensor,
    inverse: tl.tensor,
    vocab: int,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float64 sum of the `k` largest weights exp((x - high) · inverse) of `row`.

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
            order = float_order(tl.load(row + ids, mask=ids < vocab, other=0.0).to(tl.float32))
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
        mass += tl.sum(tl.where(above, tl.exp((x - high) * inverse), 0.0), 0).to(tl.float64)
        more += tl.sum(above.to(tl.int32), 0)
    return mass + (k - more).to(tl.float64) * tl.exp((floor - high) * inverse).to(tl.float64)


@jit
def _filter(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    columns: Columns,
    num_rows: tl.tensor,
    tokens: tl.tensor,
    totals: _Totals,
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
    temperature = tl.load(columns.temperature + slot)
    k, p = tl.load(columns.top_k + slot), tl.load(columns.top_p + slot)
    least = tl.load(columns.min_p + slot)
    token = tl.load(tokens + row).to(tl.int32)
    if (temperature <= 0) | (token < 0) | ((k <= 0) & (p >= 1.0) & (least <= 0.0)):
        return
    own = logits + row.to(tl.int64) * stride
    key0, key1 = _keys(columns.seed, positions, slot, row)
    high, inverse = tl.load(totals.high + row), inverse_temperature(temperature)
    k = tl.where((k <= 0) | (k > vocab), vocab, k)
    total = tl.load(totals.mass + row).to(tl.float64)
    if (k < vocab) & (p < 1.0):
        total = _mass_of_largest(own, k, high, inverse, vocab, BLOCK)
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
            if here > 0:  # noise is expensive, and mostly no token is above the winner
                count += here
                mass += tl.sum(tl.where(above, tl.exp((x - high) * inverse), 0.0), 0).to(tl.float64)
                score = tl.where(above, x * inverse + _gumbel(_bits(key0, key1, ids)), float("-inf"))
                found = tl.max(score, 0)
                at = tl.min(tl.where((score == found) & above, ids, 2147483647), 0)
                winner = tl.where(found > top, at, winner)
                top = tl.maximum(top, found)
        stays = (count < k) & (mass < need) & (tl.exp((mark - high) * inverse) >= least)
        open_ = (stays == 0) & (count > 0)
        token = tl.where(open_, winner, token)
        mark = tl.load(own + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))


def choose(logits: Tensor, rows: Rows, tokens: Tensor, *, filtered: bool, pdl: bool = False) -> None:
    """A token per row of `logits` float [rows, vocab], which may be strided: the argmax where the slot's
    temperature is 0 (lowest id on ties), else drawn. Written to `tokens` int64 [rows], -1 where a logit is
    NaN or +inf or all are -inf. Without `filtered` no row has top_k, top_p or min_p: a launch less."""
    vocab = logits.shape[1]
    shape = _, count = len(logits), cdiv(vocab, BLOCK * RUN)
    runs, columns, totals = Runs.empty(shape, logits.device), Columns.of(rows.tables), None
    if filtered:
        totals = _Totals(*(torch.empty(len(logits), device=logits.device) for _ in range(2)))
    sample_runs[shape](
        logits, rows.slots, rows.positions, columns, rows.live, runs, None, logits.stride(0), vocab, count,
        WEIGHED="drawn" if filtered else "none", BLOCK=BLOCK, RUN=RUN, **launch_options(pdl, 4),
    )  # fmt: skip
    _reduce_runs[(len(logits),)](
        runs, rows.slots, columns, tokens, totals, rows.live, count, BLOCK=pow2(count),
        **launch_options(pdl, 1),
    )  # fmt: skip
    if filtered:
        _filter[(len(logits),)](
            logits, rows.slots, rows.positions, columns, rows.live, tokens, totals, logits.stride(0), vocab,
            BLOCK=min(FILTER_BLOCK, pow2(vocab)), **launch_options(pdl, 16),
        )  # fmt: skip


@jit
def _perturb(
    logits: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    columns: Columns,
    num_rows: tl.tensor,
    names: tl.tensor | None,
    stride: int,
    vocab: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    if padding(row, num_rows):
        return
    slot = tl.load(slots + row)
    temperature = tl.load(columns.temperature + slot)
    if temperature > 0:
        key0, key1 = _keys(columns.seed, positions, slot, row)
        named = ids
        if names is not None:
            named = tl.load(names + ids, mask=ids < vocab, other=0).to(tl.int32)
        at = logits + row.to(tl.int64) * stride + ids
        x = tl.load(at, mask=ids < vocab, other=0.0) * inverse_temperature(temperature)
        tl.store(at, x + _gumbel(_bits(key0, key1, named)), mask=ids < vocab)


def perturb(logits: Tensor, rows: Rows, names: Tensor | None = None, *, pdl: bool = False) -> None:
    """See `gpu.sample.kernels.SamplingKernels.perturb`; `logits` float32 [rows, vocab], in place."""
    vocab = logits.shape[1]
    _perturb[(len(logits), cdiv(vocab, BLOCK))](
        logits, rows.slots, rows.positions, Columns.of(rows.tables), rows.live, names, logits.stride(0),
        vocab, BLOCK=BLOCK, **launch_options(pdl, 4),
    )  # fmt: skip
