"""Output files that survive a crash: lines in them are done and are not run again."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any

import msgspec

from app.batch.lines import LINES_PER_SLICE, PAUSE
from app.batch.records import Batch, Counts, Usage, UsagePart

SYNC_LINES = 32
"""Lines between two fsyncs: a power cut loses at most these, and they run again."""


FIRST = b'{"id":"batch_req_'
"""The bytes with which each record begins."""


class Tally:
    """Totals of the lines of one or more journals. Owner: the code that runs the batch."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.completed = 0
        self.failed = 0
        self.usage = Usage()

    def add(self, line: bytes) -> None:
        """Count one output line; anything else is ignored."""
        if (entry := _read(line)) is None:
            return
        self.ids.add(entry.custom_id)
        if not entry.answered:
            self.failed += 1
            return
        self.completed += 1
        assert entry.response is not None
        if (usage := entry.response.body.usage) is not None:
            self.usage.add(usage)

    def update(self, batch: Batch) -> Batch:
        """The batch with these totals."""
        counts = Counts(total=batch.request_counts.total, completed=self.completed, failed=self.failed)
        usage = self.usage.shown() if self.completed else None
        return msgspec.structs.replace(batch, request_counts=counts, usage=usage)


class Journal:
    """Appends lines to one file. Its calls block: not for the event loop.

    Owner: one thread at a time.
    """

    def __init__(self, path: Path, tally: Tally) -> None:
        """Opens or creates the file and adds its lines to `tally`. An incomplete last line, from a crash, is
        cut off."""
        self.path = path
        self._unsynced = 0
        # Unbuffered: no part of a failed write may be written later.
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", 0)
        try:
            lock(self._file, path)
        except OSError:
            self._file.close()
            raise
        with path.open("rb") as written:
            self._whole = _add_lines(written, tally)
        self._file.truncate(self._whole)

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a newline. When it raises `OSError`, nothing was appended."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self._whole)
            raise
        self._whole += len(line)
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES:
            self.sync()

    def sync(self) -> None:
        """Flush to disk."""
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()


def read_tally(directory: Path, batch: Batch) -> Tally:
    """Totals of a batch's journals, which must not be written meanwhile. Blocks."""
    tally = Tally()
    for path in (directory / batch.output_id, directory / batch.error_id):
        if path.exists():
            with path.open("rb") as file:
                _add_lines(file, tally)
    return tally


def _add_lines(file: IO[bytes], tally: Tally) -> int:
    """Count every whole line; returns their bytes."""
    whole = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        whole += len(line)
        tally.add(line)
        if number % LINES_PER_SLICE == 0:
            time.sleep(PAUSE)
    return whole


def lock(file: IO[bytes], path: Path) -> None:
    """Lock a journal until it is closed. Raises `BlockingIOError` where another process has it, or has
    replaced it since it was opened: each would write what the other has written, or to a lost file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process writes to it", str(path)) from None
    except OSError:
        return  # a file system without locks
    if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
        raise BlockingIOError(errno.EAGAIN, "another process writes to it", str(path))


def is_journal(path: Path) -> bool:
    """Whether a file is empty or begins with a record of a line, which a crash may have cut off."""
    with path.open("rb") as file:
        first = file.readline(len(FIRST))
        if FIRST.startswith(first):
            return True
        entry = _read(first + file.readline())  # of this command's input, which has ids too, none is answered
        return entry is not None and (entry.response is not None or entry.error is not None)


def drop_failed(path: Path) -> int:
    """Remove the records of failed lines from a journal that is not open, so that they run again; returns how
    many. Other records stay byte for byte. After a crash there is either the old file or the new one."""
    if not path.exists():
        return 0
    dropped = 0
    kept = path.with_name(f"{path.name}.retry")
    with path.open("rb") as old:
        lock(old, path)
        try:
            with os.fdopen(os.open(kept, _NEW, 0o600), "wb") as new:
                for line in old:
                    if (entry := _read(line)) is not None and not entry.answered:
                        dropped += 1
                    else:
                        new.write(line)
                new.flush()
                os.fsync(new.fileno())
        except OSError:  # on a full disk it would take what is left
            kept.unlink(missing_ok=True)
            raise
    if dropped:
        os.replace(kept, path)
    else:
        kept.unlink()
    return dropped


_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class _Body(msgspec.Struct, frozen=True):
    usage: UsagePart | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int = 0
    body: _Body = _Body()


class _Entry(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: Any = None

    @property
    def answered(self) -> bool:
        """Whether the line succeeded."""
        return self.error is None and self.response is not None and self.response.status_code == 200


_decode = msgspec.json.Decoder(_Entry).decode


def _read(line: bytes) -> _Entry | None:
    """None for what is no record of a line."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
