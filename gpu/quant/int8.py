"""Weights of 8-bit integers with a scale for each output, w = number × scale, and their products on a CPU.

oneDNN multiplies unsigned by signed bytes and sums in int32, at the speed at which the weights come (AMX,
VNNI, AVX2). One byte is too little for an activation: beside a few large ones the others would be 0. So each
row x becomes two rows of bytes,

    x ≈ scale × (high + low / 126)        high, low from -63 to 63, scale = largest |x| / 63

which is 13 bits and a sign. Where reading the weights takes the time, the second row is free. The digits have
7 bits because CPUs without VNNI add two products in 16 bits, which 8 would overflow.

    weight   int8 [outputs, inputs], or what `pack` made of it
    scale    float32 [outputs]

A table of embeddings is int8 [vocabulary, inputs + 4]: first the numbers of all its rows, then their scales,
in one tensor. A head that shares it is packed from its numbers.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from gpu.quant.scaled import INT8, quantise, restore

DIGIT = 63
"""The largest digit of an activation; the smallest is its negative."""

LEAST = 1e-30
"""Lower bound of a row's largest number, so that rows of zeros have a scale."""

SCALE = 4
"""Bytes of one, which must divide a table's inputs."""

ROWS = 256
"""Rows of a product at once. The products of both digits lie beside each other before they are added: those
of a long prompt would take more memory than the weights."""

SLAB = 2**20
"""Weights that are quantised at once."""

_ZEROS = torch.zeros(1, dtype=torch.int32)
"""Zero points of the weights."""


def runs_here() -> bool:
    """Whether this CPU and this build of torch have the product."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qlinear_pointwise")


def store(place: Tensor, scale: Tensor, weight: Tensor) -> None:
    """Quantise `weight` [outputs, inputs] into `place`, int8, and its `scale` [outputs]."""
    step = max(SLAB // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        numbers, scales = quantise(weight[rows], INT8)
        place[rows].copy_(numbers)
        scale[rows].copy_(scales)


def pack(numbers: Tensor) -> Tensor:
    """Pack `numbers` [outputs, inputs] for oneDNN's kernels. The layout is opaque and has the same size."""
    assert numbers.is_contiguous(), "oneDNN's packing ignores strides"
    packed: Tensor = torch.ops.onednn.qlinear_prepack(numbers, None)
    return packed


def product(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of `x` [n, inputs] and a matrix of `pack`: a new [n, outputs] in x's dtype."""
    firsts = range(0, max(len(x), 1), ROWS)
    parts = [_few_rows(x[first : first + ROWS], packed, scale) for first in firsts]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def _few_rows(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    f = x.float()
    step = torch.linalg.vector_norm(f, torch.inf, -1, keepdim=True).clamp_(min=LEAST).mul_(1 / DIGIT)
    high = f / step
    low = high - high.round()
    digits = torch.cat([high, low.mul_(2 * DIGIT)]).round_().add_(DIGIT + 1).to(torch.uint8)
    both: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(digits, 1.0, DIGIT + 1, packed, scale, _ZEROS),
        *(None, 1.0, 0, torch.float32, "none", [], ""),
    )
    return torch.add(both[: len(f)], both[len(f) :], alpha=1 / (2 * DIGIT)).mul_(step)


def new_table(rows: int, inputs: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A table of so many rows, uninitialised, and views of its numbers [rows, inputs] and scales [rows]. 4
    must divide the inputs."""
    table = torch.empty(rows, inputs + SCALE, dtype=torch.int8, device=device)
    return table, *_parts(table)


def _parts(table: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = table.shape
    inputs = width - SCALE
    flat = table.view(-1)
    return flat[: rows * inputs].view(rows, inputs), flat[rows * inputs :].view(torch.float32)


def gather(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of any table [vocabulary, inputs]: new, in its dtype, or in float32 of a table of `new_table`."""
    if table.dtype != torch.int8:
        return table[ids]
    numbers, scale = _parts(table)
    return restore(numbers[ids], scale[ids])
