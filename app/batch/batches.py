"""Batches for HTTP, and the task that runs them one after the other."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import sqlite3
import time
from functools import partial

import msgspec

from app.batch.capacity import BackgroundCapacity
from app.batch.records import Batch
from app.batch.store import Disk, Page, Store
from app.batch.work import Answers, Work
from app.http.limits import Permit
from app.http.tenant import Keys, acting
from app.service import Service
from core.errors import LoomError, RequestError, field_error

log = logging.getLogger(__name__)

RETRY = 10.0
"""Seconds until a retry after a disk error; guessed: usually somebody has to free space."""

MAX_ACTIVE = 1000
"""Batches that may wait."""

_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")


class Batches:
    """The batches of one directory. They run in order of arrival, one at a time.

    Owner: event loop.
    """

    def __init__(self, store: Store, answers: Answers, keys: Keys) -> None:
        self.store = store
        self._keys = keys
        self._answers = answers
        self._new = asyncio.Event()
        self._work: Work | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def endpoints(self) -> list[str]:
        """Endpoints that batches support."""
        return sorted(self._answers)

    def start(self, service: Service, capacity: BackgroundCapacity) -> None:
        """Start running batches: those that an earlier server left, then new ones."""
        if self.store.exists:
            self._new.set()
        self._task = asyncio.get_running_loop().create_task(self._run(service, capacity), name="batches")
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Stop the running lines; the rest waits for the next start. Idempotent."""
        self._closing = True
        self._new.set()
        if self._work is not None:
            self._work.stop()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """`stop`, and release the directory."""
        await self.stop()
        await self.store.close()

    # -- requests of clients -----------------------------------------------------------------------

    async def create(
        self, owner: str, input_file_id: str, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> Batch:
        """Store a batch. Its lines are checked later, by the task. Raises `RequestError`."""
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + seconds(window),
            metadata=metadata,
        )

        def put(disk: Disk) -> None:
            if disk.file(owner, input_file_id).purpose != "batch":
                raise RequestError("The input file's purpose must be 'batch'.", "input_file_id")
            if disk.count_active() >= MAX_ACTIVE:
                raise RequestError(f"{MAX_ACTIVE} batches wait already.", code="too_many_batches")
            disk.put_batch(owner, batch)

        await self.store.run(put)
        self._new.set()
        return batch

    async def get(self, owner: str, id: str) -> Batch:
        """The current state of a batch. Raises `NotFound`."""
        return self._live(await self.store.run(lambda disk: disk.batch(owner, id)))

    async def list(self, owner: str, page: Page) -> list[Batch]:
        """Batches of an owner."""
        return [self._live(b) for b in await self.store.run(lambda disk: disk.batches(owner, page))]

    async def cancel(self, owner: str, id: str) -> Batch:
        """Cancel a batch; results so far are kept. Raises `RequestError` for one that has ended."""
        batch = await self.get(owner, id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if not batch.active or batch.status == "finalizing":
            raise RequestError(f"A batch that is {batch.status} cannot be cancelled.", "batch_id")
        if self._work is not None and self._work.batch.id == id:
            return await self._work.cancel()
        now = int(time.time())
        batch = msgspec.structs.replace(batch, status="cancelling", cancelling_at=now)
        if batch.in_progress_at is None:  # it has no results: `Work` need not publish any
            batch = msgspec.structs.replace(batch, status="cancelled", cancelled_at=now)
        await self.store.run(lambda disk: disk.put_batch(owner, batch))
        return batch

    def _live(self, batch: Batch) -> Batch:
        return self._work.batch if self._work is not None and self._work.batch.id == batch.id else batch

    # -- the task ----------------------------------------------------------------------------------

    async def _run(self, service: Service, capacity: BackgroundCapacity) -> None:
        while not self._closing:
            await self._new.wait()
            self._new.clear()
            try:
                while not self._closing and (found := await self.store.run(Disk.next_batch)) is not None:
                    owner, batch = found
                    self._work = Work(owner, batch, self.store, self._answers, service, capacity)
                    # The batch may have been cancelled on disk before it became `_work`.
                    stored = await self.store.run(partial(Disk.batch, owner=owner, id=batch.id))
                    if stored.status == "cancelling":
                        self._work.batch = stored
                    if stored.active:
                        with acting(Permit(self._keys.owner(owner))):
                            await self._attempt(self._work)
                    self._work = None
            except (OSError, sqlite3.Error, LoomError) as error:
                log.error("batches wait %g s for the disk: %s", RETRY, error)
                asyncio.get_running_loop().call_later(RETRY, self._new.set)
            finally:
                self._work = None

    async def _attempt(self, work: Work) -> None:
        """Run a batch. An unexpected exception fails it, and the next one runs. Raises `OSError`,
        `sqlite3.Error` and `LoomError`, after which it is tried again."""
        try:
            await work.run()
        except (OSError, sqlite3.Error, LoomError):
            raise
        except Exception as error:
            log.exception("%s failed", work.batch.id)
            await work.abandon(error)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("batches have stopped running", exc_info=error)


def seconds(window: str) -> int:
    """Seconds of a completion window like `24h` or `7d`. Raises `RequestError`."""
    found = _WINDOW.fullmatch(window)
    if found is None:
        raise field_error("completion_window", "must be like '24h' or '7d'")
    return int(found[1]) * (3600 if found[2] == "h" else 86400)
