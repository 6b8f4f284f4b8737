"""Queues between threads: plans go to the launch thread, results come back to the loop.

Neither has a lock in Python on its path: a `SimpleQueue` is native code, and `append` and `popleft` of a
`deque` are atomic in CPython. Each has one producer and one consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The other side takes no more items."""


class Mailbox(Generic[T]):
    """Loop to thread. Order is kept; every item put before `close` is still taken.

    Owner: the producer calls `put` and `close`, the consumer iterates.
    """

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()
        """None is the end."""
        self._closed = False

    def put(self, item: T) -> None:
        """Hand over one item; never blocks. Raises `Closed` after `close`."""
        if self._closed:
            raise Closed
        self._items.put(item)

    def close(self) -> None:
        """No item follows. The consumer's iteration ends behind what is left."""
        self._closed = True
        self._items.put(None)

    def __iter__(self) -> Iterator[T]:
        """Items as they come; waits (GIL released) while there is none. For one consumer, once."""
        return iter(self._items.get, None)


class Outbox(Generic[T]):
    """Thread to loop. Order is kept, each item is drained exactly once.

    What `listen` was given is called from the producer's thread, once per burst: the flag is set by the first
    `put` and cleared by `drain` before it looks, so an item that arrives meanwhile wakes the loop again.
    An early wake-up finds nothing and is harmless.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._signalled = False
        self._wake: Callable[[], None] = lambda: None

    def put(self, item: T) -> None:
        """Hand over one item; wakes the loop unless a wake-up is already on its way."""
        self._items.append(item)
        if not self._signalled:
            self._signalled = True
            self._wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Set the function that `put` calls. Calls it at once if items have already arrived."""
        self._wake = wake
        if self._items:
            wake()

    def drain(self) -> list[T]:
        """Everything that has arrived, oldest first."""
        self._signalled = False
        items: list[T] = []
        while self._items:
            items.append(self._items.popleft())
        return items
