"""What the loop does between steps: measure itself, collect garbage, check the books when idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time

from app.engine import Engine

log = logging.getLogger(__name__)

LAG_EVERY = 0.05
LAG_WINDOW = 100
"""Measurements in the reported maximum: 5 s."""
COLLECT_EVERY = 10.0
FULL_EVERY = 60
"""Collections between two full ones; a full one walks everything made since the start."""
SLOW = 0.01
"""A pause worth a line in the log, in seconds."""


class Housekeeping:
    """Timers on the loop.

    Python's own collector runs whenever allocation counters say so, in the middle of a step's
    planning: 20 ms and more were seen with a model's objects alive. Here those are frozen and the
    young generations are collected at set times instead.

    Owner: event loop.
    """

    __slots__ = ("_collections", "_due", "_engine", "_lags", "_loop", "_stopped", "pause")

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lags: list[float] = []
        self._due = 0.0
        self._collections = 0
        self._stopped = False
        self.pause = 0.0
        """Of the last collection, in seconds."""

    def start(self) -> None:
        """Freeze what is alive, take over from the automatic collector, start the timers."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._measure()
        self._loop.call_later(COLLECT_EVERY, self._collect)

    def stop(self) -> None:
        """Hand collection back."""
        self._stopped = True
        gc.enable()
        gc.unfreeze()

    def _measure(self) -> None:
        """uvloop's own clock stands still during a turn of the loop, so it cannot see a long one."""
        now = time.monotonic()
        if self._due:
            self._lags = [*self._lags[-LAG_WINDOW:], max(now - self._due, 0.0)]
            self._engine.recorder.lag = max(self._lags)
        if not self._stopped:
            self._due = now + LAG_EVERY
            self._loop.call_later(LAG_EVERY, self._measure)

    def _collect(self) -> None:
        if self._stopped:
            return
        begun = time.perf_counter()
        self._collections += 1
        idle = self._engine.idle
        gc.collect(2 if idle or self._collections % FULL_EVERY == 0 else 1)
        self.pause = time.perf_counter() - begun
        if self.pause > SLOW:
            log.info("garbage collection took %.0f ms", 1e3 * self.pause)
        if idle:
            self._engine.scheduler.check_integrity()
        self._loop.call_later(COLLECT_EVERY, self._collect)
