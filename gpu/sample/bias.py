"""Logits changed by id: the user's logit_bias, and stop ids held down until min_tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from core.request.params import SamplingParams


class Additions(NamedTuple):
    """`values` float32 [k] to add to the logits of `ids` int64 [k]; an id may occur twice."""

    ids: Tensor
    values: Tensor


class BiasTable:
    """Owner: launch thread. Each slot's additions, or None where it has none.

    Everything is added, nothing assigned: a NaN under a masked id stays visible, and infinity
    becomes NaN, so that a broken row is found whatever it is asked for.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._bias: list[Additions | None] = [None] * num_slots
        self._stops: list[Additions | None] = [None] * num_slots

    def set(self, slot: int, params: SamplingParams) -> None:
        """Replace what the slot's former owner had."""
        self._bias[slot] = self._additions(
            [i for i, _ in params.logit_bias], [b for _, b in params.logit_bias]
        )
        stops = sorted(params.stop_ids) if params.min_tokens > 0 else []
        self._stops[slot] = self._additions(stops, [-torch.inf] * len(stops))

    def add_bias(self, logits: Tensor, slot: int) -> None:
        """Add the slot's logit_bias to its `logits` float32 [vocab], in place."""
        _add(logits, self._bias[slot])

    def mask_stops(self, logits: Tensor, slot: int) -> None:
        """Make the slot's stop ids impossible in its `logits` float32 [vocab], in place."""
        _add(logits, self._stops[slot])

    def stops(self, slot: int) -> list[int]:
        """The ids that `mask_stops` makes impossible."""
        additions = self._stops[slot]
        return [] if additions is None else additions.ids.tolist()

    def _additions(self, ids: list[int], values: list[float]) -> Additions | None:
        if not ids:
            return None
        return Additions(
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )


def _add(logits: Tensor, additions: Additions | None) -> None:
    if additions is not None:
        logits.index_add_(0, additions.ids, additions.values)
