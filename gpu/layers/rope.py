"""Rotary embedding and its scalings. The rotation is a function of position alone: cached prefixes
rely on that."""

from __future__ import annotations

import math

import torch

from core.models import RopeSpec
from gpu.context import ForwardContext
from gpu.ops.base import Rotation
from gpu.ops.plain import turn


def frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Radians per position, float32 [dim / 2], of all kinds but dynamic, which grows with position.

    linear: kaiokendev's interpolation; llama3: Meta's wavelength bands; yarn: arXiv 2309.00071; longrope:
    arXiv 2402.13753.
    """
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "longrope":
        return base / torch.tensor(rope.long_factors if rope.long else rope.short_factors)
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base, dim)
    return base


def _llama3(rope: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    # How many times a dimension turns within the original context decides: at most low_freq, it is
    # stretched; at least high_freq, it is kept; between, the two are mixed.
    turns = rope.original_max * base / (2 * math.pi)
    keep = ((turns - rope.low_freq) / (rope.high_freq - rope.low_freq)).clamp(0, 1)
    return base * keep + base / rope.factor * (1 - keep)


def _yarn(rope: RopeSpec, base: torch.Tensor, dim: int) -> torch.Tensor:
    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    stretch = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return base / rope.factor * stretch + base * (1 - stretch)


def _dynamic(rope: RopeSpec, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Angles [n, dim / 2] with NTK's base, which grows with the length a token is seen at.

    transformers takes the length of the longest row of the batch; a row generated past the original
    context then meets the base of its own position, which is what stands here. A cached prefix must
    not depend on who shares the batch.
    """
    length = (positions + 1.0).clamp(min=rope.original_max)
    growth = rope.factor * length / rope.original_max - (rope.factor - 1)
    theta = rope.theta * growth ** (dim / (dim - 2))
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    return positions[:, None] / theta[:, None] ** steps


class Rope:
    """cos and sin of positions, made once a step for all layers.

    No table over all positions: at a context of 131,072 it would hold 128 MiB to save eight small
    kernels a step on a CPU, and one on a GPU, where a kernel makes them.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._dim = int(head_dim * rope.partial)
        self._dtype = dtype
        self._frequencies = frequencies(rope, self._dim).to(device)

    def __call__(self, ctx: ForwardContext) -> Rotation:
        """The rotation of the step's positions, computed in float32."""
        scale = self._rope.attention_factor
        if self._rope.kind == "dynamic":
            return turn(_dynamic(self._rope, self._dim, ctx.positions.float()), scale, self._dtype)
        return ctx.ops.rotation(ctx.positions, self._frequencies, scale, self._dtype)


def unrotated(rotation: Rotation) -> Rotation:
    """A rotation of as many positions that leaves queries and keys as they are, for layers without rope."""
    return Rotation(torch.ones_like(rotation.cos), torch.zeros_like(rotation.sin))
