"""Detects a device that hangs, and fails the engine."""

from __future__ import annotations

from app.engine.loop import Engine
from core.clock import Clock

FIRST = 10
"""Times the limit that the first step may take: what was not warmed up is compiled in it."""


class Watchdog:
    """Fails the engine when a step is in flight for longer than `limit` seconds.

    It checks four times per limit, so a hang is detected within 1.5 limits. Time counts while
    steps are in flight and none comes back; an engine that is idle, paused or asleep has none, and a
    command to the device (weights are read again, graphs captured) takes the time that it takes.

    Owner: event loop.
    """

    def __init__(self, engine: Engine, limit: float, clock: Clock) -> None:
        self._engine = engine
        self._limit = limit
        self._clock = clock
        self._seen = (0, False)
        self._since = 0.0
        self.interval = limit / 4
        """Seconds between two checks."""

    def check(self) -> None:
        """Check once; the caller repeats it every `interval` seconds."""
        engine, now = self._engine, self._clock()
        busy = engine.awaits_step
        seen = (engine.recorder.steps, busy)
        if seen != self._seen or not busy:
            self._seen, self._since = seen, now
            return
        limit = self._limit if engine.recorder.steps else FIRST * self._limit
        if now - self._since > limit:
            engine.hang(
                f"no step has come back from the device for {now - self._since:.1f} s; "
                f"--watchdog-timeout is {self._limit:g} s"
            )
