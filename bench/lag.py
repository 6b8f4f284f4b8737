"""How late the event loop is."""

from __future__ import annotations

import asyncio
import time

TICK = 0.005
"""Seconds between two looks."""


class Lag:
    """Lateness of a 5 ms timer, by a clock of its own: uvloop's counts whole milliseconds and stands
    still during a turn of the loop. Owner: event loop."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._due = time.perf_counter() + TICK
        self._handle = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seen.append(max(now - self._due, 0.0))
        self._due = now + TICK
        self._handle = self._loop.call_later(TICK, self._tick)

    def stop(self) -> list[float]:
        """Seconds, ascending."""
        self._handle.cancel()
        return sorted(self.seen)
