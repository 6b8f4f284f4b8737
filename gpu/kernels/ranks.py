"""Sums and rows over the ranks of one host: each rank stores what the others need into their memory.

    push_sum     every rank's part of a row, added in the order of ranks; then to the residual, and normed
    push_rows    rows of a table that the ranks divide
    push_gather  every rank's columns of a row, beside each other

A program has a row (`push_gather`: some columns of it), and counts its exchanges on the device: a graph needs
no argument for it.

Sums are Lamport's: a program stores its part into each peer's inbox and reads its own until nothing in it is
-0.0, which is never sent. There is no flag, and no store that has to be waited for before one is set. Three
inboxes take turns; the one that was read last is filled with -0.0 again, for the exchange after the next. A
peer writes into that only when it has this rank's part of the next one, which is sent when the kernel that
filled it has ended.

Logits, once a step and larger, have flags with the number of the exchange.

No program waits for one behind it: programs begin in the order of their rows on every rank, so the first row
that is unfinished anywhere runs on all of them, and its flags come.

`gate` int32 [1] says whether there is anybody to wait for: 0 while a rank warms up. `abort` int32 [1] is of
the host: a rank that waits looks at it now and then, and ends with whatever it has when it is not 0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2
from gpu.kernels.norm import normed

COLUMNS = 4096
"""Columns of a program of `push_gather`."""

INBOXES = 3
EMPTY = -0.0
"""What an inbox holds where nothing has come."""
_INBOXES = tl.constexpr(INBOXES)

POLLS: tl.constexpr = tl.constexpr(1024)
"""Looks at a flag between two at `abort`, which is across the bus."""


class Peers(NamedTuple):
    """The buffers of `push_sum`: those of all ranks, in the order of ranks, and this rank's own state.

    inboxes  [INBOXES, ranks, rows, width] of each rank: parts of sums; EMPTY at first
    turns    int32 [rows], this rank's: exchanges so far
    gate     int32 [1], this rank's: 0 while it waits for nobody
    abort    int32 [1] of the host
    """

    inboxes: tuple[Tensor, ...]
    turns: Tensor
    gate: Tensor
    abort: Tensor


class GatherPeers(NamedTuple):
    """The buffers of `push_gather`; `turns`, `gate` and `abort` as in `Peers`.

    outs   [rows, columns of all ranks] of each rank
    flags  int32 [2, ranks, rows * blocks] of each rank: number of the last exchange for which a peer's buffer
           may be written (0), and for which its columns have arrived (1)
    """

    outs: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    turns: Tensor
    gate: Tensor
    abort: Tensor


class Place(NamedTuple):
    """Constants: this rank of so many, and rows of an inbox (`push_gather`: of flags)."""

    rank: int
    ranks: int
    rows: int


@jit
def _signal(flags: tl.tensor, at: tl.tensor, turn: tl.tensor, PLACE: tl.constexpr) -> None:
    """Set flag `at` of every peer to `turn`, after all stores of this program are visible to them."""
    RANK: tl.constexpr = PLACE.rank
    RANKS: tl.constexpr = PLACE.ranks
    tl.debug_barrier()  # the stores of all threads, before one of them sets the flag
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.atomic_xchg(flags[peer] + at, turn, sem="release", scope="sys")


@jit
def _await(flag: tl.tensor, turn: tl.tensor, abort: tl.tensor) -> None:
    """Wait until `flag` has `turn`."""
    polls = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen < turn:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % POLLS == 0:
            seen = tl.where(tl.load(abort, volatile=True) != 0, turn, seen)


@jit
def _await_all(
    flags: tl.tensor, first: tl.tensor, apart: int, turn: tl.tensor, gate: tl.tensor, abort: tl.tensor,
    PLACE: tl.constexpr,
) -> None:  # fmt: skip
    """Wait until the flag of each peer, `apart` from `first` on, has `turn`."""
    RANK: tl.constexpr = PLACE.rank
    RANKS: tl.constexpr = PLACE.ranks
    if tl.load(gate) != 0:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                _await(flags[RANK] + first + peer * apart, turn, abort)
    tl.debug_barrier()


@jit
def _bits(part: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`part` as integers, and EMPTY as one."""
    WIDE: tl.constexpr = part.dtype.primitive_bitwidth == 32
    INT: tl.constexpr = tl.int32 if WIDE else tl.int16
    LEAST: tl.constexpr = -(2**31) if WIDE else -(2**15)
    return part.to(INT, bitcast=True), tl.full(part.shape, LEAST, INT)


@jit
def _is_empty(part: tl.tensor) -> tl.tensor:
    """Where `part` has the bits of EMPTY."""
    found, empty = _bits(part)
    return found == empty


@jit
def _empty_like(part: tl.tensor) -> tl.tensor:
    """EMPTY everywhere, by its bits: a compiled -0.0 is 0.0."""
    _, empty = _bits(part)
    return empty.to(part.dtype, bitcast=True)


@jit
def _receive(at: tl.tensor, mask: tl.tensor, gate: tl.tensor, abort: tl.tensor) -> tl.tensor:
    """What a peer stores at the addresses `at`, when all of it is there."""
    found = tl.load(at, mask=mask, other=0.0, volatile=True)
    missing = tl.max((_is_empty(found) & mask).to(tl.int32), 0) * gate
    polls = 0
    while missing != 0:
        found = tl.load(at, mask=mask, other=0.0, volatile=True)
        missing = tl.max((_is_empty(found) & mask).to(tl.int32), 0)
        polls += 1
        if polls % POLLS == 0:
            missing = tl.where(tl.load(abort, volatile=True) != 0, 0, missing)
    return found


@jit
def _push_sum(
    part: tl.tensor,
    ids: tl.tensor | None,
    peers: Peers,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    keep: tl.tensor | None,
    num_rows: tl.tensor,
    keep_stride: int | None,
    eps: float,
    TABLE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    RANK: tl.constexpr = PLACE.rank
    RANKS: tl.constexpr = PLACE.ranks
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    if weight is not None:
        w = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)  # no kernel writes it: no wait
    begin(PDL)
    if padding(row, num_rows):
        return
    turn = tl.load(peers.turns + row)
    at = row.to(tl.int64) * WIDTH + cols
    if ids is None:
        own = tl.load(part + at, mask=mask, other=0.0)
    else:
        entry = tl.load(ids + row + cols * 0).to(tl.int64) - RANK * TABLE
        here = (entry >= 0) & (entry < TABLE)
        own = tl.load(part + entry * WIDTH + cols, mask=mask & here, other=0.0)
    if residual is not None:
        old = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    own = tl.where(own == 0.0, 0.0, own).to(part.dtype.element_ty)  # never EMPTY
    box = (turn % _INBOXES * RANKS).to(tl.int64) * PLACE.rows + row
    last = ((turn + _INBOXES - 1) % _INBOXES * RANKS).to(tl.int64) * PLACE.rows + row
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(peers.inboxes[peer] + (box + RANK * PLACE.rows) * WIDTH + cols, own, mask=mask)
    gate = tl.load(peers.gate)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += own.to(tl.float32)
        else:
            inbox = peers.inboxes[RANK] + peer * PLACE.rows * WIDTH + cols
            total += _receive(inbox + box * WIDTH, mask, gate, peers.abort).to(tl.float32)
            tl.store(inbox + last * WIDTH, _empty_like(own), mask=mask)
    tl.store(peers.turns + row, turn + 1)
    v = total.to(own.dtype)
    if residual is not None:
        # Rounded as often as by one rank: the sum, then the new residual.
        v = (v.to(tl.float32) + old).to(own.dtype)
        tl.store(residual + at, v, mask=mask)
    if keep is not None:
        tl.store(keep + row.to(tl.int64) * keep_stride + cols, v, mask=mask)
    if weight is not None:
        v = normed(v, w, eps, WIDTH).to(own.dtype)
    tl.store(out + at, v, mask=mask)


def push_sum(
    part: Tensor,
    peers: Peers,
    place: Place,
    *,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    keep: Tensor | None = None,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The sum over ranks of `part` [n, width], contiguous, n up to the rows of an inbox: float32 in the order
    of ranks, rounded to the dtype of `part`. With a `residual` [n, width] it is added to that in place, and
    with `norm`, a weight [width] and eps, the result is normed as by `rms_norm`: a new [n, width]. `keep` and
    `num_rows` as there; the ranks' `num_rows` are equal."""
    return _launch(part, None, peers, place, residual, norm, keep, num_rows, pdl)


def push_rows(
    table: Tensor,
    ids: Tensor,
    peers: Peers,
    place: Place,
    *,
    num_rows: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Rows `ids` [n] of a table of which each rank has as many rows, `table` [size, width], in the order of
    ranks: a new [n, width]. `num_rows` as for `push_sum`."""
    return _launch(table, ids, peers, place, None, None, None, num_rows, pdl)


def _launch(
    part: Tensor,
    ids: Tensor | None,
    peers: Peers,
    place: Place,
    residual: Tensor | None,
    norm: tuple[Tensor, float] | None,
    keep: Tensor | None,
    num_rows: Tensor | None,
    pdl: bool,
) -> Tensor:
    rows, width = len(part if ids is None else ids), part.shape[1]
    assert peers.inboxes[0].shape[2:] == (place.rows, width), "one width: inboxes take turns by row"
    assert rows <= place.rows and part.is_contiguous()
    out = part.new_empty(rows, width)
    weight, eps = norm or (None, 0.0)
    block = pow2(width)
    _push_sum[(rows,)](
        part, ids, peers, residual, weight, out, keep, num_rows, None if keep is None else keep.stride(0),
        eps, TABLE=len(part) if ids is not None else 0, WIDTH=width, BLOCK=block, PLACE=place,
        **launch_options(pdl, min(max(block // 512, 1), 8)),
    )  # fmt: skip
    return out


@jit
def _push_gather(
    part: tl.tensor,
    peers: GatherPeers,
    part_stride: int,
    SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
) -> None:
    RANK: tl.constexpr = PLACE.rank
    RANKS: tl.constexpr = PLACE.ranks
    row, block = tl.program_id(0), tl.program_id(1)
    cell = row * tl.num_programs(1) + block
    turn = tl.load(peers.turns + cell) + 1
    done = RANKS * PLACE.rows
    # What this rank read of the last exchange was launched before: it may be written over.
    _signal(peers.flags, RANK * PLACE.rows + cell, turn, PLACE)
    _await_all(peers.flags, cell, PLACE.rows, turn, peers.gate, peers.abort, PLACE)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    places = RANK * SIZE + cols
    mask = (cols < SIZE) & (places < TOTAL)
    own = tl.load(part + row.to(tl.int64) * part_stride + cols, mask=mask, other=0.0)
    for peer in tl.static_range(RANKS):
        tl.store(peers.outs[peer] + row.to(tl.int64) * TOTAL + places, own, mask=mask)
    _signal(peers.flags, done + RANK * PLACE.rows + cell, turn, PLACE)
    _await_all(peers.flags, done + cell, PLACE.rows, turn, peers.gate, peers.abort, PLACE)
    tl.store(peers.turns + cell, turn)


def push_gather(part: Tensor, peers: GatherPeers, place: Place, total: int) -> Tensor:
    """All ranks' `part` [n, size], whose rows may be strided, beside each other in the order of ranks, as far
    as `total` columns go: [n, total], which the next exchange writes over. Launched without dependent launch
    and waits for all before it: readers of the last exchange may be among them."""
    rows, size = part.shape
    blocks = cdiv(size, COLUMNS)
    assert rows * blocks <= place.rows and part.stride(1) == 1
    _push_gather[(rows, blocks)](
        part, peers, part.stride(0), SIZE=size, TOTAL=total, BLOCK=COLUMNS, PLACE=place, num_warps=8
    )
    return peers.outs[place.rank][:rows]
