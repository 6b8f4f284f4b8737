"""Decoders that make vectors or scores instead of tokens."""

from __future__ import annotations

import torch

from core.models import ModelSpec
from gpu.layers import Linear
from gpu.models.decoder import Decoder


class Embedder(Decoder):
    """LlamaModel, MistralModel, Qwen2Model, Qwen3Model: the decoder below the head."""

    __slots__ = ()

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self._head = Linear(spec.hidden, {}, dtype, device)

    def seal(self) -> None:
        """See `CausalModel.seal`. There is no head to lay out."""
        for layer in self._layers:
            layer.seal()


class Classifier(Decoder):
    """LlamaForSequenceClassification and so on: `logits` are those of the classes."""

    __slots__ = ()

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self._head = Linear(spec.hidden, {"score": len(spec.pooling.labels)}, dtype, device)
