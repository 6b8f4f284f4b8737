"""Requests and their outcomes as JSON lines, for `python -m bench.replay`."""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

import msgspec

from app.http.report import Report, readable
from app.process import begin
from core.errors import ConfigError

log = logging.getLogger(__name__)

FILE_BYTES = 256 * 2**20
FILES = 8
"""Files that are kept, of all servers that write to the directory; `--help` names both."""

WAITING_BYTES = 64 * 2**20
"""Bytes of bodies that may wait to be written; further requests are left out and counted."""
FLUSH_SECONDS = 3.0
"""Seconds that the server waits at its end for the last lines."""
SLICE = 64 * 1024
"""Bytes of a body that become JSON in one go: the GIL is held for 0.1 ms."""

HEADERS = (
    "Content-Type",
    "User-Agent",
    "X-Request-Id",
    "X-Correlation-Id",
    "X-Session-Id",
    "X-Data-Parallel-Rank",
    "X-Llm-D-Inference-Objective",
    "X-Llm-D-Slo-Ttft-Ms",
    "X-Llm-D-Slo-Tpot-Ms",
    "Traceparent",
    "Anthropic-Version",
    "Anthropic-Beta",
)
"""The headers of a request that are kept: none with a credential."""


class Accepted(msgspec.Struct, tag="request", tag_field="event", kw_only=True):
    """The dump's line for a request that was queued. `body` must stay its last field."""

    key: str
    """Shared with the request's `Ended` line, and with no other request of any server."""
    at: float
    """When it arrived, in seconds since 1970."""
    method: str
    path: str
    headers: dict[str, str] = {}
    body: str = ""
    """The body as received; bytes that are not UTF-8 are replaced."""


class Ended(msgspec.Struct, tag="end", tag_field="event", omit_defaults=True, kw_only=True):
    """The dump's line for the end of a request. If it is missing, the request ran when the process ended."""

    key: str
    status: int
    """499: the client disconnected."""
    total_ms: float
    queue_ms: float | None = None
    first_token_ms: float | None = None
    """Measured from the request's arrival, as `total_ms` is."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: list[str] = []
    """Finish reason of each choice: stop, length, abort or error."""
    error: str = ""
    """The code of the error that the client got."""
    failed: bool = False
    """The engine failed while it ran."""


class Dump:
    """A `Reporter` that writes lines in a thread of its own. Owner: event loop."""

    keeps_bodies = True

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError` where no file can be made in the directory, which is made if need be."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files = Files(directory)
        except OSError as error:
            raise ConfigError(
                f"--dump-requests {directory}: {error.strerror or error}. Name a directory that can be "
                "written to."
            ) from error
        self._lines: SimpleQueue[tuple[Accepted | Ended, bytes] | None] = SimpleQueue()
        self._writer = Writer(self._lines, files)
        self._thread = begin(self._writer.run, "loom-dump")
        self._prefix = secrets.token_hex(6)
        self._count = 0
        self._queued = 0

    def accepted(self, report: Report) -> None:
        """See `Reporter.accepted`."""
        size = len(report.body)
        if self._queued + size - self._writer.taken > WAITING_BYTES:
            self._writer.refused += 1
            return
        self._queued += size
        self._count += 1
        report.key = f"{self._prefix}-{self._count}"
        request = report.request
        headers = {name: readable(request.headers[name]) for name in HEADERS if name in request.headers}
        line = Accepted(
            key=report.key, at=report.created, method=request.method, path=request.path, headers=headers
        )
        self._lines.put((line, report.body))

    def ended(self, report: Report) -> None:
        """See `Reporter.ended`."""
        if not report.key:
            return
        first, started = report.first_token_at, report.started_at
        line = Ended(
            key=report.key,
            status=report.status,
            total_ms=_ms(report.ended_at - report.arrived),
            queue_ms=_ms(started - report.queued_at) if started else None,
            first_token_ms=_ms(first - report.arrived) if first else None,
            prompt_tokens=report.prompt_tokens,
            cached_tokens=report.cached_tokens,
            output_tokens=report.output_tokens,
            finish=report.finishes,
            error=report.error,
            failed=report.failed,
        )
        self._lines.put((line, b""))

    async def close(self) -> None:
        """See `Reporter.close`."""
        self._lines.put(None)
        await asyncio.wait((asyncio.wrap_future(self._thread),), timeout=FLUSH_SECONDS)


class Writer:
    """Takes lines from a queue until None. `refused` counts requests that did not fit into it. Owner: its
    thread, but `refused` belongs to the event loop."""

    def __init__(self, lines: SimpleQueue[tuple[Accepted | Ended, bytes] | None], files: Files) -> None:
        self._lines = lines
        self._files = files
        self._failing = False
        self._told = 0
        self.refused = 0
        self.taken = 0
        """Bytes of bodies that were taken from the queue."""

    def run(self) -> None:
        """Write lines until None comes."""
        while (item := self._lines.get()) is not None:
            line, body = item
            self._write(line, body)
            self.taken += len(body)
            if lost := self.refused - self._told:
                self._told += lost
                log.warning("%d requests are not in the dump: the disk was too slow", lost)
        self._files.close()

    def _write(self, line: Accepted | Ended, body: bytes) -> None:
        try:
            self._files.append(encoded(line, body))
            if self._failing:
                log.info("requests are dumped again")
            self._failing = False
        except OSError as error:
            if not self._failing:
                log.error("requests are not dumped: %s", error.strerror or error)
            self._failing = True


class Files:
    """The file that is written, and those before it. Its calls block. Owner: one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises `OSError`."""
        self._directory = directory
        self._size = 0
        self._open()

    def append(self, line: Iterator[bytes]) -> None:
        """Append one line, given in parts. When it raises `OSError`, the file is as before."""
        full = self._size >= FILE_BYTES
        if full or not os.fstat(self._file.fileno()).st_nlink:  # somebody has removed it
            before = self._file
            self._open(prune=full)
            before.close()
        size = self._size
        try:
            for part in line:
                left = memoryview(part)
                while left:
                    left = left[self._file.write(left) :]
                size += len(part)
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size = size

    def _open(self, prune: bool = True) -> None:
        """Open a new file. `prune`: remove the oldest ones; not for a file that was removed, or servers that
        share the directory would remove each other's by turns."""
        if prune:
            for old in sorted(self._directory.glob("requests-*.jsonl"))[: -FILES + 1]:
                old.unlink(missing_ok=True)
        name = f"requests-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        # Unbuffered: what is written survives the end of the process, however it comes.
        self._file = os.fdopen(os.open(self._directory / name, flags, 0o600), "ab", 0)
        self._size = 0

    def close(self) -> None:
        """Close the current file: no more lines follow."""
        self._file.close()


def encoded(line: Accepted | Ended, body: bytes) -> Iterator[bytes]:
    """A line in parts of some `SLICE` bytes, the `body` as its last string."""
    made = msgspec.json.encode(line)
    if not body:
        yield made + b"\n"
        return
    yield made.removesuffix(b'"}')
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(body), SLICE):
        text = decoder.decode(body[at : at + SLICE], at + SLICE >= len(body))
        yield msgspec.json.encode(text)[1:-1]
    yield b'"}\n'


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
