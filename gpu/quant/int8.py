"""Weights of 8-bit integers with a scale for each output, w = number × scale, and their products on a CPU.

One byte is too little for an activation: beside a few large ones the others would be 0. So an activation
has 13 bits and a sign, times a scale of its row. `gpu.kernels.cpu` multiplies these; where it cannot be
compiled, FBGEMM does, and oneDNN on a CPU with VNNI or AMX. Those two multiply unsigned by signed bytes and
sum in int32, so for them each row x becomes two rows of bytes,

    x ≈ scale × (high + low / 128)        high, low from -64 to 64, scale × (63 + 63 / 128) = largest |x|

The digits have 7 bits because CPUs without VNNI add two products in 16 bits, which 8 would overflow.

    weight   int8 [outputs, inputs], or what `pack` made of it
    scale    float32 [outputs]
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.kernels.cpu import INPUTS, Kernels, Weight, interleave, kernels
from gpu.quant.numbers import number
from gpu.quant.scaled import INT8, quantise

BITS = 7
BASE = 2**BITS
"""Base of an activation's digits, which lie between -BASE / 2 and BASE / 2."""

TOP = (BASE // 2 - 1) * (BASE + 1)
"""The largest number that two digits represent."""

LEAST = 1e-30
"""Lower bound of a row's scale, so that rows of zeros have one."""

_DIGITS = torch.tensor([BASE, 1.0]).view(2, 1, 1)
_LEAST, _UNITS = LEAST * _DIGITS, _DIGITS / TOP
"""For the high and the low digit: the smallest unit, and the unit divided by the row's largest number."""

LEAST_ROWS, ROWS = 64, 256
NUMBERS = 2**20
"""Rows of a product at once, and its numbers where there are more than the fewest rows. The products of both
digits lie beside each other before they are added: those of a long prompt would take more memory than the
weights, and leave the cache. 256 rows by 17,920 x 1,536 weights took 21 ms of one core in parts of 64, 42 at
once; of small products each call costs as much."""

SLAB = 2**20
"""Weights that are quantised at once."""

BLOCK = 2**25
"""Maximum number of weights in a block of FBGEMM's. Packing copies a block first: in one block, the head of a
1.5B model would need 223 MiB more while it is packed."""

_ZEROS = torch.zeros(1, dtype=torch.int32)
"""Zero points of the weights."""


class Packed(NamedTuple):
    """A matrix [outputs, inputs], packed by the library that multiplies it. oneDNN has one block, with a byte
    for each weight. FBGEMM has blocks of at most `BLOCK` weights, with inputs padded to a multiple of 512 and
    the `scale` of each output. Where `own` kernels multiply their `weight`, there are no blocks."""

    outputs: int
    inputs: int
    blocks: tuple[Tensor | torch.ScriptObject, ...]
    scale: Tensor
    own: tuple[Kernels, Weight] | None = None


def runs_here() -> bool:
    """Whether this CPU and this build of torch have the product."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return not by_onednn() or (torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qlinear_pointwise"))


@cache
def by_onednn() -> bool:
    """Whether oneDNN multiplies what the own kernels do not. Without VNNI it packs the weights anew in every
    product, and that on one core: of 17,920 x 1,536 weights and 1 row it took 6.0 ms on one core of a Zen 3
    and 5.5 on two, FBGEMM 1.8 and 1.5; of 256 rows 184 and 103, and 176 and 90."""
    return torch.cpu._is_vnni_supported() or not _has_fbgemm()


def _has_fbgemm() -> bool:
    """Whether this build of torch packs matrices for FBGEMM, on this CPU. It takes them as tensors of a
    quantised dtype, which are deprecated: the first one warns of that."""
    known = hasattr(torch, "_make_per_channel_quantized_tensor") and torch.cpu._is_avx2_supported()
    if not known or torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _packed_by_fbgemm(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1))
    return True


def store(place: Tensor, scale: Tensor, weight: Tensor) -> None:
    """Quantise `weight` [outputs, inputs] into `place`, int8, and its `scale` [outputs]."""
    step = max(SLAB // weight.shape[1], 1)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        numbers, scales = quantise(weight[rows], INT8)
        place[rows].copy_(numbers)
        scale[rows].copy_(scales)


def pack(numbers: Tensor, scale: Tensor) -> Packed:
    """Pack `numbers` [outputs, inputs], which are used up, with the `scale` [outputs] of each output, for the
    kernels that multiply them here."""
    assert numbers.is_contiguous(), "oneDNN's packing ignores strides"
    outputs, inputs = numbers.shape
    if inputs % INPUTS == 0 and (own := kernels()) is not None:
        weight = Weight(interleave(numbers.view(torch.int16)), scale, outputs)
        return Packed(outputs, inputs, (), scale, (own, weight))
    if by_onednn():
        return Packed(outputs, inputs, (torch.ops.onednn.qlinear_prepack(numbers, None),), scale)
    step = max(BLOCK // inputs, 1)
    parts = (slice(first, first + step) for first in range(0, outputs, step))
    return Packed(
        outputs, inputs, tuple(_packed_by_fbgemm(numbers[each], scale[each]) for each in parts), scale
    )


def _packed_by_fbgemm(numbers: Tensor, scale: Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    tensor = torch._make_per_channel_quantized_tensor(numbers, scale.double(), zeros, 0)
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(tensor, None)
    return packed


def product(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b of `x` [n, inputs] and a matrix of `pack`: a new [n, outputs] in x's dtype."""
    if packed.own is not None:
        return _by_own(x, *packed.own, bias)
    step, multiply = rows_at_once(packed.outputs), _by_onednn if by_onednn() else _by_fbgemm
    # `to` takes 6 us even if it converts nothing, and `len` of a tensor 4: once for each product of a token.
    n, f = x.shape[0], x if x.dtype == torch.float32 else x.float()
    if n <= step:
        out = multiply(f, packed)
    else:
        out = torch.empty(n, packed.outputs)
        for first in range(0, n, step):
            rows = slice(first, first + step)
            out[rows] = multiply(f[rows], packed)
    if bias is not None:
        out.add_(bias)
    return out if f is x else out.to(x.dtype)


def _by_own(x: Tensor, own: Kernels, weight: Weight, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32:
        return own.multiply(x.contiguous(), weight, bias)
    return own.multiply(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def rows_at_once(outputs: int) -> int:
    """Rows that a product of so many outputs computes at once."""
    return min(max(NUMBERS // outputs, LEAST_ROWS), ROWS)


def _by_onednn(x: Tensor, packed: Packed) -> Tensor:
    n, half, top = len(x), BASE // 2, _largest(x)
    # 0.5 rounds. Both digits are shifted by half the base, because the product takes unsigned bytes.
    numbers = (x * (number(TOP) / top)).add_(number(half * (BASE + 1) + 0.5)).to(torch.int16)
    digits = torch.empty(2 * n, packed.inputs, dtype=torch.uint8)
    digits[:n], digits[n:] = numbers >> BITS, numbers.bitwise_and_(BASE - 1)
    both: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(digits, 1.0, half, packed.blocks[0], packed.scale, _ZEROS),
        *(None, 1.0, 0, torch.float32, "none", [], ""),
    )
    return torch.add(both[:n], both[n:], alpha=1 / BASE).mul_(top.mul_(number(BASE / TOP)))


def _by_fbgemm(x: Tensor, packed: Packed) -> Tensor:
    """Multiply with as few torch operations as possible: each takes 3 to 10 us, since weights evict its code
    from the core's cache. NumPy's operations are faster alone, but a step that mixes them with torch's is
    slower: 33.9 ms for 32.5 with SmolLM2."""
    units = torch.addcmul(_LEAST, x.abs().amax(-1, keepdim=True), _UNITS)
    digits = x / units
    high, low = digits.unbind()
    low.sub_(high.round(), alpha=BASE)  # the product rounds both
    multiply = _fbgemm()
    parts = [multiply(digits, 1.0, BASE // 2, block) for block in packed.blocks]
    high, low = (parts[0] if len(parts) == 1 else torch.cat(parts, -1)).unbind()
    return torch.add(high, low, alpha=1 / BASE).mul_(units[0])


@cache
def _fbgemm() -> Callable[..., Tensor]:
    """Return FBGEMM's product, without two checks that torch makes in every call with a packed matrix. They
    took a sixth of the time of a SmolLM2 token.

    torch looks up `__torch_function__` on the matrix, and the class reports a missing attribute by a C++
    exception. Setting the attribute to torch's "no override" function avoids the exception. And the overload
    searches all arguments for Python objects before it calls `_op`, so `_op` is called directly."""
    packed: Any = torch._C.ScriptObject
    packed.__torch_function__ = torch._C._disabled_torch_function_impl
    overload = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    multiply: Callable[..., Tensor] = getattr(overload, "_op", overload)
    return multiply


def _largest(x: Tensor) -> Tensor:
    """Return the largest |x| of each row, [n, 1]. `vector_norm` would take 318 us instead of 25 at 64 x
    1,536, because torch does not vectorise it."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=LEAST)
