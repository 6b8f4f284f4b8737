"""Self-attention: fused projections, optional head norms, rope, the backend, output projection."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import Linear, Places
from gpu.layers.norm import RmsNorm
from gpu.layers.rope import Rotation, rotate


class Attention:
    """One layer's attention. A token's projection lies as

    | query heads | key heads | value heads |   each head_dim wide

    so that rope turns queries and keys in one go and the pool takes keys and values as they lie.
    """

    __slots__ = ("_heads", "_kv_heads", "_layer", "_norms", "_out", "_qkv")

    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer = layer
        self._heads = spec.heads
        self._kv_heads = spec.kv_heads
        parts = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        self._qkv = Linear(spec.hidden, parts, dtype, device, spec.qkv_bias)
        self._out = Linear(spec.q_size, {"o_proj": spec.hidden}, dtype, device, spec.out_bias)
        self._norms = (
            {name: RmsNorm(spec.head_dim, spec.norm_eps, dtype, device) for name in ("q_norm", "k_norm")}
            if spec.qk_norm
            else {}
        )

    def __call__(self, ctx: ForwardContext, rotation: Rotation, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        n, heads = len(x), self._heads
        turned = heads + self._kv_heads
        qkv = self._qkv(x).view(n, turned + self._kv_heads, -1)
        if self._norms:
            qkv[:, :heads] = self._norms["q_norm"](qkv[:, :heads])
            qkv[:, heads:turned] = self._norms["k_norm"](qkv[:, heads:turned])
        rotate(qkv[:, :turned], rotation)
        kv = qkv[:, heads:].view(n, 2, self._kv_heads, -1)
        return self._out(ctx.attention.run(self._layer, qkv[:, :heads], kv))

    def seal(self) -> None:
        self._qkv.seal()
        self._out.seal()

    def places(self, prefix: str) -> Places:
        found = self._qkv.places(prefix) | self._out.places(prefix)
        for name, norm in self._norms.items():
            found |= norm.places(prefix + name)
        return found
