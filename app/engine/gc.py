"""Timers of the event loop: its lag and load, garbage collection, integrity checks when idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from app.engine.replicas import Replicas
from app.engine.stream_interval import StreamInterval
from app.engine.watchdog import Watchdog

log = logging.getLogger(__name__)

LAG_EVERY = 0.05
LAG_WINDOW = 100
"""Measurements in the reported maximum: those of 5 s."""
LOAD_EVERY = 0.25
COLLECT_EVERY = 10.0
GROWN = 500_000
"""A busy server collects again when it has allocated this many more containers than it has freed.
A request makes some 150, all freed without the collector when it ends: with 1,024 of them at a time each
collection took 70 ms, in which every stream stood still, and found nothing. Only leaks grow so far."""
FULL_EVERY = 60
"""Collections between two full ones, which walk everything allocated since the start."""
LONG = 0.005
"""Seconds that an idle collection must take to freeze its survivors. A small heap is not frozen: cycles of
short-lived objects (connections, requests) would never be collected."""
SLOW = 0.01
"""Seconds that a collection must take to be logged."""


class Housekeeping:
    """Timers on the event loop.

    Python's automatic collector runs whenever allocation counters reach a threshold, also while a step is
    planned, and takes 20 ms and more with a model's objects. Here those objects are frozen, and a timer
    collects: all generations while the server is idle, young ones where it is busy and its heap has grown.

    Owner: event loop.
    """

    def __init__(
        self, replicas: Replicas, loop: asyncio.AbstractEventLoop, watchdogs: Sequence[Watchdog] = ()
    ) -> None:
        self._replicas = replicas
        self._watchdogs = watchdogs
        self._loop = loop
        self._lags: list[float] = []
        self._due = 0.0
        self._checked: object = None
        self._checking = False
        self._stream_interval = StreamInterval(time.monotonic(), time.thread_time())
        self._collections = 0
        self._stopped = False

    def start(self) -> None:
        """Freeze existing objects, turn the automatic collector off, start the timers."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._every(LAG_EVERY, self._measure)
        self._every(LOAD_EVERY, self._set_stream_interval)
        self._every(COLLECT_EVERY, self._collect)
        for watchdog in self._watchdogs:
            self._every(watchdog.interval, watchdog.check)

    def stop(self) -> None:
        """Stop the timers and turn the automatic collector on."""
        self._stopped = True
        gc.enable()
        gc.unfreeze()

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` periodically. Exceptions are logged and do not stop the timer."""

        def again() -> None:
            if self._stopped:
                return
            try:
                act()
            except Exception:
                log.exception("a housekeeping timer failed")
            self._loop.call_later(seconds, again)

        self._loop.call_later(seconds, again)

    def _measure(self) -> None:
        """Measure the lag. Not with uvloop's clock, which stands still during a turn of the loop."""
        now = time.monotonic()
        if self._due:
            self._lags = [*self._lags[-LAG_WINDOW:], max(now - self._due, 0.0)]
            lag = max(self._lags)
            for engine in self._replicas.engines:
                engine.recorder.lag = lag
        self._due = now + LAG_EVERY

    def _set_stream_interval(self) -> None:
        steps = self._stream_interval.measure(time.monotonic(), time.thread_time())
        for engine in self._replicas.engines:
            engine.set_stream_interval(steps)

    def _collect(self) -> None:
        idle = self._replicas.idle
        if not idle and gc.get_count()[0] < GROWN:
            return
        begun = time.perf_counter()
        self._collections += 1
        gc.collect(2 if idle or self._collections % FULL_EVERY == 0 else 1)
        pause = time.perf_counter() - begun
        if idle and pause > LONG:
            gc.freeze()
        if pause > SLOW:
            log.info("garbage collection took %.0f ms", 1e3 * pause)
        if idle:
            self._check_integrity()

    def _check_integrity(self) -> None:
        """Check that pages, locks and counters agree, once after requests have run. In a thread: a tree of
        60,000 nodes takes 0.3 s, during which the loop gets the GIL after a switch interval. The loop may
        change what is checked, so the result counts only if nothing has changed."""
        state = self._state()
        if self._checking or state == self._checked:
            return
        self._checking = True
        checked = self._loop.run_in_executor(None, self._replicas.check_integrity)
        checked.add_done_callback(partial(self._integrity_checked, state))

    def _integrity_checked(self, state: object, checked: asyncio.Future[None]) -> None:
        self._checking = False
        error = None if checked.cancelled() else checked.exception()
        if checked.cancelled() or state != self._state():
            return
        self._checked = state
        if error is not None:
            log.error("the integrity check of the idle engine failed", exc_info=error)

    def _state(self) -> object:
        """A snapshot that changes when an engine runs a step or allocates or frees pages."""
        engines = self._replicas.engines
        return [(engine.idle, engine.recorder.steps, engine.load().cache) for engine in engines]
