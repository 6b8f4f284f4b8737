"""Checkpoints of int-quantized W8A8 as llm-compressor writes them, and what they compute in plain torch."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.rigs.lora import Adapter

CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "scale_dtype": None,
                "strategy": "token",
                "symmetric": True,
                "type": "int",
                "zp_dtype": None,
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
}
"""The fields that llm-compressor writes for its scheme W8A8, as in its issue 2078 (RedHatAI's quantized.w8a8
models are of it). Older ones have no "format" in a group."""


def changed(*ignore: str, **weights: object) -> dict[str, Any]:
    """`CONFIG` that leaves `ignore` unquantised, too, with other fields of its weights."""
    config = deepcopy(CONFIG)
    config["ignore"] += ignore
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def quantise(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Rewrite a checkpoint's projections as int8 by its new `config`: numbers and scales by name. No row's
    largest number is 127, which those that are quantised anew would have."""
    file = path / "model.safetensors"
    weights, found = load_file(file), {}
    tensor = config["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"
    for name in [each for each in weights if each.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        if any(re.match(each.removeprefix("re:"), layer) for each in config["ignore"]):
            continue
        weight = weights[name].float()
        scale = (weight.abs().amax() if tensor else weight.abs().amax(1, keepdim=True)) / 120.0
        scale = scale.to(torch.bfloat16).reshape(1) if tensor else scale.to(torch.bfloat16)
        found[name] = (weight / scale.float()).round().to(torch.int8)
        found[f"{name}_scale"] = scale
    save_file(weights | found, file, metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return found


def by_row(model: nn.Module, ranks: int) -> dict[str, Tensor]:
    """Numbers and scales of a model's projections as `--quantization int8` has them: scales [outputs, 1], or
    of matrices whose inputs `ranks` divide [outputs, ranks]."""
    found = {}
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            parts = weight.detach().unflatten(1, (_parts(name.removesuffix(".weight"), ranks), -1))
            scale = parts.abs().amax(2) / 127
            found[name] = (parts / scale[..., None]).round().to(torch.int8).flatten(1)
            found[f"{name}_scale"] = scale
    return found


def _parts(layer: str, ranks: int) -> int:
    """Number of parts into which the inputs of a layer are divided."""
    return ranks if layer.endswith(("o_proj", "down_proj")) else 1


class W8A8Linear(nn.Module):
    """A layer whose inputs are quantised by token, and whose sums are integers."""

    def __init__(self, numbers: Tensor, scale: Tensor, bias: Tensor | None, parts: int) -> None:
        """The inputs are quantised in `parts` parts. `scale` is one, [outputs, 1] or [outputs, parts]."""
        super().__init__()
        scales = scale.double().reshape(len(scale), -1).expand(len(numbers), parts)
        self._parts = list(zip(numbers.double().chunk(parts, 1), scales.unbind(1), strict=True))
        self._bias = bias
        self.delta: Tensor | None = None
        """Addition of an adapter to the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        y = torch.zeros(())
        for own, (numbers, scale) in zip(x.chunk(len(self._parts), -1), self._parts, strict=True):
            by = (own.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-14)
            sums = torch.round(own / by).double() @ numbers.t()
            y = y + (sums * by * scale).to(x.dtype)
        y = y if self._bias is None else y + self._bias
        return y if self.delta is None else y + x @ self.delta.t()


def install(
    model: nn.Module, numbers: dict[str, Tensor], ranks: int = 1, adapter: Adapter | None = None
) -> None:
    """Let a model of transformers compute with int8 matrices, and an `adapter` that `lora.save` saves."""
    for name, weight in numbers.items():
        if not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        outer, _, own = layer.rpartition(".")
        bias = model.get_submodule(layer).bias
        made = W8A8Linear(weight, numbers[f"{name}_scale"], bias, _parts(layer, ranks))
        if adapter is not None:
            made.delta = 2.0 * (adapter[layer].b @ adapter[layer].a)
        setattr(model.get_submodule(outer), own, made)
