"""Logging to stderr, in text or JSON: one line per record, whatever clients send, and without blocking the
event loop."""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import tempfile
import threading
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue

from tqdm import tqdm

from core.config import LogFormat

log = logging.getLogger(__name__)

KEPT = 10_000
"""Lines that may wait to be written; further ones are dropped and counted. A pipe that is not read takes 64
KB and then blocks its writer, which must not be the event loop."""

BARE = {"bare": True}
"""`extra` of a record whose line has no time, level and name in front: something to be read or copied."""

FIELDS = "fields"
"""Key in `extra` of a dict of the values in a line, by name. The JSON format adds each as a member."""

PATIENCE = 1.0
"""Seconds to wait for lines to be written."""


class _Dated(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """ISO 8601 in UTC, with milliseconds: lines of several hosts sort."""
        at = datetime.fromtimestamp(record.created, UTC)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextLine(_Dated):
    """Escapes control characters of the message; tracebacks keep their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The head line of a record."""
        text = record.message if getattr(record, "bare", False) else super().formatMessage(record)
        return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


class JsonLine(_Dated):
    """A JSON object a record, with its traceback. It is ASCII: nothing that a client sends ends the line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


Lines = SimpleQueue[logging.LogRecord | threading.Event | None]
"""Formatted records, events to be set when all in front of them is written, and None, which ends the
writer."""


class StderrWriter(QueueListener):
    """Writes lines in a thread of its own. Not with a `StreamHandler`: at exit, `logging` would wait for its
    lock, which a write to a full pipe holds."""

    dropped = 0
    """Lines that did not fit the queue, counted by the handler."""
    _failed = 0
    """Lines that stderr did not take, as a file on a full disk."""
    _reported = 0

    def __init__(self, lines: Lines, formatter: logging.Formatter) -> None:
        super().__init__(lines)
        self._formatter = formatter

    def handle(self, record: logging.LogRecord | threading.Event) -> None:
        """Write one formatted record, after a note of lines dropped since the last one. An event is set:
        everything in front of it is written."""
        if isinstance(record, threading.Event):
            record.set()
            return
        try:
            self._note_lost()
            self._write(record.msg)
        except OSError:  # raised, it would end the thread: nothing would be logged any more
            self._failed += 1

    def _note_lost(self) -> None:
        if lost := self.dropped + self._failed - self._reported:
            message = f"{lost} lines were dropped: stderr was full or not read"
            note = logging.LogRecord(log.name, logging.WARNING, "", 0, message, None, None)
            self._write(self._formatter.format(note))
            self._reported += lost

    def _write(self, line: str) -> None:
        if sys.stderr.isatty():
            tqdm.write(line, file=sys.stderr)  # above the bar that may be shown there
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class AsyncStderr(QueueHandler):
    """Queues lines for a thread that writes them to stderr. `emit` may be called by any thread."""

    def __init__(self, formatter: logging.Formatter) -> None:
        # Not `Queue`: a line logged by garbage collection within `put` would take its lock twice.
        self._lines: Lines = SimpleQueue()
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self._writer = StderrWriter(self._lines, formatter)
        self._writer.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue one formatted record, unless too many wait."""
        if self._lines.qsize() < KEPT:
            self._lines.put(record)
        else:
            self._writer.dropped += 1

    def flush(self) -> None:
        """Wait until every line so far is written, up to `PATIENCE`."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(PATIENCE)

    def close(self) -> None:
        """End the writer."""
        self._writer.enqueue_sentinel()
        super().close()


def set_up(level: str, form: LogFormat = "text") -> None:
    """Send everything to stderr."""
    handler = AsyncStderr(TextLine() if form == "text" else JsonLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("asyncio", "urllib3", "filelock", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def flush() -> None:
    """Wait until the lines logged so far are on stderr, so that what is printed there next stands behind
    them."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def log_stacks() -> None:
    """Log the stack of every thread. Dumped to a file first: only the log's own thread may block on
    stderr."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:  # a full disk, no free descriptor: the original failure is still to be logged
        lines = [f"the stacks could not be dumped: {error}"]
    for line in lines:
        log.error("%s", line)
