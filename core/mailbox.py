"""The two thread crossings: plans go to the launch thread, results come back to the loop.

Both rest on `collections.deque`, whose append and popleft are atomic in CPython, so no lock stands
on the path. Each has one producer and one consumer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The other side takes no more items."""


class Mailbox(Generic[T]):
    """Loop to thread. Order is kept; every item put before `close` is still taken.

    Owner: the producer calls `put` and `close`, the consumer calls `take`.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ready = threading.Event()
        self._closed = False

    def put(self, item: T) -> None:
        """Hand over one item; never blocks. Raises `Closed` after `close`."""
        if self._closed:
            raise Closed
        self._items.append(item)
        self._ready.set()

    def close(self) -> None:
        """No item follows. The consumer empties what is left, then sees `Closed`."""
        self._closed = True
        self._ready.set()

    def take(self) -> T:
        """Next item; sleeps (GIL released) while there is none. Raises `Closed` at the end."""
        while True:
            try:
                return self._items.popleft()
            except IndexError:
                pass
            if self._closed and not self._items:
                raise Closed
            # Clear, then look again: an item put between the two sets the event once more, so a
            # wake-up can be early but is never lost.
            self._ready.clear()
            if not self._items and not self._closed:
                self._ready.wait()


class Outbox(Generic[T]):
    """Thread to loop. Order is kept, each item is drained exactly once.

    `wake` is called from the producer's thread, once per burst: the flag is set by the first `put`
    and cleared by `drain` before it looks, so an item that arrives meanwhile wakes the loop again.
    An early wake-up finds nothing and is harmless.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._items: deque[T] = deque()
        self._signalled = False
        self.wake = wake

    def put(self, item: T) -> None:
        """Hand over one item; wakes the loop unless a wake-up is already on its way."""
        self._items.append(item)
        if not self._signalled:
            self._signalled = True
            if self.wake is not None:
                self.wake()

    def drain(self) -> list[T]:
        """Everything that has arrived, oldest first."""
        self._signalled = False
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items
