"""Temperature, top_k, top_p, min_p: which tokens may be drawn, and with what weight.

They apply in this order, each to what the one before it left, renormalised:

    temperature   weight = exp((logit - best) / temperature), so the best token weighs 1
    top_k         the k largest logits
    top_p         of those, the fewest with at least top_p of *their* mass, and never none
    min_p         of those, the ones at least min_p times as likely as the best

The best token is in every one of these sets, so min_p needs no renormalising; applied first instead
of last it would shrink the mass that top_p is a share of. At equal weight the lower id stays.

Every set is "the n largest", so a floor and a count describe it and the vocabulary is never sorted
as a whole. One row at a time: a row's result cannot depend on the rows beside it, not even through
the order in which a sum over a batch is split.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpu.sample.select import at_least, below, largest

_SORTED = 4096
"""Up to here a sort (50 µs) is cheaper than another round of narrowing; measured on one core."""

SLACK = 1e-6
"""Share of the mass by which top_p may be missed. Weights are float32: without it, 0.5 + 0.3
reaches a top_p of 0.8 or not by how the logits were rounded."""


class Rule(NamedTuple):
    """One row's filters. `temperature` > 0; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Field(NamedTuple):
    """The tokens that may be drawn: `ids` int32 [m] ascending, `weights` float32 [m], not normalised."""

    ids: Tensor
    weights: Tensor


class Cut(NamedTuple):
    """The `size` largest of a row; `floor` is the least of them."""

    floor: float
    size: int


def survivors(logits: Tensor, ids: Tensor, best: float, rule: Rule) -> Field:
    """Filter one row: `logits` float32 [vocab], `ids` int32 [vocab] = 0, 1, ...; `best` is the
    largest logit, finite. Logits of minus infinity weigh nothing."""
    if 0 < rule.top_k < len(logits):
        floor = float(logits.topk(rule.top_k, sorted=False).values.min())
        kept = largest(logits, floor, rule.top_k)
        logits, ids = logits.index_select(0, kept), ids.index_select(0, kept)
    # A temperature below the least normal float would divide 0 by 0.
    temperature = max(rule.temperature, torch.finfo(torch.float32).tiny)
    field = Field(ids, (logits - best).div_(temperature).exp_())
    if rule.top_p < 1.0:
        field = _take(field, largest(field.weights, *nucleus(field.weights, rule.top_p)))
    if rule.min_p > 0.0:
        field = _take(field, at_least(field.weights, rule.min_p))
    return field


def nucleus(weights: Tensor, top_p: float) -> Cut:
    """The fewest of `weights` float32 [m] that hold `top_p` of their sum, by quickselect on mass.

    What is left out first, all entries under `floor`, cannot hold (1 - top_p) of the sum even if
    each stood right under it, so the cut lies among the rest; for a peaked distribution that is a
    few hundred. A flat one is halved around its mean until it is worth sorting.
    """
    total = float(weights.sum(dtype=torch.float64))
    need = top_p * total * (1.0 - SLACK)
    floor = 0.99 * (1.0 - top_p) * total / len(weights)
    head = weights.index_select(0, at_least(weights, floor))
    size = 0  # entries above `head`, whose mass is already taken off `need`
    while len(head) > _SORTED:
        pivot = float(head.mean(dtype=torch.float64))
        upper = head.index_select(0, at_least(head, pivot))
        if not 0 < len(upper) < len(head):
            break  # all equal, or the mean was rounded past them
        mass = float(upper.sum(dtype=torch.float64))
        if mass >= need:
            head = upper
        else:
            need -= mass
            size += len(upper)
            head = head.index_select(0, below(head, pivot))
    ranked = head.sort(descending=True).values
    mass_to = ranked.cumsum(0, dtype=torch.float64)
    last = min(int((mass_to < need).sum()), len(ranked) - 1)
    return Cut(float(ranked[last]), size + last + 1)


def _take(field: Field, kept: Tensor) -> Field:
    return Field(field.ids.index_select(0, kept), field.weights.index_select(0, kept))
