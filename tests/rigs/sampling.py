"""Helpers for sampling tests, and a reference implementation of the filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.plan import NewSlot
from core.request.params import SamplingParams
from core.types import Ints
from gpu.sample.filters import Rule
from tests.rigs.sampler import Sampled, Sampler


def by_sorting(logits: torch.Tensor, rule: Rule) -> dict[int, float]:
    """Probability by id of the tokens that remain after top_k, top_p and min_p, by sorting."""
    x = logits.double().numpy() / rule.temperature
    order = np.argsort(-x, kind="stable")
    if rule.top_k:
        order = order[: rule.top_k]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    # The tolerance of top_p is part of its definition.
    size = int((np.cumsum(p) < rule.top_p * (1 - 1e-6)).sum()) + 1
    if rule.top_p < 1.0:
        order, p = order[:size], p[:size]
    kept = p >= rule.min_p * p[0]
    order, p = order[kept], p[kept]
    return dict(zip(order.tolist(), (p / p.sum()).tolist(), strict=True))


CPU = torch.device("cpu")
VOCAB = 40


def ints(tokens: Sequence[int]) -> Ints:
    """A read-only int32 array, as in plans."""
    array = np.array(tokens, np.int32)
    array.setflags(write=False)
    return array


def new_slot(
    slot: int,
    params: SamplingParams,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
) -> NewSlot:
    return NewSlot(slot, params, ints(prompt), ints(output), 0)


def make(*params: SamplingParams, vocab: int = VOCAB, rows: int = 4_000) -> Sampler:
    """A sampler of `rows` samples at once whose slots 1, 2, ... have `params` and a prompt of 3 tokens."""
    sampler = Sampler(max(len(params), rows), vocab, CPU, slots=len(params))
    sampler.apply(
        [new_slot(i + 1, p) for i, p in enumerate(params)],
    )
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, slots: Sequence[int], positions: Sequence[int]) -> Sampled:
    """Sample from a copy of `logits` [n, vocab]."""
    return sampler.sample(logits.clone(), torch.tensor(slots), torch.tensor(positions))
