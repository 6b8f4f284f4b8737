"""An sqlite file and the one thread that uses it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

from core.errors import Unavailable, check_disk_full

T = TypeVar("T")
D = TypeVar("D", bound="Database")

PATIENCE = 10.0
"""Seconds to wait while another server writes to the same file."""


class Database(ABC):
    """The file and a lock file next to it. Calls block. Owner: the thread of its `DatabaseThread`."""

    def __init__(self, root: Path, lock: str) -> None:
        """Raises `OSError`, `sqlite3.Error` and what `_open` raises."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root = root
        self._lock = os.open(root / lock, os.O_RDWR | os.O_CREAT, 0o600)
        with ExitStack() as self._opened:  # the next attempt must find neither it locked nor a file more open
            self._opened.callback(os.close, self._lock)
            self._open()
            self._opened = self._opened.pop_all()

    @abstractmethod
    def _open(self) -> None:
        """Lock, connect, and repair what an earlier server left."""

    def _lock_alone(self) -> bool:
        """Take the lock; False when another server has it."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _connect(self, name: str, synchronous: str, schema: str) -> None:
        self._db = sqlite3.connect(
            self._root / name, isolation_level=None, check_same_thread=False, timeout=PATIENCE
        )
        self._opened.callback(self._db.close)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={synchronous}")
        self._db.executescript(schema)

    def close(self) -> None:
        """Release the file for another server."""
        self._opened.close()


class DatabaseThread(Generic[D]):
    """A database for the event loop. Calls are made in order, also those that are not awaited. Owner: event
    loop."""

    def __init__(self, name: str, make: Callable[[], D]) -> None:
        """`make` is called in the thread on first use."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._make = make
        self._disk: D | None = None
        self._closed = False

    def run(self, work: Callable[[D], T]) -> asyncio.Future[T]:
        """Run `work` in the thread. Raises what it raises, `Unavailable` when the directory is unusable or
        the server shuts down, and `DiskFull`."""
        return self._submit(lambda: self._run(work))

    def _submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise Unavailable("The server is shutting down.")
        return asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _run(self, work: Callable[[D], T]) -> T:
        try:
            if self._disk is None:
                self._disk = self._make()
            return work(self._disk)
        except (OSError, sqlite3.Error) as error:
            check_disk_full(error)
            raise

    async def close(self) -> None:
        """Close after all earlier calls. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._pool, self._shut)
            self._pool.shutdown()

    def _shut(self) -> None:
        if self._disk is not None:
            self._disk.close()
