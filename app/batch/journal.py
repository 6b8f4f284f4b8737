"""An output file that survives a crash: what is in it is done, and is not done again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from app.batch.lines import BREATH, PAUSE
from app.batch.records import Usage, UsagePart

SYNC_LINES = 32
"""Lines between two fsyncs: what a power cut can cost is run again."""


class Tally:
    """What the lines of one or more journals add up to. Owner: whoever runs the batch."""

    __slots__ = ("completed", "failed", "ids", "usage")

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.completed = 0
        self.failed = 0
        self.usage = Usage()

    def add(self, line: bytes) -> None:
        """Count one output line. Nothing happens for what is none."""
        try:
            entry = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        self.ids.add(entry.custom_id)
        if entry.error is None and entry.response is not None and entry.response.status_code == 200:
            self.completed += 1
            if (usage := entry.response.body.usage) is not None:
                self.usage.add(usage)
        else:
            self.failed += 1


class Journal:
    """Appends lines to one file. Blocks, so not for the loop of a server.

    Owner: one thread at a time.
    """

    __slots__ = ("_file", "_unsynced", "path")

    def __init__(self, path: Path, tally: Tally) -> None:
        """Opens or makes the file and adds what it has to `tally`. A last line without its end was
        torn by a crash and is cut off."""
        self.path = path
        self._unsynced = 0
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            tally.add(line)
            if number % BREATH == 0:
                time.sleep(PAUSE)
        self._file.seek(whole)
        self._file.truncate()

    def append(self, line: bytes) -> None:
        """One more line, which ends with a newline."""
        self._file.write(line)
        self._file.flush()
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES:
            self.sync()

    def sync(self) -> None:
        """What was appended is on the disk after this."""
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if not self._file.closed:
            self.sync()
            self._file.close()


class _Body(msgspec.Struct, frozen=True):
    usage: UsagePart | None = None


class _Response(msgspec.Struct, frozen=True):
    status_code: int = 0
    body: _Body = _Body()


class _Entry(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Entry).decode
