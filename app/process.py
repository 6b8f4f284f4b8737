"""Steps at the start and the end of every process that serves or runs ranks."""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import logging
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, TypeVar

from core.errors import ConfigError

log = logging.getLogger(__name__)

FAILED = 1
"""Exit code after a failure of the engine."""
HUNG = 3
"""Exit code when the watchdog ends the server because a step hangs; 2 is for a wrong configuration."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

PROBE = 1 << 16
"""Bytes written to the temporary folder at the start, as a test."""

T = TypeVar("T")


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("loom-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


VERSION = version()


def invocation(name: str = "") -> str:
    """How the user runs the command `name`: by the script `loom`, or as `python -m app`."""
    program = "loom" if Path(sys.argv[0]).stem == "loom" else "python -m app"
    return f"{program} {name}".rstrip()


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread, so that a signal does not have to wait for a long load."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # cancelling the wait does not cancel the work

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def leave(code: int) -> NoReturn:
    """End the process."""
    if code == HUNG:
        logging.shutdown()  # nothing else, which might wait for the device inside its driver
    else:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # a normal exit would free torch's objects one by one, for 0.6 s


def open_standard_files() -> None:
    """Open those of the files 0, 1 and 2 that the caller closed: sockets would get their numbers, which
    libuv aborts on when it closes one."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    for file, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(file, mode, closefd=False))


def check_temporary_folder() -> None:
    """Raise `ConfigError` unless the temporary folder is writable: torch, triton and others use it, some as
    they are imported, and would fail with a traceback."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(bytes(PROBE))
    except OSError as error:
        raise ConfigError(
            f"the temporary folder cannot be written to: {error.strerror or error}. Free space there, or "
            "set the environment variable TMPDIR to another folder."
        ) from error


def raise_file_limit() -> None:
    """Raise the limit on open files: every stream needs a socket, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log.debug("open files: %d, now %d", soft, hard)


def check_writable(folder: Path, setting: str) -> Path:
    """Return the folder, or the nearest one above it that exists. Raises `ConfigError` naming the setting
    where the folder can be neither written nor made."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(f"{folder} cannot be written to: point {setting} at a directory that can.")
    return there
