"""The decoder that all families share: embedding, layers, norm, head.

Which facts differ between families stands in `ModelSpec`; a family's class overrides what is not a
number or a switch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch

from core.models import ModelSpec
from gpu.context import ForwardContext
from gpu.layers import Attention, Linear, Mlp, RmsNorm, Rope, SparseMlp
from gpu.layers.linear import Places
from gpu.ops.base import Part, Rotation


class Layer:
    """Attention and MLP, each behind a norm.

    The residual travels beside the activations, and each norm first adds what the part before it
    made: add and norm are one kernel where a device has one.
    """

    __slots__ = ("_after", "_attention", "_before", "mlp")

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        mlp: Mlp | SparseMlp,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._before = RmsNorm(spec.hidden, spec.norm_eps, dtype, device)
        self._attention = Attention(spec, layer, dtype, device)
        self._after = RmsNorm(spec.hidden, spec.norm_eps, dtype, device)
        self.mlp = mlp

    def attend(
        self, ctx: ForwardContext, rotation: Rotation, part: Part | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """What attention's heads find for `residual` [n, hidden], which is updated in place by `part`: what
        the layer before adds, None in the first layer. No row reads another behind this."""
        x = self._before(ctx, residual) if part is None else self._before.add(ctx, part, residual)
        return self._attention.attend(ctx, rotation, x)

    def transform(self, ctx: ForwardContext, found: torch.Tensor, residual: torch.Tensor) -> Part:
        """What the MLP adds to `residual` [n, hidden], which is updated in place by what attention makes of
        what its heads `found`."""
        x = self._attention.project(ctx, found)
        return self.mlp(ctx, self._after.add(ctx, x, residual))

    def seal(self) -> None:
        self._attention.seal()
        self.mlp.seal()

    def places(self, prefix: str) -> Places:
        return (
            self._before.places(f"{prefix}input_layernorm")
            | self._attention.places(f"{prefix}self_attn.")
            | self._after.places(f"{prefix}post_attention_layernorm")
            | self.mlp.places(f"{prefix}mlp.")
        )


def unlike(kinds: Sequence[Hashable]) -> list[int]:
    """Layers that launch together what all do: of each pair of neighbouring kinds the first, and the last
    layer. A layer's norm depends on what the one before adds."""
    first = {pair: i for i, pair in reversed(list(enumerate(pairwise(kinds))))}
    return sorted({0, len(kinds) - 1} | {i + step for i in first.values() for step in (0, 1)})


class Decoder:
    """`CausalModel` of the Llama lineage. Weights are uninitialised until filled.

    Owner: launch thread, once built.
    """

    __slots__ = ("_embedding", "_head", "_layers", "_norm", "_rope", "_unlike", "spec")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self._embedding = torch.empty(spec.vocab_size, spec.hidden, dtype=dtype, device=device)
        self._layers = [
            Layer(spec, layer, self.make_mlp(layer, dtype, device), dtype, device)
            for layer in range(spec.layers)
        ]
        kinds = [(spec.window(i), type(layer.mlp)) for i, layer in enumerate(self._layers)]
        self._unlike = [self._layers[i] for i in unlike(kinds)]
        self._norm = RmsNorm(spec.hidden, spec.norm_eps, dtype, device)
        self._head = Linear(spec.hidden, {"lm_head": spec.vocab_size}, dtype, device)
        if spec.tied:
            self._head.weight = self._embedding
        self._rope = Rope(spec.rope, spec.head_dim, dtype, device)

    def make_mlp(self, layer: int, dtype: torch.dtype, device: torch.device) -> Mlp | SparseMlp:
        """The MLP of one layer."""
        return Mlp(self.spec, dtype, device)

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.forward`."""
        rotation = self._rope(ctx)
        residual = ctx.ops.embed(self._embedding, ids)
        if ctx.embedded is not None:
            residual.index_copy_(0, ctx.embedded.rows, ctx.embedded.values.to(residual.dtype))
        part: Part | None = None
        for layer in self._unlike if ctx.brief else self._layers:
            found = layer.attend(ctx, rotation, part, residual)
            if ctx.wanted is not None and layer is self._layers[-1]:
                # Of a long prompt's chunk one row goes on, or none: a layer's output and MLP are saved.
                found, residual = (rows.index_select(0, ctx.wanted) for rows in (found, residual))
                ctx = ForwardContext(ctx.positions, ctx.ops.for_samples())
            part = layer.transform(ctx, found, residual)
        assert part is not None
        return self._norm.add(ctx, part, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.logits`."""
        return self._head.wide(hidden)

    def seal(self) -> None:
        """See `CausalModel.seal`. A tied head becomes a copy where sealing changes the layout."""
        for layer in self._layers:
            layer.seal()
        self._head.seal()

    def places(self) -> Places:
        """See `CausalModel.places`. A tied head has no name of its own."""
        found = {"model.embed_tokens.weight": self._embedding} | self._norm.places("model.norm")
        for index, layer in enumerate(self._layers):
            found |= layer.places(f"model.layers.{index}.")
        return found if self.spec.tied else found | self._head.places("")
