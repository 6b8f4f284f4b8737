"""Preemption: running requests that make way for a far more important one."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from core.request import Request, State
from core.schedule.policy import by_priority
from core.schedule.prefill import Prefills
from core.schedule.queue import Waiting

MAX_VICTIMS = 8
"""Victims for one request at most; a request that needs more waits. It bounds the work of a step."""


def preempted(waiting: Waiting, running: Iterable[Request], gap: int, prefills: Prefills) -> list[Request]:
    """The fewest of `running`, all at least `gap` below the first waiting request in priority, without which
    that could start: the least important first, of equals the youngest. None if it can start anyway, or not
    even without them, and while it would get nothing of the next step."""
    admission = prefills.admission
    head = next((r for r in by_priority(waiting) if admission.places.find(r) is not None), None)
    if head is None:
        return []
    admission.spare.begin()  # rows have come and gone since the last step was planned
    prefix = admission.prefix(head)
    if admission.would_fit(head, prefix):
        return []
    rows = list(running)
    victims = nsmallest(
        MAX_VICTIMS,
        (r for r in rows if head.priority - r.priority >= gap),
        key=lambda r: (r.priority, -r.number),
    )
    left = head.num_tokens - prefix.tokens
    for count in range(1, len(victims) + 1):
        gone = victims[:count]
        if admission.would_fit(head, prefix, gone):
            others = any(r.state is State.DECODE for r in rows if r not in gone)
            pauses = others and prefills.budget.pauses(left)
            return [] if pauses or prefills.must_wait(head, left, gone) else gone
    return []
