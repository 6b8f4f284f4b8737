"""Random weights, for load tests and for models whose weights are not at hand."""

from __future__ import annotations

import torch

from gpu.layers.linear import Places
from gpu.quant import FP8, quantise_like


def fill_dummy(places: Places, device: torch.device) -> None:
    """Normal(0, 0.02), norms 1. The same every time: seed 0, in the order of `places`."""
    generator = torch.Generator(device).manual_seed(0)
    for name, place in places.items():
        if place.dtype == FP8:
            weight = torch.empty(place.shape, dtype=torch.bfloat16, device=device)
            scale = places[name + "_scale"]
            numbers, scales = quantise_like(weight.normal_(0.0, 0.02, generator=generator), scale)
            place.copy_(numbers)
            scale.copy_(scales)
        elif name.endswith("weight_scale"):
            continue  # its weight's
        elif place.dim() == 1 and name.endswith(".weight"):  # a norm's
            place.fill_(1.0)
        else:
            place.normal_(0.0, 0.02, generator=generator)
