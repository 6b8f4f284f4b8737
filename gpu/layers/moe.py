"""Routed experts: a router, and the weights of all of them in two tensors."""

from __future__ import annotations

from itertools import product

import torch

from core.models import Int4, ModelSpec, MoeSpec
from core.models.quant import MXFP4_GROUP
from core.models.spec import W8A8, Fp8
from gpu.context import ForwardContext
from gpu.experts import Choice, Experts, Packed
from gpu.layers.linear import Linear, empty_matrix, gated_mlp
from gpu.layers.parameters import WORDS, Parameters
from gpu.lora import Adaptable, LoraMatrix, LoraShape
from gpu.ops.base import Input, Part
from gpu.quant import int8, mxfp4, q4
from gpu.quant.int4 import WORD
from gpu.quant.scaled import INT8, dtype_of, scale_shape
from gpu.shard import COLUMN, ROW


def expert_scales(spec: ModelSpec, moe: MoeSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the scales of w13 and w2, [experts, ...], where these are held in 8 bits (`spec.fp8`,
    `spec.w8a8`): those of all layers, since their kernels are cut for one format."""
    held, parts = spec.eight_bits, ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.{layer}.mlp.experts.0.{part}" for layer in moe.layers for part in parts]
    if not isinstance(held, str) and not all(map(held.has, names)):
        return None
    up = scale_shape(held, [moe.intermediate] * 2, spec.hidden)
    down = scale_shape(held, [spec.hidden], moe.intermediate)
    return ((moe.experts, *up), (moe.experts, *down)) if up and down else None


def experts_held(spec: ModelSpec, moe: MoeSpec) -> Fp8 | W8A8 | Packed:
    """Return the format of the experts, "" for the dtype of the computation. Layers whose experts are
    not in 4 bits use tile configs tuned for 4 bits."""
    if spec.mxfp4 is not None:
        return "mxfp4"
    if spec.int4 is not None:
        names = (f"model.layers.{layer}.mlp.experts." for layer in moe.layers)
        return "int4" if any(_are_int4(spec.int4, moe, name) for name in names) else ""
    return spec.eight_bits if expert_scales(spec, moe) else ""


class SparseMlp:
    """The best `per_token` experts by the router's scores (`Choice`), weighted sum of their MLPs.

    The experts lie as grouped GEMM kernels want them (see `Experts`).
    """

    def __init__(self, spec: ModelSpec, moe: MoeSpec, prefix: str, parameters: Parameters) -> None:
        self._router = parameters.linear(prefix, spec.hidden, {"gate": moe.experts}, moe.bias)
        self._exact = moe.exact_router
        w13, w2, scales = _weights(spec, moe, f"{prefix}experts.", parameters)
        self._experts = Experts(
            w13=w13,
            w2=w2,
            top_k=moe.per_token,
            renormalise=moe.norm_topk,
            activation=spec.activation,
            scales=scales,
            biases=_biases(spec, moe, f"{prefix}experts.", parameters) if moe.bias else None,
            clamped=moe.clamped,
            choice=_choice(moe, prefix, parameters),
        )
        if w13.dtype == torch.uint8:
            parameters.seals.append(self._pack)
        elif spec.int8:
            parameters.seals.append(self._pack_int8)
        _place(self._experts, f"{prefix}experts.", parameters)
        if moe.stacked:
            return  # PEFT's adapters of such tensors have B in the order of their outputs, which differs here
        slices = {
            f"{prefix}experts.{part}_proj": parameters.slices[name]
            for part in ("gate", "up", "down")
            if (name := f"{prefix}experts.0.{part}_proj.weight") in parameters.slices
        }
        width = moe.intermediate
        outer, inner = {f"{prefix}experts.{part}_proj": width for part in ("gate", "up")}, spec.hidden
        last = {f"{prefix}experts.down_proj": inner}
        parameters.adaptable += [
            Adaptable(LoraShape(outer, inner, moe.experts, slices), self._adapt_up),
            Adaptable(LoraShape(last, width, moe.experts, slices), self._adapt_down),
        ]

    def _pack(self) -> None:
        """Lay MXFP4 weights out for kernels."""
        own = self._experts
        assert own.scales is not None, "MXFP4 without scales"
        (w13, s13), (w2, s2) = mxfp4.pack_all(own.w13, own.scales[0]), mxfp4.pack_all(own.w2, own.scales[1])
        self._experts = own._replace(w13=w13, w2=w2, scales=(s13, s2))
        del own
        if w13.is_cuda:
            torch.cuda.empty_cache()  # else the free memory that is measured next lacks the former layout's

    def _pack_int8(self) -> None:
        """Lay weights of 8 or 4 bits out for a CPU, an expert at a time."""
        own = self._experts
        assert own.scales is not None, "8 or 4 bits without scales"
        up, down = (
            list(map(int8.pack if weight.dtype == INT8 else q4.pack, weight, scale))
            for weight, scale in zip((own.w13, own.w2), own.scales, strict=True)
        )
        empty = own.w13.new_empty(0)
        self._experts = own._replace(w13=empty, w2=empty, matrices=(up, down))

    def _adapt_up(self, lora: LoraMatrix) -> None:
        self._experts = self._experts._replace(lora=self._experts.lora._replace(up=lora))

    def _adapt_down(self, lora: LoraMatrix) -> None:
        self._experts = self._experts._replace(lora=self._experts.lora._replace(down=lora))

    def __call__(self, ctx: ForwardContext, x: Input) -> Part:
        """Return the output [n, hidden] for `x` [n, hidden], or experts that run with the next norm."""
        if self._exact:
            x = ctx.ops.complete(x)
            logits = self._router.to_float32(x, ctx.ops)
        else:
            logits, x = self._router.router_logits(x, ctx.ops)
        if ctx.routes is not None:
            ctx.routes.append(ctx.ops.routes(logits, self._experts))
        return ctx.ops.experts(x, logits, self._experts)


def _weights(
    spec: ModelSpec, moe: MoeSpec, prefix: str, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """w13, w2 and scales of `Experts`, uninitialised.

    They are left plain when the weights are final, but for 8 and 4 bits on a CPU: packing 3 × experts small
    matrices a layer would lose the one tensor that grouped kernels want."""
    dtype, device, scales, share = parameters.dtype, parameters.device, None, 1
    sizes = (2 * moe.intermediate, spec.hidden), (spec.hidden, moe.intermediate)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(moe.experts, *shape, dtype=dtype, device=device)

    if shapes := expert_scales(spec, moe):
        up, down = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
        dtype, scales = dtype_of(spec.eight_bits), (up, down)
    elif spec.int8:
        w13, s13 = _coarse(moe, sizes[0], ("gate", "up"), prefix, parameters)
        w2, s2 = _coarse(moe, sizes[1], ("down",), prefix, parameters)
        return w13, w2, (s13, s2)
    elif spec.mxfp4 is not None and spec.mxfp4.has(prefix.removesuffix(".")):
        up, down = (empty((outputs, inputs // MXFP4_GROUP), torch.uint8) for outputs, inputs in sizes)
        dtype, scales, share = torch.uint8, (up, down), 2
    elif spec.int4 is not None and _are_int4(spec.int4, moe, prefix):
        group = spec.int4.group
        up, down = (empty((inputs // (group or inputs), outputs, 2), dtype) for outputs, inputs in sizes)
        dtype, scales, share = torch.int16, (up, down), WORD
    w13, w2 = (empty((outputs, inputs // share), dtype) for outputs, inputs in sizes)
    return w13, w2, scales


def _coarse(
    moe: MoeSpec, size: tuple[int, int], parts: tuple[str, ...], prefix: str, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [experts, outputs, ...] of 8 or 4 bits and their scales, on a CPU."""
    (outputs, inputs), count = size, moe.experts
    names = [f"{prefix}{expert}.{part}_proj" for expert, part in product(range(count), parts)]
    held = parameters.held("int8", names, inputs)
    weight, scale = empty_matrix([outputs] * count, inputs, held, parameters.dtype, parameters.device)
    assert scale is not None, "8 or 4 bits without scales"
    return weight.view(count, outputs, -1), scale.view(count, outputs, *scale.shape[1:])


def _are_int4(int4: Int4, moe: MoeSpec, prefix: str) -> bool:
    """Whether all experts of a layer, whose names begin with `prefix`, are quantised."""
    parts = product(range(moe.experts), ("gate", "up", "down"))
    return all(int4.has(f"{prefix}{expert}.{part}_proj") for expert, part in parts)


def _place(own: Experts, prefix: str, parameters: Parameters) -> None:
    """The places of each expert's gate, up and down, whose names begin with `prefix`."""
    kinds = {"weight": (own.w13, own.w2)}
    if own.scales is not None:
        up, down = own.scales
        kinds["weight_scale"] = (up.transpose(1, 2), down.transpose(1, 2)) if own.is_int4 else (up, down)
    for expert, part in product(range(len(own.w13)), ("gate", "up", "down")):
        name, split = f"{prefix}{expert}.{part}_proj", ROW if part == "down" else COLUMN
        views = {kind: _part(up[expert], down[expert], part) for kind, (up, down) in kinds.items()}
        if views["weight"].dtype in WORDS:
            parameters.place_words(f"{name}.weight", views["weight"], views["weight_scale"], split)
            continue
        for kind, view in views.items():
            parameters.place(f"{name}.{kind}", view, split)


def _part(up: torch.Tensor, down: torch.Tensor, part: str) -> torch.Tensor:
    """What gate, up or down has of an expert's `up`, gate over up, and `down`."""
    half = len(up) // 2
    return {"gate": up[:half], "up": up[half:], "down": down}[part]


def _choice(moe: MoeSpec, prefix: str, parameters: Parameters) -> Choice:
    """`Experts.choice`, with its bias placed."""
    bias = None
    if moe.scores == "sigmoid":
        name = f"{prefix}gate.e_score_correction_bias"
        bias = parameters.tensor(name, moe.experts, dtype=torch.float32)
    return Choice(bias is not None, bias, moe.groups, moe.top_groups, moe.scale)


def _biases(
    spec: ModelSpec, moe: MoeSpec, prefix: str, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Experts.biases`, placed."""
    width, dtype, device = moe.intermediate, parameters.dtype, parameters.device
    sizes = 2 * width, spec.hidden
    up, down = (torch.empty(moe.experts, size, dtype=dtype, device=device) for size in sizes)
    first = parameters.shard.rank == 0
    for expert in range(moe.experts):
        own = f"{prefix}{expert}."
        parameters.place(f"{own}gate_proj.bias", up[expert, :width], COLUMN)
        parameters.place(f"{own}up_proj.bias", up[expert, width:], COLUMN)
        if first:
            parameters.place(f"{own}down_proj.bias", down[expert])
        else:
            parameters.pass_over(f"{own}down_proj.bias", spec.hidden)
    return up, down if first else None


class SharedExpert:
    """An MLP for every token, multiplied by sigmoid(gate(x)) where it has a gate.

    Ranks divide it as they do the routed experts: each makes a partial sum.
    """

    def __init__(self, spec: ModelSpec, moe: MoeSpec, prefix: str, parameters: Parameters) -> None:
        self._activation, width = spec.activation, moe.shared
        own = f"{prefix}shared_expert." if moe.shared_gate else f"{prefix}shared_experts."
        up = {"gate_proj": width, "up_proj": width}
        down = {"down_proj": spec.hidden}
        self._gate_up = parameters.linear(own, spec.hidden, up, held=spec.held, split=COLUMN)
        self._down = parameters.linear(own, width, down, held=spec.held, split=ROW)
        self._gate: Linear | None = None
        if moe.shared_gate:
            self._gate = parameters.linear(prefix, spec.hidden, {"shared_expert_gate": 1})

    def __call__(self, ctx: ForwardContext, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, hidden]."""
        found = ctx.ops.complete(gated_mlp(x, self._gate_up, self._down, ctx.ops, self._activation))
        return found if self._gate is None else found.mul_(self._gate(x, ctx.ops).sigmoid())
