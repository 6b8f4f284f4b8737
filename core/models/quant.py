"""Which quantised checkpoints can be read: 8-bit floats with a scale per tensor, channel or block."""

from __future__ import annotations

from collections.abc import Mapping

from core.models.fields import Config
from core.models.spec import Fp8

BLOCK = 128
"""Rows and columns that share a scale in block-scaled checkpoints (DeepSeek V3, Qwen3-FP8)."""


def is_readable_fp8(config: Config) -> bool:
    """Whether a `quantization_config` is FP8 (e4m3) as `gpu.weights.fp8` reads it."""
    match config.get("quant_method"):
        case "fp8":
            return config.get("weight_block_size") in (None, [BLOCK, BLOCK])
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            groups = config.get("config_groups")
            return isinstance(groups, Mapping) and all(_is_fp8(group) for group in groups.values())
        case _:
            return False


def fp8_scaling(config: Config) -> Fp8:
    """How weights that are `is_readable_fp8` are scaled: one scale for a whole tensor is one for each of its
    outputs, too. "" without a config."""
    if not config:
        return ""
    groups = config.get("config_groups")
    schemes = groups.values() if isinstance(groups, Mapping) else ()
    blocks = any(group["weights"]["strategy"] == "block" for group in schemes)
    return "blocks" if blocks or config.get("weight_block_size") is not None else "rows"


def _is_fp8(group: object) -> bool:
    """Of compressed-tensors: one scheme and the layers it is for."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or (weights.get("type"), weights.get("num_bits")) != ("float", 8):
        return False
    if weights.get("strategy") == "block":
        return weights.get("block_structure") in (None, [BLOCK, BLOCK])
    return weights.get("strategy") in ("tensor", "channel")
