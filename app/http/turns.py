"""Spreads requests that arrive together over several turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

PER_TURN: Final = 16
"""Maximum number of requests that start in one turn of the loop. Each takes 0.4 to 0.5 ms, sixteen 7 to 8 ms.
When 512 answers end together, their clients send 512 requests at once; while all of them start,
results wait for the scheduler. With too few in a turn, requests wait while fewer rows run: steps become
smaller and more numerous, which costs the loop more. On two H100s one in a turn made 25,719 tokens/s and four
28,419 to 32,192 (`history/h100x2-turns-qwen3-8b.json`). On two H200s 16 for 8, together with
`app.listen.ACCEPTS`, made 5% more (`history/h200x2-turns-qwen3.json`). 32 make 1 to 2% more beside a
simulated device, but streams then wait longer: p99 gaps of 0.3 to 0.6 s while 1,024 clients start, for 0.3 to
0.4."""


class Turns:
    """Lets requests start in the order in which they came, `PER_TURN` in each turn of the loop.

    Owner: event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._started = 0
        """Requests that started in this turn."""
        self._due = False

    async def enter(self) -> None:
        """Wait until a request may start."""
        if self._started < PER_TURN and not self._waiting:
            self._started += 1
            self._await_next()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _await_next(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._due = False
        self._started = 0
        while self._waiting and self._started < PER_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its client has left
                waiter.set_result(None)
                self._started += 1
        if self._started:
            self._await_next()
