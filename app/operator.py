"""What an operator does to a running server: pause, profile, new weights, memory given back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Literal

from app.engine import Engine
from core.errors import RequestError
from core.order import TAGS, Tag
from core.types import Finish, FinishReason

PauseMode = Literal["keep", "retract", "abort"]


MAX_GAP = 60.0
"""Seconds between steps: a server that is told to wait for hours looks like one that hangs."""


class Operator:
    """One operation at a time, each with the engine held still where it must be.

    Owner: event loop.
    """

    __slots__ = ("_engine", "_lock", "_traces", "asleep")

    def __init__(self, engine: Engine, traces: Path) -> None:
        self._engine = engine
        self._traces = traces
        self._lock = asyncio.Lock()
        self.asleep: frozenset[Tag] = frozenset()
        """What has been given back."""

    @property
    def paused(self) -> bool:
        """No step is planned; requests are taken and wait."""
        return self._engine.paused

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Plan no more steps, and return when none is in flight.

        `keep` leaves running requests where they are; `retract` sends them back to the queue, their KV
        to the prefix cache; `abort` ends them.
        """
        async with self._lock:
            await self._hold()
            if mode == "retract":
                self._engine.scheduler.retract_all()
            elif mode == "abort":
                self._engine.abort_all(Finish(FinishReason.ABORT))

    async def resume(self) -> None:
        """Go on. Raises `RequestError` while memory is given back."""
        async with self._lock:
            if self.asleep:
                raise RequestError(
                    f"The server sleeps without {', '.join(sorted(self.asleep))}: wake it first."
                )
            self._engine.resume()

    def slow_down(self, seconds: float) -> None:
        """Leave so many seconds between a step's plan and the next, to see what slowness does; 0: none.
        Raises `RequestError`."""
        if not 0 <= seconds <= MAX_GAP:
            raise RequestError(
                f"'forward_sleep_time' must be between 0 and {MAX_GAP:g} seconds.", "forward_sleep_time"
            )
        self._engine.slow_down(seconds)

    async def start_profile(self) -> None:
        """Record a trace of the launch thread, and of the device if there is one."""
        async with self._lock:
            await self._engine.orders.carry_out("profile_start")

    async def stop_profile(self) -> Path:
        """Write the trace (Chrome's format) and say where."""
        async with self._lock:
            self._traces.mkdir(parents=True, exist_ok=True)
            path = self._traces / f"trace-{time.time_ns()}.json"
            await self._engine.orders.carry_out("profile_stop", str(path))
            return path

    async def load_weights(self, path: str) -> None:
        """Exchange the weights for those of a checkpoint of the same shape. Running requests go on with
        the new ones; what the old ones computed is dropped. A refusal leaves the old ones in place."""
        async with self._lock:
            if "weights" in self.asleep:
                raise RequestError("The weights are given back: wake the server first.")
            was_paused = self.paused
            await self._hold()
            try:
                await self._engine.orders.carry_out("load_weights", path)
                self._forget()
            finally:
                if not was_paused:
                    self._engine.resume()

    async def sleep(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Give memory back; requests wait until `wake`."""
        async with self._lock:
            await self._hold()
            tags = tuple(tag for tag in tags if tag not in self.asleep)
            if tags:
                self._forget()
                await self._engine.orders.carry_out("sleep", tags=tags)
                self.asleep |= set(tags)

    async def wake(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Take memory again; when nothing is missing any more, go on."""
        async with self._lock:
            tags = tuple(tag for tag in tags if tag in self.asleep)
            if tags:
                await self._engine.orders.carry_out("wake", tags=tags)
                self.asleep -= set(tags)
            if not self.asleep:
                self._engine.resume()

    async def _hold(self) -> None:
        engine = self._engine
        engine.paused = True
        await engine.orders.quiet(engine.scheduler.in_flight)

    def _forget(self) -> None:
        """No KV that exists now is of use: running requests start over from their tokens."""
        self._engine.scheduler.retract_all()
        self._engine.scheduler.cache.flush()
