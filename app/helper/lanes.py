"""Two queues by size: what is short never waits for what is long."""

from __future__ import annotations

from app.helper.process import HelperProcess
from core.helper import Task

LONG = 2**20
"""Bytes of a payload from which on it waits with its like."""
MAX_JOBS = 8_192
"""In each queue: as many bodies as there may be connections, each of milliseconds."""


class Lanes:
    """`core.helper.Helper` over two processes. Owner: event loop."""

    __slots__ = ("_long", "_short")

    def __init__(self) -> None:
        self._short, self._long = HelperProcess(MAX_JOBS), HelperProcess(MAX_JOBS)

    async def run(self, task: Task, payload: bytes, seconds: float) -> bytes:
        """See `core.helper.Helper.run`."""
        lane = self._short if len(payload) < LONG else self._long
        return await lane.run(task, payload, seconds)

    def close(self) -> None:
        """Kill both. Idempotent."""
        self._short.close()
        self._long.close()
