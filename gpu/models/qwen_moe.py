"""Qwen3-MoE: some layers route to experts."""

from __future__ import annotations

import torch

from gpu.layers import Mlp, SparseMlp
from gpu.models.decoder import Decoder


class QwenMoe(Decoder):
    """Qwen3MoeForCausalLM."""

    __slots__ = ()

    def make_mlp(self, layer: int, dtype: torch.dtype, device: torch.device) -> Mlp | SparseMlp:
        """Dense where the spec says so."""
        moe = self.spec.moe
        if moe is None or layer not in moe.layers:
            return Mlp(self.spec, dtype, device)
        return SparseMlp(self.spec, moe, dtype, device)
