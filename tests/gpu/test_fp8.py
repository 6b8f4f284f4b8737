"""FP8 checkpoints run as the numbers that they stand for, wherever their scales lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.models import read_spec
from gpu.build import spec_of
from gpu.weights import load_model
from gpu.weights.fp8 import FP8, dequantise
from tests.fakes import tiny_model
from tests.gpu.rig import CPU

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


@pytest.mark.parametrize("of", [per_tensor, per_channel, per_block])
@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (5, 7), (2, 256)])
def test_numbers_times_scales(of: Quantise, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    scale = of(weight)
    stored = (weight / spread(scale, weight.shape)).to(FP8)
    found = dequantise("w", stored, scale)
    torch.testing.assert_close(found, stored.float() * spread(scale, weight.shape))
    # e4m3 keeps three bits: half a step is a sixteenth.
    torch.testing.assert_close(found, weight, rtol=1 / 16, atol=float(scale.max()) / 2**9)


def test_a_scale_that_does_not_fit() -> None:
    with pytest.raises(ModelError, match=r"w \[300, 200\] has scales \[3, 3\]"):
        dequantise("w", torch.zeros(300, 200).to(FP8), torch.ones(3, 3))


def quantised(path: Path, of: Quantise, suffix: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint's projections as FP8, scales in a shard of their own; what they stand for."""
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


CHANNEL = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}


@pytest.mark.parametrize(
    ("of", "suffix", "config"),
    [
        (per_block, "_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (per_tensor, "_scale", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (per_channel, "_scale", {"quant_method": "compressed-tensors", "config_groups": {"g": CHANNEL}}),
    ],
    ids=["block", "tensor", "channel"],
)
def test_a_checkpoint_is_filled_with_what_it_stands_for(
    of: Quantise, suffix: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path = tiny_model.build("qwen3-moe-mixed", tmp_path).path
    meant = quantised(path, of, suffix, config)
    places = load_model(spec_of(path), path, torch.float32, CPU).places()
    assert any("experts" in name for name in meant)
    for name, weight in meant.items():
        torch.testing.assert_close(places[name], weight, rtol=0, atol=0)


def test_fp8_without_a_scale(tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    quantised(path, per_tensor, "_other", {"quant_method": "fp8"})
    with pytest.raises(ModelError, match=r"FP8 without a scale: neither .*weight_scale_inv"):
        load_model(spec_of(path), path, torch.float32, CPU)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}},
        {"quant_method": "compressed-tensors"},
    ],
)
def test_other_quantisations_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model.build("llama", tmp_path).path
    told = json.loads((path / "config.json").read_text())
    with pytest.raises(ModelError, match="only FP8 is supported"):
        read_spec({**told, "quantization_config": config})
