"""Rope scaling, from both spellings of it.

transformers 4 writes `rope_theta` beside `rope_scaling`; transformers 5 one `rope_parameters`. Where
both stand, `rope_scaling` wins, as it does in transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from core.errors import ModelError
from core.models.fields import Config, Fields
from core.models.spec import ModelSpec, RopeSpec


def read_rope(fields: Fields, max_position: int, theta: float = 10000.0) -> RopeSpec:
    """The rope of a config; `theta` is the family's default. Raises `ModelError` for a kind these families do
    not have."""
    name = "rope_scaling" if fields.group("rope_scaling") else "rope_parameters"
    theta = fields.number("rope_theta", theta)
    return _read(fields, Fields(_flatten(fields, name), f"config.json: {name}"), max_position, theta)


def read_ropes(fields: Fields, max_position: int, thetas: tuple[float, float]) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers that see all positions, and of those with a window, each with its own of `thetas`
    where `rope_parameters` has none for it. `rope_scaling` is for the former alone. Raises as `read_rope`."""
    name = "rope_parameters"
    groups = fields.group(name)
    if not groups.keys() <= {"full_attention", "sliding_attention"}:
        raise fields.wrong(name, "an object with full_attention and sliding_attention")
    where, scaling = f"config.json: {name}", fields.group("rope_scaling")
    each = Fields(groups, where)
    full = {**each.group("full_attention"), **scaling}
    both = (
        Fields(full, "config.json: rope_scaling" if scaling else where),
        Fields(each.group("sliding_attention"), where),
    )
    return _read(fields, both[0], max_position, thetas[0]), _read(fields, both[1], max_position, thetas[1])


def check_rotated(spec: ModelSpec) -> None:
    """Raise `ModelError` unless an even number of a head's dimensions rotate, with a factor for each pair
    where a rope lists factors."""
    for rope in filter(None, (spec.rope, spec.window_rope)):
        turned = int(spec.rope_dim * rope.partial)
        if turned % 2 or not 2 <= turned <= spec.rope_dim:
            raise ModelError(
                f"config.json: head_dim {spec.rope_dim} and partial_rotary_factor {rope.partial:g} rotate "
                f"{turned} dimensions of a head: it must be an even number from 2 to head_dim."
            )
        if any(len(each) not in (0, turned // 2) for each in (rope.short_factors, rope.long_factors)):
            raise ModelError(
                f"config.json: short_factor and long_factor of rope_scaling must have {turned // 2} numbers, "
                f"half of the {turned} dimensions that are rotated."
            )


def _read(fields: Fields, rope: Fields, max_position: int, theta: float) -> RopeSpec:
    """The rope of `rope`, an object of the config `fields`."""
    theta = rope.number("rope_theta", theta)
    if theta <= 1:
        raise rope.wrong("rope_theta", "above 1")
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = fields.size(
        "original_max_position_embeddings", rope.size("original_max_position_embeddings", max_position)
    )
    spec = RopeSpec(theta=theta, partial=partial)
    more: dict[str, Any] = {}
    match kind:
        case "default":
            return spec
        case "linear":
            pass
        case "dynamic":
            more["original_max"] = max_position
        case "llama3":
            more["original_max"] = original
            more["low_freq"] = rope.number("low_freq_factor")
            more["high_freq"] = rope.number("high_freq_factor")
        case "longrope" | "su":
            return msgspec.structs.replace(spec, **_longrope(rope, max_position, original))
        case "yarn":
            more["original_max"] = original
            more["beta_fast"] = rope.number("beta_fast", 32.0)
            more["beta_slow"] = rope.number("beta_slow", 1.0)
            more["truncate"] = rope.flag("truncate", True)
        case _:
            name = "rope_type" if rope.has("rope_type") else "type"
            raise rope.wrong(name, "default, linear, dynamic, llama3, yarn or longrope")
    factor = rope.number("factor", max_position / original if kind == "yarn" else None)
    if kind == "yarn":
        more["attention_factor"] = _yarn_attention(rope, factor)
    more["scores_factor"] = _yarn_scale(factor, _mscale(rope, "mscale_all_dim")) ** 2
    return msgspec.structs.replace(spec, kind=kind, factor=factor, **more)


def _flatten(fields: Fields, name: str) -> Config:
    """`rope_parameters` may be written once per layer type; these families have one rope."""
    group = fields.group(name)
    nested = [value for value in group.values() if isinstance(value, Mapping)]
    if not nested:
        return group
    if any(value != nested[0] for value in nested):
        raise fields.wrong(name, "the same for every layer type")
    return nested[0]


def _yarn_attention(rope: Fields, factor: float) -> float:
    """Scale of cos and sin: YaRN (arXiv 2309.00071), section 3.4, with DeepSeek's two mscales."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    mscale, all_dim = (_mscale(rope, name) for name in ("mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return _yarn_scale(factor, 1.0)


def _mscale(rope: Fields, name: str) -> float:
    """One of DeepSeek's two mscale fields; 0 where it is absent, and where it is 0."""
    return 0.0 if rope.without().get(name) in (None, 0) else rope.number(name)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Fields, max_position: int, original: int) -> dict[str, Any]:
    """LongRoPE (arXiv 2402.13753), as Phi has it."""
    if original < 2:
        raise rope.wrong("original_max_position_embeddings", "at least 2")
    factor = rope.number("factor", max_position / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "kind": "longrope",
        "original_max": original,
        "attention_factor": rope.number("attention_factor", scale),
        "short_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
        "long": max_position > original,
    }
