"""Random LoRA adapters of tiny models, as PEFT saves them, and the same merged into the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.adapters import LINEAR, TARGETS, AdapterLimits
from gpu.adapters.pool import AdapterLayout
from gpu.build import spec_of
from gpu.lora import LoraMatrix, LoraShape
from gpu.models.decoder import Decoder
from gpu.weights.peft import read_adapter

LIMITS = AdapterLimits(places=3, max_rank=8, host=4, targets=TARGETS)


class Factors(NamedTuple):
    """B A of one module, not scaled."""

    a: Tensor
    b: Tensor


Adapter = dict[str, Factors]
"""Factors by module, experts one by one."""


def shapes_of(path: Path) -> list[LoraShape]:
    """The matrices of a checkpoint that adapters may change."""
    model = Decoder(spec_of(path), torch.float32, torch.device("meta"))
    return [each.shape for each in model.adaptable]


def adapter_for(
    path: Path,
    targets: Iterable[str] = LINEAR,
    rank: int = 4,
    seed: int = 1,
    ranks: Callable[[str], int] | None = None,
) -> Adapter:
    """Random factors for the model at `path`, large enough to change its text. `ranks` by module."""
    generator, wanted = torch.Generator().manual_seed(seed), set(targets)
    made: Adapter = {}
    for shape in shapes_of(path):
        for name, outputs in shape.parts.items():
            if name.rpartition(".")[2] not in wanted:
                continue
            for module in modules(name, shape.experts):
                size = rank if ranks is None else ranks(module)
                a = torch.randn(size, shape.inputs, generator=generator) * 0.2
                made[module] = Factors(a, torch.randn(outputs, size, generator=generator) * 0.2)
    return made


def modules(name: str, experts: int) -> list[str]:
    """A matrix's module, or those of all experts."""
    head, _, last = name.rpartition(".")
    return [f"{head}.{expert}.{last}" for expert in range(experts)] if experts else [name]


def save(
    adapter: Adapter,
    directory: Path,
    alpha: float = 8.0,
    rank: int = 4,
    **config: Any,
) -> Path:
    """Write an adapter as PEFT saves it, with further fields of its `config`."""
    tensors: dict[str, Tensor] = {}
    for module, (a, b) in adapter.items():
        kind = "embedding_" if module.endswith("embed_tokens") else ""
        end = "" if kind else ".weight"
        tensors[f"base_model.model.{module}.lora_{kind}A{end}"] = a
        tensors[f"base_model.model.{module}.lora_{kind}B{end}"] = b
    return write(directory, tensors, {"r": rank, "lora_alpha": alpha, **config})


def write(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """Tensors and config of an adapter."""
    directory.mkdir(parents=True, exist_ok=True)
    saved = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(saved, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return directory


def merged(
    path: Path, adapter: Adapter, directory: Path, scale: Callable[[str], float] = lambda name: 2.0
) -> Path:
    """The checkpoint at `path` with the adapter in its weights."""
    shutil.copytree(path, directory)
    weights = load_file(directory / "model.safetensors")
    for module, (a, b) in adapter.items():
        delta = scale(module) * (b @ a)
        weights[f"{module}.weight"] += delta.t() if module.endswith("embed_tokens") else delta
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def read(path: Path, directory: Path, limits: AdapterLimits = LIMITS) -> dict[str, LoraMatrix]:
    """The adapter in `directory` for the model at `path`, by the first name of each matrix."""
    layout = AdapterLayout(shapes_of(path), limits, torch.float32)
    views = layout.views(torch.full((1, layout.bytes), 7, dtype=torch.uint8))
    read_adapter(directory, layout.shapes, limits.targets, views, spec_of(path).vocab_size)
    return {next(iter(shape.parts)): view for shape, view in zip(layout.shapes, views, strict=True)}


def delta(found: LoraMatrix, part: int = 0) -> Tensor:
    """B A of one part, of all experts where it has any."""
    a = found.a[0][..., part * found.rank : (part + 1) * found.rank, :]
    return torch.split(found.b[0], list(found.parts), dim=-2)[part] @ a
