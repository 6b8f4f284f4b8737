"""The stored responses for the event loop: one thread, which opens the file when it is first needed."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from app.api.responses.disk import Disk, Item, Record, no_previous
from app.database import DatabaseThread
from core.errors import DiskFull, NotFound, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")


class Store(DatabaseThread[Disk]):
    """Responses of all owners, durable and bounded. Owner: event loop."""

    def __init__(self, root: Path, limit: int) -> None:
        """`limit` in bytes; 0 keeps nothing and touches no disk."""
        super().__init__("responses", lambda: Disk(root, limit))
        self._limit = limit

    @property
    def keeps(self) -> bool:
        """Whether responses are stored at all."""
        return self._limit > 0

    def put(self, record: Record) -> asyncio.Future[bool]:
        """Store a record or its new state. The result is whether it is stored; errors are logged only, since
        an answer that exists must not be lost over them. It need not be awaited."""

        def put() -> bool:
            try:
                return self._run(lambda disk: disk.put(record))
            except (Unavailable, DiskFull) as error:
                log.error("response %s is not kept: %s", record.id, error)
                return False

        if self._closed:
            closed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            closed.set_result(False)
            return closed
        return self._submit(put)

    async def require(self, record: Record) -> bool:
        """`put` for an answer that must be stored: raises `Unavailable` and `DiskFull`."""
        return await self.run(lambda disk: disk.put(record))

    async def get(self, owner: str, id: str) -> Record:
        """The record of a response. Raises `NotFound`, also for another owner's, and `Unavailable` when the
        disk fails."""
        if not self.keeps:
            raise NotFound(f"Response with id '{id[:100]}' not found.", "response_id")
        return await self.run(lambda disk: disk.get(owner, id, "response_id"))

    async def history(self, owner: str, id: str) -> list[Item]:
        """Items of the conversation up to the end of response `id`, oldest first. Raises
        `RequestError`."""
        if not self.keeps:
            raise no_previous(id)
        return await self.run(lambda disk: disk.history(owner, id))

    async def item(self, owner: str, response: str, id: str, param: str) -> Item:
        """One item, input or output, of a response. Raises `NotFound`."""
        if not self.keeps:
            raise NotFound("This server keeps no responses.", param)
        return await self.run(lambda disk: disk.item(owner, response, id, param))

    async def delete(self, owner: str, id: str) -> None:
        """Remove a response. Raises `NotFound`."""
        if not self.keeps:
            raise NotFound(f"Response with id '{id[:100]}' not found.", "response_id")
        await self.run(lambda disk: disk.delete(owner, id))

    def _run(self, work: Callable[[Disk], T]) -> T:
        try:
            return super()._run(work)
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__  # without the path
            raise Unavailable(f"Stored responses cannot be reached: {reason}.") from error
