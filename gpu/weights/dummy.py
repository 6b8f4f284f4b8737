"""Random weights, for load tests and for models whose weights are not at hand."""

from __future__ import annotations

from types import MappingProxyType

import torch

from gpu.layers.linear import Places
from gpu.quant.int4 import WORD, pack, quantise, span
from gpu.quant.scaled import EIGHT_BITS, quantise_like
from gpu.shard import Slices

_MXFP4_SCALE = 120
"""2^-7, of numbers up to 6: of uniform bits the weights' standard deviation is 0.023."""


def fill_dummy(places: Places, device: torch.device, slices: Slices = MappingProxyType({})) -> None:
    """Fill weights with Normal(0, 0.02) and norms with 1, the same every time: seed 0, in the order of
    `places`. Each of several ranks gets its `slices` of what one alone would have."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(place: torch.Tensor, name: str, dtype: torch.dtype, each: int = 1) -> torch.Tensor:
        """Random weights for a place whose entries stand for `each` inputs."""
        own = slices.get(name)
        shape = (*place.shape[:-1], place.shape[-1] * each) if own is None else own.shape
        whole = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        return whole if own is None else own.of(whole)

    for name, place in places.items():
        if place.dtype in EIGHT_BITS:
            scale = places[name + "_scale"]
            numbers, scales = quantise_like(drawn(place, name, torch.bfloat16), scale, place.dtype)
            place.copy_(numbers)
            scale.copy_(scales)
        elif place.dtype == torch.int16:
            weight, scale = drawn(place, name, torch.bfloat16, WORD), places[name + "_scale"]
            group = weight.shape[1] // scale.shape[1]
            numbers, scales = quantise(weight, group)
            place.copy_(pack(numbers, span(weight.shape[1], group)))
            scale.copy_(scales.transpose(0, 1))
        elif place.dtype == torch.uint8 and name.endswith(".weight"):
            own = slices.get(name)
            shape = tuple(place.shape) if own is None else own.shape
            bits = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
            place.copy_(bits if own is None else own.of(bits))
            places[name + "_scale"].fill_(_MXFP4_SCALE)
        elif name.endswith("weight_scale"):
            continue  # its weight's
        elif place.dim() == 1 and name.endswith(".weight"):  # a norm's
            place.fill_(1.0)
        elif name in slices:
            place.copy_(drawn(place, name, place.dtype))
        else:
            place.normal_(0.0, 0.02, generator=generator)
