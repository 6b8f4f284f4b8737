"""DFlash: layers that draft a whole block at once.

A block is the last known token and masks, which see each other and the context. The context's keys and values
are made of the target's hidden states, not of tokens: `store` writes them as the target goes on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import DraftSpec
from gpu.context import ForwardContext
from gpu.layers import Attention, RmsNorm, Rope
from gpu.layers.linear import Linear
from gpu.models.base import CausalModel
from gpu.models.decoder import Layer
from gpu.models.draft import BlockModel
from gpu.ops.base import Matrix, Ops, Part


class DFlash(BlockModel):
    """Which tokens of a block see which is up to the view of `ctx.ops`."""

    def __init__(
        self, spec: DraftSpec, target: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, target, dtype, device)
        decoder, parameters = spec.decoder, self._parameters
        inputs = len(spec.aux_layers) * spec.target_hidden
        self._fc = parameters.linear("model.", inputs, {"fc": decoder.hidden})
        self._hidden_norm = RmsNorm(decoder, "model.hidden_norm", parameters)
        self._layers = [Layer(decoder, layer, parameters) for layer in range(decoder.layers)]
        self._norm = RmsNorm(decoder, "model.norm", parameters)
        self._rope = Rope(decoder.rope, decoder.head_dim, dtype, device)
        self._context: Linear
        """Keys and values of all layers in one product: their input is the same. Made by `seal`."""

    def seal(self) -> None:
        """See `DraftModel.seal`."""
        decoder, parameters = self.spec.decoder, self._parameters
        each = [attention.kv_matrix() for attention in self._attentions()]
        biases = [matrix.bias for matrix in each if matrix.bias is not None]
        self._context = parameters.linear("", decoder.hidden, {"context": sum(len(m.weight) for m in each)})
        self._context.matrix = Matrix(
            torch.cat([matrix.weight for matrix in each]), torch.cat(biases) if biases else None
        )
        super().seal()

    def fuse(self, aux: Tensor, ops: Ops | None = None) -> Tensor:
        """See `DraftModel.fuse`."""
        norm = self._hidden_norm
        return F.rms_norm(self._fc(aux, ops), norm.weight.shape, norm.weight, norm.eps)

    def store(self, ctx: ForwardContext, hidden: Tensor) -> None:
        """See `BlockModel.store`."""
        rotation = self._rope(ctx)
        each = self._context(hidden, ctx.ops).chunk(len(self._layers), dim=-1)
        for attention, kv in zip(self._attentions(), each, strict=True):
            attention.store(ctx, rotation, kv)

    def _attentions(self) -> list[Attention]:
        """Return the attention module of each layer. DFlash heads have no MLA layers."""
        return [layer.attention for layer in self._layers if isinstance(layer.attention, Attention)]

    def forward(self, ctx: ForwardContext, ids: Tensor) -> Tensor:
        """See `BlockModel.forward`."""
        rotation = self._rope(ctx)
        residual = ctx.ops.embed(self.embedding, ids)
        part: Part | None = None
        for layer in self._layers:
            found = layer.attend(ctx, rotation, part, residual)
            part = layer.transform(ctx, found, residual)
        return self._norm(ctx, part, residual)
