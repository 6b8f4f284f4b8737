"""Tokens of a step that come as embeddings, of requests whose prompt is no text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from core.plan import StepPlan
from gpu.state.view import place
from gpu.transfer import upload


class Embedded(NamedTuple):
    """Tokens that come as embeddings: `rows` int64 [e], and `values` float [e, hidden]."""

    rows: torch.Tensor
    values: torch.Tensor


def embedded(plan: StepPlan, device: torch.device) -> Embedded | None:
    """Which of the tokens of all chunks come as embeddings, and those; None where no chunk has any."""
    if all(chunk.embeds is None for chunk in plan.chunks):
        return None
    placed = zip(plan.chunks, place(plan), strict=True)
    found = [(at.first, chunk.embeds) for chunk, at in placed if chunk.embeds is not None]
    rows = np.concatenate([np.arange(first, first + len(values)) for first, values in found])
    values = np.concatenate([values for _, values in found])
    return Embedded(upload(rows, device), upload(values, device))
