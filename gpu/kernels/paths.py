"""Paths of drafts that are trees."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, cdiv, jit, launch_options, padding, pow2
from gpu.sample.rows import Rows


@jit
def drafts_beside(ancestors: tl.tensor) -> tl.tensor:
    """How many drafts before a token of these `ancestors` (`gpu.state.tables`) are not on its path: the bits
    that are 0. The sign is always 1."""
    x = ancestors ^ -1
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x += x >> 8
    return (x + (x >> 16)) & 63


@jit
def _move_paths(
    entries: tl.tensor,
    cells: tl.tensor | None,
    rows: tl.tensor,
    before: tl.tensor,
    moved: tl.tensor,
    layer_stride: int,
    width: int,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A row of a layer: a path's entries only move to the front, so the earliest goes first."""
    row = tl.program_id(0)
    begin(PDL)
    if padding(row, rows):
        return
    layer = entries + tl.program_id(1).to(tl.int64) * layer_stride
    x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    ahead = tl.load(before + row)
    given = tl.load(before + row + 1) - ahead
    for j in range(1, tl.minimum(given, DRAFTS) + 1):
        to = row + ahead + j
        further = tl.load(moved + to)
        if further > 0:
            found = to + further
            if cells is not None:
                to, found = tl.load(cells + to), tl.load(cells + found)
            entry = tl.load(layer + found.to(tl.int64) * width + x, mask=x < width)
            tl.store(layer + to.to(tl.int64) * width + x, entry, mask=x < width)


def move_paths(entries: Tensor, rows: Rows, cells: Tensor | None = None, *, pdl: bool = False) -> None:
    """See `gpu.sample.kernels.SamplingKernels.move_paths`."""
    layers, _, width = entries.shape
    assert rows.drafts is not None and rows.paths is not None
    count = min(len(rows.slots), rows.tables.slots - 1)
    block = min(pow2(width), 1024)
    _move_paths[(count, layers, cdiv(width, block))](
        entries, cells, *rows.drafts[:2], rows.paths.moved, entries.stride(0), width,
        DRAFTS=rows.tables.most_drafts, BLOCK=block, **launch_options(pdl, min(max(block // 128, 1), 8)),
    )  # fmt: skip
