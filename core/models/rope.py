"""Rope scaling, from both spellings of it.

transformers 4 writes `rope_theta` beside `rope_scaling`; transformers 5 one `rope_parameters`. Where
both stand, `rope_scaling` wins, as it does in transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from core.models.fields import Config, Fields
from core.models.spec import RopeSpec


def read_rope(fields: Fields, max_position: int) -> RopeSpec:
    """The rope of a config. Raises `ModelError` for a kind these families do not have."""
    name = "rope_scaling" if fields.group("rope_scaling") else "rope_parameters"
    group = _flatten(fields, name)
    rope = Fields(group, f"config.json: {name}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = fields.size(
        "original_max_position_embeddings", rope.size("original_max_position_embeddings", max_position)
    )
    if kind == "default":
        return RopeSpec(theta=theta, partial=partial)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, partial=partial, factor=rope.number("factor"))
    if kind == "dynamic":
        return RopeSpec(
            kind="dynamic",
            theta=theta,
            partial=partial,
            factor=rope.number("factor"),
            original_max=max_position,
        )
    if kind == "llama3":
        return RopeSpec(
            kind="llama3",
            theta=theta,
            partial=partial,
            factor=rope.number("factor"),
            original_max=original,
            low_freq=rope.number("low_freq_factor"),
            high_freq=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor", max_position / original)
        return RopeSpec(
            kind="yarn",
            theta=theta,
            partial=partial,
            factor=factor,
            original_max=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention(rope, factor),
        )
    raise rope.wrong(
        "rope_type" if rope.has("rope_type") else "type", "default, linear, dynamic, llama3 or yarn"
    )


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

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
