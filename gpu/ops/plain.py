"""The operations in plain torch: what a CPU runs, and what the kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import ClampedGate
from gpu.adapters import kernels
from gpu.attention.backend import TorchBackend
from gpu.experts import Choice, Experts
from gpu.lora import LoraMatrix, LoraRows
from gpu.ops.base import (
    HeadNorms,
    Input,
    LatentNorm,
    Matrix,
    PairNorms,
    Part,
    PendingProduct,
    Rotation,
    WideNorms,
)
from gpu.quant import int4, int8, mxfp4
from gpu.quant.numbers import number
from gpu.quant.rows import Table
from gpu.quant.scaled import INT8, integer_sums, quantise, quantise_groups, restore
from gpu.state.view import StepView

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}

TINY = 1e-20
"""Added to the sum that weights are divided by: sigmoids may all be 0."""


class TorchOps:
    """`Ops` on any device that torch has kernels for. `attention` is planned for the step of `view`.

    Owner: launch thread, for one step.
    """

    def __init__(self, view: StepView, attention: TorchBackend, rows: LoraRows | None = None) -> None:
        """`rows` have the adapters of the step, None for those of the view's tokens."""
        self._view, self._attention = view, attention
        self._rows = view.adapters.tokens if rows is None and view.adapters is not None else rows

    def for_samples(self) -> TorchOps:
        """See `Ops.for_samples`. Without padding and adapters nothing differs."""
        adapters = self._view.adapters
        return self if adapters is None else TorchOps(self._view, self._attention, adapters.samples)

    def embed(self, table: Table, ids: Tensor, lora: LoraMatrix | None = None) -> Tensor:
        """See `Ops.embed`."""
        found = table[ids]
        if lora is not None and self._rows is not None:
            kernels.embed(ids, lora, self._rows, found)
        return found

    def embed_beside(self, table: Table, ids: Tensor, hidden: Tensor, norms: PairNorms | None) -> Tensor:
        """See `Ops.embed_beside`."""
        pair = [table[ids], hidden]
        if norms is not None:
            *weights, eps = norms
            pair = [_normed(x, w, eps) for x, w in zip(pair, weights, strict=True)]
        return torch.cat(pair, dim=-1)

    def rotation(self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
        """See `Ops.rotation`."""
        return turn(positions.float()[:, None] * frequencies, scale, dtype)

    def add_rms_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_rms_norm`."""
        if part is not None:
            residual.add_(self.complete(part))
        if keep is not None:
            keep.copy_(residual)
        return _normed(residual, weight, eps)

    def add_then_norm(
        self, part: Part | None, residual: Tensor, weight: Tensor, eps: float, keep: Tensor | None = None
    ) -> Tensor:
        """See `Ops.add_then_norm`."""
        return self.add_rms_norm(part, residual, weight, eps, keep)

    def complete(self, pending: Part | Input) -> Tensor:
        """See `Ops.complete`. These operations leave neither norms nor experts pending."""
        if isinstance(pending, PendingProduct):
            return self.linear(pending.x, pending.matrix)
        assert isinstance(pending, Tensor)
        return pending

    def add_normed(self, part: Part, residual: Tensor, weight: Tensor, eps: float) -> None:
        """See `Ops.add_normed`."""
        residual.add_(_normed(self.complete(part), weight, eps))

    def mean_squares(self, qkv: Tensor, norms: WideNorms) -> Tensor:
        """See `Ops.mean_squares`."""
        return torch.stack([x.float().square().mean(-1) for x in _wide(qkv, norms)], dim=-1)

    def norm_wide(self, qkv: Tensor, norms: WideNorms, means: Tensor | None = None) -> None:
        """See `Ops.norm_wide`."""
        *weights, eps = norms
        scales = torch.rsqrt((self.mean_squares(qkv, norms) if means is None else means) + eps)
        for x, weight, scale in zip(_wide(qkv, norms), weights, scales.unbind(-1), strict=True):
            x.copy_(x.float() * scale[:, None] * weight)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: tuple[int, int],
        rotation: Rotation,
        norms: HeadNorms | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.attend`. Queries and keys lie side by side, so rope turns both in one go, and so do
        keys and values, which the pool takes as they lie."""
        q_heads, kv_heads = heads
        n, turned = len(qkv), q_heads + kv_heads
        x = qkv.view(n, turned + kv_heads, -1)
        if norms is not None:
            q_weight, k_weight, eps = norms
            x[:, :q_heads] = _normed(x[:, :q_heads], q_weight, eps)
            x[:, q_heads:turned] = _normed(x[:, q_heads:turned], k_weight, eps)
        rotate(x[:, :turned], rotation)
        self._attention.store(layer, x[:, q_heads:].view(n, 2, kv_heads, -1))
        return self._attention.attend(layer, x[:, :q_heads], self._view, sinks)

    def attend_latent(
        self, layer: int, q: Tensor, turned: Tensor, kv: Tensor, rotation: Rotation, norm: LatentNorm
    ) -> Tensor:
        """See `Ops.attend_latent`."""
        rank = len(norm.weight)
        latent, key = kv[:, :rank], kv[:, None, rank:]
        latent.copy_(_normed(latent, norm.weight, norm.eps))
        if norm.interleaved:
            for x in (turned, key):
                x.copy_(torch.cat([x[..., ::2], x[..., 1::2]], dim=-1))
        q[..., rank:] = turned
        rotate(q[..., rank:], rotation)
        rotate(key, rotation)
        self._attention.store(layer, kv[:, None, None])
        return self._attention.attend(layer, q, self._view)

    def store(
        self, layer: int, kv: Tensor, kv_heads: int, rotation: Rotation, norms: HeadNorms | None
    ) -> None:
        """See `Ops.store`."""
        x = kv.view(len(kv), 2, kv_heads, -1)
        if norms is not None:
            _, k_weight, eps = norms
            x[:, 0] = _normed(x[:, 0], k_weight, eps)
        rotate(x[:, 0], rotation)
        self._attention.store(layer, x)

    def linear(self, x: Input, matrix: Matrix) -> Tensor:
        """See `Ops.linear`."""
        x, (weight, bias, scale, lora) = self.complete(x), matrix
        if scale is not None and matrix.is_int4:
            weight, scale = int4.restore(weight, scale).to(x.dtype), None
        out = F.linear(x, weight, bias) if scale is None else product(x, weight, scale, bias)
        return self.add_lora(x, lora, out)

    def add_lora(self, x: Tensor, lora: LoraMatrix | None, y: Tensor) -> Tensor:
        """See `Ops.add_lora`."""
        if lora is not None and self._rows is not None:
            kernels.expand(kernels.shrink(x, lora, self._rows), lora, self._rows, y)
        return y

    def gated_linear(self, x: Input, matrix: Matrix, activation: str) -> Tensor:
        """See `Ops.gated_linear`."""
        return self.gate(self.linear(x, matrix), activation)

    def gate(self, both: Tensor, activation: str) -> Tensor:
        """See `Ops.gate`."""
        return gate(both, activation)

    def router_logits(self, x: Input, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """See `Ops.router_logits`."""
        return self.linear(x, matrix), self.complete(x)

    def experts(self, x: Tensor, logits: Tensor, experts: Experts) -> Part:
        """See `Ops.experts`."""
        return run_experts(x, logits, experts, self._rows)

    def routes(self, logits: Tensor, experts: Experts) -> Tensor:
        """See `Ops.routes`."""
        return route(logits, experts)[1]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, in x's dtype. In float32 by fewer operations than torch's, since a CPU
    waits for each: at 1 x 576 10.6 us for 15.3 in a loop. In a step, whose weights evict torch's code from
    the core's cache, torch's took 42."""
    if x.dtype == weight.dtype == torch.float32:
        means = (x * x).sum(-1, keepdim=True)
        device = x.device
        means = torch.addcmul(number(eps, device), means, number(1 / x.shape[-1], device))
        return (x * means.rsqrt_()).mul_(weight)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def _wide(qkv: Tensor, norms: WideNorms) -> tuple[Tensor, Tensor]:
    """Views of all queries [n, heads * head_dim] and of all keys [n, kv_heads * head_dim]."""
    q_size, k_size = len(norms[0]), len(norms[1])
    return qkv[:, :q_size], qkv[:, q_size : q_size + k_size]


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Ops.linear`: with a scale."""
    if weight.dtype == INT8:
        numbers, by = quantise(x, INT8)
        out = integer_sums(numbers, weight).float() * by[:, None] * scale
    else:
        numbers, by = quantise(x) if scale.dim() == 1 else quantise_groups(x)
        out = F.linear(restore(numbers, by), restore(weight, scale))
    return (out if bias is None else out + bias.float()).to(x.dtype)


def turn(angles: Tensor, scale: float, dtype: torch.dtype) -> Rotation:
    """The rotation by float32 `angles` [n, rotary_dim / 2]."""
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    full_cos, full_sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return Rotation(full_cos.to(dtype).unsqueeze(1), full_sin.to(dtype).unsqueeze(1))


def rotate(x: Tensor, rotation: Rotation) -> None:
    """Rotate the first rotary_dim of every head of `x` [n, heads, head_dim], in place: x · cos +
    roll(x, half) · sin, three kernels for all heads."""
    cos, sin = rotation
    dim = cos.shape[-1]
    part = x if dim == x.shape[-1] else x[..., :dim]
    turned = torch.roll(part, dim // 2, -1)
    part.mul_(cos).addcmul_(turned, sin)


def gate(both: Tensor, activation: str) -> Tensor:
    """activation(first half) · second half of [n, 2 * width], [n, width]."""
    width = both.shape[-1] // 2
    return ACTIVATIONS[activation](both[:, :width]).mul_(both[:, width:])


def _clamped_gate(both: Tensor, clamped: ClampedGate) -> Tensor:
    """`gate` for experts with clamped gate and up."""
    inner, up = both.chunk(2, -1)
    inner = inner.clamp(max=clamped.limit)
    up = up.clamp(-clamped.limit, clamped.limit) + 1
    return (inner * clamped.alpha).sigmoid_().mul_(inner).mul_(up)


def run_experts(x: Tensor, logits: Tensor, experts: Experts, rows: LoraRows | None = None) -> Tensor:
    """Tokens grouped by expert, a loop over the experts that were hit: [n, hidden]. Waits for the device
    to learn which those are. `rows` have adapters."""
    weights, chosen = route(logits, experts)
    up, down = experts.scales or (None, None)
    up_bias, down_bias = experts.biases or (None, None)
    w13, w2 = experts.matrices or (experts.w13, experts.w2)
    both = _by_expert(x, chosen, w13, up, up_bias)
    if rows is not None:
        _add_to_pairs(x, chosen, experts.lora.up, rows, both)
    hidden = _clamped_gate(both, clamped) if (clamped := experts.clamped) else gate(both, experts.activation)
    parts = _by_expert(hidden, chosen, w2, down, down_bias)
    if rows is not None:
        _add_to_pairs(hidden, chosen, experts.lora.down, rows, parts)
    return (parts.view(*weights.shape, parts.shape[1]) * weights.unsqueeze(2)).sum(1).to(x.dtype)


def _add_to_pairs(x: Tensor, chosen: Tensor, lora: LoraMatrix | None, rows: LoraRows, y: Tensor) -> None:
    """Add to `y` [n * k, outputs] what adapters do to experts' products of `x`."""
    if lora is not None:
        kernels.expand_experts(kernels.shrink_experts(x, chosen, lora, rows), chosen, lora, rows, y)


def _by_expert(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor | Sequence[int8.Packed],
    scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Products [n * k, outputs] of each pair of a row and one of its experts, `chosen` [n, k], with the
    expert's `weight`; `x` has a row for each k pairs or for each pair."""
    # Pairs sorted by expert: each expert's become one contiguous run.
    order = chosen.flatten().argsort()
    counts = torch.bincount(chosen.flatten(), minlength=len(weight)).tolist()
    some = weight[0]
    out = x.new_empty(len(order), some.outputs if isinstance(some, int8.Packed) else len(some))
    each = len(order) // max(len(x), 1)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            pairs = order[first : first + count]
            rows, own = x[pairs // each], weight[expert]
            more, by = (None if each is None else each[expert] for each in (bias, scale))
            if isinstance(own, int8.Packed):
                out[pairs] = int8.product(rows, own, more)
            elif by is None:
                out[pairs] = F.linear(rows, own, more)
            elif own.dtype == torch.int16:
                out[pairs] = F.linear(rows, _restored(own, by, x.shape[1]).to(x.dtype), more)
            else:
                out[pairs] = product(rows, own, by, more)
            first += count
    return out


def _restored(words: Tensor, scale: Tensor, inputs: int) -> Tensor:
    """float32 [outputs, inputs] of a matrix of 4 bits: integers, or packed MXFP4."""
    if scale.is_floating_point():
        return int4.restore(words, scale)
    return mxfp4.restore(*mxfp4.unpack(words, scale, inputs))


def route(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights and expert ids [n, top_k]; scores are float32 whatever the model's dtype."""
    choice = experts.choice
    scores = logits.float().sigmoid() if choice.sigmoid else F.softmax(logits, dim=-1, dtype=torch.float32)
    chosen = merits(scores, choice).topk(experts.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return (weights * choice.scale).to(logits.dtype), chosen


def merits(scores: Tensor, choice: Choice) -> Tensor:
    """The numbers that experts are chosen by, from `scores` [n, experts]: -inf in groups that are not among
    the best, the first ones on ties."""
    if choice.bias is not None:
        scores = scores + choice.bias
    if choice.groups == 1:
        return scores
    grouped = scores.view(len(scores), choice.groups, -1)
    worth = grouped.topk(2 if choice.sigmoid else 1, dim=-1).values.sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : choice.top_groups]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
