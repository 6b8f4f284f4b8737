"""Checkpoints whose experts are MXFP4, named as those of gpt-oss on the hub are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gpu.quant import mxfp4

EXCEPTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""`modules_to_not_convert` of openai/gpt-oss-20b."""


def quantise(directory: Path, model: transformers.PreTrainedModel, plain: tuple[int, ...] = ()) -> None:
    """Rewrite the checkpoint in `directory` and give its `model` the weights that transformers reads of it.
    Layers in `plain` stay as they are."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    skipped = [f"model.layers.{layer}.mlp.experts" for layer in plain]
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        if any(name.startswith(each) for each in skipped):
            continue
        numbers, scales = mxfp4.quantise(tensors.pop(name).transpose(1, 2))
        blocks = numbers.view(*scales.shape, 16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameters[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [*EXCEPTED, *skipped],
    }
    (directory / "config.json").write_text(json.dumps(config))
