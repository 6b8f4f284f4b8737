"""Runs one batch: from its input file to its output files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from app.batch.capacity import BackgroundCapacity, BackgroundRun
from app.batch.journal import Journal, Tally
from app.batch.lines import Line, answered, check_input, failed, parse_line, read_lines, unanswered
from app.batch.records import Batch, BatchError, BatchErrors, Counts, FileRecord, Status
from app.batch.store import Disk, Store
from app.service import Loaded, Phase, Service
from core.errors import Aborted, LoomError, Overloaded, RequestError, Unavailable
from core.types import FinishReason

log = logging.getLogger(__name__)

Answer = Callable[[bytes, Loaded], Awaitable[Mapping[str, Any]]]
"""From a request's body to its answer. Raises `core.errors`."""
Answers = Mapping[str, Answer]
"""Functions from body to answer, by endpoint."""

TRIES = 3
"""Attempts at a line that ends for other reasons than itself: a timeout, an operator's abort."""
TICK = 0.01
"""Seconds between two checks for capacity."""


class Work:
    """Runs one batch: validate, run every line without a result, publish the results.

    Results are in the two journals, so that a batch can be resumed by this process or another. Owner: event
    loop.
    """

    def __init__(
        self,
        owner: str,
        batch: Batch,
        store: Store,
        answers: Answers,
        service: Service,
        capacity: BackgroundCapacity,
    ) -> None:
        """`owner` is the tenant of the batch; `run` must be called while acting for it."""
        self._owner = owner
        self.batch = batch
        self._store = store
        self._answers = answers
        self._service = service
        self._capacity = capacity
        self._stopped = False
        self._tally = Tally()
        self._retries: deque[Line] = deque()
        """Lines to run again."""
        self._tries: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        """An error of the disk: the batch is tried again later."""
        self._journals: dict[bool, Journal] = {}

    async def run(self) -> None:
        """Run to the end, or until `stop`. Raises `OSError` and `sqlite3.Error`."""
        if not await self._store.run(lambda disk: disk.path(self.batch.input_file_id).is_file()):
            await self._fail(BatchError(code="file_not_found", message="The input file is gone."))
            return
        if self.batch.status == "validating":
            await self._validate()
        if not self.batch.active:
            return
        try:
            await self._open()
            if self.batch.status == "in_progress":
                await self._feed()
            if not self._stopped:
                await self._publish()
        finally:
            self._capacity.preempt_all()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._store.run(lambda disk: self._close())

    async def abandon(self, error: Exception) -> None:
        """Fail the batch and publish its results so far. Called after `run` raised `error`."""
        message = f"The server failed while it worked on this batch ({type(error).__name__})."
        published = await self._store.run(self._published)
        await self._fail(BatchError(code="internal_error", message=message), **published)

    async def cancel(self) -> Batch:
        """Start no more lines and abort those that run. No effect on a batch that is ending."""
        if self.batch.status not in ("validating", "in_progress"):
            return self.batch
        await self._move("cancelling")
        self._capacity.preempt_all()
        return self.batch

    def stop(self) -> None:
        """Leave the rest for the next start."""
        self._stopped = True
        self._capacity.preempt_all()

    # -- before and after --------------------------------------------------------------------------

    async def _validate(self) -> None:
        input_id, endpoint = self.batch.input_file_id, self.batch.endpoint
        total, errors = await self._store.run(lambda disk: check_input(disk.path(input_id), endpoint))
        if errors:
            await self._fail(*errors)
            return
        # The batch may have been cancelled in the meantime.
        status: Status = "in_progress" if self.batch.status == "validating" else self.batch.status
        await self._move(status, request_counts=Counts(total=total))

    async def _fail(self, *errors: BatchError, **published: str) -> None:
        listed = BatchErrors(data=list(errors))
        await self._move("failed", errors=listed, **published)

    async def _open(self) -> None:
        def open_journals(disk: Disk) -> None:
            for good, id in ((True, self.batch.output_id), (False, self.batch.error_id)):
                self._journals[good] = Journal(disk.path(id), self._tally)

        await self._store.run(open_journals)
        self._count()

    def _close(self) -> None:
        with contextlib.ExitStack() as last:
            for journal in self._journals.values():
                last.callback(journal.close)

    async def _publish(self) -> None:
        """Make the journals files that clients can see."""
        if self.batch.status == "in_progress":
            # How it ends is stored first, so that it ends the same way after a crash below.
            expired = self._late and not self._all_done
            await self._move("finalizing", expired_at=int(time.time()) if expired else None)
        if self.batch.expired_at is not None:
            await self._expire()
        published = await self._store.run(self._published)
        end: Status = "completed" if self.batch.expired_at is None else "expired"
        await self._move("cancelled" if self.batch.status == "cancelling" else end, **published)
        counts = self.batch.request_counts
        log.info(
            "%s: %s, %d of %d lines answered",
            self.batch.id,
            self.batch.status,
            counts.completed,
            counts.total,
        )

    def _published(self, disk: Disk) -> dict[str, str]:
        """Make files of the journals; returns the fields of the batch that name them. Store's thread."""
        self._close()
        published: dict[str, str] = {}
        for field, id in (("output_file_id", self.batch.output_id), ("error_file_id", self.batch.error_id)):
            path = disk.path(id)
            if not path.exists():  # no line was started
                continue
            if not (size := path.stat().st_size):
                path.unlink()
                continue
            name = f"{self.batch.id}_{field.removesuffix('_file_id')}.jsonl"
            made = FileRecord(
                id=id, bytes=size, created_at=int(time.time()), filename=name, purpose="batch_output"
            )
            disk.add_file(self._owner, made)
            published[field] = id
        return published

    async def _expire(self) -> None:
        """Add an error line for each request that never ran."""
        message = "The batch ran out of time before this request was executed."

        def note(disk: Disk) -> None:
            for line in self._lines(disk):
                self._append(False, unanswered(line.custom_id, "batch_expired", message))

        await self._store.run(note)
        self._count()

    async def _move(self, status: Status, **fields: Any) -> None:
        """Store a new status, with the time of the first change to it, and other fields."""
        at = f"{status}_at"
        fields = {"status": status, at: getattr(self.batch, at) or int(time.time()), **fields}
        batch = self.batch = msgspec.structs.replace(self.batch, **fields)
        await self._store.run(lambda disk: disk.put_batch(self._owner, batch))

    # -- lines -------------------------------------------------------------------------------------

    @property
    def _late(self) -> bool:
        return time.time() >= self.batch.expires_at

    @property
    def _all_done(self) -> bool:
        return len(self._tally.ids) >= self.batch.request_counts.total

    @property
    def _over(self) -> bool:
        return self._stopped or self._error is not None or self.batch.status != "in_progress" or self._late

    async def _feed(self) -> None:
        source = await self._store.run(self._lines)
        while not self._over:
            line = self._retries.popleft() if self._retries else None
            if line is None:
                line = await self._store.run(lambda disk: next(source, None))
            if line is not None:
                await self._begin(line)
            elif self._tasks:
                await self._tick()
            elif not self._retries:  # a line may have returned while the file was read
                break
        self._capacity.preempt_all()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._error is not None:
            raise self._error

    def _lines(self, disk: Disk) -> Iterator[Line]:
        """Lines without a result. Store's thread."""
        for number, text in read_lines(disk.path(self.batch.input_file_id)):
            line = parse_line(number, text, self._answers)
            if line.custom_id not in self._tally.ids:
                yield line

    async def _begin(self, line: Line) -> None:
        """Start a line as soon as there is capacity, unless the batch ends before."""
        while (admitted := self._admit()) is None:
            await self._tick()
            if self._over:
                return
        task = asyncio.create_task(self._attempt(line, *admitted))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error

    def _admit(self) -> tuple[BackgroundRun, Loaded] | None:
        return self._capacity.admit(self._service.loaded) if self._ready else None

    @property
    def _ready(self) -> bool:
        return self._service.health.phase is Phase.READY

    async def _tick(self) -> None:
        await asyncio.sleep(TICK)
        self._capacity.check_starvation()

    async def _attempt(self, line: Line, run: BackgroundRun, loaded: Loaded) -> None:
        """Run a line once. One that was preempted or rejected for load runs again."""
        work = self._answers[line.url](line.body, loaded)
        try:
            (answer,) = await asyncio.gather(work, return_exceptions=True)
        finally:
            self._capacity.release(run)
        error = answer if isinstance(answer, BaseException) else None
        rejected = isinstance(error, Overloaded | Unavailable | Aborted)
        retryable = rejected or (not isinstance(answer, BaseException) and _aborted(answer))
        engine_failed = error is not None and not isinstance(error, RequestError) and not self._ready
        if run.preempted or engine_failed or (retryable and self._may_retry(line)):
            self._retries.append(line)
        elif error is None:
            await self._record(True, partial(answered, line.custom_id, 200, answer))
        else:
            if not isinstance(error, LoomError):
                log.error("a line of %s failed", self.batch.id, exc_info=error)
            await self._record(False, partial(failed, line.custom_id, error))

    def _may_retry(self, line: Line) -> bool:
        """Whether a line that was aborted or rejected gets another attempt."""
        if self._ready:
            self._tries[line.custom_id] += 1
        return self._tries[line.custom_id] < TRIES

    async def _record(self, good: bool, line: Callable[[], bytes]) -> None:
        await self._store.run(lambda disk: self._append(good, line()))
        self._count()

    def _append(self, good: bool, text: bytes) -> None:
        """Append a line to its journal, in the store's thread. The tally counts what is in the file."""
        self._journals[good].append(text)
        self._tally.add(text)

    def _count(self) -> None:
        self.batch = self._tally.update(self.batch)


def _aborted(answer: Mapping[str, Any]) -> bool:
    """The answer was aborted."""
    return any(choice["finish_reason"] == FinishReason.ABORT.value for choice in answer.get("choices", ()))
