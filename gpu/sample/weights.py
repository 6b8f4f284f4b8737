"""What tokens were drawn by, of the few rows that ask: a sort, which reads nothing back from the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu.sample.filters import SLACK
from gpu.sample.rows import Rows


def draw_weights(logits: Tensor, rows: Rows, tokens: Tensor) -> Tensor:
    """See `gpu.sample.kernels.SamplingKernels`. A drawn token is never left out, though a sum that was
    rounded otherwise may put it just behind top_p."""
    slots, tables = rows.slots, rows.tables
    temperature, top_k, top_p, min_p = (
        column[slots].unsqueeze(1)
        for column in (tables.temperature, tables.top_k, tables.top_p, tables.min_p)
    )
    greedy = temperature <= 0
    divisor = torch.where(greedy, 1.0, temperature.clamp(min=torch.finfo(torch.float32).tiny))
    weights = (logits - logits.amax(1, keepdim=True)).div_(divisor).exp_()
    order = logits.sort(dim=1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    kept = (top_k <= 0) | (ranks < top_k)
    mass = torch.where(kept, ranked, 0.0).cumsum(1, dtype=torch.float64)
    need = torch.where(top_p < 1.0, top_p * mass[:, -1:] * (1.0 - SLACK), torch.inf)
    kept &= (mass - ranked < need) & (ranked >= min_p)
    chosen = torch.zeros_like(kept).scatter_(1, order, kept | greedy).scatter_(1, tokens.unsqueeze(1), True)
    return torch.where(chosen, weights, 0.0)
