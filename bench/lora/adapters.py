"""Random adapters as PEFT saves them, of models of which there is only a config.

Bytes of rank 16 in bfloat16, all seven targets: Qwen3-8B 87 MB, Qwen3-30B-A3B with its 128 experts 1.7 GB.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.adapters import LINEAR
from gpu.build import spec_of
from gpu.lora import LoraShape
from gpu.models.decoder import Decoder

DRAWN = 1_000_003
"""A prime, so that no two rows of a matrix are alike."""


def make_adapters(model: Path, directory: Path, count: int, rank: int, files: int) -> list[Path]:
    """`count` adapters of the model at `model`, in directories under `directory`, and of these `files`
    different ones: others are links to them, which costs no disk and no time. A server knows no difference,
    and a device holds each by itself."""
    torch.set_num_threads(1)  # others' threads of two servers may be busy on the same cores
    spec = spec_of(model)
    dtype = getattr(torch, spec.dtype)
    shapes = [each.shape for each in Decoder(spec, dtype, torch.device("meta")).adaptable]
    found = [directory / f"a{number}" for number in range(count)]
    for number, path in enumerate(found):
        path.mkdir(parents=True)
        weights = path / "adapter_model.safetensors"
        if number < files:
            save_file(factors(shapes, rank, dtype, seed=number), weights)
        else:
            os.link(found[number % files] / weights.name, weights)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(LINEAR)}
        (path / "adapter_config.json").write_text(json.dumps(config))
    return found


def factors(shapes: Sequence[LoraShape], rank: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """A and B of every matrix of a layer, by name; those of experts as [experts, ...]. B is small, as after
    little training. Numbers repeat after `DRAWN`: to draw all would take half a minute for 1.7 GB."""
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found: dict[str, Tensor] = {}

    def normal(size: Sequence[int], deviation: float) -> Tensor:
        count, first = math.prod(size), 7919 * len(found) % DRAWN
        own = drawn.repeat(-(-(first + count) // DRAWN))[first : first + count]
        return own.mul(deviation).view(*size)

    for shape in shapes:
        many = [shape.experts] if shape.experts else []
        for name, outputs in shape.parts.items():
            if name.rpartition(".")[2] not in LINEAR:
                continue
            key = f"base_model.model.{name}.lora_"
            found[f"{key}A.weight"] = normal([*many, rank, shape.inputs], shape.inputs**-0.5)
            found[f"{key}B.weight"] = normal([*many, outputs, rank], 0.01)
    return found
