"""Weights of 8-bit integers with a scale for each output, w = number × scale, and their products on a CPU.

oneDNN multiplies unsigned by signed bytes and sums in int32, at the speed at which the weights come (AMX,
VNNI, AVX2). One byte is too little for an activation: beside a few large ones the others would be 0. So each
row x becomes two rows of bytes,

    x ≈ scale × (high + low / 128)        high, low from -64 to 63, scale × (63 + 63 / 128) = largest |x|

which is 13 bits and a sign. Where reading the weights takes the time, the second row is free. The digits have
7 bits because CPUs without VNNI add two products in 16 bits, which 8 would overflow.

    weight   int8 [outputs, inputs], or what `pack` made of it
    scale    float32 [outputs]
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from gpu.quant.scaled import INT8, quantise

BITS = 7
BASE = 2**BITS
"""Base of an activation's digits, which lie between -BASE / 2 and BASE / 2 - 1."""

TOP = (BASE // 2 - 1) * (BASE + 1)
"""The largest number that two digits represent."""

LEAST = 1e-30
"""Lower bound of a row's largest number, so that rows of zeros have a scale."""

LEAST_ROWS, ROWS = 64, 256
NUMBERS = 2**20
"""Rows of a product at once, and its numbers where there are more than the fewest rows. The products of both
digits lie beside each other before they are added: those of a long prompt would take more memory than the
weights, and leave the cache. 256 rows by 17,920 x 1,536 weights took 21 ms of one core in parts of 64, 42 at
once; of small products each call costs as much."""

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
    out = torch.empty(len(x), len(scale))
    step = rows_at_once(len(scale))
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        _few_rows(x[rows], packed, scale, out[rows])
    return (out if bias is None else out.add_(bias)).to(x.dtype)


def rows_at_once(outputs: int) -> int:
    """Rows that a product of so many outputs computes at once."""
    return min(max(NUMBERS // outputs, LEAST_ROWS), ROWS)


def _few_rows(x: Tensor, packed: Tensor, scale: Tensor, out: Tensor) -> None:
    f, n, half = x.float(), len(x), BASE // 2
    # Four times as fast as `vector_norm`, which is not vectorised.
    top = torch.maximum(f.amax(-1, keepdim=True), f.amin(-1, keepdim=True).neg_()).clamp_(min=LEAST)
    # 0.5 rounds. Both digits are shifted by half the base, because the product takes unsigned bytes.
    numbers = f.mul(TOP / top).add_(half * (BASE + 1) + 0.5).to(torch.int16)
    digits = torch.empty(2 * n, x.shape[1], dtype=torch.uint8)
    digits[:n], digits[n:] = numbers >> BITS, numbers.bitwise_and_(BASE - 1)
    both: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(digits, 1.0, half, packed, scale, _ZEROS),
        *(None, 1.0, 0, torch.float32, "none", [], ""),
    )
    torch.add(both[:n], both[n:], alpha=1 / BASE, out=out).mul_(top.mul_(BASE / TOP))
