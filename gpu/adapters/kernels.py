"""The products of adapters in plain torch: what a CPU runs, and what the kernels are tested against.

A step with adapters makes its work lists once and then, for each matrix that adapters may change,

    h = shrink(x)        float32 [n, parts * rank]: A[place of the row] x
    y += expand(h)       B[place of the row] h, part by part

Rows without a place are left as they are; what `h` holds for them is never read. On a GPU these are
`gpu.kernels.lora`'s, which wait for nothing and whose grids are of padded sizes; here the host reads the
lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from core.types import Ints
from gpu.lora import LoraMatrix, LoraRows
from gpu.state.view import StepView


def lay_out(view: StepView, sampled: Tensor, place: Tensor, tokens: LoraRows, samples: LoraRows) -> None:
    """Fill `tokens` for the view's tokens and `samples` for those of `sampled`, int32 [s]: slots. `place`
    int32 [slots] is the place of each slot, -1 for none. Behind the view's true counts is no row."""
    true, queries, chunks, chosen = view.counts.tolist()
    firsts = view.chunk_firsts[: chunks + 1].cpu().numpy()
    slots = np.concatenate(
        [
            view.decode_slots[:queries].cpu().numpy(),
            np.repeat(view.chunk_slots[:chunks].cpu().numpy(), np.diff(firsts)),
        ]
    )
    assert len(slots) == true
    each = place.cpu().numpy()
    _lay_out(each[slots], tokens)
    _lay_out(each[sampled[:chosen].cpu().numpy()], samples)


def shrink(x: Tensor, lora: LoraMatrix, rows: LoraRows) -> Tensor:
    """A x of contiguous `x` [n, inputs]: a new float32 [n, parts * rank]."""
    h = x.new_zeros(len(x), lora.a.shape[-2], dtype=torch.float32)
    for place, at in _groups(rows, lora):
        h[at] = x[at].float() @ lora.a[place].float().t()
    return h


def expand(h: Tensor, lora: LoraMatrix, rows: LoraRows, y: Tensor) -> None:
    """Add B h to `y` [n, outputs], contiguous, in place; part i of the outputs is of columns
    i * rank ... (i + 1) * rank of `h` [n, parts * rank]."""
    for place, at in _groups(rows, lora):
        y[at] = _added(y[at], h[at], lora.b[place], lora.parts)


def embed(ids: Tensor, lora: LoraMatrix, rows: LoraRows, y: Tensor) -> None:
    """Add B A[:, id] to `y` [n, hidden], in place, for each of `ids` [n]."""
    for place, at in _groups(rows, lora):
        found = lora.a[place].index_select(1, ids[at]).float().t()
        y[at] = _added(y[at], found, lora.b[place], lora.parts)


# Experts: of pairs of a row and one of its k experts, pair i * k + j being row i's jth. `chosen` is
# integer [n, k], -1 in padded rows.


def shrink_experts(x: Tensor, chosen: Tensor, lora: LoraMatrix, rows: LoraRows) -> Tensor:
    """A[place, expert] x: a new float32 [n * k, parts * rank]. `x` is [n, inputs], a row of each k pairs,
    or [n * k, inputs], one of each pair."""
    h = x.new_zeros(chosen.numel(), lora.a.shape[-2], dtype=torch.float32)
    shared = chosen.numel() // len(x)
    for place, expert, pairs in _pairs(chosen, rows, lora):
        h[pairs] = x[pairs // shared].float() @ lora.a[place, expert].float().t()
    return h


def expand_experts(h: Tensor, chosen: Tensor, lora: LoraMatrix, rows: LoraRows, y: Tensor) -> None:
    """Add B[place, expert] h to `y` [n * k, outputs], as `expand` does: to gate and up before the
    activation, to down before the rows' weights."""
    for place, expert, pairs in _pairs(chosen, rows, lora):
        y[pairs] = _added(y[pairs], h[pairs], lora.b[place, expert], lora.parts)


def _lay_out(places: Ints, rows: LoraRows) -> None:
    """Fill `rows`, whose first ones have `places`."""
    each = np.full(len(rows.places), -1, np.int32)
    each[: len(places)] = places
    counts = np.bincount(each[each >= 0], minlength=len(rows.starts) - 1)
    order = np.argsort(np.where(each < 0, len(counts), each), kind="stable")
    for into, values in (
        (rows.places, each),
        (rows.order, order),
        (rows.starts, np.append(0, np.cumsum(counts))),
    ):
        into.copy_(torch.from_numpy(values))


def _groups(rows: LoraRows, lora: LoraMatrix) -> Iterator[tuple[int, Tensor]]:
    """Each place that changes this matrix, and the rows that use it."""
    starts, ranks = rows.starts.tolist(), lora.ranks.tolist()
    for place, (first, end) in enumerate(pairwise(starts)):
        if end > first and ranks[place]:
            yield place, rows.order[first:end].long()


def _pairs(chosen: Tensor, rows: LoraRows, lora: LoraMatrix) -> Iterator[tuple[int, int, Tensor]]:
    """Each place and expert of the step, and the pairs of a row and an expert that use them."""
    k = chosen.shape[1]
    for place, at in _groups(rows, lora):
        experts = chosen[at]
        for expert in sorted(set(experts.flatten().tolist())):
            row, j = (experts == expert).nonzero(as_tuple=True)
            yield place, expert, at[row] * k + j


def _added(y: Tensor, h: Tensor, b: Tensor, parts: tuple[int, ...]) -> Tensor:
    """`y` [n, outputs] + B h, summed in float32."""
    halves = torch.split(h, b.shape[-1], dim=1)
    found = [part @ own.float().t() for part, own in zip(halves, torch.split(b, list(parts)), strict=True)]
    return (y.float() + torch.cat(found, dim=1)).to(y.dtype)
