"""Steps of captured sizes, and what texts of a GPU must share with those of a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from core.plan import Chunk, NewSlot, PageWrites, StepPlan
from core.request import SamplingParams
from tests.rigs.arrays import ints
from tests.rigs.driver import Answer

TIE = 5e-3
"""Margin of log-probabilities below which the order of two tokens is the arithmetic's: products of
float32 run in TF32 in the experts' kernels."""


def same_text(got: Answer, want: Answer) -> None:
    for at, (mine, theirs) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        if mine != theirs:
            assert want.margins[at] < TIE, f"token {at}: {mine} for {theirs}"
            return  # from here on the texts are two
        assert got.logprobs[at] == pytest.approx(want.logprobs[at], abs=2e-2)


def full(tokens: int, mixed: bool, rows: int) -> StepPlan:
    """A step that fills a graph: slots with three pages each, one chunk of what is left."""
    decode = list(range(1, min(tokens, rows) + (0 if mixed else 1)))
    chunks, new, cells = [], [], []
    if mixed:
        slot, count = rows, tokens - len(decode)
        known = ints([i % 250 for i in range(count)])
        chunks.append(Chunk(slot, 0, known, True))
        new.append(NewSlot(slot, SamplingParams(temperature=0.0), known, ints([]), 0))
        cells += [(slot, at, 100 + at) for at in range(-(-count // 16))]
    for slot in decode:
        params = SamplingParams(temperature=0.0 if slot % 2 else 0.8, seed=slot)
        new.append(NewSlot(slot, params, ints([]), ints([]), 37 + slot % 5))
        cells += [(slot, at, 1 + (slot * 3 + at) % 90) for at in range(3)]
    columns = np.array(cells, np.int32).reshape(-1, 3).T
    return StepPlan(1, ints(decode), tuple(chunks), tuple(new), PageWrites(*columns))
