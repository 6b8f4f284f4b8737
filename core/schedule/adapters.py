"""Places of LoRA adapters on the device: which adapters may run, and which one comes next."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from core.request import Request

PATIENCE = 0.25
"""Seconds that a request waits for a place while requests run in all of them; then one is drained for it."""

Queue = Mapping[str, Collection[Request]]
"""Waiting requests by adapter."""


class Place(msgspec.Struct, eq=False):
    """A place for an adapter on the device."""

    number: int
    adapter: str = ""
    ready: bool = False
    """The adapter is there; before, it is on its way."""
    newest: int = -1
    """Arrival number of the last request that waited when the adapter got the place."""
    draining: bool = False
    """No request behind `newest` starts here: the place is needed for another adapter."""
    rows: int = 0
    """Requests that hold a slot."""
    until: int = 0
    """Steps before this one may still read the place."""
    used: int = 0
    """When a request last started or ended here."""


class Places:
    """Lets at most as many distinct adapters run as there are places.

    A request whose adapter has no place is passed over, and others go on. Adapters get places in the order of
    their first requests, first the place that was used least recently of those without rows. Where all have
    rows, new requests for these adapters could keep another one waiting for ever: when it has waited for
    `PATIENCE`, the place with the fewest rows is drained. It still starts the requests that waited when its
    adapter came (a step holds only some of their prompts), and none that came later: they wait for the next
    turn. With 512 callers, Zipf's popularity of 64 adapters and 8 places a simulation made 0.92 of the base
    model's tokens this way, and 0.85 when a drained place started nothing.

    Owner: event loop.
    """

    def __init__(self, count: int, urgent: bool = False) -> None:
        """`count` 0: there are no adapters. `urgent`: those of requests with a higher priority go first."""
        self._places = [Place(number) for number in range(count)]
        self._at: dict[str, Place] = {}
        self._pinned: set[str] = set()
        self._due: list[tuple[str, int]] = []
        self._urgent = urgent
        self._uses = 0
        self.applied = 0
        """Steps whose results have arrived."""

    def find(self, request: Request) -> int | None:
        """The place where a request may start now, -1 for the base model; None: nowhere."""
        adapter = request.root.adapter
        if not adapter:
            return -1
        place = self._at.get(adapter)
        if place is None or not place.ready or (place.draining and request.number > place.newest):
            return None
        return place.number

    def assign(self, waiting: Queue, now: float) -> None:
        """Give places to the adapters of waiting requests, or have places drained for them. Before requests
        are admitted, so that nothing is drained for an adapter that nobody waits for any more."""
        wanted = sorted(((self._turn(r), a) for a, r in waiting.items() if a not in self._at))
        while wanted and (place := self._idle(waiting)) is not None:
            adapter = wanted.pop(0)[1]
            self._give(place, adapter, max(request.number for request in waiting[adapter]))
        late = sum(now - next(iter(waiting[adapter])).since > PATIENCE for _, adapter in wanted)
        self._drain(late)

    def take_due(self) -> list[tuple[str, int]]:
        """(adapter, place) of the copies to the device that are due since the last call. Each is answered
        with `placed` or `forget`."""
        due, self._due = self._due, []
        return due

    def placed(self, adapter: str) -> None:
        """The copy of `adapter` is done."""
        self._at[adapter].ready = True

    def enter(self, adapter: str) -> None:
        """A request got a slot."""
        if adapter:
            place = self._at[adapter]
            place.rows += 1
            self._use(place)

    def leave(self, adapter: str, step: int) -> None:
        """A request gave its slot back; steps before `step` may still compute its row."""
        if adapter:
            place = self._at[adapter]
            place.rows -= 1
            place.until = step
            self._use(place)

    def pin(self, adapter: str) -> None:
        """Never give the adapter's place to another."""
        self._pinned.add(adapter)

    def forget(self, adapter: str) -> None:
        """Free the adapter's place: it has no rows, and is not on its way there any more."""
        self._pinned.discard(adapter)
        place = self._at.pop(adapter, None)
        if place is not None:
            place.adapter, place.ready, place.draining = "", False, False

    @property
    def running(self) -> list[str]:
        """Adapters of requests that hold a slot."""
        return [place.adapter for place in self._places if place.rows]

    @property
    def taken(self) -> int:
        """Places with an adapter."""
        return len(self._at)

    def check(self, holders: Collection[Request]) -> None:
        """Raise unless the counts are those of the requests that hold a slot."""
        adapters = [request.root.adapter for request in holders if request.root.adapter]
        for place in self._places:
            if place.rows != (adapters.count(place.adapter) if place.adapter else 0):
                raise RuntimeError(f"place {place.number} counts {place.rows} rows of {place.adapter!r}")
        if sum(place.rows for place in self._places) != len(adapters):
            raise RuntimeError("a request runs with an adapter that has no place")

    # -- choice ----------------------------------------------------------------------------------------

    def _turn(self, requests: Collection[Request]) -> tuple[int, int]:
        """Sort key of an adapter's requests: the smallest goes first. No two adapters have the same."""
        return (-max(r.priority for r in requests) if self._urgent else 0, next(iter(requests)).number)

    def _idle(self, waiting: Queue) -> Place | None:
        """The least recently used place that no request and no step uses, an empty one first. A place whose
        own requests are about to start is not idle, unless it is drained."""
        idle = [
            place
            for place in self._places
            if not place.rows and place.until <= self.applied and self._can_go(place, waiting)
        ]
        return min(idle, key=lambda place: (place.adapter != "", place.used), default=None)

    def _can_go(self, place: Place, waiting: Queue) -> bool:
        if not place.adapter:
            return True
        if not place.ready or place.adapter in self._pinned:
            return False
        starting = waiting.get(place.adapter, ())
        return not starting or (place.draining and all(r.number > place.newest for r in starting))

    def _give(self, place: Place, adapter: str, newest: int) -> None:
        self._at.pop(place.adapter, None)
        place.adapter, place.ready, place.draining, place.newest = adapter, False, False, newest
        self._at[adapter] = place
        self._use(place)
        self._due.append((adapter, place.number))

    def _drain(self, count: int) -> None:
        """Drain `count` places, and no more. A place without rows is not drained: its requests are about to
        start, and if nothing runs no plan would follow that could give the place away."""
        draining = [place for place in self._places if place.draining]
        for place in draining[count:]:
            place.draining = False
        if len(draining) < count:
            able = [p for p in self._places if p.rows and not p.draining and p.adapter not in self._pinned]
            able.sort(key=lambda place: (place.rows, place.used))
            for place in able[: count - len(draining)]:
                place.draining = True

    def _use(self, place: Place) -> None:
        self._uses += 1
        place.used = self._uses
