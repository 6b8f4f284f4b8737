"""`python -m app` in forks of one process that has imported it: a start that imports torch and the rest again
takes 2 s of CPU time, and the tests start three dozen."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.chaos.tiny import ROOT

# Its parent process runs one thread, imports, and computes nothing: a fork has no threads, thus no locks that
# other threads hold and no OpenMP threads that it would wait for.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.rigs.preloaded"])


class Forked:
    """A running command, as a `subprocess.Popen`."""

    def __init__(self, *arguments: str, stderr: Path) -> None:
        self.args = arguments
        self._process = _FORKS.Process(
            target=_command, args=(arguments, dict(os.environ), stderr), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has exited."""
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code


def _command(arguments: tuple[str, ...], environment: dict[str, str], stderr: Path) -> None:
    """What `python -m app` does, in this environment, with its standard error in a file."""
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.chdir(ROOT)
    with stderr.open("ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [str(ROOT / "app/__main__.py"), *arguments]
    from app.cli import main

    main()
