"""Checkpoints in 4 bits, packed number by number as the formats' definitions say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
"""Sizes of which each of two ranks has matrices that are held in 4 bits."""

WIDE_HYBRID: dict[str, Any] = {
    **WIDE,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""`WIDE` for variants with linear attention."""


LAYERS = re.compile(r"(_proj|_proj_with_mqa|in_proj_(qkvz?|z)|\.w[123])\.weight$")
"""Names of matrices, but for routers, tables and the head."""


class Numbers(NamedTuple):
    """A matrix in 4 bits: numbers [outputs, inputs], zero points and scales [outputs, groups]."""

    numbers: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def meant(self) -> Tensor:
        """The weights."""
        each = self.numbers.shape[1] // self.zeros.shape[1]
        zeros, scales = (part.repeat_interleave(each, 1) for part in (self.zeros, self.scales.float()))
        return (self.numbers - zeros) * scales


def quantised(weight: Tensor, group: int, symmetric: bool) -> Numbers:
    """`weight` by groups of inputs, zero points 1 to 15 (GPTQ's first format has no 0)."""
    outputs, inputs = weight.shape
    parts = weight.view(outputs, inputs // group, group)
    if symmetric:
        scales, zeros = parts.abs().amax(-1) / 7, torch.full(parts.shape[:2], 8)
    else:
        least, most = parts.amin(-1), parts.amax(-1)
        scales = (most - least).clamp(min=1e-6) / 15
        zeros = (-least / scales).round().clamp(1, 15).int()
    scales = scales.half()
    found = (parts / scales.float()[..., None]).round() + zeros[..., None]
    return Numbers(found.clamp(0, 15).int().flatten(1), zeros.int(), scales)


def words(numbers: Tensor, order: Iterable[int] = range(8)) -> Tensor:
    """int32 [n, m / 8] of [n, m]: `order` says which of eight numbers four bits hold, the lowest first."""
    rows, count = numbers.shape
    padded = torch.zeros(rows, -(-count // 8) * 8, dtype=torch.int64)
    padded[:, :count] = numbers
    found = torch.zeros(rows, padded.shape[1] // 8, dtype=torch.int64)
    for word in range(found.shape[1]):
        for at, which in enumerate(order):
            found[:, word] |= padded[:, 8 * word + which] << 4 * at
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def awq(of: Numbers) -> dict[str, Tensor]:
    """Version "gemm": words along the outputs, interleaved."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(of.numbers.t(), order),
        "qzeros": words(of.zeros.t(), order),
        "scales": of.scales.t(),
    }


def gptq(of: Numbers, less: int = 1) -> dict[str, Tensor]:
    """Numbers along the inputs, zero points along the outputs and `less` than they are."""
    outputs, inputs = of.numbers.shape
    return {
        "qweight": words(of.numbers).t(),
        "qzeros": words(of.zeros.t() - less),
        "scales": of.scales.t(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // of.zeros.shape[1]),
        "bias": torch.zeros(outputs),
    }


def gptq_v2(of: Numbers) -> dict[str, Tensor]:
    return gptq(of, 0)


def pack_quantized(of: Numbers) -> dict[str, Tensor]:
    """compressed-tensors: numbers from -8 to 7, plus 8."""
    found = {
        "weight_packed": words(of.numbers),
        "weight_scale": of.scales,
        "weight_shape": torch.tensor(of.numbers.shape),
    }
    symmetric = bool((of.zeros == 8).all())
    return found if symmetric else found | {"weight_zero_point": words(of.zeros.t()).t()}


class Kind(NamedTuple):
    """A format, and how weights are quantised; `group` -1: by output."""

    pack: Callable[[Numbers], dict[str, Tensor]]
    group: int
    symmetric: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config."""
        pack, group, symmetric = self
        if pack is awq:
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": group,
                "version": "gemm",
                "zero_point": True,
            }
        if pack is not pack_quantized:
            form = {"checkpoint_format": pack.__name__}
            return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric} | form
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "group_size": max(group, 0) or None}
        weights["strategy"] = "channel" if group < 0 else "group"
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": ["lm_head"],
        }


KINDS = {
    "awq": Kind(awq, 32),
    "gptq": Kind(gptq, 32),
    "gptq, symmetric, by channel": Kind(gptq, -1, True),
    "gptq_v2": Kind(gptq_v2, 32),
    "w4a16, symmetric": Kind(pack_quantized, 32, True),
    "w4a16": Kind(pack_quantized, 32),
    "w4a16, by channel": Kind(pack_quantized, -1),
}


def quantise(
    path: Path, kind: Kind, plain: Iterable[str] = (), layers: re.Pattern[str] = LAYERS, **config: Any
) -> dict[str, Tensor]:
    """Rewrite a checkpoint's matrices of names like `layers` in 4 bits, but for those with a part of `plain`,
    in two shards; further fields of its quantization_config are `config`. Returns the weights that it stands
    for."""
    meant = load_file(path / "model.safetensors")
    weights = dict(meant)
    left = tuple(plain)
    for name in filter(layers.search, list(meant)):
        if any(part in name for part in left):
            continue
        found = quantised(meant[name], kind.group if kind.group > 0 else meant[name].shape[1], kind.symmetric)
        meant[name] = found.meant
        del weights[name]
        layer = name.removesuffix("weight")
        beside = {layer + last: tensor.contiguous() for last, tensor in kind.pack(found).items()}
        weights = beside | weights  # its own bias stays
    (path / "model.safetensors").unlink()
    where = {}
    for at, file in enumerate(("a.safetensors", "b.safetensors")):
        part = {name: weights[name] for name in sorted(weights)[at::2]}
        save_file(part, path / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = {**kind.config, **config}
    (path / "config.json").write_text(json.dumps(told))
    return meant


def plain_of(path: Path, meant: dict[str, Tensor], directory: Path) -> Path:
    """The checkpoint in 16 or 32 bits that one in 4 bits stands for."""
    directory.mkdir()
    told = json.loads((path / "config.json").read_text())
    del told["quantization_config"]
    (directory / "config.json").write_text(json.dumps(told))
    for each in path.glob("generation_config.json"):
        shutil.copy(each, directory)
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, directory / "model.safetensors")
    return directory


def change(path: Path, name: str, tensor: Tensor | None, rename: str = "") -> None:
    """Put another tensor into a checkpoint of `quantise`, or remove it; `rename`: under another name."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"][name]
    weights = load_file(file)
    del weights[name], index["weight_map"][name]
    if tensor is not None:
        weights[rename or name], index["weight_map"][rename or name] = tensor, file.name
    save_file(weights, file, {"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
