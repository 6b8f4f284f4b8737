"""What the loop does between steps: measure itself, collect garbage, check the books when idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from functools import partial

from app.engine.loop import Engine
from app.engine.watchdog import Watchdog

log = logging.getLogger(__name__)

LAG_EVERY = 0.05
LAG_WINDOW = 100
"""Measurements in the reported maximum: 5 s."""
COLLECT_EVERY = 10.0
FULL_EVERY = 60
"""Collections between two full ones; a full one walks everything made since the start."""
LONG = 0.005
"""Seconds of an idle collection after which the survivors are frozen: none of them is garbage. What is alive
for a moment only (connections, their requests) must not be: its cycles would never be found, so a small heap
is walked again and again."""
SLOW = 0.01
"""A pause worth a line in the log, in seconds."""


class Housekeeping:
    """Timers on the loop.

    Python's own collector runs whenever allocation counters say so, in the middle of a step's
    planning: 20 ms and more were seen with a model's objects alive. Here those are frozen and the
    young generations are collected at set times instead.

    Owner: event loop.
    """

    __slots__ = (
        "_checked",
        "_checking",
        "_collections",
        "_due",
        "_engine",
        "_lags",
        "_loop",
        "_stopped",
        "_watchdog",
        "pause",
    )

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, watchdog: Watchdog | None = None
    ) -> None:
        self._engine = engine
        self._watchdog = watchdog
        self._loop = loop
        self._lags: list[float] = []
        self._due = 0.0
        self._checked: object = None
        self._checking = False
        self._collections = 0
        self._stopped = False
        self.pause = 0.0
        """Of the last collection, in seconds."""

    def start(self) -> None:
        """Freeze what is alive, take over from the automatic collector, start the timers."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._every(LAG_EVERY, self._measure)
        self._every(COLLECT_EVERY, self._collect)
        if self._watchdog is not None:
            self._every(self._watchdog.interval, self._watchdog.look)

    def stop(self) -> None:
        """Hand collection back."""
        self._stopped = True
        gc.enable()
        gc.unfreeze()

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` again and again. What it raises is a line in the log, not the end of its timer."""

        def again() -> None:
            if self._stopped:
                return
            try:
                act()
            except Exception:
                log.exception("housekeeping raised; it goes on")
            self._loop.call_later(seconds, again)

        self._loop.call_later(seconds, again)

    def _measure(self) -> None:
        """uvloop's own clock stands still during a turn of the loop, so it cannot see a long one."""
        now = time.monotonic()
        if self._due:
            self._lags = [*self._lags[-LAG_WINDOW:], max(now - self._due, 0.0)]
            self._engine.recorder.lag = max(self._lags)
        self._due = now + LAG_EVERY

    def _collect(self) -> None:
        begun = time.perf_counter()
        self._collections += 1
        idle = self._engine.idle
        gc.collect(2 if idle or self._collections % FULL_EVERY == 0 else 1)
        self.pause = time.perf_counter() - begun
        if idle and self.pause > LONG:
            gc.freeze()
        if self.pause > SLOW:
            log.info("garbage collection took %.0f ms", 1e3 * self.pause)
        if idle:
            self._check_books()

    def _check_books(self) -> None:
        """Look whether pages, locks and counters agree, once after work, in a thread: a tree of 60,000 nodes
        takes 0.3 s, during which the loop has the GIL back after every switch interval. It reads what the
        loop may change meanwhile, so what it finds counts only where nothing has changed."""
        state = self._state()
        if self._checking or state == self._checked:
            return
        self._checking = True
        checked = self._loop.run_in_executor(None, self._engine.check_integrity)
        checked.add_done_callback(partial(self._books_checked, state))

    def _books_checked(self, state: object, checked: asyncio.Future[None]) -> None:
        self._checking = False
        error = None if checked.cancelled() else checked.exception()
        if checked.cancelled() or state != self._state():
            return
        self._checked = state
        if error is not None:
            log.error("the books of the idle engine do not agree", exc_info=error)

    def _state(self) -> object:
        """What differs when work was done, or pages came or went without any."""
        engine = self._engine
        return engine.idle, engine.recorder.steps, engine.load().cache
