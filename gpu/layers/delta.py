"""Linear attention by the gated delta rule: projections, convolution, states, gated norm, output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core.models import LinearSpec, ModelSpec
from gpu.context import ForwardContext
from gpu.layers.parameters import Parameters
from gpu.ops.base import Input, Rotation
from gpu.shard import COLUMN, ROW
from gpu.state.recurrent import DeltaInputs

GATED_NORM = ".linear_attn.norm.weight"
"""End of the name of a weight that is not less by `ModelSpec.norm_offset`, as those of other norms are."""


class GatedDeltaNet:
    """One layer's linear attention, in the place of `Attention`. Its states are those of `ctx.states`."""

    def __init__(
        self, spec: ModelSpec, linear: LinearSpec, layer: int, prefix: str, parameters: Parameters
    ) -> None:
        self._layer, self._linear, self._eps = spec.place(layer), linear, spec.norm_eps
        self.width = linear.value_size
        heads, value = linear.value_heads, linear.value_size
        sizes = {"q": linear.key_size, "k": linear.key_size, "v": value}
        apart = parameters.shard.ranks > 1  # of each of queries, keys and values a rank has a part
        wide, narrow = {"in_proj_qkvz": linear.channels + value}, {"in_proj_ba": 2 * heads}
        if not linear.mixed:
            wide = {f"in_proj_{part}": size for part, size in sizes.items()}
            wide = (wide if apart else {"in_proj_qkv": linear.channels}) | {"in_proj_z": value}
            narrow = {"in_proj_b": heads, "in_proj_a": heads}
        self._wide = parameters.linear(prefix, spec.hidden, wide, held=spec.held, split=COLUMN)
        self._narrow = parameters.linear(prefix, spec.hidden, narrow, split=COLUMN)
        self.out = parameters.linear(prefix, value, {"out_proj": spec.hidden}, held=spec.held, split=ROW)
        dtype, device = parameters.dtype, parameters.device
        conv = torch.empty(linear.channels, 1, linear.kernel, dtype=dtype, device=device)
        views = torch.split(conv, [*sizes.values()]) if apart else (conv,)
        for name, view in zip(("_q", "_k", "_v") if apart else ("",), views, strict=True):
            parameters.place(f"{prefix}conv1d{name}.weight", view, COLUMN)
        self._conv = conv[:, 0]
        self._decay, self._bias = (
            parameters.tensor(prefix + name, heads, split=COLUMN, dtype=torch.float32)
            for name in ("A_log", "dt_bias")
        )
        self._norm = parameters.tensor(f"{prefix}norm.weight", linear.value_dim)

    def attend(self, ctx: ForwardContext, rotation: Rotation, x: Input) -> torch.Tensor:
        """Output of the heads for `x` [n, hidden]: [n, value_heads * value_dim]. It has no positions."""
        assert ctx.states is not None, "linear attention in a step without states"
        wide, narrow = self._wide(x, ctx.ops), self._narrow(x, ctx.ops)
        qkv, z, b, a = self._apart(wide, narrow)
        decay = -self._decay.exp() * F.softplus(a.float() + self._bias)
        inputs = DeltaInputs(qkv, decay, b.float().sigmoid(), self._conv, self._linear)
        found = ctx.states.mix(self._layer, inputs)
        normed = F.rms_norm(found.float(), found.shape[-1:], eps=self._eps).to(found.dtype) * self._norm
        gated = normed * F.silu(z.float().view_as(found))
        return gated.to(qkv.dtype).flatten(1)

    def _apart(self, wide: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values together [n, channels], the gate of the output [n, value_size], and what
        `beta` and the decay are made of [n, value_heads]."""
        linear = self._linear
        if not linear.mixed:
            return (
                *torch.split(wide, [linear.channels, linear.value_size], -1),
                *torch.split(narrow, linear.value_heads, -1),
            )
        heads, each = linear.key_heads, linear.value_heads // linear.key_heads
        sizes = [linear.key_dim, linear.key_dim, each * linear.value_dim, each * linear.value_dim]
        *qkv, z = (part.flatten(1) for part in torch.split(wide.view(len(wide), heads, -1), sizes, -1))
        b, a = (part.flatten(1) for part in torch.split(narrow.view(len(wide), heads, -1), each, -1))
        return torch.cat(qkv, -1), z, b, a
