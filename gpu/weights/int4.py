"""4-bit weights of checkpoints, and how they get into the layout of `gpu.quant.int4`.

A layer has no `weight` but several tensors. int32 words hold eight numbers each, the first in the lowest
bits, of AWQ in the order 0, 2, 4, 6, 1, 3, 5, 7:

    AWQ     qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    GPTQ    qweight [in / 8, out], the same qzeros, in its first format less 1, and scales
    W4A16   weight_packed [out, in / 8], weight_zero_point [out / 8, groups], weight_scale [out, groups]

AWQ is that of version "gemm", W4A16 "pack-quantized" of compressed-tensors, which has no zero points where
all are 8. GPTQ's g_idx [in] says which group an input is in: i / group, or the checkpoint is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from core.errors import ModelError
from core.models import Int4
from gpu.quant import q4
from gpu.quant.int4 import expand, pack, span
from gpu.weights.stage import Copy

EIGHT = 8
"""Numbers in a word of a checkpoint, and the zero point of symmetric ones."""

SLAB = 2**23
"""Numbers that are repacked at once: 100 MiB in passing, in each of the reading threads."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in AWQ's words the outputs are, in order."""

_BESIDE = {
    "awq": ("qzeros", "scales"),
    "gptq": ("qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_zero_point", "weight_scale", "weight_shape", "weight_g_idx"),
}


class Side(NamedTuple):
    """The dimension of a tensor that lies along a side of the matrix, and how much of the side an entry
    stands for; 0: all of it."""

    dim: int
    per: int


class Sides(NamedTuple):
    """Both sides of the matrix, None where a tensor does not have one."""

    outputs: Side | None
    inputs: Side | None

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """The shape of the tensor for a matrix [outputs, inputs]."""
        sizes = {
            side.dim: -(-size // side.per) if side.per else 1
            for side, size in zip(self, (outputs, inputs), strict=True)
            if side is not None
        }
        return tuple(sizes[dim] for dim in sorted(sizes))


def _tensors(int4: Int4) -> Mapping[str, Sides]:
    """The tensors of a layer, the numbers first."""
    group = int4.group
    if int4.format == "pack-quantized":
        found = {
            "weight_packed": Sides(Side(0, 1), Side(1, EIGHT)),
            "weight_scale": Sides(Side(0, 1), Side(1, group)),
        }
        zeros = {"weight_zero_point": Sides(Side(0, EIGHT), Side(1, group))}
        return found if int4.symmetric else found | zeros
    numbers = Sides(Side(1, EIGHT), Side(0, 1)) if int4.format == "awq" else Sides(Side(1, 1), Side(0, EIGHT))
    return {
        "qweight": numbers,
        "qzeros": Sides(Side(1, EIGHT), Side(0, group)),
        "scales": Sides(Side(1, 1), Side(0, group)),
    }


def _family(int4: Int4) -> str:
    return "gptq" if int4.format == "gptq_v2" else int4.format


def layer_of(int4: Int4, name: str) -> str:
    """The layer whose numbers the tensor `name` has; "" for any other tensor."""
    layer, _, last = name.rpartition(".")
    return layer if last == ("weight_packed" if int4.format == "pack-quantized" else "qweight") else ""


def is_beside(int4: Int4, name: str) -> bool:
    """Whether a tensor is one of those that come with a layer's numbers."""
    return name.rpartition(".")[2] in _BESIDE[_family(int4)]


def beside(int4: Int4, layer: str) -> list[str]:
    """Names of the tensors that may accompany a layer's quantised numbers."""
    return [f"{layer}.{last}" for last in _BESIDE[_family(int4)]]


class Packed(NamedTuple):
    """A matrix [outputs, inputs] as a checkpoint has it, or a part of one."""

    int4: Int4
    outputs: int
    inputs: int
    sides: Mapping[str, Sides]
    tensors: Mapping[str, Tensor]

    @property
    def groups(self) -> int:
        return self.inputs // (self.int4.group or self.inputs)

    def part(self, dim: int, start: int, size: int) -> Packed:
        """Views of the `size` outputs (dim 0) or inputs from `start` on. Raises `ModelError` where they begin
        or end within a word or a group."""
        if (start, size) == (0, (self.outputs, self.inputs)[dim]):
            return self
        found = dict(self.tensors)
        for name, tensor in self.tensors.items():
            side = self.sides[name][dim]
            if side is None or not side.per:
                continue
            last = start + size
            if start % side.per or (last % side.per and last < (self.outputs, self.inputs)[dim]):
                raise ModelError(
                    f"{name} cannot be cut into {start} to {last}: {side.per} of that side are one entry."
                )
            found[name] = tensor.narrow(side.dim, start // side.per, -(-size // side.per))
        sizes = (size, self.inputs) if dim == 0 else (self.outputs, size)
        return Packed(self.int4, *sizes, self.sides, found)

    def slabs(self) -> Iterator[tuple[int, Packed]]:
        """Yield the matrix in blocks of outputs, each with the index of its first output."""
        step = max(SLAB // self.inputs // 64, 1) * 64
        for first in range(0, self.outputs, step):
            yield first, self.part(0, first, min(step, self.outputs - first))

    def to(self, device: torch.device, copy: Copy) -> Packed:
        """The same matrix on a device."""
        if device.type == "cpu":
            return self
        found = {}
        for name, tensor in self.tensors.items():
            found[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            copy(found[name], tensor)
        return self._replace(tensors=found)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """Numbers uint8 [outputs, inputs], and scale float32 [groups, outputs, 2] (`gpu.quant.int4`)."""
        kind, tensors = self.int4.format, self.tensors
        if kind == "pack-quantized":
            numbers, scales = _numbers(tensors["weight_packed"]), tensors["weight_scale"].t()
            zeros = torch.full_like(scales, EIGHT, dtype=torch.uint8)
            if "weight_zero_point" in tensors:
                zeros = _numbers(tensors["weight_zero_point"].t())[:, : self.outputs]
        else:
            scales, zeros = tensors["scales"], _numbers(tensors["qzeros"])
            if kind == "awq":
                numbers, zeros = _in_order(_numbers(tensors["qweight"])).t(), _in_order(zeros)
            else:
                numbers = _numbers(tensors["qweight"].t())
                zeros = zeros + (kind == "gptq")
        return numbers, torch.stack([scales.float(), zeros.float()], -1)

    def floats(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return expand(*self.unpack())

    def nibbles(self) -> q4.Numbers:
        """Return the matrix as `gpu.quant.q4` stores it. `q4.GROUP` must divide the size of its groups."""
        numbers, pairs = self.unpack()
        by, zero = pairs.unbind(-1)
        scale = torch.stack([by, -zero * by], -1).transpose(0, 1)
        shared = scale.repeat_interleave(self.inputs // self.groups // q4.GROUP, 1)
        return q4.Numbers(numbers.numpy(), shared.numpy())


def _numbers(words: Tensor) -> Tensor:
    """uint8 [n, 8 m] of int32 `words` [n, m]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    """AWQ's numbers [n, outputs], each word's outputs in order."""
    return numbers.view(len(numbers), -1, EIGHT)[..., _AWQ_PLACES].flatten(1)


def read_packed(int4: Int4, layer: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> Packed:
    """The matrix of `shape` [outputs, inputs] of a layer, of its `tensors` by the last word of their names.
    Raises `ModelError` naming the tensor that is missing, or has another shape, dtype or other groups."""
    if len(shape) != 2:
        raise ModelError(f"{layer} is quantised ({int4.format}) and is no matrix here, but {list(shape)}.")
    outputs, inputs = shape
    sides = _tensors(int4)
    group = int4.group or inputs
    if inputs % group:
        raise ModelError(f"{layer} has {inputs} inputs, which groups of {group} do not divide.")
    for name, each in sides.items():
        if name not in tensors:
            raise ModelError(f"{layer} is quantised ({int4.format}) and has no {layer}.{name}.")
        if tuple(tensors[name].shape) != (want := each.shape(outputs, inputs)):
            raise ModelError(f"{layer}.{name} {list(tensors[name].shape)} instead of {list(want)}.")
        _check_dtype(f"{layer}.{name}", tensors[name].dtype)
    for name in ("g_idx", "weight_g_idx"):
        if (order := tensors.get(name)) is not None:
            neighbours = torch.arange(inputs) // group
            if order.shape != neighbours.shape or not torch.equal(order.long(), neighbours):
                raise ModelError(
                    f"{layer}.{name} puts inputs that are not neighbours in one group, which is not served: "
                    "use a checkpoint without act-order (desc_act)."
                )
    return Packed(int4, outputs, inputs, sides, {name: tensors[name] for name in sides})


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise `ModelError` for scales that are no floats, or words that would be other bits than meant."""
    scales = name.endswith(("scales", "scale"))
    if not (dtype.is_floating_point if scales else dtype == torch.int32):
        raise ModelError(f"{name} is {dtype} instead of {'floats' if scales else torch.int32}.")


def store(place: Tensor, scale: Tensor, packed: Packed, copy: Copy) -> None:
    """Repack `packed` into a place int16 [outputs, inputs / 4] and its `scale` [outputs, groups, 2], on their
    device."""
    apart = span(packed.inputs, packed.inputs // scale.shape[1])
    for first, slab in packed.slabs():
        numbers, pairs = slab.to(place.device, copy).unpack()
        rows = slice(first, first + slab.outputs)
        place[rows].copy_(pack(numbers, apart))
        scale[rows].copy_(pairs.transpose(0, 1))
