"""Multi-token prediction (MTP): a layer of the target's own checkpoint, which drafts token after token.

    x = eh_proj(norm(embedding) | norm(state))  ─► a layer of the target's kind ─► norm ─► logits, next state

DeepSeek-V3, arXiv 2412.19437, section 2.2, has a layer for each further token. Checkpoints have the first
one, which drafts further tokens from its own states, as EAGLE does. These and the target's are those behind
the last norm, as in SGLang's deepseek_nextn.py. vLLM's deepseek_mtp.py norms its own for logits alone, and
reads no embedding at position 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.models import DraftSpec
from core.models.mtp import FIRST
from gpu.context import ForwardContext
from gpu.layers import RmsNorm, Rope
from gpu.layers.linear import Places
from gpu.models.base import CausalModel
from gpu.models.decoder import Layer
from gpu.models.draft import ChainModel, run_behind


class Mtp(ChainModel):
    """The layer, with the embedding and the head of its target."""

    def __init__(
        self, spec: DraftSpec, target: CausalModel, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, target, dtype, device)
        decoder, parameters = spec.decoder, self._parameters
        embedded, state = (RmsNorm(decoder, FIRST + name, parameters) for name in ("enorm", "hnorm"))
        self._norms = embedded.weight, state.weight, decoder.norm_eps
        self._fc = parameters.linear(FIRST, 2 * decoder.hidden, {"eh_proj": decoder.hidden})
        self._layer = Layer(decoder, 0, parameters)
        self._norm = RmsNorm(decoder, f"{FIRST}shared_head.norm", parameters)
        self._rope = Rope(decoder.rope, decoder.rope_dim, dtype, device)

    def places(self) -> Places:
        """See `DraftModel.places`: names are those of the target's checkpoint."""
        return {self._theirs(name): place for name, place in super().places().items()}

    def _theirs(self, name: str) -> str:
        own = next(begin for begin in self.spec.names if name.startswith(begin))
        return self.spec.names[own] + name.removeprefix(own)

    def forward(self, ctx: ForwardContext, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `ChainModel.forward`."""
        rotation = self._rope(ctx)
        residual = self._fc(ctx.ops.embed_beside(self.embedding, ids, hidden, self._norms), ctx.ops)
        found = self._layer.attend(ctx, rotation, None, residual)
        out = self._norm(*run_behind(ctx, rotation, [self._layer], found, residual))
        return out, out
