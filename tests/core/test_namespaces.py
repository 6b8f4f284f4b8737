"""Whom a new request may share with, as the device knows it, and how long a slot keeps its texts."""

from __future__ import annotations

import numpy as np
import pytest

from core.request import Request, SamplingParams
from core.schedule.table import SlotTable
from core.types import RootKey

PAIRS = [
    ({"adapter": "a"}, {"tenant": "a"}),
    ({"tenant": "ab"}, {"tenant": "a", "salt": "b"}),
    ({"salt": "a"}, {"own": "a"}),
    ({"salt": "a"}, {"salt": "A"}),
    ({}, {"salt": "0"}),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_requests_that_share_no_prefix_share_no_namespace(one: dict[str, str], other: dict[str, str]) -> None:
    mine, theirs = (RootKey(**fields).namespace() for fields in (one, other))
    assert mine != theirs
    assert mine == RootKey(**one).namespace()
    assert mine and np.int64(mine) == mine


def test_slots_are_taken_in_turn() -> None:
    """What a slot keeps of former answers is then overwritten as late as can be."""
    table, taken = SlotTable(3), []
    for at in range(7):
        request = Request(str(at), np.ones(2, np.int32), SamplingParams())
        taken.append(table.take(request, 0, 16))
        table.release(request)
    assert taken == [1, 2, 3, 1, 2, 3, 1]
