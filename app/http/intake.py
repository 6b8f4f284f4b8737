"""Limits the memory of request bodies that are being received or decoded, over all clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from core.clock import Clock
from core.errors import Unavailable

MAX_HELD = 512 * 2**20
"""Bytes of bodies being received or decoded: 64 of the largest. 300 clients that sent 8 MB each and then
stalled held 4.9 GB."""
IDLE_SECONDS = 1.0
"""After so long without data a body may be dropped when others need the memory (guessed)."""


class Reading:
    """One body: bytes received, the time of the last ones, and the timeout that ends its reader."""

    __slots__ = ("deadline", "last", "size")

    def __init__(self) -> None:
        self.size = 0
        self.last = 0.0
        self.deadline: asyncio.Timeout | None = None


class Intake:
    """The bodies in memory. Owner: event loop."""

    def __init__(self, budget: int, clock: Clock) -> None:
        """`budget` is in bytes."""
        self.budget = budget
        self._clock = clock
        self._arriving: OrderedDict[Reading, None] = OrderedDict()
        """Longest idle first."""
        self.held = 0

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Count a body while this is open."""
        reading = Reading()
        try:
            yield reading
        finally:
            self._forget(reading)

    @asynccontextmanager
    async def arriving(self, reading: Reading, seconds: float) -> AsyncIterator[None]:
        """Receive the body within this context. Raises `TimeoutError` after `seconds`, and when the body is
        dropped for others."""
        try:
            async with asyncio.timeout(seconds) as reading.deadline:
                yield
        finally:
            self._arriving.pop(reading, None)

    def add(self, reading: Reading, size: int) -> None:
        """Count more bytes of a body. Above the budget, idle bodies are dropped, longest idle first.
        Raises `Unavailable` when none is idle."""
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

    def take(self, reading: Reading, size: int) -> None:
        """Count a body that has arrived completely. Raises `Unavailable` as `add` does."""
        try:
            self.add(reading, size)
        finally:
            self._arriving.pop(reading, None)

    def _end(self, idle: Reading) -> None:
        assert idle.deadline is not None
        if not idle.deadline.expired():
            idle.deadline.reschedule(0.0)
        self._forget(idle)

    def _forget(self, reading: Reading) -> None:
        self._arriving.pop(reading, None)
        self.held -= reading.size
        reading.size = 0
