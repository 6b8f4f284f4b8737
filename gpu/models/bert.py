"""The encoders of the BERT lineage (Devlin et al., arXiv 1810.04805): BERT, RoBERTa, XLM-RoBERTa.

They differ in where positions begin, in how many kinds of segments there are and in the names of the
head's matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers import Linear
from gpu.layers.linear import Places
from gpu.ops.base import Rotation
from gpu.ops.plain import ACTIVATIONS


class LayerNorm:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last axis; both [size]."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = spec.norm_eps
        self._weight = torch.empty(spec.hidden, dtype=dtype, device=device)
        self._bias = torch.empty(spec.hidden, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size], a new tensor."""
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def places(self, name: str) -> Places:
        return {f"{name}.weight": self._weight, f"{name}.bias": self._bias}


class Layer:
    """Attention and MLP, each with its norm behind the residual."""

    __slots__ = ("_act", "_after", "_down", "_heads", "_layer", "_norm", "_out", "_qkv", "_up")

    def __init__(self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layer = layer
        self._heads = spec.heads
        self._act = ACTIVATIONS[spec.activation]
        size = spec.hidden
        parts = {"query": size, "key": size, "value": size}
        self._qkv = Linear(size, parts, dtype, device, spec.qkv_bias)
        self._out = Linear(size, {"dense": size}, dtype, device, spec.out_bias)
        self._after = LayerNorm(spec, dtype, device)
        self._up = Linear(size, {"dense": spec.intermediate}, dtype, device, spec.mlp_bias)
        self._down = Linear(spec.intermediate, {"dense": size}, dtype, device, spec.mlp_bias)
        self._norm = LayerNorm(spec, dtype, device)

    def __call__(self, ctx: ForwardContext, unturned: Rotation, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        heads = (self._heads, self._heads)
        seen = ctx.ops.attend(self._layer, self._qkv(x), heads, unturned, None)
        x = self._after(self._out(seen) + x)
        return self._norm(self._down(self._act(self._up(x))) + x)

    def seal(self) -> None:
        for linear in (self._qkv, self._out, self._up, self._down):
            linear.seal()

    def places(self, prefix: str) -> Places:
        return (
            self._qkv.places(f"{prefix}attention.self.")
            | self._out.places(f"{prefix}attention.output.")
            | self._after.places(f"{prefix}attention.output.LayerNorm")
            | self._up.places(f"{prefix}intermediate.")
            | self._down.places(f"{prefix}output.")
            | self._norm.places(f"{prefix}output.LayerNorm")
        )


class Head:
    """Classes of a text from its first token: classes(tanh(dense(x)))."""

    __slots__ = ("_classes", "_dense", "_names")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        # BERT's first matrix is the base model's pooler; RoBERTa has both in its head.
        bert = spec.architecture.startswith("Bert")
        self._names = ("bert.pooler.", "") if bert else ("classifier.", "classifier.")
        last = "classifier" if bert else "out_proj"
        self._dense = Linear(spec.hidden, {"dense": spec.hidden}, dtype, device, bias=True)
        self._classes = Linear(spec.hidden, {last: len(spec.pooling.labels)}, dtype, device, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [n, classes] of hidden states [n, hidden]."""
        return self._classes(self._dense(x).tanh()).float()

    def seal(self) -> None:
        self._dense.seal()
        self._classes.seal()

    def places(self) -> Places:
        dense, classes = self._names
        return self._dense.places(dense) | self._classes.places(classes)


class Bert:
    """`CausalModel` in all but the name: every token sees the whole text. Weights are uninitialised until
    filled.

    Owner: launch thread, once built.
    """

    __slots__ = ("_head", "_layers", "_norm", "_positions", "_prefix", "_types", "_words", "spec")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        facts = spec.encoder
        assert facts is not None, "a spec of an encoder"
        self.spec = spec
        self._prefix = "bert." if spec.architecture.startswith("Bert") else "roberta."

        def table(rows: int) -> torch.Tensor:
            return torch.empty(rows, spec.hidden, dtype=dtype, device=device)

        self._words = table(spec.vocab_size)
        self._positions = table(spec.max_position + facts.first_position)
        self._types = table(facts.token_types)
        self._norm = LayerNorm(spec, dtype, device)
        self._layers = [Layer(spec, layer, dtype, device) for layer in range(spec.layers)]
        self._head = Head(spec, dtype, device) if spec.task == "classify" else None

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.forward`. A model with one kind of segment takes a pair as one text."""
        facts = self.spec.encoder
        assert facts is not None
        x = ctx.ops.embed(self._words, ids) + self._positions[ctx.positions + facts.first_position]
        if ctx.segments is None or facts.token_types == 1:
            x = x + self._types[0]
        else:
            x = x + self._types[ctx.segments]
        x = self._norm(x)
        nothing = x.new_empty(len(x), 1, 0)  # of a head's width is rotated
        for layer in self._layers:
            x = layer(ctx, Rotation(nothing, nothing), x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, classes] of hidden states [n, hidden]; an encoder without a head has none."""
        assert self._head is not None, "this encoder has no head"
        return self._head(hidden)

    def seal(self) -> None:
        """See `CausalModel.seal`."""
        for layer in self._layers:
            layer.seal()
        if self._head is not None:
            self._head.seal()

    def places(self) -> Places:
        """See `CausalModel.places`."""
        tables = f"{self._prefix}embeddings."
        found = {
            f"{tables}word_embeddings.weight": self._words,
            f"{tables}position_embeddings.weight": self._positions,
            f"{tables}token_type_embeddings.weight": self._types,
        } | self._norm.places(f"{tables}LayerNorm")
        for index, layer in enumerate(self._layers):
            found |= layer.places(f"{self._prefix}encoder.layer.{index}.")
        return found if self._head is None else found | self._head.places()
