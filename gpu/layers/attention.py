"""Self-attention: fused projections, optional head norms, rope, the backend, output projection."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers.norm import norm_weight
from gpu.layers.parameters import Parameters
from gpu.ops.base import HeadNorms, Input, Matrix, Rotation, WideNorms
from gpu.shard import COLUMN, ROW


class Attention:
    """One layer's attention. A token's projection lies as

    | query heads | key heads | value heads |   each head_dim wide

    so that rope turns queries and keys in one go and the pool takes keys and values as they lie. With an
    output gate, that of each query head stands behind it in the product.
    """

    def __init__(
        self, spec: ModelSpec, layer: int, prefix: str, parameters: Parameters, inputs: int = 0
    ) -> None:
        """`inputs`: width of what is projected, where that is not `spec.hidden`."""
        self._layer = spec.place(layer)
        self._heads = (spec.heads, spec.kv_heads)
        self._gated = spec.output_gate
        q_size = (1 + spec.output_gate) * spec.q_size
        parts = {"q_proj": q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        heads = COLUMN._replace(copies=dict.fromkeys(("k_proj", "v_proj"), spec.kv_copies))
        self._qkv = parameters.linear(prefix, inputs or spec.hidden, parts, spec.qkv_bias, spec.held, heads)
        self.width, out = spec.q_size, {"o_proj": spec.hidden}
        self.out = parameters.linear(prefix, spec.q_size, out, spec.out_bias, spec.held, ROW)
        self._sinks: torch.Tensor | None = None
        if spec.sinks:
            self._sinks = parameters.tensor(f"{prefix}sinks", spec.heads, split=COLUMN)
        self._norms: HeadNorms | None = None
        self._wide: WideNorms | None = None
        names = f"{prefix}q_norm.weight", f"{prefix}k_norm.weight"
        if spec.qk_norm == "head":
            q, k = (norm_weight(spec, name, spec.head_dim, parameters) for name in names)
            self._norms = (q, k, spec.norm_eps)
        if spec.qk_norm == "all":
            q = parameters.tensor(names[0], spec.q_size, split=COLUMN)
            k = parameters.tensor(names[1], spec.kv_size, split=COLUMN, copies=spec.kv_copies)
            self._wide = (q, k, spec.norm_eps)

    def attend(self, ctx: ForwardContext, rotation: Rotation, x: Input) -> torch.Tensor:
        """Attention output of the heads for `x` [n, inputs]: [n, heads * head_dim]."""
        ops = ctx.ops
        qkv = self._qkv(x, ops)
        if self._wide is not None:
            ops.norm_wide(qkv, self._wide)
        if not self._gated:
            return ops.attend(self._layer, qkv, self._heads, rotation, self._norms, self._sinks)
        heads, kv_heads = self._heads
        split = qkv.view(len(qkv), 2 * (heads + kv_heads), -1)
        queries, gates = split[:, : 2 * heads : 2], split[:, 1 : 2 * heads : 2]
        qkv = torch.cat([queries, split[:, 2 * heads :]], 1).flatten(1)
        found = ops.attend(self._layer, qkv, self._heads, rotation, self._norms, self._sinks)
        return found * gates.flatten(1).sigmoid()

    def kv_matrix(self) -> Matrix:
        """The part of the projection that makes keys and values; void once the weights are sealed."""
        weight, bias, *_ = self._qkv.matrix
        heads, kv_heads = self._heads
        first = len(weight) // (heads + 2 * kv_heads) * heads
        return Matrix(weight[first:], None if bias is None else bias[first:])

    def store(self, ctx: ForwardContext, rotation: Rotation, kv: torch.Tensor) -> None:
        """Write keys and values [n, 2 * kv_heads * head_dim], by `kv_matrix`, to their pages; attend to
        nothing."""
        ctx.ops.store(self._layer, kv, self._heads[1], rotation, self._norms)
