"""The encoders of the BERT lineage (Devlin et al., arXiv 1810.04805): BERT, RoBERTa, XLM-RoBERTa.

They differ in where positions begin, in how many kinds of segments there are and in the names of the
head's matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers import Linear, Parameters
from gpu.models.base import CausalModel
from gpu.ops.base import Ops, Rotation
from gpu.ops.plain import ACTIVATIONS


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last axis; both [size]."""

    def __init__(self, spec: ModelSpec, name: str, parameters: Parameters) -> None:
        self._eps = spec.norm_eps
        self._weight = parameters.tensor(f"{name}.weight", spec.hidden)
        self._bias = parameters.tensor(f"{name}.bias", spec.hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size], a new tensor."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class Layer:
    """Attention and MLP, each with its norm behind the residual."""

    def __init__(self, spec: ModelSpec, layer: int, prefix: str, parameters: Parameters) -> None:
        self._layer = layer
        self._heads = spec.heads
        self._act = ACTIVATIONS[spec.activation]
        size = spec.hidden

        def linear(name: str, inputs: int, parts: dict[str, int], bias: bool) -> Linear:
            return parameters.linear(f"{prefix}{name}.", inputs, parts, bias)

        qkv = {"query": size, "key": size, "value": size}
        self._qkv = linear("attention.self", size, qkv, spec.qkv_bias)
        self._out = linear("attention.output", size, {"dense": size}, spec.out_bias)
        self._after = LayerNorm(spec, f"{prefix}attention.output.LayerNorm", parameters)
        self._up = linear("intermediate", size, {"dense": spec.intermediate}, spec.mlp_bias)
        self._down = linear("output", spec.intermediate, {"dense": size}, spec.mlp_bias)
        self._norm = LayerNorm(spec, f"{prefix}output.LayerNorm", parameters)

    def __call__(self, ctx: ForwardContext, unturned: Rotation, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        heads = (self._heads, self._heads)
        seen = ctx.ops.attend(self._layer, self._qkv(x), heads, unturned, None)
        x = self._after(self._out(seen) + x)
        return self._norm(self._down(self._act(self._up(x))) + x)


class Head:
    """Classes of a text from its first token: classes(tanh(dense(x)))."""

    def __init__(self, spec: ModelSpec, parameters: Parameters) -> None:
        # BERT's first matrix is the base model's pooler; RoBERTa has both in its head.
        bert = spec.architecture.startswith("Bert")
        names = ("bert.pooler.", "", "classifier") if bert else ("classifier.", "classifier.", "out_proj")
        dense, classes, last = names
        self._dense = parameters.linear(dense, spec.hidden, {"dense": spec.hidden}, bias=True)
        self._classes = parameters.linear(classes, spec.hidden, {last: len(spec.pooling.labels)}, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, classes] of hidden states [n, hidden]."""
        return self._classes(self._dense(x).tanh()).float()


class Bert(CausalModel):
    """`CausalModel` in all but the name: every token sees the whole text."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        facts, parameters = spec.encoder, self._parameters
        assert facts is not None, "a spec of an encoder"
        prefix = "bert." if spec.architecture.startswith("Bert") else "roberta."

        def table(name: str, rows: int) -> torch.Tensor:
            return parameters.tensor(f"{prefix}embeddings.{name}_embeddings.weight", rows, spec.hidden)

        self.embedding = table("word", spec.vocab_size)
        self._positions = table("position", spec.max_position + facts.first_position)
        self._types = table("token_type", facts.token_types)
        self._norm = LayerNorm(spec, f"{prefix}embeddings.LayerNorm", parameters)
        self._layers = [
            Layer(spec, layer, f"{prefix}encoder.layer.{layer}.", parameters) for layer in range(spec.layers)
        ]
        self._head = Head(spec, parameters) if spec.task == "classify" else None

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.forward`. A model with one kind of segment takes a pair as one text."""
        facts = self.spec.encoder
        assert facts is not None
        x = ctx.ops.embed(self.embedding, ids) + self._positions[ctx.positions + facts.first_position]
        if ctx.segments is None or facts.token_types == 1:
            x = x + self._types[0]
        else:
            x = x + self._types[ctx.segments]
        x = self._norm(x)
        nothing = x.new_empty(len(x), 1, 0)  # of a head's width is rotated
        for layer in self._layers:
            x = layer(ctx, Rotation(nothing, nothing), x)
        return x

    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """float32 [n, classes] of hidden states [n, hidden]; an encoder without a head has none."""
        assert self._head is not None, "this encoder has no head"
        return self._head(hidden)
