"""Routed experts in plain torch: tokens grouped by expert, a loop over the experts that were hit."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core.models import ModelSpec, MoeSpec
from gpu.layers.linear import Linear, Places
from gpu.layers.mlp import ACTIVATIONS, gate


class SparseMlp:
    """Softmax over all experts, the best `per_token` of them, weighted sum of their MLPs.

    `w13` [experts, 2 * intermediate, hidden] is gate over up, `w2` [experts, hidden, intermediate]:
    the layout of grouped GEMM kernels.
    """

    __slots__ = ("_act", "_moe", "_router", "_w2", "_w13")

    def __init__(self, spec: ModelSpec, moe: MoeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._moe = moe
        self._act = ACTIVATIONS[spec.activation]
        self._router = Linear(spec.hidden, {"gate": moe.experts}, dtype, device)
        width = moe.intermediate
        self._w13 = torch.empty(moe.experts, 2 * width, spec.hidden, dtype=dtype, device=device)
        self._w2 = torch.empty(moe.experts, spec.hidden, width, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        weights, experts = self._route(x)
        per_token = self._moe.per_token
        # Token-expert pairs sorted by expert: each expert's tokens become one contiguous run.
        order = experts.flatten().argsort()
        counts = torch.bincount(experts.flatten(), minlength=self._moe.experts).tolist()
        tokens = order // per_token
        inputs = x[tokens]
        outputs = torch.empty_like(inputs)
        first = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            run = slice(first, first + count)
            hidden = gate(F.linear(inputs[run], self._w13[expert]), self._act)
            outputs[run] = F.linear(hidden, self._w2[expert])
            first += count
        outputs *= weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add_(0, tokens, outputs)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and expert ids [n, per_token]; the softmax is float32 whatever the model's dtype."""
        shares = F.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self._moe.per_token, dim=-1)
        if self._moe.norm_topk:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def seal(self) -> None:
        """The experts stay plain: packing 3 × experts small matrices a layer would lose the one
        tensor that grouped kernels want."""
        self._router.seal()

    def places(self, prefix: str) -> Places:
        found = self._router.places(prefix)
        width = self._moe.intermediate
        for expert in range(self._moe.experts):
            name = f"{prefix}experts.{expert}."
            found[f"{name}gate_proj.weight"] = self._w13[expert, :width]
            found[f"{name}up_proj.weight"] = self._w13[expert, width:]
            found[f"{name}down_proj.weight"] = self._w2[expert]
        return found
