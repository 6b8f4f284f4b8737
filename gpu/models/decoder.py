"""The decoder that all families share: embedding, layers, norm, head.

Which facts differ between families stands in `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from itertools import pairwise

import torch

from core.models import ModelSpec, Norms
from gpu.context import AuxStates, ForwardContext, Tail
from gpu.layers import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Mlp,
    Parameters,
    RmsNorm,
    Rope,
    SharedExpert,
    SparseMlp,
    unrotated,
)
from gpu.lora import Adaptable, LoraMatrix, LoraShape
from gpu.models.base import CausalModel
from gpu.ops.base import Matrix, Ops, Part, PendingExperts, Rotation
from gpu.quant.rows import FileRows
from gpu.shard import ALONE, COLUMN, Shard, slice_of

TABLE = "model.embed_tokens"


class Layer:
    """Attention and MLP, each behind a norm.

    The residual travels beside the activations, and each norm first adds what the part before it
    made: add and norm are one kernel where a device has one.
    """

    norm_names = ("input_layernorm", "post_attention_layernorm")

    def __init__(self, spec: ModelSpec, layer: int, parameters: Parameters, inputs: int = 0) -> None:
        """`inputs` as `Attention` takes it."""
        prefix = f"model.layers.{layer}."
        self.number, self._scale, self._partial = layer, spec.residual_scale, spec.ranks > 1
        self._first_norm, self._second_norm = (
            RmsNorm(spec, prefix + name, parameters) for name in self.norm_names
        )
        own = f"{prefix}self_attn."
        self.attention: Attention | LatentAttention | GatedDeltaNet
        if spec.linear is not None and layer in spec.linear.layers:
            self.attention = GatedDeltaNet(spec, spec.linear, layer, f"{prefix}linear_attn.", parameters)
        elif spec.latent is None:
            self.attention = Attention(spec, layer, own, parameters, inputs)
        else:
            self.attention = LatentAttention(spec, spec.latent, layer, own, parameters)
        self._mlp: Mlp | SparseMlp
        self._shared: SharedExpert | None = None
        if spec.moe is not None and layer in spec.moe.layers:
            self._mlp = SparseMlp(spec, spec.moe, f"{prefix}mlp.", parameters)
            if spec.moe.shared:
                self._shared = SharedExpert(spec, spec.moe, f"{prefix}mlp.", parameters)
        else:
            self._mlp = Mlp(spec, f"{prefix}mlp.", parameters)
        self.kind = (spec.window(layer), type(self._mlp), type(self.attention))
        """Layers of a kind launch the same kernels."""

    def attend(
        self, ctx: ForwardContext, rotation: Rotation, part: Part | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """Attention output of the heads for `residual` [n, hidden], to which `part`, the output of the layer
        before (None in the first layer), is added in place. Rows are independent from here on. A draft model
        reads the sum in `ctx.aux`, where the kernel of the norm stores it."""
        places = [] if ctx.aux is None else ctx.aux.places(self.number, len(residual))
        x = self._first_norm.before(ctx, part, residual, *places[:1])
        for again in places[1:]:
            again.copy_(places[0])
        return self.attention.attend(ctx, rotation, x)

    def transform(self, ctx: ForwardContext, found: torch.Tensor, residual: torch.Tensor) -> Part | None:
        """Output of the MLP for `residual` [n, hidden], to which the projection of what attention's heads
        `found` is added in place; None where the output is, too."""
        projected = self._scaled(ctx, self.attention.out.part(found, ctx.ops))
        x = self._second_norm.before(ctx, projected, residual)
        if self._shared is None:
            return self._scaled(ctx, self._mlp(ctx, x))
        x = ctx.ops.complete(x)  # for both, before one of them changes the residual
        made, own = self._mlp(ctx, x), self._shared(ctx, x)
        if not self._partial:
            residual.add_(own)
        elif isinstance(made, PendingExperts):
            made = made._replace(beside=own)
        else:
            made = ctx.ops.complete(made).add_(own)
        return self._scaled(ctx, made)

    def _scaled(self, ctx: ForwardContext, part: Part) -> Part:
        return part if self._scale == 1.0 else scaled(ctx.ops.complete(part), self._scale)


class PostNormLayer(Layer):
    """Attention and MLP, each in front of a norm of what it made.

    The norm adds that to the residual in one kernel, and what comes next reads the residual as it is.
    """

    norm_names = ("post_attention_layernorm", "post_feedforward_layernorm")

    def attend(
        self, ctx: ForwardContext, rotation: Rotation, part: Part | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """See `Layer.attend`; there is no `part`."""
        if ctx.aux is not None:
            for place in ctx.aux.places(self.number, len(residual)):
                place.copy_(residual)
        return self.attention.attend(ctx, rotation, residual)

    def transform(self, ctx: ForwardContext, found: torch.Tensor, residual: torch.Tensor) -> None:
        """See `Layer.transform`."""
        self._first_norm.add_to(ctx, residual, self.attention.out.part(found, ctx.ops))
        self._second_norm.add_to(ctx, residual, self._mlp(ctx, residual))


class BothNormLayer(Layer):
    """Attention and MLP, each with a norm on its input and another on its output."""

    norm_names = ("input_layernorm", "pre_feedforward_layernorm")

    def __init__(self, spec: ModelSpec, layer: int, parameters: Parameters, inputs: int = 0) -> None:
        super().__init__(spec, layer, parameters, inputs)
        self._norms_behind = [
            RmsNorm(spec, f"model.layers.{layer}.{name}", parameters) for name in PostNormLayer.norm_names
        ]

    def transform(self, ctx: ForwardContext, found: torch.Tensor, residual: torch.Tensor) -> None:
        """See `Layer.transform`."""
        of_attention, of_mlp = self._norms_behind
        of_attention.add_to(ctx, residual, self.attention.out.part(found, ctx.ops))
        of_mlp.add_to(ctx, residual, self._mlp(ctx, self._second_norm(ctx, None, residual)))


_LAYERS: Mapping[Norms, type[Layer]] = {"before": Layer, "behind": PostNormLayer, "both": BothNormLayer}


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`x` times `factor`, in place; most families have no factor, and no kernel for it."""
    return x if factor == 1.0 else x.mul_(factor)


def distinct_layers(kinds: Sequence[Hashable]) -> list[int]:
    """Layers that together launch every kernel of the model: the first occurrence of each pair of
    neighbouring kinds, and the last layer. A layer's norm depends on the output of the one before."""
    first = {pair: i for i, pair in reversed(list(enumerate(pairwise(kinds))))}
    return sorted({0, len(kinds) - 1} | {i + step for i in first.values() for step in (0, 1)})


class _TableLora:
    """What adapters add to the embedding.

    `Parameters` holds its method. One of the decoder, which holds `Parameters`, would make a cycle: a model
    that sleeps or is replaced would keep its weights until the garbage collector finds them, and the server
    freezes what is there at its start.
    """

    matrix: LoraMatrix | None = None

    def adapt(self, lora: LoraMatrix) -> None:
        """Add this in steps with adapters."""
        self.matrix = lora


class Decoder(CausalModel):
    """The Llama lineage: models that generate, those below their head, and those with one for classes."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
        table: FileRows | None = None,
        q4_layers: Container[str] = (),
    ) -> None:
        """`table`: the checkpoint's embedding, which stays in its file. `q4_layers`: see `Parameters`."""
        super().__init__(spec, dtype, device, shard)
        parameters, vocabulary = self._parameters, COLUMN._replace(total=spec.vocab_size)
        parameters.q4_layers = q4_layers
        own = slice_of(shard, (spec.vocab_rows, spec.hidden), vocabulary)
        if table is None:
            self.embedding = parameters.tensor(
                f"{TABLE}.weight", spec.vocab_rows, spec.hidden, split=vocabulary
            )
        else:
            self.embedding = table if shard.ranks == 1 else table.part(own.start, spec.vocab_rows)
        self._table_lora = _TableLora()
        slices = {} if shard.ranks == 1 else {TABLE: own.transposed}
        shape = LoraShape({TABLE: spec.hidden}, spec.vocab_rows, slices=slices)
        parameters.adaptable.append(Adaptable(shape, self._table_lora.adapt))
        self._norm = RmsNorm(spec, "model.norm", parameters)
        # Rounded as if it were multiplied into the table, which the head may share.
        self._table_scale = torch.tensor(spec.table_scale, dtype=dtype).item()
        kind = _LAYERS[spec.norms]
        self._layers = [kind(spec, layer, parameters) for layer in range(spec.layers)]
        heads = {
            "generate": {"lm_head": spec.vocab_rows},
            "classify": {"score": len(spec.pooling.labels)},
            "embed": {},
        }
        split = vocabulary if spec.task == "generate" else None
        self._head = parameters.linear("", spec.hidden, heads[spec.task], held=spec.held_tables, split=split)
        if table is not None:
            self._fill_head_alone()
        elif spec.tied and isinstance(self.embedding, torch.Tensor) and not spec.held_tables:
            self._head.matrix = Matrix(self.embedding)
            parameters.places.pop("lm_head.weight", None)
        self._rope = Rope(spec.rope, spec.rope_dim, dtype, device)
        self._window_rope: Rope | None = None
        if spec.window_rope is not None:
            self._window_rope = Rope(spec.window_rope, spec.head_dim, dtype, device)

    def _fill_head_alone(self) -> None:
        """Load an embedding that stays in its file into a tied head, and nowhere else."""
        spec, parameters = self.spec, self._parameters
        if not spec.tied or spec.task != "generate":
            parameters.pass_over(f"{TABLE}.weight", spec.vocab_size, spec.hidden)
            return
        parameters.rename("lm_head.weight", f"{TABLE}.weight")
        if spec.held_tables:
            parameters.rename("lm_head.weight_scale", f"{TABLE}.weight_scale")

    def forward(self, ctx: ForwardContext, ids: torch.Tensor) -> torch.Tensor:
        """See `CausalModel.forward`."""
        rotations = self._rotations(ctx)
        residual = scaled(ctx.ops.embed(self.embedding, ids, self._table_lora.matrix), self._table_scale)
        if ctx.embedded is not None:
            residual.index_copy_(0, ctx.embedded.rows, ctx.embedded.values.to(residual.dtype))
        residual = scaled(residual, self.spec.embedding_scale)
        part: Part | None = None
        aux, wanted = ctx.aux, ctx.wanted
        final = aux is not None and not aux.layers
        for layer in self._distinct(aux) if ctx.brief else self._layers:
            found = layer.attend(ctx, rotations[layer.number], part, residual)
            if wanted is not None and not final and layer is self._layers[-1]:
                # One row of a long prompt's chunk goes on, or none: a layer's output and MLP are saved.
                if ctx.tail is not None:
                    for place, rows in zip(ctx.tail, (found, residual), strict=True):
                        place.copy_(rows)
                found, residual = (rows.index_select(0, wanted) for rows in (found, residual))
                ctx = ForwardContext(ctx.positions, ctx.ops.for_samples())
            part = layer.transform(ctx, found, residual)
        hidden = self._norm(ctx, part, residual)
        if aux is not None and final:
            aux.out[: len(hidden)].copy_(hidden)
            hidden = hidden if wanted is None else hidden.index_select(0, wanted)
        return hidden

    @property
    def tail_widths(self) -> Sequence[int]:
        """Widths of the last layer's attention output and of the residual."""
        return self._layers[-1].attention.width, self.spec.hidden

    def finish(self, ctx: ForwardContext, tail: Tail) -> torch.Tensor:
        """See `CausalModel.finish`: the last layer's output projection and MLP, and the last norm."""
        found, residual = tail
        return self._norm(ctx, self._layers[-1].transform(ctx, found, residual), residual)

    def _rotations(self, ctx: ForwardContext) -> Mapping[int, Rotation]:
        """The rotation of each layer, by its number."""
        spec, rotation = self.spec, self._rope(ctx)
        found = dict.fromkeys(range(spec.layers), rotation)
        if self._window_rope is not None:
            found |= dict.fromkeys(spec.window_layers, self._window_rope(ctx))
        if spec.nope_layers:
            found |= dict.fromkeys(spec.nope_layers, unrotated(rotation))
        return found

    def _distinct(self, aux: AuxStates | None) -> list[Layer]:
        """The layers that together launch every kernel: one whose input is kept has another norm."""
        kept = () if aux is None else aux.layers
        kinds = [(layer.kind, layer.number in kept) for layer in self._layers]
        return [self._layers[i] for i in distinct_layers(kinds)]

    def logits(self, hidden: torch.Tensor, ops: Ops | None = None) -> torch.Tensor:
        """See `CausalModel.logits`."""
        found = scaled(self._head.to_float32(hidden, ops), self.spec.logits_scale)
        cap = self.spec.logits_cap
        return found.div_(cap).tanh_().mul_(cap) if cap else found
