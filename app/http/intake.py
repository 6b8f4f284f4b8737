"""Request bodies on their way in: how much of them all clients together may have in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from core.clock import Clock
from core.errors import Unavailable

MAX_HELD = 512 * 2**20
"""Bytes of bodies that are arriving or being decoded: 64 of the largest. 300 clients that sent 8 MB each and
then fell silent held 4.9 GB."""
IDLE_SECONDS = 1.0
"""Nothing came for so long: such a body makes room for others when there is none (guessed)."""


class Reading:
    """One body: the bytes of it that are here, when the last ones came, and what ends its reader."""

    __slots__ = ("deadline", "last", "size")

    def __init__(self) -> None:
        self.size = 0
        self.last = 0.0
        self.deadline: asyncio.Timeout | None = None


class Intake:
    """The bodies in memory. Owner: event loop."""

    __slots__ = ("_arriving", "_clock", "budget", "held")

    def __init__(self, budget: int, clock: Clock) -> None:
        """`budget` is in bytes."""
        self.budget = budget
        self._clock = clock
        self._arriving: OrderedDict[Reading, None] = OrderedDict()
        """The one that has been idle for longest comes first."""
        self.held = 0

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """A body is in memory for as long as this is open."""
        reading = Reading()
        try:
            yield reading
        finally:
            self._forget(reading)

    @asynccontextmanager
    async def arriving(self, reading: Reading, seconds: float) -> AsyncIterator[None]:
        """Its bytes come within this, and within `seconds`. Raises `TimeoutError` after them, and when the
        body has to make room for others."""
        try:
            async with asyncio.timeout(seconds) as reading.deadline:
                yield
        finally:
            self._arriving.pop(reading, None)

    def add(self, reading: Reading, size: int) -> None:
        """So many bytes more have come. Bodies that stand still make room for them, the one that has been
        idle for longest first. Raises `Unavailable` when all others move."""
        now = reading.last = self._clock()
        self._arriving[reading] = None
        self._arriving.move_to_end(reading)
        reading.size += size
        self.held += size
        while self.held > self.budget:
            idle = next(iter(self._arriving))
            if idle is reading or now - idle.last < IDLE_SECONDS:
                raise Unavailable("The server has no room for another request body right now; send it again.")
            self._end(idle)

    def _end(self, idle: Reading) -> None:
        assert idle.deadline is not None
        if not idle.deadline.expired():
            idle.deadline.reschedule(0.0)
        self._forget(idle)

    def _forget(self, reading: Reading) -> None:
        self._arriving.pop(reading, None)
        self.held -= reading.size
        reading.size = 0
