"""Embedding rows of a step's tokens: decode rows from their slots' cells, the others from ids."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gpu.kernels.jit import begin, jit, options, pow2


@jit
def _embed(
    table: tl.tensor,
    cells: tl.tensor,
    slots: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    DECODE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # | decode rows: cells[slots[i]] | padding to DECODE | chunk tokens: ids[i - DECODE] | padding |
    row = tl.program_id(0)
    begin(PDL)
    chunk = row >= DECODE
    index = tl.where(chunk, row - DECODE, row)
    if index >= tl.load(counts + chunk.to(tl.int32)):
        return
    slot = tl.load(slots + index, mask=chunk == 0, other=0)
    cell = tl.load(cells + slot, mask=chunk == 0, other=0).to(tl.int64)
    token = tl.where(chunk, tl.load(ids + index, mask=chunk, other=0).to(tl.int64), cell)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    found = tl.load(table + token * WIDTH + cols, mask=mask)
    tl.store(out + row.to(tl.int64) * WIDTH + cols, found, mask=mask)


def embed(
    table: Tensor,
    cells: Tensor,
    slots: Tensor,
    counts: Tensor,
    ids: Tensor | None = None,
    *,
    pdl: bool = False,
) -> Tensor:
    """Rows of `table` [vocab, width] for d decode rows, then for c chunk tokens: [d + c, width].

    cells   integer [max_slots]   each slot's last token
    slots   integer [d]           slot of each decode row
    ids     integer [c] or None   tokens of chunks
    counts  int32 [2]             how many decode rows and chunk tokens are real; the rest of either
                                  part of the output is not written
    """
    decode, chunk = len(slots), 0 if ids is None else len(ids)
    width = table.shape[1]
    out = torch.empty(decode + chunk, width, dtype=table.dtype, device=table.device)
    block = pow2(width)
    _embed[(decode + chunk,)](
        table,
        cells,
        slots,
        slots if ids is None else ids,
        counts,
        out,
        DECODE=decode,
        WIDTH=width,
        BLOCK=block,
        PDL=pdl,
        **options(min(max(block // 512, 1), 8), pdl=pdl),
    )
    return out
