"""Totals of drafts, as `/metrics` tells them."""

from __future__ import annotations

import numpy as np

from core.stats import DraftStatistics
from core.types import Ints


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def test_totals() -> None:
    s = DraftStatistics([0] * 3)
    assert (s.length, s.rate) == (0.0, 0.0)
    s.add(ints(3, 3, 0, 1, 2), ints(4, 2, 1, 1, 0))  # the third had no drafts, the last was at its limit
    assert (s.rows, s.drafted, s.accepted) == (4, 9, 4)
    assert s.per_position == [2, 1, 1]
    assert (s.length, s.rate) == (2.0, 4 / 9)


def test_a_step_whose_rows_brought_a_token_each() -> None:
    s = DraftStatistics([0] * 3)
    s.add(ints(0, 0), None)
    s.add(ints(2, 0), None)
    assert (s.rows, s.drafted, s.accepted, s.per_position) == (1, 2, 0, [0, 0, 0])
    s.add(ints(), ints())
    assert (s.rows, s.length, s.rate) == (1, 1.0, 0.0)
