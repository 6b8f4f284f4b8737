"""Preemption: running requests that make way for a far more important one."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from core.request import Request
from core.schedule.prefill import Prefills

MAX_VICTIMS = 8
"""Victims for one request at most; a request that needs more waits. It bounds the work of a step."""


def preempted(head: Request, running: Iterable[Request], gap: int, prefills: Prefills) -> list[Request]:
    """The fewest of `running`, all at least `gap` below `head` in priority, without which it could start: the
    least important first, of equals the youngest. None if it can start anyway, or not even without them."""
    if prefills.would_fit(head):
        return []
    below = (r for r in running if head.priority - r.priority >= gap)
    victims = nsmallest(MAX_VICTIMS, below, key=lambda r: (r.priority, -r.number))
    for count in range(1, len(victims) + 1):
        if prefills.would_fit(head, victims[:count]):
            return victims[:count]
    return []
