"""EAGLE and EAGLE-3: a layer or two over a token and the hidden state of the position before it.

EAGLE    x = fc(embedding | state); layers without a norm in front of the first; no last norm
EAGLE-3  x = norm(embedding) | norm(state), which the first layer's attention projects; state = fc(states)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import DraftSpec, ModelSpec
from gpu.context import ForwardContext
from gpu.layers import Parameters, RmsNorm, Rope
from gpu.models.base import CausalModel
from gpu.models.decoder import Layer
from gpu.models.draft import ChainModel, run_behind
from gpu.ops.base import Ops, PairNorms, Part, Rotation


class _Unnormed(Layer):
    """EAGLE's first layer, whose input goes to attention as it is."""

    def __init__(self, spec: ModelSpec, parameters: Parameters) -> None:
        super().__init__(spec, 0, parameters)
        del parameters.places["model.layers.0.input_layernorm.weight"]

    def attend(self, ctx: ForwardContext, rotation: Rotation, part: Part | None, residual: Tensor) -> Tensor:
        return self.attention.attend(ctx, rotation, residual)


class _Fused(Layer):
    """EAGLE-3's first layer, whose attention projects a token's embedding beside a hidden state."""

    def __init__(self, spec: ModelSpec, parameters: Parameters) -> None:
        super().__init__(spec, 0, parameters, 2 * spec.hidden)
        self._hidden_norm = RmsNorm(spec, "model.layers.0.hidden_norm", parameters)

    @property
    def norms(self) -> PairNorms:
        """Norms of the embedding and of the hidden state."""
        return self._first_norm.weight, self._hidden_norm.weight, self._first_norm.eps


class Eagle(ChainModel):
    """EAGLE, whose two versions differ in how they draft, not in the model."""

    def __init__(
        self, spec: DraftSpec, target: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, target, dtype, device)
        decoder, parameters = spec.decoder, self._parameters
        self._fc = parameters.linear(
            "model.", 2 * decoder.hidden, {"fc": decoder.hidden}, bias="fc.bias" in spec.own
        )
        rest = [Layer(decoder, layer, parameters) for layer in range(1, decoder.layers)]
        self._layers = [_Unnormed(decoder, parameters), *rest]
        self._rope = Rope(decoder.rope, decoder.head_dim, dtype, device)

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainModel.forward`."""
        rotation = self._rope(ctx)
        residual = self._fc(ctx.ops.embed_beside(self.embedding, ids, hidden, None), ctx.ops)
        found = self._layers[0].attend(ctx, rotation, None, residual)
        ctx, part, residual = run_behind(ctx, rotation, self._layers, found, residual)
        assert part is not None, "norms stand in front"
        residual.add_(ctx.ops.complete(part))
        return residual, residual


class Eagle3(ChainModel):
    """EAGLE-3, and 3.1 with its norms of auxiliary states and of what the next step reads."""

    def __init__(
        self, spec: DraftSpec, target: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, target, dtype, device)
        decoder, parameters = spec.decoder, self._parameters
        count, width = len(spec.aux_layers), spec.target_hidden
        self._fc = parameters.linear("model.", count * width, {"fc": decoder.hidden})
        self._input_norm: Tensor | None = None
        if spec.norm_before_fc:
            self._input_norm = parameters.tensor("model.input_norm.weight", count * width)
        self._fc_norms: Tensor | None = None
        if spec.fc_norm:
            self._fc_norms = torch.empty(count, width, dtype=dtype, device=device)
            parameters.places |= {f"model.fc_norm.{i}.weight": row for i, row in enumerate(self._fc_norms)}
        self._first = _Fused(decoder, parameters)
        rest = [Layer(decoder, layer, parameters) for layer in range(1, decoder.layers)]
        self._layers = [self._first, *rest]
        self._norm = RmsNorm(decoder, "model.norm", parameters)
        self._rope = Rope(decoder.rope, decoder.head_dim, dtype, device)

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """See `DraftModel.fuse`."""
        eps = self.spec.decoder.norm_eps
        if self._input_norm is not None:
            aux = F.rms_norm(aux, self._input_norm.shape, self._input_norm, eps)
        if self._fc_norms is not None:
            count, width = self._fc_norms.shape
            each = F.rms_norm(aux.view(-1, count, width), (width,), eps=eps)
            aux = (each * self._fc_norms).view(-1, count * width)
        return self._fc(aux, ops)

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainModel.forward`."""
        rotation = self._rope(ctx)
        pair = ctx.ops.embed_beside(self.embedding, ids, hidden, self._first.norms)
        residual = hidden
        if self.spec.norm_before_residual:
            residual = pair[:, hidden.shape[1] :].contiguous()
        found = self._first.attention.attend(ctx, rotation, pair)
        ctx, part, residual = run_behind(ctx, rotation, self._layers, found, residual)
        out = self._norm(ctx, part, residual)
        return out, out if self.spec.norm_output else residual
