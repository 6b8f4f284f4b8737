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
from gpu.kv.states import Pending, StatePool
from gpu.state.recurrent import DeltaInputs
from gpu.state.view import StepView

BLOCK = 64
"""Tokens of a chunk that are computed together."""

EPSILON = 1e-6


def gated_delta(pool: StatePool, layer: int, view: StepView, inputs: DeltaInputs) -> Tensor:
    """See `DeltaRule`. A view's numbers are read on the host, where they lie."""
    qkv, decay, beta, weight, linear = inputs
    conv, memory = pool.conv[layer], pool.memory[layer]
    _, queries, count, _ = view.counts.tolist()
    out = qkv.new_zeros(len(qkv), linear.value_heads, linear.value_dim)
    if queries:
        _decode(pool, layer, view, inputs, out)
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
                for each in (conv, memory):
                    each[due_at[stop]] = each[slot]
        if pool.pending is not None:
            pool.pending.held[layer, slot] = start + end - first
    return out


def _decode(pool: StatePool, layer: int, view: StepView, inputs: DeltaInputs, out: Tensor) -> None:
    """Decode rows, one token of each at a time."""
    qkv, decay, beta, weight, linear = inputs
    conv, memory = pool.conv[layer], pool.memory[layer]
    pending = None if pool.pending is None else pool.pending.of(layer)
    slots = view.decode_slots[: int(view.counts[1])].long()
    at, left = torch.arange(len(slots), device=slots.device), torch.ones_like(slots)
    if pending is not None:
        at = F.pad(slots.diff() != 0, (1, 0), value=True).nonzero()[:, 0]
        left = at.diff(append=slots.new_tensor([len(slots)]))
        slots = torch.where(view.kv_slot_mapping[at] > 0, slots[at], 0)
    window, kept = conv[slots], memory[slots]
    if pending is not None:
        window = _take_in(pending, slots, view.positions[at], window, kept, linear)
    for number in range(int(left.max())):
        if number:
            more = left > number
            at, slots, left, window, kept = (each[more] for each in (at + 1, slots, left, window, kept))
        whole = torch.cat([window, qkv[at, :, None]], -1)
        window, mixed = whole[..., 1:], F.silu((whole * weight).sum(-1))
        found = step(kept, *_heads(mixed, linear), decay[at], beta[at])
        out[at] = found.to(out.dtype)
        if number == 0:
            conv[slots], memory[slots] = window, kept
        elif pending is not None:
            pending.inputs[slots, number - 1], pending.mixed[slots, number - 1] = qkv[at], mixed
            pending.gates[slots, number - 1] = torch.stack([decay[at], beta[at]], 1)
        due, which = (pool.saves[slots, :, 0] == view.positions[at, None] + 1).nonzero().unbind(1)
        entries = pool.saves[slots[due], which, 1].long()
        conv[entries], memory[entries] = window[due], kept[due]


def _take_in(
    pending: Pending, slots: Tensor, starts: Tensor, window: Tensor, kept: Tensor, linear: LinearSpec
) -> Tensor:
    """Update copies of a layer's states by the accepted drafts of rows that begin at `starts`: `kept` in
    place. Returns the convolution's `window` after them."""
    due = (starts - pending.held[slots]).clamp(0, pending.inputs.shape[1]).long()
    pending.held[slots] = starts + 1
    for number in range(int(due.max())):
        rows = (due > number).nonzero()[:, 0]
        part, (decay, beta) = kept[rows], pending.gates[slots[rows], number].unbind(1)
        step(part, *_heads(pending.mixed[slots[rows], number], linear), decay, beta)
        kept[rows] = part
    whole = torch.cat([window, pending.inputs[slots].mT], -1)
    places = due[:, None] + torch.arange(window.shape[-1], device=due.device)
    return whole.gather(-1, places[:, None].expand_as(window))


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
