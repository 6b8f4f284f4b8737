"""Which running requests give their place to one that is far more important."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from core.request import Request
from core.schedule.prefill import Prefills

MOST = 8
"""Requests that go for one: who needs more waits as others do. It bounds the work of a step."""


def preempted(head: Request, running: Iterable[Request], gap: int, prefills: Prefills) -> list[Request]:
    """The fewest of `running`, all at least `gap` below `head`, without which it could start: the least
    important first, of equals the youngest. None when it can start as it is, or not even without them."""
    if prefills.would_fit(head):
        return []
    below = (r for r in running if head.priority - r.priority >= gap)
    victims = nsmallest(MOST, below, key=lambda r: (r.priority, -r.number))
    for count in range(1, len(victims) + 1):
        if prefills.would_fit(head, victims[:count]):
            return victims[:count]
    return []
