"""Multi-head latent attention (MLA): DeepSeek-V2, arXiv 2405.04434, section 2.1."""

from __future__ import annotations

import torch

from core.models import LatentSpec, ModelSpec
from gpu.context import ForwardContext
from gpu.layers.linear import Linear
from gpu.layers.norm import norm_weight
from gpu.layers.parameters import Parameters
from gpu.ops.base import Input, LatentNorm, Rotation
from gpu.shard import COLUMN, ROW

EPS = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` says: DeepSeek's classes pass none."""


class LatentAttention:
    """One layer's attention, in its absorbed form: `kv_b_proj`, which makes keys and values of latents, is
    multiplied into queries and into results. Pages keep latents, once for all heads.

        q · (U_k latent) = (U_kᵀ q) · latent        Σ p U_v latent = U_v Σ p latent

    Ranks divide the heads. Each has all of what makes latents, and keeps all of them.
    """

    def __init__(
        self, spec: ModelSpec, latent: LatentSpec, layer: int, prefix: str, parameters: Parameters
    ) -> None:
        self._layer, self._spec, self._latent = layer, spec, latent
        name, inputs = "q_proj", spec.hidden
        self._q_down: Linear | None = None
        if latent.q_rank:
            name, inputs, down = "q_b_proj", latent.q_rank, {"q_a_proj": latent.q_rank}
            self._q_down = parameters.linear(prefix, spec.hidden, down, spec.qkv_bias, spec.held)
            self._q_norm = parameters.tensor(f"{prefix}q_a_layernorm.weight", latent.q_rank)
        heads = {name: spec.heads * latent.query_dim}
        self._q = parameters.linear(prefix, inputs, heads, held=spec.held, split=COLUMN)
        kv = {"kv_a_proj_with_mqa": spec.head_dim}
        self._kv = parameters.linear(prefix, spec.hidden, kv, spec.qkv_bias, spec.held)
        weight = norm_weight(spec, f"{prefix}kv_a_layernorm.weight", latent.kv_rank, parameters)
        self._norm = LatentNorm(weight, EPS, latent.interleaved)
        # In the dtype of the computation, whatever the checkpoint's: a batch of small products.
        rows = spec.heads * (latent.nope_dim + latent.value_dim)
        up = parameters.tensor(f"{prefix}kv_b_proj.weight", rows, latent.kv_rank, split=COLUMN)
        by_head = up.view(spec.heads, -1, latent.kv_rank)
        self._keys, self._values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
        self.width, out = spec.heads * latent.value_dim, {"o_proj": spec.hidden}
        self.out = parameters.linear(prefix, self.width, out, spec.out_bias, spec.held, ROW)

    def attend(self, ctx: ForwardContext, rotation: Rotation, x: Input) -> torch.Tensor:
        """Attention output of the heads for `x` [n, hidden]: [n, heads * value_dim]."""
        ops, spec, rank = ctx.ops, self._spec, self._latent.kv_rank
        x = ops.complete(x)
        n, kv = len(x), self._kv(x, ops)
        if self._q_down is not None:
            x = ops.add_rms_norm(None, self._q_down(x, ops), self._q_norm, EPS)
        heads = self._q(x, ops).view(n, spec.heads, -1)
        plain, turned = heads[..., : self._latent.nope_dim], heads[..., self._latent.nope_dim :]
        q = heads.new_empty(n, spec.heads, spec.head_dim)
        torch.bmm(plain.transpose(0, 1), self._keys, out=q[..., :rank].transpose(0, 1))
        found = ops.attend_latent(self._layer, q, turned, kv, rotation, self._norm)
        out = heads.new_empty(n, spec.heads, self._latent.value_dim)
        by_head = found.view(n, spec.heads, rank).transpose(0, 1)
        torch.bmm(by_head, self._values.transpose(1, 2), out=out.transpose(0, 1))
        return out.flatten(1)
