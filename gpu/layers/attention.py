"""Self-attention: fused projections, optional head norms, rope, the backend, output projection."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import Linear, Places
from gpu.ops.base import HeadNorms, Rotation


class Attention:
    """One layer's attention. A token's projection lies as

    | query heads | key heads | value heads |   each head_dim wide

    so that rope turns queries and keys in one go and the pool takes keys and values as they lie.
    """

    __slots__ = ("_heads", "_layer", "_norms", "_out", "_qkv")

    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer = layer
        self._heads = (spec.heads, spec.kv_heads)
        parts = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        self._qkv = Linear(spec.hidden, parts, dtype, device, spec.qkv_bias, spec.fp8)
        self._out = Linear(spec.q_size, {"o_proj": spec.hidden}, dtype, device, spec.out_bias, spec.fp8)
        self._norms: HeadNorms | None = None
        if spec.qk_norm:
            q, k = (torch.empty(spec.head_dim, dtype=dtype, device=device) for _ in range(2))
            self._norms = (q, k, spec.norm_eps)

    def attend(self, ctx: ForwardContext, rotation: Rotation, x: torch.Tensor) -> torch.Tensor:
        """What the heads found for `x` [n, hidden]: [n, heads * head_dim]."""
        ops = ctx.ops
        return ops.attend(self._layer, self._qkv(x, ops), self._heads, rotation, self._norms)

    def project(self, ctx: ForwardContext, found: torch.Tensor) -> torch.Tensor:
        """What attention adds, [n, hidden], of what its heads found."""
        return self._out(found, ctx.ops)

    def seal(self) -> None:
        self._qkv.seal()
        self._out.seal()

    def places(self, prefix: str) -> Places:
        found = self._qkv.places(prefix) | self._out.places(prefix)
        if self._norms is not None:
            found |= {f"{prefix}q_norm.weight": self._norms[0], f"{prefix}k_norm.weight": self._norms[1]}
        return found
