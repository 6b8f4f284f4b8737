"""Measures the lag of the event loop."""

from __future__ import annotations

import asyncio
import time

TICK = 0.005
"""Seconds between two samples."""


class Lag:
    """Lateness of a 5 ms timer, by `perf_counter`: uvloop's clock has a resolution of a millisecond and does
    not advance during an iteration. Owner: event loop."""

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
        """Stop. Returns all lags in seconds, ascending."""
        self._handle.cancel()
        return sorted(self.seen)
