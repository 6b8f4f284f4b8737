"""Checkpoints in FP8, scaled as the formats' definitions say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu.quant.scaled import FP8

TOP = 448.0
"""The largest e4m3."""

Quantise = Callable[[torch.Tensor], torch.Tensor]


def per_tensor(weight: torch.Tensor) -> torch.Tensor:
    return (weight.abs().amax() / TOP).reshape(1)


def per_channel(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1, keepdim=True) / TOP


def per_block(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            scale[i, j] = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].abs().max() / TOP
    return scale


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for every number."""
    if (scale.dim() == 2 and scale.shape[1] > 1) or scale.shape[0] not in (1, shape[0]):
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return scale[: shape[0], : shape[1]]
    return scale.reshape(-1, 1).expand(shape)


def quantised(path: Path, of: Quantise, suffix: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's projections in FP8, with the scales in a second file. Returns the dequantised
    weights."""
    file = path / "model.safetensors"
    weights = load_file(file)
    scales: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name in [name for name in weights if "_proj" in name and name.endswith("weight")]:
        scale = of(weights[name])
        weights[name] = (weights[name] / spread(scale, weights[name].shape)).to(FP8)
        meant[name] = weights[name].float() * spread(scale, weights[name].shape)
        scales[name + suffix] = scale
        scales[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
    file.unlink()
    where = {}
    for shard, tensors in (("a.safetensors", weights), ("b.safetensors", scales)):
        save_file(tensors, path / shard, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return meant
