"""Operations on a running server: pause, profile, load weights, release memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from app.engine.replicas import Replicas
from app.engine.shielded import Shielded, shielded
from core.command import TAGS, Action, Tag
from core.errors import RequestError, field_error
from core.types import Finish, FinishReason

PauseMode = Literal["keep", "retract", "abort"]

MAX_GAP = 60.0
"""Maximum seconds between steps: with hours the server would seem to hang."""


class Operator(Shielded):
    """Runs one operation at a time on all replicas, paused where necessary. An operation that only some of
    them can do is undone on those.

    Owner: event loop.
    """

    def __init__(self, replicas: Replicas, traces: Path, weights: str = "") -> None:
        """`weights` is the checkpoint that is loaded."""
        super().__init__()
        self._replicas = replicas
        self._engines = replicas.engines
        self._traces = traces
        self._weights = weights
        self._lock = asyncio.Lock()
        self._stays_paused = False
        """Set by `pause`, cleared by `resume`."""
        self.asleep: frozenset[Tag] = frozenset()
        """Memory that is released. The engines are paused meanwhile."""

    @property
    def paused(self) -> bool:
        """Whether no steps are planned; new requests wait then."""
        return self._engines[0].paused

    @shielded
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Plan no more steps, and return when none is in flight.

        `keep` leaves running requests as they are; `retract` returns them to the queue and their KV to the
        prefix cache; `abort` ends them.
        """
        async with self._held():
            self._stays_paused = True
            for engine in self._engines:
                if mode == "retract":
                    engine.retract_all()
                elif mode == "abort":
                    engine.abort_all(Finish(FinishReason.ABORT))

    @shielded
    async def resume(self) -> None:
        """Continue. Raises `RequestError` while memory is released."""
        async with self._lock:
            if self.asleep:
                raise RequestError(
                    f"The server sleeps without {', '.join(sorted(self.asleep))}: wake it first."
                )
            self._stays_paused = False
            self._resume_unless_held()

    def slow_down(self, seconds: float) -> None:
        """Wait so many seconds between the plans of two steps, to simulate a slow server; 0: none. Raises
        `RequestError`."""
        if not 0 <= seconds <= MAX_GAP:
            raise field_error("forward_sleep_time", f"must be between 0 and {MAX_GAP:g} seconds")
        for engine in self._engines:
            engine.slow_down(seconds)

    @shielded
    async def start_profile(self) -> None:
        """Record a trace of a launch thread, and of the devices if there are any: the first replica's, since
        torch records one trace at a time. Raises `RequestError` where it could not be written at the end."""
        async with self._lock:
            try:
                self._traces.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RequestError(
                    f"{self._traces} cannot be made: {error.strerror or error}. Set the environment variable "
                    "LOOM_CACHE to a directory that can be written to."
                ) from None
            await self._engines[0].commands.carry_out("profile_start")

    @shielded
    async def stop_profile(self) -> Path:
        """Write the trace in Chrome's format; returns its path."""
        async with self._lock:
            path = self._traces / f"trace-{time.time_ns()}.json"
            await self._engines[0].commands.carry_out("profile_stop", str(path))
            return path

    @shielded
    async def load_weights(self, path: str) -> None:
        """Replace the weights by those of a checkpoint of the same shape. Running requests continue with the
        new ones; KV of the old ones is dropped. If it fails, the old ones stay."""
        async with self._held():
            if "weights" in self.asleep:
                raise RequestError("The weights are released: wake the server first.")
            await self._replicas.together(
                lambda engine: engine.commands.carry_out("load_weights", path),
                lambda engine: engine.commands.carry_out("load_weights", self._weights),
            )
            self._weights = path
            self._drop_kv()

    @shielded
    async def sleep(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Release memory; requests wait until `wake`."""
        async with self._held():
            tags = tuple(tag for tag in tags if tag not in self.asleep)
            if tags:
                self._drop_kv()
                await self._exchange("sleep", "wake", tags)
                self.asleep |= set(tags)

    @shielded
    async def wake(self, tags: tuple[Tag, ...] = TAGS) -> None:
        """Allocate released memory again. When all of it is back, continue, unless `pause` was called."""
        async with self._lock:
            tags = tuple(tag for tag in tags if tag in self.asleep)
            if tags:
                await self._exchange("wake", "sleep", tags)
                self.asleep -= set(tags)
                self._resume_unless_held()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Hold the lock with no step in flight. Afterwards the engines continue, unless they are to stay
        paused or asleep."""
        async with self._lock:
            for engine in self._engines:
                engine.paused = True
            try:
                for engine in self._engines:
                    await engine.quiet()
                yield
            finally:
                self._resume_unless_held()

    def _resume_unless_held(self) -> None:
        if not self._stays_paused and not self.asleep:
            for engine in self._engines:
                engine.resume()

    async def _exchange(self, action: Action, back: Action, tags: tuple[Tag, ...]) -> None:
        await self._replicas.together(
            lambda engine: engine.commands.carry_out(action, tags=tags),
            lambda engine: engine.commands.carry_out(back, tags=tags),
        )

    def _drop_kv(self) -> None:
        """Drop all KV: running requests are computed again from their tokens."""
        for engine in self._engines:
            engine.retract_all()
            engine.flush()
