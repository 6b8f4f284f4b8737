"""Logging: one line a record, nothing a client sent can start a new one, and no line holds the loop."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import sys
import tempfile
import threading
from collections import deque

log = logging.getLogger(__name__)

KEPT = 10_000
"""Lines that may wait for a reader of stderr; the oldest go first. A pipe that nobody reads takes
64 KB and then blocks its writer: that must not be the event loop."""

PATIENCE = 1.0
"""Seconds that the exit waits for lines to be read."""


class OneLine(logging.Formatter):
    """Escapes control characters of the message; tracebacks keep their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The head line of a record."""
        text = super().formatMessage(record)
        return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


class Behind(logging.Handler):
    """Hands lines to a thread that writes them to stderr.

    `emit` may be called by any thread; the writer thread alone touches stderr.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._ready = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._write, name="loom-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record."""
        self._idle.clear()
        self._lines.append(self.format(record))
        self._ready.set()

    def flush(self) -> None:
        """Wait until everything is written, but not for ever."""
        self._idle.wait(PATIENCE)

    def _write(self) -> None:
        while True:
            self._ready.wait()
            self._ready.clear()
            with contextlib.suppress(IndexError):
                while True:
                    sys.stderr.write(self._lines.popleft() + "\n")
                    sys.stderr.flush()
            self._idle.set()


def set_up(level: str) -> None:
    """Send everything to stderr."""
    handler = Behind()
    handler.setFormatter(OneLine())
    atexit.register(handler.flush)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("asyncio", "urllib3", "filelock", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def log_stacks() -> None:
    """What every thread is doing, for whoever reads the log after a failure. By way of a file: only
    the log's own thread may wait for the reader of stderr."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:  # a full disk, no descriptor left: what failed is still to be told
        lines = [f"the stacks could not be dumped: {error}"]
    for line in lines:
        log.error("%s", line)
