"""Plain-torch references of all kernels, for tests and checks.

Same arguments as the launchers, device sizes as Python numbers, float32 inside, zeros in rows that a kernel
does not write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import ClampedGate
from gpu.quant.scaled import quantise, quantise_groups, restore


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, [n, width]."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_mul(both: Tensor) -> Tensor:
    """silu(first half) · second half, [n, 2 * width] to [n, width]."""
    gate, up = both.float().chunk(2, -1)
    return (F.silu(gate) * up).to(both.dtype)


def gelu_mul(both: Tensor) -> Tensor:
    """gelu(first half) · second half, with gelu by tanh, [n, 2 * width] to [n, width]."""
    gate, up = both.float().chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") * up).to(both.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x · cos + roll(x) · sin in the first `rotary` of [n, heads, dim]; cos, sin [n, rotary]."""
    rotary = cos.shape[-1]
    part = x[..., :rotary].float()
    turned = part * cos[:, None].float() + part.roll(rotary // 2, -1) * sin[:, None].float()
    return torch.cat([turned, x[..., rotary:].float()], -1)


def norm_rope(
    qkv: Tensor,
    kv_heads: int,
    dim: int,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [n, heads, dim] of `qkv` [n, ...], normed and rotated."""
    n = len(qkv)
    x = qkv.view(n, -1, dim)
    q, k, v = torch.split(x, [x.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = rms_norm(q.float(), q_weight, eps), rms_norm(k.float(), k_weight, eps)
    cos, sin = (r.view(n, -1) for r in rope)
    return rotate(q, cos, sin).to(qkv.dtype), rotate(k, cos, sin).to(qkv.dtype), v


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Weights float32 and experts int64 [T, k], best first, lowest expert first on ties."""
    shares = F.softmax(logits.float(), -1)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = shares.gather(1, order)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), order


def moe(
    x: Tensor,
    logits: Tensor,
    w13: Tensor,
    w2: Tensor,
    top_k: int,
    renormalise: bool = True,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    coarse: bool = False,
    biases: tuple[Tensor, Tensor] | None = None,
    clamped: ClampedGate | None = None,
) -> Tensor:
    """The weighted sum of the top-k experts' gated MLPs, [T, hidden]; rounds where the kernels do. `scales`:
    of weights of 8 bits; with `coarse` activations are quantised too. `biases` [experts, 2 * width] and
    [experts, hidden]."""
    numbers = w13.dtype
    if scales is not None:
        w13, w2 = restore(w13, scales[0]), restore(w2, scales[1])

    by_group = scales is not None and scales[0].dim() == w13.dim()

    def activations(rows: Tensor) -> Tensor:
        if not coarse:
            return rows.float()
        return restore(*(quantise_groups(rows) if by_group else quantise(rows, numbers)))

    weights, experts = route(logits, top_k, renormalise)
    width = w2.shape[2]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted(set(experts.flatten().tolist())):
        rows, j = (experts == expert).nonzero(as_tuple=True)
        both = activations(x[rows]) @ w13[expert].float().T
        if biases is not None:
            both = both + biases[0][expert].float()
        inner, up = both[:, :width], both[:, width:]
        if clamped is None:
            hidden = F.silu(inner) * up
        else:
            inner, up = inner.clamp(max=clamped.limit), up.clamp(-clamped.limit, clamped.limit)
            hidden = inner * torch.sigmoid(clamped.alpha * inner) * (up + 1)
        down = activations(hidden.to(x.dtype)) @ w2[expert].float().T
        if biases is not None:
            down = down + biases[1][expert].float()
        part = down.to(x.dtype).float()
        out.index_add_(0, rows, part * weights[rows, j, None])
    return out.to(x.dtype)


def decode_attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    pages: Tensor,
    lengths: Sequence[int],
    page_size: int,
    scale: float,
    *,
    cap: float = 0.0,
    window: int = 0,
    skip: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row: float32 out [rows, heads, dim] and base-2 log-sum-exp [rows, heads].

    `q` [rows, heads, dim], `cache` K and V [tokens, kv_heads, dim], `pages` [rows, pages], `sinks` [heads].
    """
    k_all, v_all = cache
    rows, heads, _ = q.shape
    group = heads // k_all.shape[1]
    out = torch.zeros(rows, heads, v_all.shape[2], dtype=torch.float32, device=q.device)
    lse = torch.zeros(rows, heads, dtype=torch.float32, device=q.device)
    for row, length in enumerate(lengths):
        if length == 0:
            continue
        start = max(skip, length - window if window else 0)
        at = torch.arange(start, length, device=q.device)
        cells = pages[row].long()[at // page_size] * page_size + at % page_size
        k, v = (side[cells].float().repeat_interleave(group, 1) for side in (k_all, v_all))
        scores = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out[row] = torch.einsum("hk,khd->hd", _shares(scores, None if sinks is None else sinks[:, None]), v)
        lse[row] = torch.logsumexp(scores, -1) * 1.4426950408889634
    return out, lse


def _shares(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax of `scores` [..., keys], beside the score of a `sink` [..., 1] that is dropped."""
    if sink is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink.to(scores.dtype)], -1).softmax(-1)[..., :-1]


def prefill_attention(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    pages: Tensor,
    chunks: Sequence[tuple[int, int, int]],
    page_size: int,
    scale: float,
    *,
    cap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks, each (row of its first token, that token's position, tokens): float32
    [n, heads, dim], 0 in other rows. `q` [n, heads, dim], `cache` and `sinks` as above, `pages` [chunks,
    pages].
    """
    k_all, v_all = cache
    group = q.shape[1] // k_all.shape[1]
    out = torch.zeros(*q.shape[:2], v_all.shape[2], dtype=torch.float32, device=q.device)
    for own, (first, start, count) in zip(pages, chunks, strict=True):
        at = torch.arange(start + count, device=q.device)
        cells = own.long()[at // page_size] * page_size + at % page_size
        k, v = (side[cells].float().repeat_interleave(group, 1) for side in (k_all, v_all))
        for row in range(0, count, 512):  # bounds the scores to 512 queries
            rows = slice(first + row, first + min(row + 512, count))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            here = torch.arange(start + row, start + min(row + 512, count), device=q.device)[:, None]
            hidden = (at > here) | ((at <= here - window) if window else at < 0)
            sink = None if sinks is None else sinks[:, None, None].expand(-1, scores.shape[1], 1)
            shares = _shares(scores.masked_fill(hidden, float("-inf")), sink)
            out[rows] = torch.einsum("hqk,khd->qhd", shares, v)
    return out


def merge_state(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention results [rows, heads, dim] over disjoint keys, and their base-2 log-sum-exps."""
    both = torch.stack([lse, other_lse]).double()
    total = torch.logsumexp(both * 0.6931471805599453, 0) * 1.4426950408889634
    share = torch.exp2(both - total).nan_to_num(0.0)
    merged = torch.stack([out, other]).double().nan_to_num(0.0) * share[..., None]
    return merged.sum(0).to(out.dtype), total.float()


def race(logits: Tensor, bits: Tensor, temperatures: Tensor) -> Tensor:
    """Gumbel-max scores float64 [n, vocab] whose argmax is the token: logit / t + gumbel, the logit if t is
    0.

    `bits` as of `gpu.sample.noise.bits`, `temperatures` [n].
    """
    v = ((bits.double() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)
    gumbel = -torch.log(-torch.log1p(-v))
    heat = temperatures.double()[:, None]
    x = logits.double()
    return torch.where(heat > 0, x / heat.where(heat > 0, 1.0) + gumbel, x)


def survivors(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Tokens of a row [vocab] that remain after top_k, then top_p, then min_p, bool [vocab]; by sorting."""
    order = logits.sort(descending=True, stable=True).indices
    weights = ((logits - logits.max()).double() / temperature).exp()[order]
    rank = torch.arange(len(order), device=logits.device)
    kept = rank < (top_k or len(order))
    if top_p < 1.0:
        mass = weights * kept
        kept &= mass.cumsum(0) - mass < top_p * mass.sum() * (1 - 1e-6)
    kept &= weights >= min_p
    return torch.zeros_like(kept).scatter_(0, order, kept)
