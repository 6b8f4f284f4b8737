"""The gated delta rule in plain torch, for CPUs and as the reference of the kernels.

A head's memory S [key_dim, value_dim] takes a token's key k, value v, decay g and share b by

    S = exp(g) S;   S = S + k (b (v - Sᵀk))ᵀ;   the output is Sᵀq

(Gated DeltaNet, arXiv 2412.06464). Queries and keys have length 1, queries are scaled by 1 / sqrt(key_dim).
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from core.models import LinearSpec
from gpu.kv.states import StatePool
from gpu.state.recurrent import DeltaInputs
from gpu.state.view import StepView

BLOCK = 64
"""Tokens of a chunk that are computed together."""

EPSILON = 1e-6


def gated_delta(pool: StatePool, layer: int, view: StepView, inputs: DeltaInputs) -> Tensor:
    """See `DeltaRule`. A view's numbers are read on the host, where they lie."""
    qkv, decay, beta, weight, linear = inputs
    conv, memory = pool.conv[layer], pool.memory[layer]
    _, rows, count, _ = view.counts.tolist()
    out = qkv.new_zeros(len(qkv), linear.value_heads, linear.value_dim)
    if rows:
        slots = view.decode_slots[:rows].long()
        window = torch.cat([conv[slots], qkv[:rows, :, None]], -1)
        heads = _heads(F.silu((window * weight).sum(-1)), linear)
        conv[slots], kept = window[..., 1:], memory[slots]
        out[:rows] = step(kept, *heads, decay[:rows], beta[:rows])
        memory[slots] = kept
        due, which = (pool.saves[slots, :, 0] == view.positions[:rows, None] + 1).nonzero().unbind(1)
        _save(pool, layer, slots[due], pool.saves[slots[due], which, 1].long())
    firsts, starts = view.chunk_firsts[: count + 1].tolist(), view.chunk_starts[:count].tolist()
    for slot, start, first, end in zip(
        view.chunk_slots[:count].tolist(), starts, firsts[:-1], firsts[1:], strict=True
    ):
        due_at = {tokens - start + first: entry for tokens, entry in pool.saves[slot].tolist()}
        ends = sorted({first, end, *(at for at in due_at if first < at < end)})
        for begin, stop in pairwise(ends):
            window = torch.cat([conv[slot], qkv[begin:stop].T], -1)
            mixed = F.conv1d(window[None], weight[:, None], groups=len(weight))[0].T
            conv[slot] = window[:, 1 - linear.kernel :]
            heads = _heads(F.silu(mixed), linear)
            out[begin:stop], memory[slot] = chunk(memory[slot], *heads, decay[begin:stop], beta[begin:stop])
            if stop in due_at:
                _save(pool, layer, slot, due_at[stop])
    return out


def _save(pool: StatePool, layer: int, slots: Tensor | int, entries: Tensor | int) -> None:
    for each in (pool.conv[layer], pool.memory[layer]):
        each[entries] = each[slots]


def _heads(mixed: Tensor, linear: LinearSpec) -> tuple[Tensor, Tensor, Tensor]:
    """float32 queries and keys [n, value_heads, key_dim], normed, and values [n, value_heads, value_dim] of
    `mixed` [n, channels]."""
    sizes = [linear.key_size, linear.key_size, linear.value_size]
    q, k, v = (part.float() for part in torch.split(mixed, sizes, -1))
    q, k = (part.view(len(part), linear.key_heads, -1) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + EPSILON) for part in (q, k))
    each = linear.value_heads // linear.key_heads
    q, k = (part.repeat_interleave(each, 1) for part in (q * linear.key_dim**-0.5, k))
    return q, k, v.view(len(v), linear.value_heads, -1)


def step(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token of each row: output [n, heads, value_dim]; `memory` [n, heads, key_dim, value_dim] is
    advanced in place."""
    memory.mul_(decay.exp()[..., None, None])
    change = (v - torch.einsum("nhkv,nhk->nhv", memory, k)) * beta[..., None]
    memory.add_(k[..., None] * change[..., None, :])
    return torch.einsum("nhkv,nhk->nhv", memory, q)


def chunk(
    memory: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """A run of tokens of one text: outputs [n, heads, value_dim] and the memory [heads, key_dim, value_dim]
    behind them.

    What a block's tokens write, its `changes`, depends on what those before them wrote: a triangular system.
    With sums of decays G, and D[i, j] = exp(G[i] - G[j]) for i >= j,

        changes[i] + sum over j < i of b[i] D[i, j] (k[i]·k[j]) changes[j] = b[i] (v[i] - exp(G[i]) Sᵀk[i])
    """
    found = []
    for at in range(0, len(q), BLOCK):
        rows = slice(at, at + BLOCK)
        q_, k_, v_ = (part[rows].transpose(0, 1) for part in (q, k, v))
        b, total = beta[rows].T[..., None], decay[rows].T.cumsum(-1)[..., None]
        ratio = (total - total.mT).tril().exp().tril()
        written = b * (v_ - total.exp() * (k_ @ memory))
        system = b * (k_ @ k_.mT) * ratio
        changes = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
        found.append((total.exp() * (q_ @ memory) + (q_ @ k_.mT * ratio) @ changes).transpose(0, 1))
        end = total[:, -1:]
        memory = end.exp() * memory + (k_ * (end - total).exp()).mT @ changes
    return torch.cat(found), memory
